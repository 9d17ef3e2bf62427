"""``treadle.compile`` and what it returns."""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from treadle.capture.bind import (
    apply_outputs,
    clear_fresh,
    first_misfit,
    forget_call,
    named_state,
    read_inputs,
    step_eagerly,
    without_updates,
)
from treadle.capture.dynamic import Dims
from treadle.capture.given import Call
from treadle.capture.guards import GuardKey, Keys
from treadle.capture.reads import Place, argument_place
from treadle.capture.refuse import check_call, check_models, named_models, named_optimizers
from treadle.capture.snapshot import Snapshot
from treadle.capture.step import capture
from treadle.capture.torch_private import flatten, unflatten
from treadle.options import Options, from_environment
from treadle.patterns import Patterns, fixed_numbers
from treadle.pipeline import Compiled, compile_graph, frontier_points
from treadle.report.account import Account, account_of, observed_of
from treadle.report.explain import explain
from treadle.report.html import page
from treadle.report.summary import Summary, summary_of
from treadle.report.trace import trace_of
from treadle.report.watch import watcher_for
from treadle.runtime.cache import Cache
from treadle.runtime.interrupt import uninterrupted
from treadle.runtime.meter import PeakReport, measure_peak
from treadle.saved import Saved, load_saved, save
from treadle.shapes import Dynamic, find, parameter_names
from treadle.stages import STAGES, Clock, text_of
from treadle.undo import Undo
from treadle.util.errors import BadIndex, LoweringError, RuntimeFailure, TreadleError
from treadle.util.expected import NotExpected
from treadle.util.files import check_output, write_output
from treadle.variants import Variants, warn_of_recompiles

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)


_Serving = Callable[[Compiled, Sequence[Tensor], Undo], Any]
"""What is done with the variant of a call, its inputs, and what undoes it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value in which a compiled step left eager's: ``name`` is the user's."""

    batch: int
    name: str
    absolute: float
    relative: float


