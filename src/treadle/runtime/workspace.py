"""The workspace of library calls: measured, so that a budget can be kept.

A convolution reorders its operands, attention's backward and products of 16 bits sum in another
dtype: none of this is in the graph. Each distinct call runs on zeros when a step is compiled, or on
other values if its operator rejects zeros, and the result is cached on disk.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from treadle.compat.operators.operator_facts import facts_by_name
from treadle.runtime.execute.bindings import spec_bytes
from treadle.runtime.invented_call import InventedCall, KernelRefuses, signature_of
from treadle.runtime.meter import measure_each
from treadle.runtime.store.artifact import BufferSpec, CallStep
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.registry import target_for

__all__ = ["CallMemory", "KernelRefuses", "Workspaces"]

_SCALES = (0.01, 1.0, 30.0)
"""Scales of invented matrices."""


@final
@dataclass(frozen=True, slots=True)
class CallMemory:
    """Bytes that a call takes beside its arguments and the elements of its results: ``workspace``
    while it runs, and ``spare`` as long as each of its results lives."""

    workspace: int
    spare: tuple[int, ...] = ()

    def largest(self, other: "CallMemory") -> "CallMemory":
        """A bound of both, which are of one call."""
        return CallMemory(
            max(self.workspace, other.workspace),
            tuple(map(max, self.spare, other.spare)),
        )


class Workspaces:
    """Measured workspaces by call; ``device`` is where calls run, ``machine`` the identity of all
    else that a measurement depends on."""

    def __init__(self, cache: Cache, device: str, machine: str) -> None:
        self._cache = cache
        self.machine = machine
        self._device = torch.device(device)
        self._known: dict[str, CallMemory] = {}

    @property
    def on_host(self) -> bool:
        """Whether calls run on the CPU."""
        return target_for(self._device).on_host

    def of(self, steps: Sequence[CallStep], buffers: Mapping[str, BufferSpec]) -> list[CallMemory]:
        """What each call takes. ``KernelRefuses`` for one that cannot run."""
        keys = [self._key(step, buffers) for step in steps]
        missing: dict[str, CallStep] = {}
        for key, step in zip(keys, steps, strict=True):
            if key not in self._known:
                stored = self._cache.get(key)
                if stored is None:
                    missing[key] = step
                else:
                    workspace, *spare = map(int, stored.split())
                    self._known[key] = CallMemory(workspace, tuple(spare))
        if missing:
            self._measure(missing, buffers)
        return [self._known[key] for key in keys]

    def _measure(self, steps: Mapping[str, CallStep], buffers: Mapping[str, BufferSpec]) -> None:
        """Measure all calls in one session of the meter. At most two of them have their arguments
        at a time. The generators stay as they were."""
        scaled = [(key, step, scale) for key, step in steps.items() for scale in _scales_of(step)]
        spares: dict[int, list[int]] = {}
        with torch.random.fork_rng(devices=self._generators()), torch.no_grad():
            runs = (
                functools.partial(
                    _note,
                    spares,
                    number,
                    InventedCall(step, _results(step, buffers), self._device, scale),
                )
                for number, (_, step, scale) in enumerate(scaled)
            )
            peaks = measure_each(runs, self._device)
        largest: dict[str, CallMemory] = {}
        for number, ((key, step, _), peak) in enumerate(zip(scaled, peaks, strict=True)):
            spare = spares[number]
            results = sum(map(spec_bytes, _results(step, buffers))) + sum(spare)
            found = CallMemory(max(0, peak - results), tuple(spare))
            largest[key] = found.largest(largest.get(key, found))
        for key, found in largest.items():
            self._known[key] = found
            self._cache.put(key, " ".join(map(str, (found.workspace, *found.spare))).encode())

    def _generators(self) -> list[int]:
        return target_for(self._device).driver.generators(self._device)

    def _key(self, step: CallStep, buffers: Mapping[str, BufferSpec]) -> str:
        outputs = _results(step, buffers)
        shapes = [(spec.shape, spec.strides, str(spec.dtype)) for spec in outputs]
        facts = (
            "workspace 4",  # of several scales, with copies of results and their spare bytes
            step.op,
            signature_of(step),
            repr(shapes),
            self.machine,
        )
        return content_key(*facts)


def _note(spares: dict[int, list[int]], number: int, call: InventedCall) -> None:
    spares[number] = call()


def _results(step: CallStep, buffers: Mapping[str, BufferSpec]) -> list[BufferSpec]:
    return [buffers[name] for name in step.outputs if name]


def _scales_of(step: CallStep) -> tuple[float, ...]:
    """The scales of the numbers that a call runs on: the number of terms of a matrix exponential,
    and so its memory, depends on them."""
    return _SCALES if facts_by_name(step.op).invented == "matrices" else (1.0,)
