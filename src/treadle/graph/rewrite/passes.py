"""What a pass is, its constraints on the order, and the only loop that runs passes."""

import abc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from treadle.graph.core.signature import StepGraph
from treadle.graph.core.verify import verify
from treadle.util.errors import TreadleError, VerifyError


@dataclass(frozen=True, slots=True)
class Contract:
    """What a pass demands, kept per step: passes are named by their class.

    ``requires``: must have run, and not been invalidated since. ``after``: if they run at all,
    they run before this one. ``invalidates``: what these established is gone.
    """

    requires: tuple[type["GraphPass"], ...] = ()
    after: tuple[type["GraphPass"], ...] = ()
    invalidates: tuple[type["GraphPass"], ...] = ()
    repeatable: bool = True


class GraphPass(abc.ABC):
    """Turns a valid step into a valid step, in place.

    A concrete pass is a frozen dataclass: its fields are its options, and its ``repr`` is its
    name in logs, in dumps and in cache keys.
    """

    contract: ClassVar[Contract] = Contract()

    @abc.abstractmethod
    def run(self, step: StepGraph) -> int:
        """Return the number of changes; zero promises an unchanged graph."""


def until_settled(once: Callable[[StepGraph], int], step: StepGraph) -> int:
    """Do ``once`` until it finds nothing; how many places it changed in all."""
    total = 0
    while changes := once(step):
        total += changes
    return total


@dataclass(frozen=True, slots=True)
class PassReport:
    """One run of one pass."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    matches: int

    @property
    def changed(self) -> bool:
        """Whether the pass reports changes, or the number of nodes differs."""
        return bool(self.matches) or self.nodes_before != self.nodes_after


class Observer:
    """Hears of every pass. Reports, dumps and timers subclass it; the runner never prints."""

    def starts(self, step: StepGraph) -> None:
        """The passes are about to run, the first of them on ``step``."""

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        """``each`` has run on ``step``, which has been verified since if that changed it."""


SILENT = Observer()


def run_passes(
    step: StepGraph, passes: Sequence[GraphPass], observer: Observer = SILENT
) -> list[PassReport]:
    """Run ``passes`` in order, each timed and told to ``observer``; verified after those that
    change something, and at the end, should others have changed it against their promise."""
    verify(step)
    observer.starts(step)
    reports: list[PassReport] = []
    silent: list[GraphPass] = []
    for each in passes:
        _check_contract(each, step)
        report = _run(each, step)
        reports.append(report)
        silent.append(each)
        if report.changed:
            _verify_after(silent, step)
            silent.clear()
        _record(each, step)
        observer.ran(each, step, report)
    if silent:
        _verify_after(silent, step)
    return reports


def _run(each: GraphPass, step: StepGraph) -> PassReport:
    before = len(step.graph.nodes)
    start = time.perf_counter()
    matches = each.run(step)
    seconds = time.perf_counter() - start
    return PassReport(repr(each), seconds, before, len(step.graph.nodes), matches)


def _verify_after(passes: Sequence[GraphPass], step: StepGraph) -> None:
    """``VerifyError`` names the last pass, and those before it that said they changed nothing."""
    try:
        verify(step)
    except VerifyError as error:
        raise VerifyError(f"after {', '.join(map(str, passes))}: {error.message}") from None


def _check_contract(each: GraphPass, step: StepGraph) -> None:
    kind = type(each)
    for needed in each.contract.requires:
        if needed not in step.history:
            raise _broken(f"{kind.__name__} requires {needed.__name__}, which has not run")
    if kind in step.history and not each.contract.repeatable:
        raise _broken(f"{kind.__name__} may run only once")
    for earlier in step.history:
        if kind in earlier.contract.after:
            raise _broken(f"{earlier.__name__} must run after {kind.__name__}, but ran before it")


def _record(each: GraphPass, step: StepGraph) -> None:
    kept = [kind for kind in step.history if kind not in each.contract.invalidates]
    step.history[:] = [*kept, type(each)]


def _broken(message: str) -> TreadleError:
    return TreadleError(message, code="TR-901", remedy="change the order of the passes")