class Step:
    """A training step that is compiled at its first call, and again when its inputs change kind.

    Call it as the function it was made from. Parameters, buffers and optimizer state are the
    user's own tensors, updated in place.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        models: Models | None,
        optimizers: Optimizers,
        options: Options,
        shapes: Dynamic | None = None,
    ) -> None:
        self.options = options
        self.recompiles: list[str] = []
        self._function = function
        self._models = named_models(models)
        self._optimizers = named_optimizers(optimizers)
        self._keys = Keys(self._models, self._optimizers)
        self._variants = Variants(options.max_cached)
        self._last: Compiled | None = None
        self._store = Cache(options.cache_dir)
        self._saved: Saved | None = None
        self._shapes = shapes
        self._patterns: Patterns | None = None
        self._takes_update = "update" not in parameter_names(function)
        self._lock = threading.RLock()
        self._call = Call()
        self._numbers: list[Place] = []  # of Python's, that change from call to call
        check_models(self._models, self._optimizers)

    def __reduce__(self) -> Any:
        raise TreadleError(
            "a compiled step cannot be copied or pickled: it is bound to its model's tensors",
            code="TR-005",
            remedy="compile the copy's own step; step.save(path) keeps what was compiled",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on this batch. ``update=False``, for a function without a parameter of
        that name: gradients stay in ``.grad``, no optimizer steps, and the next call with an
        update includes them."""
        with self._lock:
            return self._serve(self._run, args, kwargs)

    def profile(self, *args: Any, **kwargs: Any) -> Any:
        """Run one real step, each kernel and library call timed; ``explain`` then shows it."""
        with self._lock:
            return self._serve(self._profiled, args, kwargs)

    def _profiled(self, compiled: Compiled, inputs: Sequence[Tensor], undo: Undo) -> Any:
        seconds = [0.0] * len(compiled.artifact.steps)
        result = self._run(compiled, inputs, undo, seconds)
        compiled.kernel_seconds = tuple(seconds)
        return result

    def _serve(self, run: _Serving, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call. One in which a condition that only raises does not have the answer that was
        taken for granted has changed nothing: it is eager's."""
        try:
            return self._compiled_call(run, args, kwargs)
        except NotExpected as error:
            why = str(error)
        return self._eager_call(why, args, dict(kwargs))

    def _eager_call(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's function as it is, which raises what there is to raise; ``why`` else."""
        update = kwargs.pop("update", True) if self._takes_update else True
        plain = nullcontext() if update else without_updates(self._models, self._optimizers)
        with plain:
            result = self._function(*args, **kwargs)
        note = f"a call ran eagerly: {why or 'a check did not hold, and nothing was raised'}"
        if note not in self.recompiles:
            self.recompiles.append(note)
            warnings.warn(note, RuntimeWarning, stacklevel=4)
        return result

    def _compiled_call(self, run: _Serving, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where gradients or state were replaced by ones of another type, which a key does not
        see, nothing has begun: the step is compiled again, once."""
        compiled, inputs = self._ready(args, dict(kwargs))
        undo = self._undo(compiled, inputs)
        try:
            return run(compiled, inputs, undo)
        except RuntimeFailure as error:
            changed = first_misfit(compiled.captured.step, inputs) if error.code == "TR-401" else ""
            if not changed:
                raise
        self._variants.drop(compiled)
        self._patterns = None
        known = len(self.recompiles)
        compiled, inputs = self._ready(args, dict(kwargs))
        self.recompiles[known:] = [changed]
        return run(compiled, inputs, self._undo(compiled, inputs))

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Compiled, list[Tensor]]:
        """The variant for this call, and its inputs."""
        update = kwargs.pop("update", True) if self._takes_update else True
        compiled = self._variant(args, kwargs, update=update)
        return compiled, read_inputs(compiled.captured, self._call.leaves)

    def _undo(self, compiled: Compiled, inputs: Sequence[Tensor]) -> Undo:
        """Until a variant has run once, what it overwrites is kept aside, where the budget
        allows."""
        try:
            compiled.checks.require(inputs)
        except BadIndex as error:
            if not compiled.captured.conditions:
                raise
            forget_call(compiled.captured)  # one of them may speak of these numbers
            raise NotExpected(error.message) from None
        return Undo.of(compiled, inputs)

    def _run(
        self,
        compiled: Compiled,
        inputs: Sequence[Tensor],
        undo: Undo,
        seconds: list[float] | None = None,
    ) -> Any:
        """All of the step or nothing; after a first run only memory can fail, and says so."""
        with uninterrupted():
            results = self._perform(compiled, inputs, undo, seconds)
            return apply_outputs(compiled.captured, results)

    def _perform(
        self,
        compiled: Compiled,
        inputs: Sequence[Tensor],
        undo: Undo,
        seconds: list[float] | None,
    ) -> list[Tensor | None]:
        begun: list[bool] = []

        def begins() -> None:
            begun.append(True)
            clear_fresh(compiled.captured)

        try:
            results = compiled.executable.run(inputs, seconds, begins)
            step_eagerly(compiled.captured, results)
        except NotExpected:
            undo.restore()
            forget_call(compiled.captured)
            raise
        except BaseException as error:
            if undo.restore() or not begun:
                raise
            raise RuntimeFailure(
                f"the step failed in the middle, and is partly done: {error}",
                code="TR-406",
                remedy="load the last checkpoint before going on; then give the step less memory",
            ) from error
        compiled.has_run = True
        return results

    def prepare(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compile for this batch without running the step, and return the variant."""
        with self._lock:
            return self._variant(args, kwargs)

    def explain(self) -> str:
        """Why the step takes what it takes: what to do next, time by phase and kernel, fallbacks
        and why, what is alive at the peak. ``profile`` and ``measure`` first add what is measured.
        """
        return explain(self._account())

    def summary(self) -> Summary:
        """The numbers of ``explain`` as an object: peaks, kernels, fallbacks, phases, seconds."""
        return summary_of(self._account())

    def trace(self, path: str | Path) -> Path:
        """Write a trace for ``chrome://tracing`` or Perfetto: kernels, phases and bytes alive.

        Times are those of ``profile``, or floors before it. TR-004 if it cannot be written."""
        chosen, text = Path(path), trace_of(self._account())
        write_output(chosen, text)
        return chosen

    def _frontier(self) -> tuple[tuple[int, float], ...]:
        """Peak and estimated seconds of plans for other budgets; none for many shapes at once."""
        compiled = self.compiled
        if compiled.pattern is not None:
            return ()
        captured = compiled.captured
        return frontier_points(captured.step, captured.device, self.options, self._store)

    def _account(self) -> Account:
        """Of the variant that ran last."""
        return account_of(observed_of(self.compiled, name_of(self._function), self.recompiles))

    def report(self, path: str | Path, *, frontier: bool = True) -> Path:
        """Write what ``explain`` says and more as one HTML file; TR-004 if that cannot be done.

        ``frontier``: with plans for other budgets, which takes about as long as planning did."""
        chosen, account = Path(path), self._account()
        check_output(chosen)
        write_output(chosen, page(account, self._frontier() if frontier else ()))
        return chosen

    def graph(self, stage: str = "planned") -> str:
        """What a stage made: the graph ``captured``, ``clean`` or ``planned``, the memory plan's
        ``decisions``, the ``loops`` and ``kernels``, or the generated ``sources``."""
        if stage not in STAGES:
            raise TreadleError(
                f"there is no stage {stage!r}", code="TR-002", remedy=f"one of {', '.join(STAGES)}"
            )
        compiled = self.compiled
        return compiled.story.texts.get(stage) or text_of(compiled.artifact)

    def save(self, path: str | Path) -> None:
        """Write what was compiled so far to a file that ``treadle.load`` takes."""
        with self._lock:
            if not self._variants:
                _ = self.compiled  # says that there is nothing yet
            save(Path(path), self._variants, self._store)

    def measure(self, *args: Any, **kwargs: Any) -> PeakReport:
        """Run one real step and measure the peak of all tensor bytes alive during it.

        The copies that a variant's first run keeps for undoing it are not counted."""
        with self._lock:
            report = self._serve(self._measured, args, kwargs)
        if not isinstance(report, PeakReport):
            raise RuntimeFailure(
                "nothing was measured: a check did not hold, and the call ran eagerly",
                code="TR-408",
                remedy="measure another batch",
            )
        return report

    def _measured(self, compiled: Compiled, inputs: Sequence[Tensor], undo: Undo) -> PeakReport:
        held = [*inputs, *compiled.executable.held()]
        held += [each.grad for each in compiled.captured.kept if each.grad is not None]
        held += [undo.random] if undo.random is not None and compiled.draws else []
        report = measure_peak(lambda: self._run(compiled, inputs, undo), held)
        compiled.measured_peak = report.peak_bytes
        return report

    @property
    def compiled(self) -> Compiled:
        """The variant that ran last. ``TreadleError`` before the first call."""
        if self._last is None:
            raise TreadleError(
                "the step has not been compiled yet",
                code="TR-003",
                remedy="call it once, or call prepare(...) with a batch",
            )
        return self._last

    def verify(
        self, batches: Iterable[Sequence[Any]], *, rtol: float = 1e-4, atol: float = 1e-5
    ) -> Difference | None:
        """Run each batch both ways from the same state and random numbers; change nothing.

        Returns the first value (result, parameter, buffer, state) that differs by more than
        ``atol + rtol * |eager|``, or ``None``.
        """
        with self._lock:
            for number, batch in enumerate(batches):
                found = self._verify_one(number, tuple(batch), rtol, atol)
                if found is not None:
                    return found
        return None

    def _verify_one(
        self, number: int, batch: tuple[Any, ...], rtol: float, atol: float
    ) -> Difference | None:
        compiled = self._variant(batch, {})
        captured = compiled.captured
        held = [_tensors(each.place.get()) for each in captured.left]
        others = [*_leaves(batch), *(tensor for each in held for tensor in each)]
        places = [each.place for each in captured.left if isinstance(each.place, Place)]
        start = Snapshot(self._models, self._optimizers, others, places, captured.generators)
        try:
            given = unflatten(*flatten(batch))  # containers that the step may change
            ours = _tensors((self(*given), given))
            after = named_state(captured, batch)
            start.restore()
            given = unflatten(*flatten(batch))
            theirs = _tensors((self._function(*given), given))
            eager = named_state(captured, batch)
        finally:
            start.restore()
        pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        pairs += [(name, value, eager[name]) for name, value in after.items() if name in eager]
        return _first_difference(number, pairs, rtol, atol)

    def _variant(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool = True
    ) -> Compiled:
        called, given = self._keys.called(args, kwargs, update=update)
        self._call.serve(given)
        found = self._variants.again(called)
        if found is not None:
            self._last = found
            return found
        key = self._keys.key(called)
        found = self._variants.get(key)
        if found is not None:
            self._variants.note(found, called, self._keys)
        else:
            known = len(self.recompiles)
            if self._variants.forget_replaced(key):
                self.recompiles.append("parameters were replaced by other objects")
                self._patterns = None
            found = self._from_pattern(key, args, kwargs, update)
            if found is None:
                self.recompiles += self._variants.why_not(key, self._models)
                warn_of_recompiles(self.recompiles, known)
                self._note_numbers(self._variants.changed_numbers(key))
                found = self._compile(args, kwargs, update=update)
            self._variants.add(key, found)
        self._last = found
        return found

    def _note_numbers(self, found: Iterable[str | Place]) -> None:
        """From now on these are inputs, where the graph allows it."""
        known = {(each.label, each.name) for each in self._numbers}
        for each in found:
            place = argument_place(each) if isinstance(each, str) else each
            if (place.label, place.name) not in known:
                known.add((place.label, place.name))
                self._numbers.append(place)

    def _from_pattern(
        self, key: GuardKey, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool
    ) -> Compiled | None:
        """The variant for this call's sizes, if dynamic shapes were declared and it may be one."""
        if self._shapes is None:
            return None
        found = find(self._shapes, self._function, args, kwargs)
        tensors = [t for m in self._models.values() for t in (*m.parameters(), *m.buffers())]
        if any(not tensor.is_cpu for tensor in tensors):
            return None  # generated code for GPUs has its sizes in it
        patterns = self._patterns or Patterns(self._shapes, self.recompiles)
        self._patterns = patterns
        return patterns.variant(
            key,
            found,
            fixed_numbers(tensors),
            lambda dims: self._compile(args, kwargs, dims, update=update),
        )

    def _compile(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Dims | None = None,
        *,
        update: bool = True,
    ) -> Compiled:
        watcher = watcher_for(name_of(self._function), self.options)
        clock = Clock(watcher)
        try:
            with clock.stage("capture"):
                captured = capture(
                    self._function,
                    models=self._models,
                    optimizers=self._optimizers,
                    args=args,
                    kwargs=kwargs,
                    dims=dims,
                    update=update,
                    call=self._call,
                    numbers=tuple(self._numbers),
                )
            compiled = compile_graph(captured, self.options, cache=self._store, clock=clock)
        finally:
            watcher.closes()
        why = self._saved.difference(compiled.facts) if self._saved else ""
        self.recompiles += [why] if why else []
        if self.options.strict:
            _refuse_fallbacks(compiled)
        return compiled


def compile(
    function: Callable[..., Any],
    *,
    model: Models | None = None,
    optimizer: Optimizers = (),
    memory: str | int | float | None = None,
    strict: bool | None = None,
    shapes: Dynamic | None = None,
    numerics: str | None = None,
    rng: str | None = None,
    options: Options | None = None,
) -> Step:
    """Compile a whole training step: forward, loss, backward, clipping and optimizer.

    ``model`` and ``optimizer`` are the ones ``function`` uses: one, a list or a dict; a function
    that only evaluates or leaves gradients needs no optimizer. ``memory``
    bounds the peak bytes of the whole step, parameters and state included: ``"7GiB"``, bytes, or
    a ratio between the two extreme plans. ``shapes``: what ``dynamic`` returns, for dims that
    change from call to call. ``numerics="eager"``: round where eager rounds;
    ``rng="counter"``: dropout masks that need no memory (``Options``). Nothing is compiled until
    the first call.
    Raises ``TreadleError`` kinds with a code and a remedy; see ``docs/errors.md``.
    """
    check_call(function, model)
    chosen = options or from_environment()
    if memory is not None:
        chosen = replace(chosen, memory=memory)
    if strict is not None:
        chosen = replace(chosen, strict=strict)
    if numerics is not None:
        chosen = replace(chosen, numerics=numerics)
    if rng is not None:
        chosen = replace(chosen, rng=rng)
    return Step(function, model, optimizer, chosen, shapes)


def load(
    path: str | Path,
    function: Callable[..., Any],
    *,
    model: Models,
    optimizer: Optimizers = (),
    shapes: Dynamic | None = None,
    options: Options | None = None,
) -> Step:
    """A step that finds in ``path`` what ``Step.save`` wrote there, and does not compile it again.

    ``function``, ``model``, ``optimizer`` and ``shapes`` as for ``compile``; the budget and what
    else decides the compiled code are those of the saved step. What the file does not fit is
    compiled, and ``Step.recompiles`` says why. ``RuntimeFailure`` TR-405 when the file is damaged.
    """
    chosen = options or from_environment()
    store = Cache(chosen.cache_dir)
    saved = load_saved(Path(path), store)
    step = Step(function, model, optimizer, saved.applied(chosen), shapes)
    step._store, step._saved = store, saved
    return step


def name_of(function: Callable[..., Any]) -> str:
    """What to call a step: the function's name, or its class's."""
    return function.__name__ if isinstance(function, FunctionType) else type(function).__name__


def _refuse_fallbacks(compiled: Compiled) -> None:
    for each in compiled.captured.eager:
        raise LoweringError(
            f"strict: an optimizer would step eagerly: {each.reason.words}",
            code="TR-302",
            remedy=f"leave strict off; {each.reason.code} says what to do",
        )
    reasons = compiled.artifact.fallbacks
    if reasons:
        lines = "; ".join(f"{step.op}: {step.reason}" for step in reasons[:5])
        raise LoweringError(
            f"strict: {len(reasons)} operations fall back to PyTorch's kernels: {lines}",
            code="TR-302",
            where=reasons[0].origin,
            remedy="leave strict off, or register a lowering for the operation",
        )


def _tensors(value: Any) -> list[Tensor]:
    """Copies of the tensors in a result."""
    return [tensor.detach().clone() for tensor in _leaves(value)]


def _leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _first_difference(
    number: int, pairs: Sequence[tuple[str, Tensor, Tensor]], rtol: float, atol: float
) -> Difference | None:
    for name, ours, theirs in pairs:
        if torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True):
            continue
        gap = (ours.double() - theirs.double()).abs().max().item()
        scale = theirs.double().abs().max().item()
        return Difference(number, name, gap, gap / scale if scale else float("inf"))
    return None
