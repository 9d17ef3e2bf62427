"""Steps that can be recorded only in part: split into segments.

Operations that may wait for the host, or that run there, are executed between the recorded ones, in
order. Those that depend on nothing recorded come first of all, and those on which nothing recorded
depends come last::

    a  h1  b  w  c  h2        h*: on the host; w: waits, and takes what b made
    h1 | a b | w | c | h2

A step moves only past steps with which it shares no memory that either of them writes or frees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.compat.operators.operator_facts import Effect, facts_by_name
from treadle.runtime.execute.bindings import spec_bytes
from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep, Launch, Storage

MOST = 12
"""The number of segments up to which recording still pays."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps that run one after another, by number. ``reads``: buffers of calls that a recorded
    segment fills and this segment, which is not recorded, reads. ``copied``: buffers that it fills
    and a recorded segment reads, at the addresses of the recording. ``makes``: all buffers that it
    fills."""

    steps: tuple[int, ...]
    recorded: bool
    reads: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()


def split(artifact: Artifact, recorded: Sequence[bool]) -> tuple[Segment, ...]:
    """The steps of an artifact in segments. ``recorded``: which steps can be recorded."""
    uses = [_Uses.of(artifact, at) for at in range(len(artifact.steps))]
    movable = [
        not can and isinstance(step, CallStep) and _is_calm(step)
        for can, step in zip(recorded, artifact.steps, strict=True)
    ]
    everything = range(len(uses))
    early, rest = _pulled(everything, uses, movable)
    late, middle = _pulled(rest[::-1], uses, movable)
    parts = [(early, False), *_runs(middle[::-1], recorded), (late[::-1], False)]
    return _linked(artifact, uses, [part for part in parts if part[0]])


def _pulled(
    order: Sequence[int], uses: Sequence["_Uses"], movable: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """The steps that may run before all others, and the other steps."""
    pulled: list[int] = []
    passed: list[int] = []
    for at in order:
        free = movable[at] and not any(uses[at].conflicts(uses[other]) for other in passed)
        (pulled if free else passed).append(at)
    return pulled, passed


def _runs(order: Sequence[int], recorded: Sequence[bool]) -> list[tuple[list[int], bool]]:
    runs: list[tuple[list[int], bool]] = []
    for at in order:
        if not runs or runs[-1][1] != recorded[at]:
            runs.append(([], recorded[at]))
        runs[-1][0].append(at)
    return runs


def _linked(
    artifact: Artifact, uses: Sequence["_Uses"], parts: Sequence[tuple[list[int], bool]]
) -> tuple[Segment, ...]:
    """The segments, each with the buffers of library calls that it shares with others."""
    is_recorded: dict[str, bool] = {}  # by name: whether a recorded segment makes it
    for steps, recorded in parts:
        for at in steps:
            for write in uses[at].writes:
                if write.place is Storage.CALL:
                    is_recorded.setdefault(write.name, recorded)
    taken = {
        name.name
        for steps, recorded in parts
        if recorded
        for at in steps
        for name in (*uses[at].reads, *uses[at].writes)
    }
    segments: list[Segment] = []
    for steps, recorded in parts:
        touched = {read.name for at in steps for read in (*uses[at].reads, *uses[at].writes)}
        makes = {name for at in steps for name in uses[at].fills if name in is_recorded}
        own = {name for name in makes if not is_recorded[name]}
        reads = () if recorded else sorted(name for name in touched if is_recorded.get(name))
        copied = () if recorded else sorted(own & taken)
        segments.append(
            Segment(tuple(steps), recorded, tuple(reads), tuple(copied), tuple(sorted(makes)))
        )
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class _Uses:
    """The memory that a step uses. Releasing a buffer counts as a write to it."""

    reads: tuple[BufferSpec, ...]
    writes: tuple[BufferSpec, ...]
    fills: tuple[str, ...]  # that this step fills
    waits: bool = False  # it may end the call: what comes after it stays there

    @staticmethod
    def of(artifact: Artifact, at: int) -> "_Uses":
        step, buffers = artifact.steps[at], artifact.buffers
        released = artifact.releases[at] if artifact.releases else ()
        if isinstance(step, Launch):  # what of its buffers it writes is not said
            names = tuple(dict.fromkeys(name for row in step.buffers for name in row))
            specs = tuple(buffers[name] for name in names)
            return _Uses(specs, (*specs, *(buffers[name] for name in released)), names)
        reads = tuple(buffers[v.buffer] for v in step.views)
        results = tuple(name for name in step.outputs if name is not None)
        written = reads if _may_write(step) else ()
        written = (*written, *(buffers[name] for name in (*results, *released)))
        return _Uses(reads, written, results, waits=_may_end_the_call(step))

    def conflicts(self, other: "_Uses") -> bool:
        """Whether the order of the two matters."""
        return (
            self.waits
            or other.waits
            or _any_shared(self.writes, other.writes)
            or _any_shared(self.writes, other.reads)
            or _any_shared(self.reads, other.writes)
        )


def _any_shared(some: Sequence[BufferSpec], others: Sequence[BufferSpec]) -> bool:
    return any(_shares(a, b) for a in some for b in others)


def _shares(one: BufferSpec, other: BufferSpec) -> bool:
    """Whether two buffers may have memory in common. Inputs of one device may be views of one
    memory."""
    if one.name == other.name:
        return True
    if one.place is not other.place:
        return False
    if one.place is Storage.INPUT:
        return one.device == other.device
    if one.place is not Storage.ARENA or one.device != other.device:
        return False
    first, second = sorted((one, other), key=lambda buffer: buffer.offset)
    return first.offset + spec_bytes(first) > second.offset


def _may_write(step: CallStep) -> bool:
    """Whether it may write to its arguments."""
    return facts_by_name(step.op).writes


def _may_end_the_call(step: CallStep) -> bool:
    """Whether it checks an assumption of the artifact, or communicates with other ranks."""
    return bool(facts_by_name(step.op).effects & (Effect.CONDITION | Effect.COMMUNICATES))


def _is_calm(step: CallStep) -> bool:
    """Whether the call is an operator of PyTorch's with known effects that draws nothing."""
    facts = facts_by_name(step.op)
    return facts.native and not facts.draws
