"""The workspace of library calls: measured, so that a budget can be kept.

A convolution reorders its operands, attention's backward and products of 16 bits sum in another
dtype: none of this is in the graph. Each distinct call runs on zeros when a step is compiled, or on
other values if its operator rejects zeros, and the result is cached on disk.
"""

from collections.abc import Mapping, Sequence

import torch

from treadle.compat.operators.operator_facts import facts_by_name
from treadle.runtime.execute.bindings import spec_bytes
from treadle.runtime.invented_call import InventedCall, KernelRefuses, signature_of
from treadle.runtime.meter import measure_each
from treadle.runtime.store.artifact import BufferSpec, CallStep
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.registry import target_for

__all__ = ["KernelRefuses", "Workspaces"]

_SCALES = (0.01, 1.0, 30.0)
"""Of invented matrices."""


class Workspaces:
    """Measured workspaces by call; ``device`` is where calls run, ``machine`` the identity of all
    else that a measurement depends on."""

    def __init__(self, cache: Cache, device: str, machine: str) -> None:
        self._cache = cache
        self.machine = machine
        self._device = torch.device(device)
        self._known: dict[str, int] = {}

    @property
    def on_host(self) -> bool:
        """Whether calls run on the CPU."""
        return target_for(self._device).on_host

    def of(self, steps: Sequence[CallStep], buffers: Mapping[str, BufferSpec]) -> list[int]:
        """Bytes that each call holds while it runs, its arguments and results left out.
        ``KernelRefuses`` for one that cannot run."""
        keys = [self._key(step, buffers) for step in steps]
        missing: dict[str, CallStep] = {}
        for key, step in zip(keys, steps, strict=True):
            if key not in self._known:
                workspace = self._cache.get(key)
                if workspace is None:
                    missing[key] = step
                else:
                    self._known[key] = int(workspace)
        if missing:
            self._measure(missing, buffers)
        return [self._known[key] for key in keys]

    def _measure(self, steps: Mapping[str, CallStep], buffers: Mapping[str, BufferSpec]) -> None:
        """All of them in one session of the meter, each with arguments that are gone before the
        next but one has its own. The generators stay as they were."""
        scaled = [(key, step, scale) for key, step in steps.items() for scale in _scales_of(step)]
        with torch.random.fork_rng(devices=self._generators()), torch.no_grad():
            runs = (
                InventedCall(
                    step, [buffers[name] for name in step.outputs if name], self._device, scale
                )
                for _, step, scale in scaled
            )
            peaks = measure_each(runs, self._device)
        largest: dict[str, int] = {}
        for (key, step, _), peak in zip(scaled, peaks, strict=True):
            results = sum(map(spec_bytes, _results(step, buffers)))
            largest[key] = max(0, peak - results, largest.get(key, 0))
        for key, extra in largest.items():
            self._known[key] = extra
            self._cache.put(key, str(extra).encode())

    def _generators(self) -> list[int]:
        return target_for(self._device).driver.generators(self._device)

    def _key(self, step: CallStep, buffers: Mapping[str, BufferSpec]) -> str:
        outputs = _results(step, buffers)
        shapes = [(spec.shape, spec.strides, str(spec.dtype)) for spec in outputs]
        facts = (
            "workspace 3",  # of several scales, with copies of results
            step.op,
            signature_of(step),
            repr(shapes),
            self.machine,
        )
        return content_key(*facts)


def _results(step: CallStep, buffers: Mapping[str, BufferSpec]) -> list[BufferSpec]:
    return [buffers[name] for name in step.outputs if name]


def _scales_of(step: CallStep) -> tuple[float, ...]:
    """Sizes of the numbers that a call is run on: how many terms an exponential of a matrix has
    depends on them, and what they are kept in."""
    return _SCALES if facts_by_name(step.op).invented == "matrices" else (1.0,)
