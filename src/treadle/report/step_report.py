"""All facts about a compiled step, as data: ``explain``, reports, traces and summaries show it."""

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from treadle.graph.core.node_info import info
from treadle.graph.core.signature import Role, StepGraph
from treadle.options import Options
from treadle.passes.memory.decisions import Decision, Row, rows
from treadle.report.host_steps import (
    HostStep,
    PhaseSummary,
    Use,
    calls_of,
    kernels_of,
    phases_of,
    total,
)
from treadle.report.log import BodyNotes, CompileLog, KernelInfo, Notes
from treadle.runtime.execute.bindings import spec_bytes
from treadle.runtime.execute.loops import RUNNERS, Branch
from treadle.runtime.store.artifact import Artifact, CallStep, Launch
from treadle.schedule.timeline import Timeline
from treadle.targets.model import DeviceModel
from treadle.util.package import VERSION

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
    whole: bool = True  # with its optimizer and its batch
    launching: str = ""  # whether its launches are replayed on a GPU, and why not
    conditions: int = 0  # that are looked at in each call
    decisions: tuple[tuple[int, str], ...] = ()  # of them: the answer, and the line that asks
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
class Memory:
    """``budget``: as it was asked for. ``budget_bytes`` is ``None`` for a ratio as well.
    ``bounds``: values whose sizes are known at run time only, and the bytes that they are counted
    with. ``variants``: those of the step that take turns in one arena; ``step_bytes``: what no call
    exceeds, whichever of them serves it; ``place_bytes``: that their recordings share.
    ``bound_bytes``: within a budget, a proved lower bound of the peak of every plan that is
    estimated to be as fast. ``micro_batches``: if they were asked for, which ones, and why.
    ``planner``: what of it is not the default."""

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
    micro_batches: str = ""
    planner: str = ""


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
        return kernels_of(self._all_steps, self.build.artifact)

    @cached_property
    def calls(self) -> tuple[Use, ...]:
        """The library calls that were chosen."""
        return calls_of(step for step in self._all_steps if not step.function and not step.reason)

    @cached_property
    def fallbacks(self) -> tuple[Use, ...]:
        """Those that were not."""
        return calls_of(step for step in self._all_steps if not step.function and step.reason)

    @cached_property
    def phases(self) -> tuple[PhaseSummary, ...]:
        """In the order in which they run."""
        return phases_of(self._all_steps, self.operations)

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
        return total(step.seconds for step in self.host_steps)


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
        notes.micro_batches,
        seen.options.method.words,
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
        noted = _noted(step, notes.kernels, infos, seen.build.artifact)
        if isinstance(step, Launch):
            at = tuple(places[kernel] for kernel in step.kernels if kernel in places)
        else:
            at = tuple([place] if (place := next(calls, None)) is not None else [])
        rate = device.rate(_DTYPES.get(noted.info.dtype, torch.float32))
        floor = max(noted.bytes_moved / device.bandwidth, noted.flops / rate)
        where = noted.info.where or step.origin
        host_steps.append(replace(noted, where=where, floor_seconds=floor, seconds=measured, at=at))
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
            assert isinstance(step, CallStep)
            inside = "if taken" if RUNNERS[step.op] is Branch else "each round"
            loop_round = _round(body, name, host, notes[name], inside)
            steps += [*loop_round, *_rounds(body, loop_round, notes)]
    return tuple(steps)


def _round(
    body: Artifact, body_name: str, loop: HostStep, notes: BodyNotes, inside: str
) -> list[HostStep]:
    """The steps of a function of a loop, which have the place of the loop in the user's code."""
    calls = iter(notes.calls)
    steps: list[HostStep] = []
    for step in body.steps:
        noted = _noted(step, notes.kernels, calls, body)
        info = replace(noted.info, phase=loop.phase, module=loop.info.module, where=loop.where)
        name = f"{noted.name} ({inside})"
        steps.append(replace(noted, name=name, info=info, where=loop.where, body=body_name))
    return steps


def _noted(
    step: Launch | CallStep,
    kernels: Mapping[str, KernelInfo],
    calls: Iterator[KernelInfo],
    artifact: Artifact,
) -> HostStep:
    """What notes say of a step; ``calls``: those of the library calls that are still to come."""
    if isinstance(step, Launch):
        info = next((kernels[name] for name in step.kernels if name in kernels), _NOTHING)
        name, function, reason = step.function, step.function, ""
        moved, loops = step.bytes_moved, len(step.buffers)
    else:
        info = next(calls, _NOTHING)
        name, function, reason = step.op, "", _reason(step, artifact)
        moved, loops = info.bytes_moved, 0
    return HostStep(
        name, function, reason, info, info.where, loops, moved, info.flops, 0.0, None, ()
    )


def _reason(step: CallStep, artifact: Artifact) -> str:
    """Why a call is a fallback, and what it costs beside its own work."""
    copied, written = artifact.copied_by(step), len(step.updates)
    if not copied:
        return step.reason
    return f"{step.reason}; copied arguments that it writes to: {copied} of {written}"


_NOTHING = KernelInfo((), "", "", "")


def _versions(build: BuildRecord) -> tuple[tuple[str, str], ...]:
    facts = build.facts
    shown = ("torch", "compiler", "device", "machine", "threads", "kernels", "numerics", "rng")
    return (
        ("treadle", f"{VERSION}, sources {facts['treadle'][:12]}"),
        ("python", platform.python_version()),
        *((name, facts[name].strip("'")) for name in shown),
        ("key", build.key),
    )
