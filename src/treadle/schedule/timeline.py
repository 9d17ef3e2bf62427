"""The bytes alive at each step of a plan, and their values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.algebra.extents import largest
from treadle.loop.kernel import Kernel, KernelPlan
from treadle.loop.printing import dtype_name
from treadle.loop.program import Buffer, BufferKind, Call, Origin
from treadle.schedule.arena import Interval
from treadle.schedule.beside import lives_beside
from treadle.schedule.plan import (
    PlanStep,
    held_by_calls,
    lifetimes,
    plan_writes,
    touched_by,
)

_SHOWN = 64


@dataclass(frozen=True, slots=True)
class AliveAtPeak:
    """A temporary that is alive at the peak."""

    name: str
    type: str
    size_bytes: int
    phase: str
    module: str
    where: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes alive during each kernel and call of a plan; of dynamic shapes, at the largest sizes.

    ::

        peak  =  sum(inputs) + constants + arena + max(calls + workspace) + reserve

    ``inputs``: 0 for those on another device. ``reserve``: what libraries and the tables of
    launches hold, and what an allocator adds to requests. ``temporaries`` are the bytes of the
    arena in use, by the phase that wrote them. The arena is one block, there all the time;
    ``peak_at`` is the step where most of it and of the calls' bytes is in use, and ``held`` names
    the largest temporaries there.
    """

    names: tuple[str, ...]
    phases: tuple[str, ...]
    inputs: tuple[int, ...]
    constants: int
    arena: int
    reserve: int
    temporaries: Mapping[str, tuple[int, ...]]
    calls: tuple[int, ...]
    workspace: tuple[int, ...]
    peak_at: int
    held: tuple[AliveAtPeak, ...]


def timeline(plan: KernelPlan) -> Timeline:
    """What ``plan`` holds, step by step."""
    kept = frozenset(ref.buffer for ref in plan.results if ref is not None)
    spans = lifetimes(touched_by(plan.steps), plan.buffers, kept)
    lives = {
        name: interval
        for name, interval in spans.items()
        if interval.nbytes and not plan.is_elsewhere(plan.buffers[name])
    }  # without bytes: nobody writes it
    ours = [lives[name] for name in lives if name in plan.offsets]
    theirs = _beside_arena(plan, lives, kept)
    writers = _writers(plan.steps)
    temporaries = _in_arena(plan, ours, writers)
    workspace = tuple(step.workspace if isinstance(step, Call) else 0 for step in plan.steps)
    held = held_by_calls(plan.steps, theirs)
    sums = [sum(bytes_at[i] for bytes_at in temporaries.values()) for i in range(len(plan.steps))]
    alive = [sums[i] + held[i] + workspace[i] for i in range(len(plan.steps))]
    at = alive.index(max(alive)) if alive else 0
    inputs = tuple(
        0 if plan.is_elsewhere(buffer) else largest(buffer.nbytes)
        for buffer in (plan.buffers[name] for name in plan.inputs)
    )
    constants = _constants(plan)
    worst = max((*(a + b for a, b in zip(held, (*workspace, 0), strict=True)),), default=0)
    return Timeline(
        names=tuple(step.name if isinstance(step, Kernel) else step.op for step in plan.steps),
        phases=tuple(_origin(step).phase for step in plan.steps),
        inputs=inputs,
        constants=constants,
        arena=plan.arena_bytes,
        reserve=plan.peak_bytes - sum(inputs) - constants - plan.arena_bytes - worst,
        temporaries=temporaries,
        calls=tuple(held[:-1]),
        workspace=workspace,
        peak_at=at,
        held=_alive_at(at, plan, lives, writers),
    )


def timeline_from(data: Mapping[str, Any]) -> Timeline:
    """The inverse of ``dataclasses.asdict``, after a way through JSON."""
    rows = {phase: tuple(row) for phase, row in data["temporaries"].items()}
    held = tuple(AliveAtPeak(**fields) for fields in data["held"])
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    fields: dict[str, Any] = {**data, **lists, "temporaries": rows, "held": held}
    return Timeline(**fields)


def _beside_arena(
    plan: KernelPlan, lives: Mapping[str, Interval], kept: frozenset[str]
) -> dict[str, Interval]:
    """What calls allocate, results, and temporaries that are allocated as those are."""
    theirs = {name: interval for name, interval in lives.items() if name not in plan.offsets}
    by_call = {name for step in plan.steps if isinstance(step, Call) for name in step.writes}
    moved = {name: interval for name, interval in theirs.items() if name not in by_call | kept}
    return theirs | lives_beside(moved, plan.steps)


def _constants(plan: KernelPlan) -> int:
    """What is neither a temporary nor an input."""
    inputs = frozenset(plan.inputs)
    return sum(
        largest(buffer.nbytes)
        for name, buffer in plan.buffers.items()
        if buffer.kind is not BufferKind.TEMPORARY and name not in inputs
    )


def _in_arena(
    plan: KernelPlan, ours: Sequence[Interval], writers: Mapping[str, Origin]
) -> dict[str, tuple[int, ...]]:
    """A value that takes over another's bytes counts from the step after; they are one block."""
    begins = sorted((interval.first, writers[interval.name].phase) for interval in ours)
    rows = {phase: [0] * len(plan.steps) for _, phase in begins}  # equal from process to process
    followed = {(plan.offsets[interval.name], interval.first) for interval in ours}
    for interval in ours:
        heir = (
            interval.last > interval.first
            and (plan.offsets[interval.name], interval.last) in followed
        )
        end = interval.last - 1 if heir else interval.last
        row = rows[writers[interval.name].phase]
        for i in range(interval.first, min(end + 1, len(row))):
            row[i] += interval.nbytes
    return {phase: tuple(row) for phase, row in rows.items()}


def _alive_at(
    at: int, plan: KernelPlan, lives: Mapping[str, Interval], writers: Mapping[str, Origin]
) -> tuple[AliveAtPeak, ...]:
    alive = [interval for interval in lives.values() if interval.first <= at <= interval.last]
    alive.sort(key=lambda interval: (-interval.nbytes, interval.name))
    return tuple(
        _held(plan.buffers[interval.name], writers[interval.name]) for interval in alive[:_SHOWN]
    )


def _held(buffer: Buffer, origin: Origin) -> AliveAtPeak:
    shape = ", ".join(str(largest(size)) for size in buffer.shape)
    kind = f"{dtype_name(buffer.dtype)}[{shape}]"
    size = largest(buffer.allocated)
    return AliveAtPeak(buffer.name, kind, size, origin.phase, origin.module, origin.where)


def _writers(steps: Sequence[PlanStep]) -> dict[str, Origin]:
    """The origin of the first step that writes each buffer."""
    found: dict[str, Origin] = {}
    for step in steps:
        for name in plan_writes(step):
            found.setdefault(name, _origin(step, name))
    return found


def _origin(step: PlanStep, name: str = "") -> Origin:
    """Of a kernel's origins that of the value called ``name``, else that of its last."""
    if isinstance(step, Call):
        return step.origin
    named = (origin for origin in step.origins if name in origin.nodes)
    return next(named, step.origins[-1] if step.origins else Origin(()))
