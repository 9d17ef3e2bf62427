"""Peak rates of the present device: products, copies, exponentials.

They are measured on generated data, once per machine, and rounded up to powers of the fourth root
of two. So another run on the same machine mostly finds the same rates and makes the same plans, and
no kernel is faster than its floor, the least time by these rates.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from treadle.targets.model import FLOAT8, DeviceModel
from treadle.targets.record import DeviceTarget

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FIRST_WITH_FLOAT8 = (8, 9)
"""The compute capability of NVIDIA GPUs that multiply it."""
_SECONDS = 0.1
"""For each measurement, after a first call."""


def measured(target: DeviceTarget, device: torch.device) -> DeviceModel:
    """The model of ``device``: its own memory and ceilings, and what ``target`` knows besides."""
    side, elements = (256, 1 << 22) if target.on_host else (4096, 1 << 25)

    def seconds(run: Callable[[], object]) -> float:
        return _least(run, lambda: target.driver.synchronize(device))

    copy, exponential = map(seconds, _passes(elements, device))
    slow = max(exponential - copy, 0.0) / elements
    found = {
        dtype: 2 * side**3 / seconds(_product(side, dtype, device))
        for dtype in _dtypes(target, device)
    }
    flops = {dtype: rounded_up(rate) for dtype, rate in found.items()}
    flops |= {dtype: flops[FLOAT8[0]] for dtype in FLOAT8 if FLOAT8[0] in flops}
    bandwidth = rounded_up(2 * 4 * elements / copy)
    element = rounded_up(slow) if target.on_host else 0.0
    memory = target.driver.memory(device) or target.model.memory
    name = target.driver.hardware(device) or target.model.name
    return replace(
        target.model, name=name, flops=flops, bandwidth=bandwidth, element=element, memory=memory
    )


def _dtypes(target: DeviceTarget, device: torch.device) -> tuple[torch.dtype, ...]:
    """What the device multiplies."""
    capability = target.driver.capability(device)
    return (*_DTYPES, FLOAT8[0]) if capability and capability >= _FIRST_WITH_FLOAT8 else _DTYPES


def _passes(
    elements: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """One pass over float32 numbers that only copies, and one that computes exponentials."""
    x, y = (torch.ones(elements, device=device) for _ in range(2))
    return (lambda: y.copy_(x)), (lambda: torch.exp(x, out=y))


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    if dtype in FLOAT8:
        x, one = torch.ones(side, side, device=device).to(dtype), torch.ones((), device=device)
        like = None, None, torch.bfloat16, True
        return lambda: torch.ops.aten._scaled_mm.default(x, x.t(), one, one, *like)
    x = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(x)
    return lambda: torch.mm(x, x, out=out)


def _least(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of the fastest call."""
    run()
    wait()
    best, end = math.inf, time.perf_counter() + _SECONDS
    while best is math.inf or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def rounded_up(value: float) -> float:
    """The least power of the fourth root of two that is not below."""
    return 0.0 if value <= 0.0 else 2.0 ** (math.ceil(4 * math.log2(value)) / 4)


def to_words(model: DeviceModel) -> dict[str, object]:
    """The ceilings as plain data, for a file."""
    flops = {str(dtype).removeprefix("torch."): rate for dtype, rate in model.flops.items()}
    return {
        "name": model.name,
        "flops": flops,
        "bandwidth": model.bandwidth,
        "element": model.element,
        "memory": model.memory,
    }


def from_words(words: Mapping[str, object], like: DeviceModel) -> DeviceModel:
    """``from_words(to_words(m), like) == m``, for models that differ from ``like`` in ceilings."""
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in (*_DTYPES, *FLOAT8)}
    flops = words["flops"]
    assert isinstance(flops, dict)
    rates = {by_name[str(name)]: float(rate) for name, rate in flops.items()}
    return replace(
        like,
        name=str(words["name"]),
        flops=rates,
        bandwidth=float(str(words["bandwidth"])),
        element=float(str(words["element"])),
        memory=int(str(words["memory"])),
    )
