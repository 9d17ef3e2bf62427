"""Observers of passes that use the graph: they write it down, or run it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from treadle.graph.analysis.execute import run_step
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, Observer, PassReport
from treadle.graph.text.diff import diff
from treadle.graph.text.printing import show
from treadle.util.errors import VerifyError


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
                raise VerifyError(f"after {each}: {output.name} has different results")

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
