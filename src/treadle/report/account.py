"""Everything there is to say about a compiled step, as data: ``explain`` and reports show it."""

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.graph.signature import Role
from treadle.passes.memory.cost import device_for
from treadle.passes.memory.decisions import Row, rows
from treadle.pipeline import Compiled
from treadle.runtime.artifact import Artifact, CallStep, Launch
from treadle.runtime.bindings import spec_bytes
from treadle.schedule.timeline import Timeline
from treadle.stages import Fused
from treadle.util.sizes import parse_bytes
from treadle.util.software import VERSION

_NOTHING = Fused((), "", "")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one role."""

    role: Role
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One generated function in a step: all its launches together.

    ``floor_seconds``: its bytes at the bandwidth that plans are estimated with. ``seconds``:
    measured, if ``Step.profile`` has run.
    """

    function: str
    launches: int
    loops: int
    fused: Fused
    where: str
    bytes_moved: int
    floor_seconds: float
    seconds: float | None
    source: str


@dataclass(frozen=True, slots=True)
class CallUse:
    """One kernel of PyTorch's in a step; ``reason`` says why it is a fallback, if it is one."""

    op: str
    count: int
    where: str
    reason: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Memory:
    """``budget``: as it was asked for. ``budget_bytes`` is ``None`` for a ratio as well."""

    predicted_bytes: int
    measured_bytes: int | None
    arena_bytes: int
    budget: str
    budget_bytes: int | None
    decisions: tuple[Row, ...]
    timeline: Timeline | None


@dataclass(frozen=True, slots=True)
class Account:
    """A compiled step. Stages in the order they ran; kernels and calls by time, else by bytes."""

    name: str
    device: str
    operations: tuple[tuple[str, int], ...]
    inputs: tuple[Inputs, ...]
    written_back: int
    left: tuple[str, ...]  # places outside that get what the step leaves there
    results: int
    stages: tuple[tuple[str, float], ...]
    from_cache: bool
    library: bool
    dims: str
    memory: Memory
    kernels: tuple[KernelUse, ...]
    calls: tuple[CallUse, ...]
    fallbacks: tuple[CallUse, ...]
    host_steps: int
    profiled_seconds: float | None
    bandwidth: float
    recompiles: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    roles: tuple[Role, ...]
    has_run: bool

    @property
    def launches(self) -> int:
        return sum(each.launches for each in self.kernels)

    @property
    def compile_seconds(self) -> float:
        return sum(seconds for _, seconds in self.stages)


def account_of(compiled: Compiled, name: str = "", recompiles: Sequence[str] = ()) -> Account:
    """What ``compiled`` is and how it came about."""
    step, artifact = compiled.captured.step, compiled.artifact
    phases = Counter(node.meta["phase"] for node in step.graph.nodes if node.op == "call_function")
    calls = _calls(compiled)
    return Account(
        name=name,
        device=artifact.device,
        operations=tuple(phases.items()),
        inputs=_inputs(compiled),
        written_back=sum(out.writes is not None for out in step.signature.outputs),
        left=tuple(each.place.label for each in compiled.captured.left),
        results=sum(out.writes is None for out in step.signature.outputs),
        stages=tuple(compiled.seconds.items()),
        from_cache=compiled.from_cache,
        library=compiled.library,
        dims=compiled.facts["sizes"],
        memory=_memory(compiled),
        kernels=_kernels(compiled),
        calls=tuple(each for each in calls if not each.reason),
        fallbacks=(*(each for each in calls if each.reason), *_eager_steps(compiled)),
        host_steps=len(artifact.steps),
        profiled_seconds=sum(compiled.kernel_seconds) if compiled.kernel_seconds else None,
        bandwidth=device_for(artifact.device).bandwidth,
        recompiles=tuple(recompiles),
        versions=_versions(compiled),
        roles=tuple(entry.role for entry in step.signature.inputs),
        has_run=compiled.has_run,
    )


