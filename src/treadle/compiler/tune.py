"""Alternative schedules for one kernel, tried on this machine; the fastest is used, and cached.

A choice is data, so no other part of the pipeline knows about it: the program is scheduled again
with the result.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from treadle.algebra.extents import Size
from treadle.codegen.host import artifact_of
from treadle.compiler.memory import Scheduled
from treadle.compiler.target import Target
from treadle.loop.kernel import Kernel, KernelLaunch, KernelPlan, KernelSchedule
from treadle.loop.nest import arguments_of, bytes_moved, indices
from treadle.loop.program import Buffer, BufferKind
from treadle.loop.verify import verify_kernel
from treadle.runtime.kernels.tune import Trials
from treadle.schedule.equality import kernel_key
from treadle.schedule.plan import schedule
from treadle.schedule.workers import Workers, scratch_buffers, workers_for
from treadle.util.errors import TreadleError

_WORTH = 1 << 20
"""Bytes moved from which a kernel is worth trying: a smaller one is launched in no less time."""
_TIMES = 20
"""Launches of a call, so that it takes longer than the host needs to begin one."""
_MARGIN = 0.97
"""Another schedule is taken where it needs no more than this share of the chosen one's time."""


def tuned(scheduled: Scheduled, target: Target, trials: Trials) -> Scheduled:
    """The same program under the fastest schedules; as it was where those need more memory."""
    tuner = Tuner(scheduled.plan, target, trials)
    choices = tuner.choices()
    if not choices:
        return scheduled

    def choose(kernel: Kernel) -> KernelSchedule:
        return choices.get(kernel.name) or tuner.workers.choose(kernel)

    plan = schedule(
        scheduled.program,
        fuse=target.options.fuse,
        allocator=target.hardware.allocator,
        workers=replace(tuner.workers, choose=choose),
    )
    fits = target.options.memory is None or plan.peak_bytes <= scheduled.plan.peak_bytes
    return replace(scheduled, plan=plan) if fits else scheduled


class Tuner:
    """Tries the kernels of one plan. Equal kernels are tried once."""

    def __init__(self, plan: KernelPlan, target: Target, trials: Trials) -> None:
        word, once = target.record.workers, target.rounds_once
        self.workers: Workers = workers_for(word, rounds_once=once)
        self._plan = plan
        self._target = target
        self._trials = trials
        self._known: dict[Hashable, KernelSchedule | None] = {}

    def choices(self) -> Mapping[str, KernelSchedule]:
        """By the name of a kernel the schedule that is faster than the chosen one."""
        chosen: dict[str, KernelSchedule] = {}
        for kernel in self._plan.steps:
            if isinstance(kernel, Kernel) and self._can_be_tried(kernel):
                key = kernel_key(kernel, self._plan.buffers)
                if key not in self._known:
                    self._known[key] = self._remembered(kernel, repr(key))
                best = self._known[key]
                if best is not None:
                    chosen[kernel.name] = replace(best, in_place=False)  # as the arena will have it
        return chosen

    def _can_be_tried(self, kernel: Kernel) -> bool:
        """Large enough, of known sizes, and safe to run on zeros: no index depends on data."""
        sizes = (kernel.rows.extent, kernel.cols.extent)
        if any(isinstance(size, Size) for size in sizes) or 0 in sizes:
            return False
        values = [value for index in indices(kernel.body) for value in index.values]
        return not values and bytes_moved(kernel, self._plan.buffers) >= _WORTH

    def _remembered(self, kernel: Kernel, key: str) -> KernelSchedule | None:
        """What was found before on such a machine, or is found now."""
        alternatives = self.workers.alternatives(kernel)
        key = f"{key} {self._target.rounds_once}"
        at = self._trials.remembered(key, lambda: self._fastest(kernel, alternatives))
        return alternatives[at] if 0 < at < len(alternatives) else None

    def _fastest(self, kernel: Kernel, alternatives: tuple[KernelSchedule, ...]) -> int:
        """The number of the fastest; the first one is the chosen one."""
        in_place = kernel.scheduled.in_place
        seconds = [
            self._seconds(self.workers.under(kernel, replace(how, in_place=in_place)))
            for how in alternatives
        ]
        best = min(range(len(seconds)), key=seconds.__getitem__)
        return best if seconds[best] < _MARGIN * seconds[0] else 0

    def _seconds(self, kernel: Kernel) -> float:
        """Of a few launches on zeros; infinite where the language cannot make it."""
        buffers = self._buffers(kernel)
        verify_kernel(kernel, buffers)
        names = arguments_of(kernel)
        plan = KernelPlan((kernel,), buffers, {}, 0, 0, names, ())
        artifact = artifact_of(
            plan,
            (KernelLaunch((kernel,), 0),) * _TIMES,
            device=self._target.device,
            language=self._target.record.language,
            contract=self._target.rounds_once,
        )
        inputs = [_zeros(buffers[name], self._target.device) for name in names]
        try:
            return self._trials.seconds(artifact, inputs)
        except TreadleError:
            return float("inf")  # too many registers, or too much shared memory

    def _buffers(self, kernel: Kernel) -> dict[str, Buffer]:
        """Those of the plan as inputs, and scratch as it is under the kernel's schedule."""
        scratch = scratch_buffers([kernel], self.workers, device=self._plan.device)
        both = {**self._plan.buffers, **scratch}
        return {name: replace(both[name], kind=BufferKind.INPUT) for name in arguments_of(kernel)}


def _zeros(buffer: Buffer, device: str) -> torch.Tensor:
    elements = torch.zeros(buffer.elements, dtype=buffer.dtype, device=device)
    return elements.as_strided(buffer.shape, buffer.strides)
