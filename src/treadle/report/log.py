"""The text and data of a compile that are stored, so that a cached step can be reported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from treadle.algebra.extents import sample_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, PassReport
from treadle.loop.kernel import Kernel, KernelPlan
from treadle.loop.origins import OriginSummary
from treadle.loop.program import Call, Origin
from treadle.passes.comm.simulate import CommunicationTimeline
from treadle.passes.memory.cost import work_of
from treadle.passes.memory.decisions import Decision
from treadle.report.products import Product, size_of, text_of
from treadle.report.stages import Watcher
from treadle.runtime.store.artifact import Artifact
from treadle.schedule.timeline import Timeline, timeline


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
class StagePass:
    """One run of a pass, without its time, and the stage that ran it."""

    stage: str
    report: PassReport


@dataclass(frozen=True, slots=True)
class BodyNotes:
    """What is known of a function of a loop: its kernels by name, its calls in their order."""

    kernels: Mapping[str, KernelInfo]
    calls: tuple[KernelInfo, ...]


@dataclass(frozen=True, slots=True)
class Notes:
    """What a compile knows beside its texts: a report is made of it, also of a cached step."""

    decisions: tuple[Decision, ...] = ()
    kernels: Mapping[str, KernelInfo] = field(default_factory=dict[str, KernelInfo])
    calls: tuple[KernelInfo, ...] = ()  # in the order of the artifact's
    timeline: Timeline | None = None
    passes: tuple[StagePass, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])  # of what the stages made
    communication: CommunicationTimeline | None = None
    bodies: Mapping[str, BodyNotes] = field(default_factory=dict[str, BodyNotes])  # by their names
    bound_bytes: int | None = None  # of the peaks of all plans as fast, within a budget
    micro_batches: str = ""  # which ones, and why


class CompileLog(Watcher):
    """The text of every product but the sources, which the artifact holds, and notes."""

    def __init__(self, texts: Mapping[str, str] | None = None, notes: Notes | None = None) -> None:
        self.texts: dict[str, str] = dict(texts or {})
        self.notes = notes or Notes()
        self.pass_seconds: list[float | None] = [None] * len(self.notes.passes)
        self._stage = ""
        self._nodes: dict[str, fx.Node] = {}

    def begins(self, stage: str) -> None:
        self._stage = stage

    def after(self, earlier: "CompileLog") -> "CompileLog":
        """This log, which may be of another process, after the passes of an ``earlier`` one."""
        passes = (*earlier.notes.passes, *self.notes.passes)
        sizes = {**self.notes.sizes, **earlier.notes.sizes}
        log = CompileLog(self.texts, replace(self.notes, passes=passes, sizes=sizes))
        log.pass_seconds = [*earlier.pass_seconds, *self.pass_seconds]
        return log

    def produced(self, name: str, product: Product) -> None:
        if not isinstance(product, Artifact):
            self.texts[name] = text_of(product)
        self.note_size(name, product)
        match product:
            case StepGraph():
                self._nodes = {str(node): node for node in product.graph.nodes}
            case KernelPlan():
                notes = self._made_of(product)
                line = timeline(product)
                self.notes = replace(
                    self.notes, kernels=notes.kernels, calls=notes.calls, timeline=line
                )
                self._nodes = {}
            case tuple():
                self.notes = replace(self.notes, decisions=product)
            case _:
                pass

    def made_inside(self, name: str, step: StepGraph, plan: KernelPlan) -> None:
        """What runs in each round of a loop, under the name that the artifact has for it."""
        self._nodes = {str(node): node for node in step.graph.nodes}
        bodies = {**self.notes.bodies, name: self._made_of(plan)}
        self.notes = replace(self.notes, bodies=bodies)
        self._nodes = {}

    def _made_of(self, plan: KernelPlan) -> BodyNotes:
        kernels = {k.name: self._fused(k) for k in plan.steps if isinstance(k, Kernel)}
        return BodyNotes(kernels, tuple(self._called(c) for c in plan.steps if isinstance(c, Call)))

    def bounded(self, nbytes: int) -> None:
        self.notes = replace(self.notes, bound_bytes=nbytes)

    def split(self, why: str) -> None:
        self.notes = replace(self.notes, micro_batches=why)

    def simulated(self, line: CommunicationTimeline) -> None:
        self.notes = replace(self.notes, communication=line)

    def note_size(self, name: str, product: Product) -> None:
        """How large ``product`` is; ``name``: its own, or that of its stage."""
        self.notes = replace(self.notes, sizes={**self.notes.sizes, name: size_of(product)})

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        self.pass_seconds.append(report.seconds)
        told = StagePass(self._stage, replace(report, seconds=0.0))
        self.notes = replace(self.notes, passes=(*self.notes.passes, told))

    def _fused(self, kernel: Kernel) -> KernelInfo:
        return self._info(kernel.origins)

    def _info(self, origins: Sequence[Origin]) -> KernelInfo:
        found = OriginSummary.of(origins)
        return KernelInfo(found.operations, found.phase, found.module, found.where)

    def _called(self, call: Call) -> KernelInfo:
        info = self._info((call.origin,))
        node = self._nodes.get(call.origin.nodes[0]) if call.origin.nodes else None
        if node is None:
            return info
        flops, moved, dtype = work_of(node)
        size = sample_of(moved)
        return replace(info, flops=flops, bytes_moved=size, dtype=str(dtype or ""))
