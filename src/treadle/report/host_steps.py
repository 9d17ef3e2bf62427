"""What a call runs, launch by launch, and added up by kernel, by operator and by phase."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from treadle.report.log import KernelInfo
from treadle.runtime.store.artifact import Artifact
from treadle.util.wording import layer_of

T = TypeVar("T")
_PHASES = ("forward", "backward", "optimizer")


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


def total(seconds: Iterable[float | None]) -> float | None:
    """The sum of those that were measured; ``None`` if none was."""
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
        seconds=total(step.seconds for step in steps),
        source=source,
        inside=bool(first.body),
    )


def _by_time(uses: Iterable[Use]) -> tuple[Use, ...]:
    return tuple(sorted(uses, key=lambda use: (-(use.seconds or 0.0), -use.floor_seconds)))


def kernels_of(steps: Sequence[HostStep], artifact: Artifact) -> tuple[Use, ...]:
    """The launches of each generated function, with its text."""
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


def calls_of(steps: Iterable[HostStep]) -> tuple[Use, ...]:
    """The calls of each operator for one line."""
    groups = _grouped(steps, lambda step: (step.name, step.reason, step.phase, step.where))
    return _by_time(map(_use, groups))


def phases_of(steps: Sequence[HostStep], operations: Mapping[str, int]) -> tuple[PhaseSummary, ...]:
    """Each phase; ``operations``: of the captured graph, by phase."""
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
                seconds=total(step.seconds for step in own),
            )
            summaries.append(phase)
    return tuple(summaries)
