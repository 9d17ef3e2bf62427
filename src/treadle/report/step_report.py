"""All facts about a compiled step, as data: ``explain``, reports, traces and summaries show it."""

import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from treadle.graph.core.node_info import info
from treadle.graph.core.signature import Role, StepGraph
from treadle.options import Options
from treadle.passes.memory.decisions import Decision, Row, layer_of, rows
from treadle.report.log import BodyNotes, CompileLog, KernelInfo, Notes
from treadle.runtime.execute.bindings import spec_bytes
from treadle.runtime.store.artifact import Artifact, Launch
from treadle.schedule.timeline import Timeline
from treadle.targets.model import DeviceModel
from treadle.util.package import VERSION

T = TypeVar("T")
_PHASES = ("forward", "backward", "optimizer")
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class VariantMemory:
    """One variant of a step: what it is for, what it needs of the arena, and its predicted peak.
    ``is_recorded``: whether its launches are replayed; ``own_bytes``: that stay allocated for it
    alone, beside all that variants share."""

    name: str
    arena_bytes: int
    peak_bytes: int
    is_recorded: bool = False
    own_bytes: int = 0


class BuildRecord(Protocol):
    """What the stages made of a step, and out of what; see ``Built``. ``hardware``: what times were
    estimated with."""

    artifact: Artifact
    seconds: dict[str, float]
    facts: Mapping[str, str]
    key: str
    from_cache: bool
    library: bool
    hardware: DeviceModel

    @property
    def log(self) -> CompileLog:
        """What is kept of the compile."""
        ...


@dataclass(frozen=True, slots=True)
class Observed:
    """Something compiled that is to be told about: a variant of a step, or a graph of the backend.

    ``left``: places outside that get what the step leaves there. ``eager``: optimizers that step
    after the graph, and why. ``kernel_seconds``: measured, one entry per host step, or empty.
    """

    name: str
    step: StepGraph
    build: BuildRecord
    options: Options
    left: tuple[str, ...] = ()
    eager: tuple[tuple[str, str], ...] = ()
    kernel_seconds: tuple[float, ...] = ()
    measured_peak: int | None = None
    has_run: bool = True
    recompiles: tuple[str, ...] = ()
    whole: bool = True  # with its optimizer and its batch; of the backend all inputs are alike
    launching: str = ""  # whether its launches are replayed on a GPU, and why not
    conditions: int = 0  # that are looked at in each call
    decisions: tuple[tuple[bool, str], ...] = ()  # of them: the answer, and the line that asks
    variants: tuple[VariantMemory, ...] = ()  # that take turns in one arena, this one among them
    step_bytes: int = 0  # that no call exceeds, whichever of them serves it
    place_bytes: int = 0  # that recordings share for inputs
    start: str = ""  # whether a process traces it, in words


@dataclass(frozen=True, slots=True)
class RoleInputs:
    """The inputs of one role."""

    role: Role
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HostStep:
    """One launch of a generated kernel, or one kernel of PyTorch's (``function`` is empty).

    ``name`` is the operator's for a kernel of PyTorch's, and ``reason`` says why it is a fallback,
    if it is one. ``floor_seconds``: ``max(bytes / bandwidth, flops / rate)`` of the device that
    plans are estimated for, less where bytes stay in a cache; ``seconds``: measured, if
    ``Step.profile`` has run. ``at``: its positions in the timeline. ``body``: the name of the
    function of a loop that it stands in.
    """

    name: str
    function: str
    reason: str
    info: KernelInfo
    where: str
    loops: int
    bytes_moved: int
    flops: float
    floor_seconds: float
    seconds: float | None
    at: tuple[int, ...]
    body: str = ""

    @property
    def phase(self) -> str:
        """The phase it belongs to; ``other`` where nothing says."""
        return self.info.phase or "other"


