"""Watchers of a compile: what to print while it runs, and what to write down."""

import hashlib
import sys
from pathlib import Path
from typing import TextIO

from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.pass_observers import DumpPasses
from treadle.graph.rewrite.passes import GraphPass, PassReport
from treadle.graph.text.canonical import SourceLines
from treadle.graph.text.diff import diff
from treadle.graph.text.printing import show
from treadle.options import Options
from treadle.report.made_up import NumbersPrinter
from treadle.report.products import Product, text_of
from treadle.report.progress import ProgressLine
from treadle.report.stages import PRODUCTS, Watcher, Watchers
from treadle.runtime.store.artifact import Artifact
from treadle.util.files import can_be_live

_LEVEL = {"loops": 3, "kernels": 3, "sources": 4}
"""From which level of ``debug`` on a product is printed."""
_NUMBERS = 5
"""From which level of ``debug`` on every pass is run on random inputs."""
_SUFFIX = {"cpp": "cpp", "triton": "py"}


def watcher_for(name: str, options: Options, stream: TextIO | None = None) -> Watcher:
    """What ``options`` ask for; ``name`` is the step's. ``stream``: standard error."""
    out = stream or sys.stderr
    watchers: list[Watcher] = []
    if options.debug > 0:
        watchers.append(StagePrinter(options.debug, out))
    if options.debug >= _NUMBERS:
        watchers.append(NumbersPrinter(lambda text: print(text, file=out, flush=True)))
    if options.dump is not None:
        watchers.append(Dump(options.dump, name))
    if options.progress and options.debug == 0 and can_be_live(out):
        watchers.append(ProgressLine(out))
    return Watchers(watchers)


class StagePrinter(Watcher):
    """The ladder: 1 stages, 2 what each pass changed, 3 loops and kernels, 4 sources."""

    def __init__(self, level: int, stream: TextIO) -> None:
        self._level = level
        self._stream = stream
        self._text = ""
        self._lines = SourceLines()

    def locates(self, lines: SourceLines) -> None:
        self._lines = lines

    def ends(self, stage: str, seconds: float) -> None:
        self._print(f"treadle: {stage} {seconds:.2f} s")

    def starts(self, step: StepGraph) -> None:
        self._text = show(step) if self._level > 1 else ""

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        if self._level < 2:
            return
        nodes = f"{report.nodes_before} -> {report.nodes_after} nodes"
        self._print(f"treadle: {report.name}: {report.matches} changes, {nodes}")
        text = show(step)
        self._print(diff(self._text, text))
        self._text = text

    def produced(self, name: str, product: Product) -> None:
        if self._level >= _LEVEL.get(name, 1 << 10):
            self._print(f"treadle: {name}\n{self._lines.fill(text_of(product))}")

    def _print(self, text: str) -> None:
        if text:
            print(text, file=self._stream, flush=True)


class Dump(Watcher):
    """Every product as a file of ``folder/NAME-DIGEST``, which names the captured graph::

    captured.txt  passes/01-RemoveNoOps.txt  passes/01-RemoveNoOps.diff  ...  times.txt
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._root = folder
        self._name = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
        self._folder = folder
        self._passes: DumpPasses | None = None
        self._times: list[str] = []
        self._lines = SourceLines()

    def locates(self, lines: SourceLines) -> None:
        self._lines = lines

    def produced(self, name: str, product: Product) -> None:
        text = self._lines.fill(text_of(product))
        if name == PRODUCTS[0]:
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            self._folder = self._root / f"{self._name}-{digest}"
            self._folder.mkdir(parents=True, exist_ok=True)
            self._passes = DumpPasses(self._folder / "passes", self._lines.fill)
        if isinstance(product, Artifact):
            for at, source in enumerate(product.all_sources):
                path = self._folder / f"{name}-{at}.{_SUFFIX[source.language]}"
                path.write_text(source.text)
        else:
            (self._folder / f"{name}.txt").write_text(text + "\n")

    def starts(self, step: StepGraph) -> None:
        if self._passes is not None:
            self._passes.starts(step)

    def ran(self, each: GraphPass, step: StepGraph, report: PassReport) -> None:
        if self._passes is not None:
            self._passes.ran(each, step, report)

    def ends(self, stage: str, seconds: float) -> None:
        self._times.append(f"{stage:20} {seconds:8.3f} s\n")

    def closes(self) -> None:
        if self._passes is not None:
            (self._folder / "times.txt").write_text("".join(self._times))
