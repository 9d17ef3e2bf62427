"""What a compile tells of itself while it runs, and what is kept of that as text."""

import base64
import json
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import fx

from treadle.graph.canonical import SourceLines
from treadle.graph.operators import operation_name
from treadle.graph.passes import GraphPass, Observer, PassReport
from treadle.graph.printing import show
from treadle.graph.signature import StepGraph
from treadle.loop.kernel import Kernel, Plan
from treadle.loop.printing import show_call, show_kernel, show_program
from treadle.loop.program import Call, Origin, Program
from treadle.passes.memory.cost import work_of
from treadle.passes.memory.decisions import Decision, folded
from treadle.runtime.artifact import Artifact
from treadle.runtime.serialize import artifact_from_dict, artifact_to_dict
from treadle.schedule.timeline import Timeline, timeline, timeline_from
from treadle.util.errors import RuntimeFailure
from treadle.util.extents import sample_of

Product = StepGraph | Program | Plan | Artifact | tuple[Decision, ...]
"""What a stage makes."""

STAGES = ("captured", "clean", "planned", "decisions", "loops", "kernels", "sources")
"""The products of a compile, in the order they are made."""


class Watcher(Observer):
    """Hears of every stage, beside every pass. It changes nothing of what it is shown."""

    def begins(self, stage: str) -> None:
        """A stage begins: one of capture, passes, planning and the others."""

    def ends(self, stage: str, seconds: float) -> None:
        """It is over, or has failed; ``seconds``: how long it took."""

    def locates(self, lines: SourceLines) -> None:
        """The source lines that products refer to from now on."""

    def made(self, name: str, product: Product) -> None:
        """A stage has made one of ``STAGES``; ``product`` belongs to the compile."""

    def closes(self) -> None:
        """The compile is over, or has failed."""


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def starts(self, step: StepGraph) -> None:
        for each in self._watchers:
            each.starts(step)

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        for watcher in self._watchers:
            watcher.ran(each, step, report)

    def begins(self, stage: str) -> None:
        for each in self._watchers:
            each.begins(stage)

    def ends(self, stage: str, seconds: float) -> None:
        for each in self._watchers:
            each.ends(stage, seconds)

    def locates(self, lines: SourceLines) -> None:
        for each in self._watchers:
            each.locates(lines)

    def made(self, name: str, product: Product) -> None:
        for each in self._watchers:
            each.made(name, product)

    def closes(self) -> None:
        for each in self._watchers:
            each.closes()


@dataclass
class Clock:
    """Seconds per stage, in the order the stages ran."""

    watcher: Watcher = field(default_factory=Watcher)
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Times what runs within; the watcher hears of its end after an error as well."""
        self.watcher.begins(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.watcher.ends(name, spent)


def text_of(product: Product) -> str:
    """A product as a person reads it."""
    match product:
        case StepGraph():
            return show(product, details=True)
        case Program():
            return show_program(product)
        case Plan():
            parts = [
                show_kernel(s) if isinstance(s, Kernel) else show_call(s) for s in product.steps
            ]
            return "\n\n".join(parts)
        case Artifact():
            return "\n\n".join(source.text for source in product.sources)
        case _:
            return "\n".join(folded(product))


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What one kernel or library call is made of: operations of the planned graph, and the phase,
    module and user's line that most of them belong to.

    Of a library call also the work: ``flops`` of products in ``dtype``, and ``bytes_moved``, each
    operand and result once.
    """

    operations: tuple[str, ...]
    phase: str
    module: str
    where: str
    flops: float = 0.0
    dtype: str = ""
    bytes_moved: int = 0


@dataclass(frozen=True, slots=True)
class Notes:
    """What a compile knows beside its texts: a report is made of it, also of a cached step."""

    decisions: tuple[Decision, ...] = ()
    kernels: Mapping[str, KernelInfo] = field(default_factory=dict[str, KernelInfo])
    calls: tuple[KernelInfo, ...] = ()  # in the order of the artifact's
    timeline: Timeline | None = None


