"""What a compile returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from torch import Tensor

from treadle.capture.captured import Captured
from treadle.compat.operators.custom_op import NAMESPACE
from treadle.compat.operators.operator_facts import facts_by_name
from treadle.graph.analysis.index_check import IndexCheck
from treadle.graph.core.signature import StepGraph
from treadle.graph.text.canonical import SourceLines
from treadle.options import Options
from treadle.runtime.execute.executable import Executable
from treadle.runtime.ranks.votes import VariantText
from treadle.runtime.store.artifact import Artifact, CallStep
from treadle.targets.model import DeviceModel
from treadle.util.sizes import format_bytes

if TYPE_CHECKING:  # a start from the cache has none of them
    from treadle.passes.comm.cost import CommunicationModel
    from treadle.report.log import CompileLog


@dataclass(repr=False)
class Built:
    """What the stages make of a step.

    ``key`` names the artifact in the cache; ``facts`` are what the key is made of, and ``entry`` is
    what the cache holds: the artifact and its log without this run's source ``lines``. ``library``:
    no compiler was found or wanted, all is PyTorch's kernels. ``checks``: what a call's inputs must
    be before anything runs. ``hardware``: what its times were estimated with; ``communication``:
    those of its collectives, if it has any. ``draws``: whether a run may advance PyTorch's random
    generators. ``told``: the log.
    """

    key: str
    facts: Mapping[str, str]
    entry: bytes
    lines: SourceLines
    artifact: Artifact
    executable: Executable
    told: "Callable[[], CompileLog]"
    seconds: dict[str, float]
    from_cache: bool
    library: bool
    checks: IndexCheck
    hardware: DeviceModel
    communication: "CommunicationModel | None"
    draws: bool

    @property
    def log(self) -> "CompileLog":
        """What is kept of the compile, read when somebody asks."""
        return self.told()


@final
@dataclass(frozen=True, slots=True)
class StartRecord:
    """What the cache has of a variant for processes to come: under which ``keys``, none if nothing;
    the ``reason`` why not, if one is known. ``is_found``: it was there, and nothing was traced;
    ``differs``: why what was there did not serve."""

    keys: tuple[str, ...] = ()
    reason: str = ""
    is_found: bool = False
    differs: str = ""

    @property
    def words(self) -> str:
        """What of that the user is to know."""
        if self.is_found:
            return "nothing was traced: another process had stored a capture of the same step"
        said: list[str] = []
        if self.differs:
            said.append(f"the capture that another process stored does not fit: {self.differs}")
        if self.keys:
            same = "as long as everything that the step reads is the same"
            said.append(f"the next process traces nothing, {same}")
        elif self.reason:
            said.append(f"the next process traces again: {self.reason}")
        return "; ".join(said)


@final
@dataclass(frozen=True, slots=True)
class StoredBuild:
    """What another process needs to find what one built: what the key is made of, the user's source
    lines, what a call's inputs must be, and whether a call may advance PyTorch's random
    generators."""

    facts: dict[str, str]
    lines: tuple[str, ...]
    checks: IndexCheck
    draws: bool


@dataclass(slots=True)
class KeptResults:
    """Results of a call that are the step's and not the caller's: ``count`` from number ``start``
    on. ``tensors``: those of the last call, until somebody takes them."""

    start: int
    count: int
    tensors: list[Tensor] = field(default_factory=list[Tensor])

    def take(self) -> list[Tensor]:
        """The tensors, which are gone from here then."""
        taken, self.tensors = self.tensors, []
        return taken


@dataclass(frozen=True, slots=True)
class Carrying:
    """A step whose updates run in its next call, as three: see ``passes/comm/carry``.
    ``flushed``: the inputs of the step that ``flush`` takes ahead of what is carried."""

    first: "Compiled"
    steady: "Compiled"
    flush: "Compiled"
    flushed: tuple[int, ...]


@dataclass(kw_only=True, repr=False)
class Compiled(Built):
    """One compiled variant of a step, and how it came about."""

    captured: Captured
    options: Options
    measured_peak: int | None = None
    has_run: bool = False
    start: StartRecord = StartRecord()
    kernel_seconds: tuple[float, ...] = ()
    pattern: Artifact | None = None  # the artifact for many shapes that this one was made from
    handles: tuple[str, ...] = ()  # of its regions, by number
    groups: tuple[str, ...] = ()  # that it communicates in
    common: VariantText | None = None  # what their ranks must have in common
    carrying: Carrying | None = None  # then what is built is its steady part
    kept: KeptResults | None = None

    def __repr__(self) -> str:
        peak = format_bytes(self.executable.promised_bytes)
        return f"<treadle variant {self.key[:8]}, peak {peak}>"

    def views(self) -> list[Tensor]:
        """The tensors through which its programs read and write the user's memory."""
        return [view for program in self.programs for view in program.executable.frame.views()]

    @property
    def programs(self) -> "tuple[Compiled, ...]":
        """All that may run for it: itself, or the three parts of one that is carried."""
        parts = self.carrying
        return (self,) if parts is None else (parts.first, parts.steady, parts.flush)

    @property
    def step(self) -> StepGraph:
        """The graph that was built: of a carried step the one that runs from the second call on."""
        parts = self.carrying
        return self.captured.step if parts is None else parts.steady.captured.step

    @property
    def runs_users_code(self) -> bool:
        """Whether anything of the user's may run in a call, or is put in a place of theirs: then
        what was found at its beginning may be otherwise at its end. An optimizer that steps by
        itself finds its gradients in ``.grad``; an operator of theirs may do anything."""
        captured = self.captured
        if captured.optimizers.eager or captured.result.left:
            return True
        return any(_calls_users(program.artifact) for program in self.programs)

    @property
    def untraced(self) -> bool:
        """Whether another process captured it, and this one traced nothing."""
        return self.start.is_found

    def stored(self) -> StoredBuild:
        """For other processes."""
        return StoredBuild(dict(self.facts), self.lines.lines, self.checks, self.draws)

    def release(self) -> None:
        """Give back the memory that stays between calls; the next call allocates it again."""
        for program in self.programs:
            program.executable.release()


def _calls_users(artifact: Artifact) -> bool:
    """Whether an operator that is called may be neither PyTorch's nor ours."""
    calls = [step for step in artifact.steps if isinstance(step, CallStep)]
    known = (facts_by_name(call.op).native or call.op.startswith(f"{NAMESPACE}.") for call in calls)
    return not all(known) or any(map(_calls_users, artifact.bodies.values()))
