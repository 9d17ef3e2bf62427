"""The stages of a compile: their order, their products, their observers, and their clock."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, Observer, PassReport

if TYPE_CHECKING:  # a start from the cache makes none of them
    from treadle.graph.text.canonical import SourceLines
    from treadle.passes.comm.simulate import CommunicationTimeline
    from treadle.report.products import Product


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a compile: why it stands where it does, and the names of what it ``makes``."""

    name: str
    why: str
    makes: tuple[str, ...] = ()


ORDER = (
    Stage(
        "start",
        (
            "first: if another process stored a capture of this step, it is bound and nothing is "
            "traced"
        ),
    ),
    Stage(
        "import",
        (
            "once per process: imports what captures and compiles; a start from a stored capture "
            "needs none of it"
        ),
    ),
    Stage(
        "capture",
        "one run of the step on fake tensors; later calls run none of this",
        ("captured",),
    ),
    Stage(
        "extend", "if you registered passes: before the cache lookup, because they change the graph"
    ),
    Stage("look up", "before any work: equal graphs and options have equal artifacts"),
    Stage("clean", "before planning: merged and removed values need no memory", ("clean",)),
    Stage(
        "plan memory",
        "on the graph that will run: it decides what is lowered, and how often",
        ("planned", "decisions"),
    ),
    Stage(
        "lower and schedule",
        "after planning: recomputed values fuse with their readers",
        ("loops", "kernels"),
    ),
    Stage("tune", "if requested: choices are data, so the program is scheduled again"),
    Stage("generate code", "writes the scheduled kernels as text; decides nothing", ("sources",)),
    Stage(
        "keep", "stores the results for reports and the cache, and for starts once the step has run"
    ),
    Stage(
        "build",
        "last: compilers receive finished text, and take binaries from the cache if they can",
    ),
)
"""All stages, in the order they run; from the cache those that make nothing, and no tuning."""

PRODUCTS = tuple(product for stage in ORDER for product in stage.makes)
"""What the stages make, by name and in order; ``captured`` is with what users registered."""


class Watcher(Observer):
    """Hears of every stage, beside every pass. It changes nothing of what it is shown."""

    def begins(self, stage: str) -> None:
        """A stage of ``ORDER`` begins."""

    def ends(self, stage: str, seconds: float) -> None:
        """The stage has ended, or has failed, after so many ``seconds``."""

    def locates(self, lines: "SourceLines") -> None:
        """The source lines that products refer to from now on."""

    def produced(self, name: str, product: "Product") -> None:
        """A stage has made one of ``PRODUCTS``; ``product`` belongs to the compile."""

    def bounded(self, nbytes: int) -> None:
        """The plan is within a budget; ``nbytes``: a proved lower bound of the peak of every plan
        that is estimated to be as fast."""

    def split(self, why: str) -> None:
        """Micro-batches were asked for; ``why``: which ones the plan has, and why."""

    def simulated(self, line: "CommunicationTimeline") -> None:
        """The planned graph communicates; ``line``: when, and beside what, as simulated."""

    def closes(self) -> None:
        """The compile is over, or has failed."""


class Watchers(Watcher):
    """Several watchers as one: each hears everything."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def starts(self, step: StepGraph) -> None:
        for watcher in self._watchers:
            watcher.starts(step)

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        for watcher in self._watchers:
            watcher.ran(each, step, report)

    def begins(self, stage: str) -> None:
        for watcher in self._watchers:
            watcher.begins(stage)

    def ends(self, stage: str, seconds: float) -> None:
        for watcher in self._watchers:
            watcher.ends(stage, seconds)

    def locates(self, lines: "SourceLines") -> None:
        for watcher in self._watchers:
            watcher.locates(lines)

    def produced(self, name: str, product: "Product") -> None:
        for watcher in self._watchers:
            watcher.produced(name, product)

    def bounded(self, nbytes: int) -> None:
        for watcher in self._watchers:
            watcher.bounded(nbytes)

    def split(self, why: str) -> None:
        for watcher in self._watchers:
            watcher.split(why)

    def simulated(self, line: "CommunicationTimeline") -> None:
        for watcher in self._watchers:
            watcher.simulated(line)

    def closes(self) -> None:
        for watcher in self._watchers:
            watcher.closes()


@dataclass
class Clock:
    """Seconds per stage, in the order the stages ran."""

    watcher: Watcher = field(default_factory=Watcher)
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def heard_by(self, watcher: Watcher) -> "Clock":
        """The same clock; ``watcher`` hears of its stages before its own does."""
        return Clock(Watchers([watcher, self.watcher]), self.seconds)

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
