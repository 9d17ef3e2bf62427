"""What a pass is, what it may demand of the order, and the only loop that runs passes."""

import abc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from treadle.graph.analysis.execute import run_step
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.verify import verify
from treadle.graph.text.diff import diff
from treadle.graph.text.printing import show
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
        """Return how many places changed; zero promises an untouched graph."""


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


class Observer:
    """Hears of every pass. Reports, dumps and timers subclass it; the runner never prints."""

    def starts(self, step: StepGraph) -> None:
        """The passes are about to run, the first of them on ``step``."""

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        """``each`` has run on ``step``, which has been verified since."""


SILENT = Observer()


def run_passes(
    step: StepGraph, passes: Sequence[GraphPass], observer: Observer = SILENT
) -> list[PassReport]:
    """Run ``passes`` in order, each verified and timed, and told to ``observer``."""
    verify(step)
    observer.starts(step)
    reports: list[PassReport] = []
    for each in passes:
        _check_contract(each, step)
        report = _run(each, step)
        reports.append(report)
        _record(each, step)
        observer.ran(each, step, report)
    return reports


def _run(each: GraphPass, step: StepGraph) -> PassReport:
    before = len(step.graph.nodes)
    start = time.perf_counter()
    matches = each.run(step)
    seconds = time.perf_counter() - start
    try:
        verify(step)
    except VerifyError as error:
        raise VerifyError(f"after {each}: {error.message}") from None
    return PassReport(repr(each), seconds, before, len(step.graph.nodes), matches)


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


class DumpPasses(Observer):
    """Writes the step to ``folder`` as text: ``00-start.txt``, then text and diff per pass.
    ``fill``: what to do to a text before, as to put source lines into it."""

    def __init__(self, folder: Path, fill: Callable[[str], str] = str) -> None:
        self._folder = folder
        self._fill = fill
        self._text = ""
        self._count = 0

    def starts(self, step: StepGraph) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._text = self._fill(show(step, exact=True))
        (self._folder / f"{self._count:02}-start.txt").write_text(self._text + "\n")

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        self._count += 1
        text = self._fill(show(step, exact=True))
        stem = self._folder / f"{self._count:02}-{type(each).__name__}"
        stem.with_suffix(".txt").write_text(f"# {_sentence(report)}\n{text}\n")
        stem.with_suffix(".diff").write_text(diff(self._text, text) + "\n")
        self._text = text


def _sentence(report: PassReport) -> str:
    nodes = f"{report.nodes_before} -> {report.nodes_after} nodes"
    return f"{report.name}: {report.matches} changes, {nodes}, {report.seconds * 1e3:.1f} ms"


class CheckNumbers(Observer):
    """Runs the step on ``inputs`` after every pass: the numbers must stay, bit for bit.

    ``seed`` is set before each run, so that random operations draw the same numbers. After a pass
    that changed numbers the next one is compared with what that gave.
    """

    def __init__(self, inputs: Sequence[Tensor], seed: int = 0) -> None:
        self._inputs = inputs
        self._seed = seed
        self._expected: list[Tensor | None] = []

    def starts(self, step: StepGraph) -> None:
        self._expected = self._results(step)

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        before, self._expected = self._expected, self._results(step)
        for new, old, output in zip(self._expected, before, step.signature.outputs, strict=True):
            if not _same_bits(new, old):
                raise VerifyError(f"after {each}: {output.name} has other numbers")

    def _results(self, step: StepGraph) -> list[Tensor | None]:
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            return run_step(step, self._inputs)


def _same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    same = (left == right) | ((left != left) & (right != right))  # a NaN equals a NaN
    if left.is_floating_point():
        same &= left.isnan() | (left.signbit() == right.signbit())
    return bool(same.all())
