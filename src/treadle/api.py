"""``treadle.compile`` and what it returns."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, overload

import torch
from torch import nn

from treadle.capture.refuse import (
    check_call,
    check_models,
    decorated,
    named_models,
    named_optimizers,
    with_loose,
)
from treadle.compiler.compiled import Compiled
from treadle.options import DataParallel, Options, options_with
from treadle.runtime.store.cache import Cache
from treadle.session.bind import forget_call, read_inputs
from treadle.session.breaks import known_regions
from treadle.session.closures import ClosureStep
from treadle.session.data_parallel import rank_group
from treadle.session.logs import show_logs
from treadle.session.serve import Measuring, Serving, profiled, run, serve
from treadle.session.tracebacks import hide_own_frames
from treadle.session.user_step import UserStep, arguments_of
from treadle.session.variants.compiling import VariantCompiler
from treadle.session.variants.dispatch import Dispatcher
from treadle.session.variants.history import History
from treadle.session.variants.shapes import Dynamic, dynamic
from treadle.targets.registry import model_for
from treadle.util.errors import RuntimeFailure, TreadleError
from treadle.util.files import check_output, write_output
from treadle.util.sizes import format_bytes

if TYPE_CHECKING:  # what tells of a step is imported when it is asked: a start tells nothing
    from treadle.graph.regions.regions import Region
    from treadle.report.beside import Comparison
    from treadle.report.communication import SimulatedStep
    from treadle.report.step_report import StepReport
    from treadle.report.summary import Summary
    from treadle.report.tensorboard import Writer
    from treadle.runtime.meter import PeakReport
    from treadle.session.compare import Difference, Tolerance
    from treadle.session.nonfinite import NonFinite
    from treadle.session.saved import Saved

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)
P = ParamSpec("P")
R = TypeVar("R")


class Step(Generic[P, R]):
    """A training step that is compiled at its first call, and again when its inputs change type or
    shape.

    Call it like the original function, with positional or keyword arguments. Parameters, buffers
    and optimizer state are the user's own tensors, updated in place. It has the function's name,
    docstring and signature, and the function itself is ``__wrapped__``.
    """

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(
        self,
        function: Callable[P, R],
        models: Models | None,
        optimizers: Optimizers,
        options: Options,
        shapes: Dynamic | None = None,
        *,
        cache: Cache | None = None,
        saved: "Saved | None" = None,
        parallel: DataParallel | None = None,
    ) -> None:
        self.options = options
        group = None if parallel is None else rank_group(parallel)
        stepped = named_optimizers(optimizers)
        trained = with_loose(named_models(models), stepped)
        self._step = UserStep.of(function, trained, stepped, group, eight_bits=options.eight_bits)
        self.__name__ = self.__qualname__ = self._step.name
        functools.update_wrapper(self, function, updated=())
        self._cache = cache or Cache(options.cache_dir)
        compiler = VariantCompiler(
            self._step, options, self._cache, saved, History(self._step.name)
        )
        show_logs(options.logs)
        self._callbacks = options.told
        self._dispatcher = Dispatcher(compiler, shapes)
        self._closures = ClosureStep(self._step, self._dispatcher)
        self._lock = self._dispatcher.carrier.lock
        self._step.gathered.drop()
        check_models(self._step.models, self._step.optimizers)

    def __repr__(self) -> str:
        count, last = len(self._variants()), self._dispatcher.last
        if last is None:
            return f"<treadle step {self._step.name}, not compiled yet>"
        peak = format_bytes(last.executable.promised_bytes)
        variants = f"{count} variant{'s' * (count != 1)}"
        return f"<treadle step {self._step.name}, {variants}, peak {peak}>"

    def _repr_html_(self) -> str:
        """In notebooks: the figures as a table, and ``explain`` behind a click."""
        if self._dispatcher.last is None:
            return f"<code>{escape(repr(self))}</code>"
        from treadle.report.beside import html_of

        return html_of(self._step_report(), self.explain())

    def __reduce__(self) -> NoReturn:
        raise TreadleError(
            "a compiled step cannot be copied or pickled: it is bound to its model's tensors",
            code="TR-005",
            remedy=(
                "compile a step for the copied model; step.save(path) and treadle.load avoid the "
                "compile"
            ),
        )

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Any, update: bool, **kwargs: Any) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on this batch. With ``update=False`` no optimizer steps, and gradients
        accumulate in ``.grad`` until the next call with an update. (If the function has a parameter
        of that name, it receives the value.)"""
        try:
            with self._lock:
                result = serve(self._step, self._dispatcher, self._closures, run, args, kwargs)
            if self._callbacks:
                self._dispatcher.history.tell(self, self._callbacks, called=True)
            return result
        except Exception as error:
            self._hide_own_frames(error)
            raise  # here and not by ``_served``: its caller's frame would come back on the way out

    def _served(self, serving: Serving, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        try:
            with self._lock:
                result = serve(self._step, self._dispatcher, self._closures, serving, args, kwargs)
            if self._callbacks:
                self._dispatcher.history.tell(self, self._callbacks, called=True)
            return result
        except Exception as error:
            self._hide_own_frames(error)
            raise

    def _hide_own_frames(self, error: Exception) -> None:
        if not self.options.debug:
            hide_own_frames(error)

    def profile(self, *args: object, **kwargs: object) -> Any:
        """Run one real step and time each kernel and library call; ``explain`` then shows the
        times.

        Four runs that are rolled back come first, so each time is the median of five. There is only
        one run if ranks communicate, or if the budget has no room for copies of what a step
        overwrites."""
        return self._served(profiled, args, kwargs)

    def prepare(self, *args: object, **kwargs: object) -> Compiled:
        """Compile for this batch without running the step, and return the variant (see
        ``compiled``)."""
        with self._lock, self._dispatcher.carrier:
            update = self._step.take_update(kwargs)
            compiled = self._dispatcher.variant(args, kwargs, update=update)
        if self._callbacks:
            self._dispatcher.history.tell(self, self._callbacks, called=False)
        return compiled

    def flush(self) -> None:
        """Run the updates that the last call carried to the next one (``Options.carry``).
        Parameters and optimizer state then have the values that they would have without ``carry``.
        Reading or writing them flushes automatically, except through memory that you hold already
        (a view, ``p.data``, a NumPy array). With several ranks, all ranks must flush, or none."""
        with self._lock:
            self._dispatcher.carrier.flush()
            self._dispatcher.carrier.unhook()

    @property
    def recompiles(self) -> list[str]:
        """The reason for each recompile and each eager call, in order."""
        return self._dispatcher.history.recompiles

    @property
    def recaptures(self) -> list[str]:
        """The reasons for captures that changed nothing: the new graph was known already, so
        nothing was compiled. (An example is a dict that the step fills at first use.)"""
        return self._dispatcher.history.recaptures

    def explain(self) -> str:
        """Where the time and memory of the step go: what to do next, time per phase and kernel,
        fallbacks with their reasons, the values alive at the peak. Call ``profile`` and ``measure``
        first to include measurements.
        """
        from treadle.report.explain import explain

        return explain(self._step_report())

    def compare(self, other: "Step[..., Any]") -> "Comparison":
        """Compare the variant that ran last with that of ``other``, such as the same function with
        another budget: peaks, times, launches, and the values that are kept or recomputed for the
        backward. ``print`` shows a table. Times are measured if ``profile`` has run on both."""
        from treadle.report.beside import compared

        return compared(self._step_report(), other._step_report())

    def stages(self) -> str:
        """The stages of the compile in their order. Each has its seconds, its input and output, the
        reason for its place, and what each of its passes changed in the graph."""
        from treadle.report.explain import explain_stages

        return explain_stages(self._step_report())

    def regions(self) -> "tuple[Region, ...]":
        """The parts of the step that one compiler handles, in an order in which they can run. Each
        has its operations, the reasons why they cannot be lowered, and its graph as text."""
        return known_regions(self.compiled)

    def summary(self) -> "Summary":
        """The numbers of ``explain`` as an object: peaks, kernels, fallbacks, phases, seconds."""
        from treadle.report.summary import summary_of

        return summary_of(self._step_report())

    def trace(self, path: str | Path) -> Path:
        """Write a trace for ``chrome://tracing`` or Perfetto: kernels, phases and bytes alive.

        Times are those of ``profile``, or estimates before it ran. TR-004 if the file cannot be
        written."""
        from treadle.report.trace import trace_of

        chosen, text = Path(path), trace_of(self._step_report())
        write_output(chosen, text)
        return chosen

    def simulate(
        self, *, ranks: int | Mapping[str, int], device: str | None = None
    ) -> "SimulatedStep":
        """Simulate the variant that ran last, or was prepared, on a timeline with its collectives.
        ``ranks`` is the number of ranks of every group, or a dict by group names; they need not
        exist.

        Each rank gets a batch like this one, and each collective sends as many bytes. Without
        ``device``, times are those of this device and its groups as measured; with ``device``
        (``cpu``, ``h200``, ``h100``, ``a100``, ``rtx4090``), those of its model. Nothing runs.
        ``PlanError`` TR-204 for an unknown device, TR-550 for a group without ranks."""
        from treadle.compiler.communication import graph_to_simulate
        from treadle.report.communication import simulate_step

        compiled = self.compiled
        planned = graph_to_simulate(compiled)
        if device is not None:
            return simulate_step(planned, ranks=ranks, device=model_for(device))
        costs, here = compiled.communication, compiled.hardware
        return simulate_step(planned, ranks=ranks, device=here, costs=costs)

    def _frontier(self) -> tuple[tuple[int, float, int], ...]:
        """Peak, estimated seconds and lower bound of plans for other budgets; none for many shapes
        at once."""
        compiled = self.compiled
        if compiled.pattern is not None:
            return ()
        from treadle.compiler.memory import frontier_points

        captured = compiled.captured
        return frontier_points(
            compiled.step, captured.device, self.options, self._cache, captured.kept_bytes
        )

    def _variants(self) -> list[Compiled]:
        return [*self._dispatcher.variants, *self._closures.variants()]

    def _step_report(self) -> "StepReport":
        """Of the variant that ran last."""
        from treadle.compiler.observed import observed_of
        from treadle.report.step_report import report_of

        seen = observed_of(self.compiled, self._step.name, self.recompiles, self._variants())
        if self._closures.served_last:
            seen = replace(seen, eager=(*seen.eager, *self._closures.reasons()))
        return report_of(seen)

    def report(self, path: str | Path, *, frontier: bool = True) -> Path:
        """Write the content of ``explain`` and more as one HTML file; TR-004 if it cannot be
        written.

        ``frontier``: include plans for other budgets, which takes about as long as planning did."""
        from treadle.report.html import page

        chosen, report = Path(path), self._step_report()
        check_output(chosen)
        write_output(chosen, page(report, self._frontier() if frontier else ()))
        return chosen

    def to_tensorboard(self, target: "str | Path | Writer", global_step: int | None = None) -> None:
        """Write the numbers of ``summary`` and the texts of ``explain`` and ``recompiles`` to a
        ``SummaryWriter`` of TensorBoard, or to a folder for one (TR-010 without TensorBoard).

        Call ``profile`` and ``measure`` first to include times and the measured peak."""
        from treadle.report.tensorboard import write_tensorboard

        write_tensorboard(self._step_report(), target, global_step)

    def graph(self, stage: str = "planned") -> str:
        """The output of a stage: the graph ``captured``, ``clean`` or ``planned``, the memory
        plan's ``decisions``, the ``loops`` and ``kernels``, or the generated ``sources``."""
        from treadle.report.products import text_of
        from treadle.report.stages import PRODUCTS

        if stage not in PRODUCTS:
            raise TreadleError(
                f"there is no stage {stage!r}",
                code="TR-002",
                remedy=f"one of {', '.join(PRODUCTS)}",
            )
        compiled = self.compiled
        return compiled.log.texts.get(stage) or text_of(compiled.artifact)

    def save(self, path: str | Path) -> None:
        """Write everything compiled so far to a file for ``treadle.load``."""
        from treadle.session.saved import save

        with self._lock:
            self._dispatcher.carrier.catch_up()
            variants = self._variants()
            if not variants:
                _ = self.compiled  # says that there is nothing yet
            save(Path(path), variants, self._cache)

    def measure(self, *args: object, **kwargs: object) -> "PeakReport":
        """Run one real step and measure the bytes of all tensors: ``peak_bytes`` during it,
        ``before_bytes`` and ``after_bytes``.

        The copies that a variant's first run keeps for a rollback are not counted."""
        measuring = Measuring()
        self._served(measuring, args, kwargs)
        if not measuring.reports:
            raise RuntimeFailure(
                "nothing was measured: a check of the step failed, and the call ran eagerly",
                code="TR-408",
                remedy="measure another batch",
            )
        return max(measuring.reports, key=lambda peak_report: peak_report.peak_bytes)

    @property
    def compiled(self) -> Compiled:
        """The variant that ran last, or was prepared. ``from_cache``: nothing was compiled;
        ``untraced``: nothing was traced either. ``TreadleError`` TR-003 before the first call."""
        last = self._dispatcher.last
        if last is None:
            raise TreadleError(
                "the step has not been compiled yet",
                code="TR-003",
                remedy="call it once, or call prepare(...) with a batch",
            )
        return last

    def verify(
        self, batches: Iterable[object], *, rtol: float = 1e-4, atol: float = 1e-5
    ) -> "Difference | None":
        """Run each batch compiled and in eager, from the same state and random numbers. Changes
        nothing. A batch is a tuple or list of arguments; anything else is the only argument.

        Returns the first value (result, parameter, buffer, state) that differs by more than
        ``atol + rtol * |eager|``, or ``None``. It includes the region and the operation where the
        difference starts; treadle finds them by compiling one region after another.
        """
        from treadle.session.compare import Tolerance, first_difference

        within = Tolerance(rtol, atol)
        with self._lock:
            self._dispatcher.carrier.catch_up()
            for number, values in enumerate(batches):
                batch = arguments_of(values)
                with self._dispatcher.carrier:
                    compiled = self._dispatcher.variant(batch, {})
                difference = first_difference(
                    self._step, compiled, self._flushed, batch, number, within
                )
                if difference is not None:
                    return self._located(difference, batch, within)
        return None

    def find_nan(self, *args: object, **kwargs: object) -> "NonFinite | None":
        """The first value of a step on this batch that is NaN although none of its inputs is, with
        its operation, module, line and kernel, and the infinite value that caused it. Without a
        NaN: an infinite value that reaches a result, a parameter or state. ``None`` if there is
        neither. Changes nothing.

        The operations run one by one with PyTorch's kernels, outside the step's arena, so they need
        eager's memory. With several ranks, all ranks must call it.
        """
        from treadle.session.nonfinite import first_nonfinite

        with self._lock:
            self._dispatcher.carrier.catch_up()
            update = self._step.take_update(kwargs)
            with self._dispatcher.carrier:
                compiled = self._dispatcher.variant(args, kwargs, update=update)
                while self._dispatcher.takes_other_path(args, {**kwargs, "update": update}):
                    compiled = self._dispatcher.variant(args, kwargs, update=update)
            inputs = read_inputs(compiled.captured, self._dispatcher.call.leaves)
            try:
                hosts = self._step_report().host_steps
                return first_nonfinite(compiled.captured, inputs, hosts)
            finally:
                forget_call(compiled.captured)

    def _flushed(self, *args: object) -> Any:
        """A call, of which nothing is left for the next one."""
        result = self._served(run, args, {})
        self.flush()
        return result

    def _located(
        self, difference: "Difference", batch: tuple[object, ...], within: "Tolerance"
    ) -> "Difference":
        """With the region and the node that a difference comes from."""
        from treadle.graph.core.node_info import info
        from treadle.session.bisect import Bisection

        with self._dispatcher.carrier:
            compiled = self._dispatcher.variant(batch, {})
        inputs = read_inputs(compiled.captured, self._dispatcher.call.leaves)
        culprit = Bisection(compiled, self._cache, within).first(
            [input_.clone() for input_ in inputs]
        )
        if culprit is None:
            return difference
        where = info(culprit.node).where
        return replace(difference, region=culprit.region, node=culprit.node.name, where=where)


@overload
def compile(
    function: Callable[P, R],
    *,
    model: Models | None = None,
    optimizer: Optimizers = (),
    memory: str | int | float | None = None,
    micro_batch: int | str | None = None,
    optimizer_state: str | None = None,
    strict: bool | None = None,
    shapes: Dynamic | None = None,
    numerics: str | None = None,
    rng: str | None = None,
    parallel: DataParallel | None = None,
    options: Options | None = None,
) -> Step[P, R]: ...
@overload
def compile(
    function: None = None,
    *,
    model: Models | None = None,
    optimizer: Optimizers = (),
    memory: str | int | float | None = None,
    micro_batch: int | str | None = None,
    optimizer_state: str | None = None,
    strict: bool | None = None,
    shapes: Dynamic | None = None,
    numerics: str | None = None,
    rng: str | None = None,
    parallel: DataParallel | None = None,
    options: Options | None = None,
) -> Callable[[Callable[P, R]], Step[P, R]]: ...
def compile(
    function: Callable[P, R] | None = None,
    *,
    model: Models | None = None,
    optimizer: Optimizers = (),
    memory: str | int | float | None = None,
    micro_batch: int | str | None = None,
    optimizer_state: str | None = None,
    strict: bool | None = None,
    shapes: Dynamic | None = None,
    numerics: str | None = None,
    rng: str | None = None,
    parallel: DataParallel | None = None,
    options: Options | None = None,
) -> "Step[P, R] | Callable[[Callable[P, R]], Step[P, R]]":
    """Compile a whole training step: forward, loss, backward, clipping and optimizer.

    Nothing is compiled until the first call. Without ``function`` it returns a decorator:
    ``@treadle.compile(model=model, optimizer=optimizer)`` above the function of the step.

    - ``model``, ``optimizer``: those that ``function`` uses: one, or a list or dict of them. A
      function that only evaluates, or only computes gradients, needs no optimizer.
    - ``memory``: the maximum of bytes alive during the step, parameters and state included:
      ``"7GiB"``, bytes as an int, or a ratio from ``0.0`` (the smallest plan) to ``1.0`` (the
      fastest).
    - ``micro_batch``: compute gradients for at most so many rows of the batch at a time; or
      ``"auto"``: as many as fit ``memory``.
    - ``optimizer_state``: ``"8bit"`` keeps averages of gradients in a quarter of their bytes
      (``Options``).
    - ``strict``: a fallback to PyTorch is an error.
    - ``shapes``: the dims that change from call to call, from ``treadle.dynamic``.
    - ``numerics``, ``rng``: rounding and random numbers (see ``Options``).
    - ``parallel``: ``DataParallel`` for a plain model on many ranks.
    - ``options``: all other ``Options``. Without them, the environment sets the defaults.

    All errors are subclasses of ``TreadleError`` with a code and a remedy
    (``docs/reference/errors.md``).
    """
    chosen = options_with(
        options,
        memory=memory,
        micro_batch=micro_batch,
        optimizer_state=optimizer_state,
        strict=strict,
        numerics=numerics,
        rng=rng,
    )

    def compiled(function: Callable[P, R]) -> Step[P, R]:
        check_call(function, model, Step)
        return Step(function, model, optimizer, chosen, shapes, parallel=parallel)

    if function is not None:
        return compiled(function)
    return lambda *args, **kwargs: compiled(decorated(args, kwargs))


def load(
    path: str | Path,
    function: Callable[P, R],
    *,
    model: Models,
    optimizer: Optimizers = (),
    shapes: Dynamic | None = None,
    parallel: DataParallel | None = None,
    options: Options | None = None,
) -> Step[P, R]:
    """A step with the compiled code of a file that ``Step.save`` wrote.

    ``function``, ``model``, ``optimizer``, ``shapes`` and ``parallel`` are as for ``compile``. The
    budget, and all other options that determine the compiled code, are those of the saved step. A
    call that does not fit the file is compiled, and ``Step.recompiles`` has the reason. A damaged
    file raises ``RuntimeFailure`` TR-405.
    """
    from treadle.session.saved import load_saved

    chosen = options_with(options)
    cache = Cache(chosen.cache_dir)
    saved = load_saved(Path(path), cache)
    options = saved.applied(chosen)
    return Step(
        function, model, optimizer, options, shapes, cache=cache, saved=saved, parallel=parallel
    )


__all__ = [
    "DataParallel",
    "Dynamic",
    "Options",
    "RuntimeFailure",
    "Step",
    "TreadleError",
    "compile",
    "dynamic",
    "load",
]