def _inputs(compiled: Compiled) -> tuple[Inputs, ...]:
    artifact = compiled.artifact
    counts: Counter[Role] = Counter()
    sizes: Counter[Role] = Counter()
    entries = compiled.captured.step.signature.inputs
    for entry, name in zip(entries, artifact.inputs, strict=True):
        counts[entry.role] += 1
        sizes[entry.role] += spec_bytes(artifact.buffers[name])
    return tuple(Inputs(role, counts[role], sizes[role]) for role in Role if counts[role])


def _memory(compiled: Compiled) -> Memory:
    budget = compiled.options.memory
    notes = compiled.story.notes
    sized = isinstance(budget, str | int)
    return Memory(
        compiled.artifact.peak_bytes,
        compiled.measured_peak,
        compiled.artifact.arena_bytes,
        "" if budget is None else str(budget),
        parse_bytes(budget) if sized else None,
        tuple(rows(notes.decisions)),
        notes.timeline,
    )


def _timed(compiled: Compiled) -> list[tuple[Launch | CallStep, float | None]]:
    """Each host step and its measured seconds, if there are any."""
    steps = compiled.artifact.steps
    return list(zip(steps, compiled.kernel_seconds or (None,) * len(steps), strict=True))


def _total(seconds: Sequence[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return sum(known) if known else None


def _kernels(compiled: Compiled) -> tuple[KernelUse, ...]:
    groups: dict[str, list[tuple[Launch, float | None]]] = {}
    for step, seconds in _timed(compiled):
        if isinstance(step, Launch):
            groups.setdefault(step.function, []).append((step, seconds))
    bandwidth = device_for(compiled.artifact.device).bandwidth
    known = compiled.story.notes.kernels
    found: list[KernelUse] = []
    for function, uses in groups.items():
        first = uses[0][0]
        moved = sum(launch.bytes_moved for launch, _ in uses)
        use = KernelUse(
            function,
            launches=len(uses),
            loops=sum(len(launch.buffers) for launch, _ in uses),
            fused=known.get(first.kernels[0], _NOTHING) if first.kernels else _NOTHING,
            where=first.origin,
            bytes_moved=moved,
            floor_seconds=moved / bandwidth,
            seconds=_total([seconds for _, seconds in uses]),
            source=_source(compiled.artifact, function),
        )
        found.append(use)
    return tuple(sorted(found, key=lambda use: (-(use.seconds or 0.0), -use.bytes_moved)))


def _source(artifact: Artifact, function: str) -> str:
    sources = (each for each in artifact.sources if function in each.functions)
    return next((each.function(function).strip() for each in sources), "")


def _calls(compiled: Compiled) -> tuple[CallUse, ...]:
    groups: dict[tuple[str, str], list[tuple[CallStep, float | None]]] = {}
    for step, seconds in _timed(compiled):
        if isinstance(step, CallStep):
            groups.setdefault((step.op, step.reason), []).append((step, seconds))
    found = [
        CallUse(op, len(uses), uses[0][0].origin, reason, _total([each for _, each in uses]))
        for (op, reason), uses in groups.items()
    ]
    return tuple(sorted(found, key=lambda use: (-(use.seconds or 0.0), -use.count)))


def _eager_steps(compiled: Compiled) -> list[CallUse]:
    """Optimizers that step after the graph: not timed, and not in the plan."""
    tail = "it steps after the graph, and its memory is not in the plan"
    return [
        CallUse(
            f"{type(each.optimizer).__name__}.step",
            1,
            "",
            f"{each.reason.code}: {each.reason.words}; {tail}",
            None,
        )
        for each in compiled.captured.eager
    ]


def _versions(compiled: Compiled) -> tuple[tuple[str, str], ...]:
    facts = compiled.facts
    shown = ("torch", "compiler", "device", "machine", "threads", "kernels", "numerics", "rng")
    return (
        ("treadle", f"{VERSION}, sources {facts['treadle'][:12]}"),
        ("python", platform.python_version()),
        *((name, facts[name].strip("'")) for name in shown),
        ("key", compiled.key),
    )