@dataclass(frozen=True, slots=True)
class Use:
    """Host steps that are told together: the launches of one generated function, or the calls of
    one operator for one line. ``inside``: in each round of a loop."""

    name: str
    reason: str
    launches: int
    loops: int
    operations: tuple[str, ...]
    phase: str
    module: str
    where: str
    bytes_moved: int
    flops: float
    floor_seconds: float
    seconds: float | None
    source: str = ""
    inside: bool = False


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase of a step: ``"forward"``, ``"backward"``, ``"optimizer"``, or ``"other"``.

    ``operations`` of the captured graph became ``launches`` of generated kernels, ``library_calls``
    and ``fallbacks``. ``floor_seconds``: the time that their bytes and products need at the rates
    of the device (the real time is less if data stays in a cache); ``seconds``: measured, ``None``
    before ``Step.profile``.
    """

    name: str
    operations: int
    launches: int
    library_calls: int
    fallbacks: int
    floor_seconds: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Memory:
    """``budget``: as it was asked for. ``budget_bytes`` is ``None`` for a ratio as well.
    ``bounds``: values whose sizes are known at run time only, and the bytes that they are counted
    with. ``variants``: those of the step that take turns in one arena; ``step_bytes``: what no call
    exceeds, whichever of them serves it; ``place_bytes``: that their recordings share.
    ``bound_bytes``: within a budget, a proved lower bound of the peak of every plan that is
    estimated to be as fast."""

    predicted_bytes: int
    measured_bytes: int | None
    arena_bytes: int
    budget: str
    budget_bytes: int | None
    decisions: tuple[Row, ...]
    timeline: Timeline | None
    bounds: tuple[int, int] = (0, 0)
    variants: tuple[VariantMemory, ...] = ()
    step_bytes: int = 0
    place_bytes: int = 0
    bound_bytes: int | None = None


@dataclass(frozen=True)
class StepReport:
    """What ``observed`` is and how it came about, kernels and calls by time, else by estimate.
    ``rounds``: one round of each loop among the host steps, whose time is in that of the loop."""

    observed: Observed
    host_steps: tuple[HostStep, ...]
    rounds: tuple[HostStep, ...]
    memory: Memory

    @property
    def build(self) -> BuildRecord:
        """What the stages made of it."""
        return self.observed.build

    @property
    def notes(self) -> Notes:
        """What was heard of the stages, the same whether the code is from the cache or not."""
        return self.build.log.notes

    @cached_property
    def operations(self) -> Mapping[str, int]:
        """How many operations of the captured graph each phase has."""
        nodes = self.observed.step.graph.nodes
        return Counter(info(node).phase for node in nodes if node.op == "call_function")

    @cached_property
    def inputs(self) -> tuple[RoleInputs, ...]:
        """Those of each role."""
        counts: Counter[Role] = Counter()
        sizes: Counter[Role] = Counter()
        for role, name in zip(self.roles, self.build.artifact.inputs, strict=True):
            counts[role] += 1
            sizes[role] += spec_bytes(self.build.artifact.buffers[name])
        return tuple(RoleInputs(role, counts[role], sizes[role]) for role in Role if counts[role])

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of each input."""
        return tuple(entry.role for entry in self.observed.step.signature.inputs)

    @property
    def written_back(self) -> int:
        """How many inputs change in place."""
        return sum(out.writes is not None for out in self.observed.step.signature.outputs)

    @property
    def results(self) -> int:
        """How many values the step gives."""
        return len(self.observed.step.signature.outputs) - self.written_back

    @property
    def _all_steps(self) -> tuple[HostStep, ...]:
        return (*self.host_steps, *self.rounds)

    @cached_property
    def kernels(self) -> tuple[Use, ...]:
        """The launches of each generated function."""
        return _kernels(self._all_steps, self.build.artifact)

    @cached_property
    def calls(self) -> tuple[Use, ...]:
        """The library calls that were chosen."""
        return _calls(step for step in self._all_steps if not step.function and not step.reason)

    @cached_property
    def fallbacks(self) -> tuple[Use, ...]:
        """Those that were not."""
        return _calls(step for step in self._all_steps if not step.function and step.reason)

    @cached_property
    def phases(self) -> tuple[PhaseSummary, ...]:
        """In the order in which they run."""
        return _phases(self._all_steps, self.operations)

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """What the compiled code depends on beside the step."""
        return _versions(self.build)

    @property
    def launches(self) -> int:
        """Launches of generated kernels in a call."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def compile_seconds(self) -> float:
        """Seconds of all stages together."""
        return sum(self.build.seconds.values())

    @property
    def at_peak(self) -> HostStep | None:
        """The kernel or call during which most is alive, if that is known."""
        line = self.memory.timeline
        peak = -1 if line is None else line.peak_at
        return next((step for step in self.host_steps if peak in step.at), None)

    @property
    def floor_seconds(self) -> float:
        """Estimated seconds of kernels and calls together."""
        return sum(step.floor_seconds for step in self.host_steps)

    @property
    def profiled_seconds(self) -> float | None:
        """The measured time of all host steps; ``None`` where they were not timed."""
        return _total(step.seconds for step in self.host_steps)


def report_of(seen: Observed) -> StepReport:
    """What ``seen`` is and how it came about."""
    hosts = _host_steps(seen, seen.build.hardware)
    rounds = _rounds(seen.build.artifact, hosts, seen.build.log.notes.bodies)
    return StepReport(seen, hosts, rounds, _memory(seen))


def _memory(seen: Observed) -> Memory:
    asked, budget = seen.options.memory, seen.options.budget
    artifact, notes = seen.build.artifact, seen.build.log.notes
    return Memory(
        artifact.peak_bytes,
        seen.measured_peak,
        artifact.arena_bytes,
        "" if asked is None else str(asked),
        None if budget is None else budget.nbytes,
        tuple(rows(_explained(notes.decisions, asked is not None))),
        notes.timeline,
        _bounds(artifact),
        seen.variants,
        seen.step_bytes or artifact.peak_bytes,
        seen.place_bytes,
        notes.bound_bytes,
    )


def _explained(decisions: Sequence[Decision], is_budgeted: bool) -> list[Decision]:
    """Within a budget, what is computed again may cost more time than keeping it would."""
    return [
        replace(decision, why="recomputed to stay within the budget")
        if is_budgeted and decision.decision == "recompute"
        else decision
        for decision in decisions
    ]


def _bounds(artifact: Artifact) -> tuple[int, int]:
    """How many buffers have a bound instead of a size, and their bytes; numbers are none."""
    buffers = [buffer for buffer in artifact.buffers.values() if buffer.unsized and buffer.shape]
    return len(buffers), sum(map(spec_bytes, buffers))


def _host_steps(seen: Observed, device: DeviceModel) -> tuple[HostStep, ...]:
    """Notes know kernels by name, and library calls in their order."""
    steps, notes = seen.build.artifact.steps, seen.build.log.notes
    seconds = seen.kernel_seconds or (None,) * len(steps)
    names = notes.timeline.names if notes.timeline is not None else ()
    places = {name: at for at, name in enumerate(names) if name in notes.kernels}
    calls = iter([at for at, name in enumerate(names) if name not in notes.kernels])
    infos = iter(notes.calls)
    host_steps: list[HostStep] = []
    for step, measured in zip(steps, seconds, strict=True):
        if isinstance(step, Launch):
            info = next((notes.kernels[k] for k in step.kernels if k in notes.kernels), _NOTHING)
            name, function, reason = step.function, step.function, ""
            at = tuple(places[kernel] for kernel in step.kernels if kernel in places)
            moved, loops = step.bytes_moved, len(step.buffers)
        else:
            info = next(infos, _NOTHING)
            name, function, reason = step.op, "", step.reason
            at = tuple([place] if (place := next(calls, None)) is not None else [])
            moved, loops = info.bytes_moved, 0
        rate = device.rate(_DTYPES.get(info.dtype, torch.float32))
        floor = max(moved / device.bandwidth, info.flops / rate)
        where = info.where or step.origin
        host_steps.append(
            HostStep(
                name, function, reason, info, where, loops, moved, info.flops, floor, measured, at
            )
        )
    return tuple(host_steps)


def _rounds(
    artifact: Artifact, hosts: Sequence[HostStep], notes: Mapping[str, BodyNotes]
) -> tuple[HostStep, ...]:
    """One round of each loop among the steps of an artifact, and of loops in it. How many rounds
    there are is not known, so there is no estimate of their time."""
    steps: list[HostStep] = []
    for step, host in zip(artifact.steps, hosts, strict=True):
        for name in () if isinstance(step, Launch) else step.bodies:
            body = artifact.bodies[name]
            loop_round = _round(body, name, host, notes[name])
            steps += [*loop_round, *_rounds(body, loop_round, notes)]
    return tuple(steps)


def _round(body: Artifact, name: str, loop: HostStep, notes: BodyNotes) -> list[HostStep]:
    """The steps of a function of a loop, which have the place of the loop in the user's code."""
    calls = iter(notes.calls)
    steps: list[HostStep] = []
    for step in body.steps:
        if isinstance(step, Launch):
            known = next((notes.kernels[k] for k in step.kernels if k in notes.kernels), _NOTHING)
            said, function, reason = step.function, step.function, ""
            moved, loops = step.bytes_moved, len(step.buffers)
        else:
            known, said, function, reason = next(calls, _NOTHING), step.op, "", step.reason
            moved, loops = known.bytes_moved, 0
        told = replace(known, phase=loop.phase, module=loop.info.module, where=loop.where)
        steps.append(
            HostStep(
                f"{said} (each round)", function, reason, told, loop.where, loops, moved,
                known.flops, 0.0, None, (), name,
            )
        )  # fmt: skip
    return steps


