"""What library calls allocate beside their results: measured, so that a budget can be kept.

A convolution reorders its operands, attention's backward sums in another dtype: none of it is in
the graph. Each distinct call runs once on zeros when a step is compiled, and the answer is kept
in the cache on disk.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.runtime.artifact import BufferSpec, CallStep, View
from treadle.runtime.bindings import spec_bytes
from treadle.runtime.cache import Cache, content_key
from treadle.runtime.execute import resolve
from treadle.runtime.halves import widened
from treadle.runtime.meter import measure_each
from treadle.runtime.packed import LENGTHS
from treadle.targets.registry import target_for


class Workspaces:
    """Measured workspaces by call; ``device`` is where calls run, ``machine`` the identity of all
    else that a measurement depends on."""

    def __init__(self, cache: Cache, device: str, machine: str) -> None:
        self._cache = cache
        self.machine = machine
        self._device = torch.device(device)
        self._known: dict[str, int] = {}

    def of(self, steps: Sequence[CallStep], buffers: Mapping[str, BufferSpec]) -> list[int]:
        """Bytes that each call holds while it runs, its arguments and results left out."""
        keys = [self._key(step, buffers) for step in steps]
        missing: dict[str, CallStep] = {}
        for key, step in zip(keys, steps, strict=True):
            if key not in self._known:
                found = self._cache.get(key)
                if found is None:
                    missing[key] = step
                else:
                    self._known[key] = int(found)
        if missing:
            self._measure(missing, buffers)
        return [self._known[key] for key in keys]

    def _measure(self, steps: Mapping[str, CallStep], buffers: Mapping[str, BufferSpec]) -> None:
        """All of them in one session of the meter. The generators stay as they were."""
        with torch.random.fork_rng(devices=self._generators()), torch.no_grad():
            runs = [_Run(step, self._device) for step in steps.values()]
            peaks = measure_each(runs, self._device)
        for (key, step), peak in zip(steps.items(), peaks, strict=True):
            results = sum(spec_bytes(buffers[name]) for name in step.outputs if name)
            extra = max(0, peak - results)
            self._known[key] = extra
            self._cache.put(key, str(extra).encode())

    def _generators(self) -> list[int]:
        return target_for(self._device).driver.generators(self._device)

    def _key(self, step: CallStep, buffers: Mapping[str, BufferSpec]) -> str:
        outputs = [buffers[name] for name in step.outputs if name]
        shapes = [(spec.shape, spec.strides, str(spec.dtype)) for spec in outputs]
        facts = (
            "workspace",
            step.op,
            repr(_signature((step.args, sorted(step.kwargs.items())))),
            repr(shapes),
            self.machine,
        )
        return content_key(*facts)


class _Run:
    """One call on zeros, its result dropped. Arguments exist before the measurement begins."""

    def __init__(self, step: CallStep, device: torch.device) -> None:
        self._op = widened(step.op, resolve(step.op))
        self._args = [_zeros(each, device) for each in step.args]
        self._kwargs = {name: _zeros(each, device) for name, each in step.kwargs.items()}
        at = LENGTHS.get(step.op)
        if at is not None:  # no sequence may be empty
            self._args[at].fill_(len(self._args[at - 1]))

    def __call__(self) -> None:
        self._op(*self._args, **self._kwargs)


def _zeros(value: Any, device: torch.device) -> Any:
    if isinstance(value, View):
        size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True))
        storage: Tensor = torch.zeros(max(size, 0), dtype=value.dtype, device=device)
        return storage.as_strided(value.shape, value.strides)
    if isinstance(value, tuple | list):
        return [_zeros(each, device) for each in value]
    return value


def _signature(value: Any) -> Any:
    """What tells one call from another: layouts of tensors, and everything else as it is."""
    if isinstance(value, View):
        return (value.shape, value.strides, str(value.dtype))
    if isinstance(value, tuple | list):
        return [_signature(each) for each in value]
    return str(value)