class Story(Watcher):
    """The text of every product but the sources, which the artifact holds, and notes."""

    def __init__(self, texts: Mapping[str, str] | None = None, notes: Notes | None = None) -> None:
        self.texts: dict[str, str] = dict(texts or {})
        self.notes = notes or Notes()
        self._nodes: dict[str, fx.Node] = {}

    def made(self, name: str, product: Product) -> None:
        if not isinstance(product, Artifact):
            self.texts[name] = text_of(product)
        match product:
            case StepGraph():
                self._nodes = {str(node): node for node in product.graph.nodes}
            case Plan():
                kernels = {k.name: self._fused(k) for k in product.steps if isinstance(k, Kernel)}
                calls = tuple(self._called(c) for c in product.steps if isinstance(c, Call))
                line = timeline(product)
                self.notes = replace(self.notes, kernels=kernels, calls=calls, timeline=line)
                self._nodes = {}
            case tuple():
                self.notes = replace(self.notes, decisions=product)
            case _:
                pass

    def _fused(self, kernel: Kernel) -> KernelInfo:
        return self._info(kernel.origins)

    def _info(self, origins: Sequence[Origin]) -> KernelInfo:
        names = dict.fromkeys(name for origin in origins for name in origin.nodes)
        operations = tuple(self._operation(name) for name in names)
        phase = _most(each.phase for each in origins)
        own = [each for each in origins if each.phase == phase]
        module, where = _most(each.module for each in own), _most(each.where for each in own)
        return KernelInfo(operations, phase, module, where)

    def _operation(self, name: str) -> str:
        node = self._nodes.get(name)
        return name if node is None else operation_name(node.target)

    def _called(self, call: Call) -> KernelInfo:
        info = self._info((call.origin,))
        node = self._nodes.get(call.origin.nodes[0]) if call.origin.nodes else None
        if node is None:
            return info
        flops, moved, dtype = work_of(node)
        size = sample_of(moved)
        return replace(info, flops=flops, bytes_moved=size, dtype=str(dtype or ""))


def _most(words: Iterable[str]) -> str:
    """The word that occurs most often, of equals the last; empty ones do not count."""
    counts = Counter(word for word in words if word)
    return max(reversed(counts), key=counts.__getitem__, default="")


def with_lines(artifact: Artifact, story: Story, lines: SourceLines) -> tuple[Artifact, Story]:
    """Both with the source lines of this run in place of their numbers."""
    steps = tuple(replace(each, origin=lines.fill(each.origin)) for each in artifact.steps)
    texts = {name: lines.fill(text) for name, text in story.texts.items()}
    notes = story.notes
    decisions = tuple(replace(each, where=lines.fill(each.where)) for each in notes.decisions)
    line = notes.timeline
    if line is not None:
        held = tuple(replace(each, where=lines.fill(each.where)) for each in line.held)
        line = replace(line, held=held)
    kernels = {name: _filled(each, lines) for name, each in notes.kernels.items()}
    calls = tuple(_filled(each, lines) for each in notes.calls)
    notes = replace(notes, decisions=decisions, kernels=kernels, calls=calls, timeline=line)
    return replace(artifact, steps=steps), Story(texts, notes)


def _filled(info: KernelInfo, lines: SourceLines) -> KernelInfo:
    return replace(info, where=lines.fill(info.where))


def saved_bytes(artifact: Artifact, story: Story) -> bytes:
    """An artifact and its story as one JSON document: what a cache and a saved step hold."""
    told = {"texts": story.texts, "notes": asdict(story.notes)}
    packed = zlib.compress(json.dumps(told).encode())
    data = {"artifact": artifact_to_dict(artifact), "story": base64.b64encode(packed).decode()}
    return json.dumps(data, separators=(",", ":")).encode()


def read_saved(blob: bytes) -> tuple[Artifact, Story] | None:
    """The inverse; ``None`` for what another version wrote, or anything else."""
    try:
        data = json.loads(blob)
        told = json.loads(zlib.decompress(base64.b64decode(data["story"])))
        texts = {str(name): str(text) for name, text in told["texts"].items()}
        return artifact_from_dict(data["artifact"]), Story(texts, _notes(told["notes"]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, zlib.error):
        return None
    except RuntimeFailure:
        return None


def _notes(data: Mapping[str, Any]) -> Notes:
    kernels = {name: _info(each) for name, each in data["kernels"].items()}
    calls = tuple(_info(each) for each in data["calls"])
    decisions = tuple(Decision(**each) for each in data["decisions"])
    line = data["timeline"]
    return Notes(decisions, kernels, calls, None if line is None else timeline_from(line))


def _info(data: Mapping[str, Any]) -> KernelInfo:
    fields: dict[str, Any] = {**data, "operations": tuple(data["operations"])}
    return KernelInfo(**fields)