_NOTHING = KernelInfo((), "", "", "")


def _total(seconds: Iterable[float | None]) -> float | None:
    known = [part for part in seconds if part is not None]
    return sum(known) if known else None


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _use(steps: Sequence[HostStep], source: str = "") -> Use:
    first = steps[0]
    modules = dict.fromkeys(layer_of(step.info.module) for step in steps if step.info.module)
    return Use(
        name=first.name,
        reason=first.reason,
        launches=len(steps),
        loops=sum(step.loops for step in steps),
        operations=first.info.operations,
        phase=first.phase,
        module=", ".join(modules),
        where=first.where,
        bytes_moved=sum(step.bytes_moved for step in steps),
        flops=sum(step.flops for step in steps),
        floor_seconds=sum(step.floor_seconds for step in steps),
        seconds=_total(step.seconds for step in steps),
        source=source,
        inside=bool(first.body),
    )


def _by_time(uses: Iterable[Use]) -> tuple[Use, ...]:
    return tuple(sorted(uses, key=lambda use: (-(use.seconds or 0.0), -use.floor_seconds)))


def _kernels(steps: Sequence[HostStep], artifact: Artifact) -> tuple[Use, ...]:
    texts = _texts(artifact)
    kernel_steps = (step for step in steps if step.function)
    groups = _grouped(kernel_steps, lambda step: (step.body, step.function))
    return _by_time(_use(group, texts[group[0].body, group[0].function]) for group in groups)


