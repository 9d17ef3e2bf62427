"""One call of a step: all of it or nothing."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from treadle.capture.eager import CallsClosure
from treadle.capture.failures import noted_eager
from treadle.capture.symbolic.branches.decisions import MOST_DECISIONS
from treadle.compiler.compiled import Compiled
from treadle.runtime.execute.interrupt import Uninterrupted
from treadle.runtime.meter import PeakReport, measure_peak
from treadle.session.agreement import RankCall, tell_ranks
from treadle.session.bind import (
    apply_outputs,
    first_misfit,
    forget_call,
    read_inputs,
)
from treadle.session.carried import Carrier, flush_for_eager
from treadle.session.closures import Closure, ClosureStep
from treadle.session.perform import perform
from treadle.session.undo import Undo
from treadle.session.user_step import UserStep
from treadle.session.variants.dispatch import Dispatcher
from treadle.util.errors import BadIndex, RuntimeFailure
from treadle.util.expected import LeftToEager, NotExpected

Serving = Callable[[Compiled, Sequence[Tensor], Undo], object]
"""What is done with the variant of a call, its inputs, and what undoes it."""


class _Call(NamedTuple):
    """One call of a step, and what is done with its variant."""

    step: UserStep
    dispatcher: Dispatcher
    serving: Serving
    args: tuple[object, ...]
    kwargs: dict[str, object]


def serve(
    step: UserStep,
    dispatcher: Dispatcher,
    closures: ClosureStep | None,
    serving: Serving,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """A call. One whose optimizer calls a closure as it likes is Python's, and each of ``closures``
    a call of its own."""
    call = _Call(step, dispatcher, serving, args, kwargs)
    try:
        return _in_one_graph(call)
    except CallsClosure:
        if closures is None:
            raise
    except Exception:
        dispatcher.failed()
        raise
    flush_for_eager()
    return _with_closures(call, closures)


def _with_closures(call: _Call, closures: ClosureStep) -> object:
    named = dict(call.kwargs)
    if not call.step.take_update(named):
        call.dispatcher.history.ran_eagerly("update=False for a step with a closure")
        return call.step.run_eagerly(call.args, call.kwargs)
    part = closures.dispatcher

    def one(closure: Closure) -> object:
        return serve(closures.closure, part, None, call.serving, (closure,), {})

    result, served = closures.run(one, call.args, named)
    if served:
        call.dispatcher.last = part.last
    else:
        call.dispatcher.forget_closure()
        call.dispatcher.history.ran_eagerly("its optimizer received no closure")
    return result


def _in_one_graph(call: _Call) -> object:
    """A call in which a condition that only raises does not have the answer that was taken for
    granted has changed nothing: it is eager's. A call that takes another path than the last is
    served by the variant of that path. Where calls found none in a row, some are not tried."""
    dispatcher = call.dispatcher
    may_skip = call.serving is run and call.step.group is None
    with dispatcher.carrier:
        tries = 0 if may_skip and dispatcher.eager_calls.takes() else MOST_DECISIONS
        why, ends = dispatcher.eager_calls.why, False
        for _ in range(tries):
            try:
                result = _compiled_call(call)
            except NotExpected as error:
                why = str(error)
                ends = isinstance(error, LeftToEager)
            else:
                dispatcher.note_served()
                return result
            flush_for_eager()  # its own as well: a look at values or an eager call reads them
            if ends or not dispatcher.takes_other_path(call.args, call.kwargs):
                break
        else:  # nothing was tried
            flush_for_eager()
        try:
            result = call.step.run_eagerly(call.args, call.kwargs)  # raises what there is to raise
        except BaseException as error:
            noted_eager(error)
            tell_ranks(dispatcher.last, error)
            raise
    if ends:
        dispatcher.eager_calls.begin(why)
    dispatcher.history.ran_eagerly(
        why or "a check of the step failed, but its own code raised no error"
    )
    return result


def _compiled_call(call: _Call) -> object:
    """Where gradients or state were replaced by ones of another type, which a key does not see,
    nothing has begun: the step is compiled again, once."""
    dispatcher, named = call.dispatcher, dict(call.kwargs)
    compiled = dispatcher.variant(call.args, named, update=call.step.take_update(named))
    inputs = read_inputs(compiled.captured, dispatcher.call.leaves)
    try:
        return _served(dispatcher.carrier, compiled, inputs, call.serving)
    except RuntimeFailure as error:
        misfit = first_misfit(compiled.captured.step, inputs) if error.code == "TR-401" else ""
        if not misfit:
            raise
    compiled = dispatcher.again(compiled, misfit, call.args, dict(call.kwargs))
    inputs = read_inputs(compiled.captured, dispatcher.call.leaves)
    return _served(dispatcher.carrier, compiled, inputs, call.serving)


def _served(
    carrier: Carrier, compiled: Compiled, inputs: Sequence[Tensor], serving: Serving
) -> object:
    """By the program whose turn it is."""
    program, passed = carrier.turn(compiled, inputs)
    try:
        result = serving(program, passed, _undo(program, passed))
    except BaseException:
        compiled.captured.dependencies.host_draws.undo()
        carrier.note_written()
        raise
    carrier.served(compiled, program, inputs)
    return result


def _undo(compiled: Compiled, inputs: Sequence[Tensor]) -> Undo:
    """Until a variant has run once, what it overwrites is kept aside, where the budget allows."""
    try:
        compiled.checks.require(inputs)
    except BadIndex as error:
        if not compiled.captured.dependencies.conditions:
            tell_ranks(compiled, error)
            raise
        forget_call(compiled.captured)  # one of them may speak of these numbers
        raise NotExpected(error.message) from None
    return Undo.of(compiled, inputs)


def run(
    compiled: Compiled,
    inputs: Sequence[Tensor],
    undo: Undo,
    seconds: list[float] | None = None,
) -> object:
    """All of the step or nothing; after a first run only memory can fail, and says so.
    ``seconds``: gets the time of each host step."""
    call = RankCall(compiled)
    with Uninterrupted():
        try:
            results = perform(compiled, inputs, undo, seconds, call)
            if compiled.kept is not None:
                kept = results[compiled.kept.start :][: compiled.kept.count]
                compiled.kept.tensors = [result for result in kept if result is not None]
            return apply_outputs(compiled.captured, results)
        except NotExpected:
            raise
        except BaseException as error:
            call.failed(error)
            raise


_SAMPLES = 5
"""Runs of which a profile shows the median for each kernel."""


def profiled(compiled: Compiled, inputs: Sequence[Tensor], undo: Undo) -> object:
    """The result of a run in which each kernel and library call is timed. Runs that are undone come
    before it, and each time is the median."""
    samples = _rehearsed(compiled, inputs)
    seconds = [0.0] * len(compiled.artifact.steps)
    result = run(compiled, inputs, undo, seconds)
    rows = zip(*samples, seconds, strict=True)
    compiled.kernel_seconds = tuple(statistics.median(row) for row in rows)
    return result


def _rehearsed(compiled: Compiled, inputs: Sequence[Tensor]) -> list[list[float]]:
    """The seconds of each host step in runs that leave everything as it was. None where ranks would
    have to agree on it, where the budget has no room for copies of what is overwritten, or where a
    run fails: the call itself does so again."""
    samples: list[list[float]] = []
    kept = None if compiled.groups else Undo.kept(compiled, inputs)
    if kept is None or not kept.complete:
        return samples
    try:
        for _ in range(_SAMPLES - 1):
            seconds = [0.0] * len(compiled.artifact.steps)
            compiled.executable.run(inputs, seconds)
            kept.restore()
            samples.append(seconds)
    except Exception:
        kept.restore()
        return []
    return samples


class Measuring:
    """Serves by a run of which the peak of all tensor bytes alive is measured: ``reports``."""

    def __init__(self) -> None:
        self.reports: list[PeakReport] = []

    def __call__(self, compiled: Compiled, inputs: Sequence[Tensor], undo: Undo) -> object:
        """The result of the run."""
        results: list[object] = []
        report = measure_peak(
            lambda: results.append(run(compiled, inputs, undo)), _held(compiled, inputs, undo)
        )
        compiled.measured_peak = report.peak_bytes
        self.reports.append(report)
        return results.pop()


def _held(compiled: Compiled, inputs: Sequence[Tensor], undo: Undo) -> Iterator[Tensor]:
    """What is alive before a run and counts: no list of it is kept, since the run may put another
    block in the place of the arena."""
    yield from inputs
    yield from compiled.executable.held()
    for parameter in compiled.captured.gradients.kept:
        if parameter.grad is not None:
            yield parameter.grad
    if undo.random is not None and compiled.draws:
        yield undo.random
