"""One graph that the backend compiled, and access to all of them."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor, fx

from treadle.compiler.compiled import Built
from treadle.compiler.pipeline import compile_step
from treadle.graph.core.node_info import known_value
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Options
from treadle.passes.cleanup.memory_order import DrawInMemoryOrder
from treadle.report.explain import explain, explain_stages
from treadle.report.html import page
from treadle.report.stages import Clock
from treadle.report.step_report import Observed, StepReport, report_of
from treadle.report.summary import Summary, summary_of
from treadle.report.trace import trace_of
from treadle.report.watch import watcher_for
from treadle.runtime.execute.executable import Executable
from treadle.runtime.store.cache import Cache
from treadle.targets.registry import device_of_kinds
from treadle.util.errors import LoweringError
from treadle.util.files import write_output

FIRST = (DrawInMemoryOrder(),)
"""What is done to a graph before it is compiled, or planned."""
_NUMBERS = itertools.count()
_PROFILING = threading.Event()
"""Set while kernels are to be timed: autograd runs backward graphs in threads of its own."""


class CompiledGraph:
    """One graph that the backend compiled for one set of sizes: a forward and its backward, or one
    of them.

    ``name``: the number of the compile, and the phases: ``"0 forward and backward"``. Times are
    known after a run inside ``profiling()``. The peak is never measured, because the graph is part
    of a step that treadle does not control.
    """

    def __init__(
        self,
        phase: str,
        step: StepGraph,
        built: Built,
        options: Options,
        note: Callable[[], str] = str,
    ) -> None:
        self.number = next(_NUMBERS)
        self.name = f"{self.number} {phase}"
        self._step = step
        self._built = built
        self._options = options
        self._note = note
        self._seconds: tuple[float, ...] = ()
        self._has_run = False
        _GRAPHS.add(self)

    @staticmethod
    def of(
        phase: str,
        name: str,
        step: StepGraph,
        options: Options,
        note: Callable[[], str] = str,
        *,
        is_planned: bool = False,
    ) -> "CompiledGraph":
        """``step`` compiled; ``name``: of its stages where they are shown; ``is_planned``: the
        budget has been spent on the graph that it is a half of. ``LoweringError`` TR-302 for a
        fallback where ``options`` are strict."""
        cache = Cache(options.cache_dir)
        deciding = replace(options, memory=None) if is_planned else options
        with watched(name, options) as clock:
            run_passes(step, FIRST, clock.watcher)
            device = device_of_graph(step.graph)
            built = compile_step(step, device, deciding, cache=cache, clock=clock)
        _require_strict(built, options)
        return CompiledGraph(phase, step, built, options, note)

    @property
    def executable(self) -> Executable:
        """What runs it."""
        return self._built.executable

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The graph's results, as the backend calls it."""
        with self.timed() as seconds:
            return self.executable.run(self.checked(tensors), seconds)

    def release(self) -> None:
        """Free its memory until the next call."""
        self.executable.release()

    def checked(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inputs of a call, after a check that every index is in range."""
        self._built.checks.require(tensors)
        return tensors

    @contextmanager
    def timed(self) -> Iterator[list[float] | None]:
        """Around a call, or a part of one: the list that collects the times of its steps, if they
        are recorded."""
        self._has_run = True
        if not _PROFILING.is_set():
            yield None
            return
        seconds = [0.0] * len(self._built.artifact.steps)
        yield seconds
        known = self._seconds or [0.0] * len(seconds)
        self._seconds = tuple(new or old for new, old in zip(seconds, known, strict=True))

    def explain(self) -> str:
        """As ``Step.explain``: where the time and memory of the graph go."""
        return explain(self._step_report())

    def stages(self) -> str:
        """The stages of the compile in their order: seconds, input and output, the reason for its
        place, and what each pass changed in the graph."""
        return explain_stages(self._step_report())

    def summary(self) -> Summary:
        """As ``Step.summary``: the numbers of ``explain`` as an object."""
        return summary_of(self._step_report())

    def report(self, path: str | Path) -> Path:
        """As ``Step.report``, without other budgets: one HTML file. TR-004 if it cannot be
        written."""
        write_output(Path(path), page(self._step_report()))
        return Path(path)

    def trace(self, path: str | Path) -> Path:
        """As ``Step.trace``: a trace for ``chrome://tracing`` or Perfetto."""
        write_output(Path(path), trace_of(self._step_report()))
        return Path(path)

    def _step_report(self) -> StepReport:
        observed = Observed(
            name=f"graph {self.name}",
            step=self._step,
            build=self._built,
            options=self._options,
            kernel_seconds=self._seconds,
            has_run=self._has_run,
            whole=False,
            launching=self._note(),
        )
        return report_of(observed)


_GRAPHS: "weakref.WeakSet[CompiledGraph]" = weakref.WeakSet()
"""``torch.compile`` keeps what it compiled and hands nothing back: this is how users reach it."""


def compiled() -> tuple[CompiledGraph, ...]:
    """The graphs that the backend compiled in this process and that are still in use, in the order
    of compiles.

    A model with gradients is one graph of forward and backward, or one of each; each graph break
    and each set of sizes adds its own. ``torch._dynamo.reset()`` forgets them.
    """
    return tuple(sorted(_GRAPHS, key=lambda graph: graph.number))


@contextmanager
def profiling() -> Iterator[None]:
    """Time the kernels of every graph that runs inside, one by one; ``explain`` then shows the
    times."""
    _PROFILING.set()
    try:
        yield
    finally:
        _PROFILING.clear()


@contextmanager
def watched(name: str, options: Options) -> Iterator[Clock]:
    """A clock for the compile of one graph. Graphs are many: none has a line of progress."""
    watcher = watcher_for(name, replace(options, progress=False))
    try:
        yield Clock(watcher)
    finally:
        watcher.closes()


def device_of_graph(graph: fx.Graph) -> str:
    """Where a graph runs: its inputs without dims, such as numbers on the host, have no say."""
    kinds = {
        val.device.type
        for node in graph.find_nodes(op="placeholder")
        if isinstance(val := known_value(node), Tensor) and val.ndim
    }
    return device_of_kinds(frozenset(kinds))


def _require_strict(built: Built, options: Options) -> None:
    if options.strict and built.artifact.fallbacks:
        first = built.artifact.fallbacks[0]
        raise LoweringError(
            f"strict=True: {first.op} falls back to PyTorch's kernels: {first.reason}",
            code="TR-302",
        )