def _texts(artifact: Artifact, body: str = "") -> dict[tuple[str, str], str]:
    """The text of each generated function, by its name and that of the loop's function it is of."""
    texts = {
        (body, name): source.function(name).strip()
        for source in artifact.sources
        for name in source.functions
    }
    for name, loop_body in artifact.bodies.items():
        texts |= _texts(loop_body, name)
    return texts


def _calls(steps: Iterable[HostStep]) -> tuple[Use, ...]:
    groups = _grouped(steps, lambda step: (step.name, step.reason, step.phase, step.where))
    return _by_time(map(_use, groups))


def _phases(steps: Sequence[HostStep], operations: Mapping[str, int]) -> tuple[PhaseSummary, ...]:
    summaries: list[PhaseSummary] = []
    for name in dict.fromkeys((*_PHASES, *(step.phase for step in steps))):
        own = [step for step in steps if step.phase == name]
        if own or operations.get(name):
            calls = [step for step in own if not step.function]
            phase = PhaseSummary(
                name,
                operations=operations.get(name, 0),
                launches=len(own) - len(calls),
                library_calls=sum(not call.reason for call in calls),
                fallbacks=sum(bool(call.reason) for call in calls),
                floor_seconds=sum(step.floor_seconds for step in own),
                seconds=_total(step.seconds for step in own),
            )
            summaries.append(phase)
    return tuple(summaries)


def _versions(build: BuildRecord) -> tuple[tuple[str, str], ...]:
    facts = build.facts
    shown = ("torch", "compiler", "device", "machine", "threads", "kernels", "numerics", "rng")
    return (
        ("treadle", f"{VERSION}, sources {facts['treadle'][:12]}"),
        ("python", platform.python_version()),
        *((name, facts[name].strip("'")) for name in shown),
        ("key", build.key),
    )
