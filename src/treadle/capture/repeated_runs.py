"""The runs of one trace, each of which uses what the earlier runs met.

::

    the step changes containers       others stand in their places
    it counts with numbers            numbers stand in where it counts
    it asks for real numbers          its code is rewritten to take those that stand in
    it fails where something stood in for a number or a container, as it itself might not
                                      nothing stands in
"""

import contextlib
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import NoReturn, final

from torch import Tensor, fx

from treadle.capture.explain_errors import show_line, users_codes
from treadle.capture.integrations.grad_scaler import ScalerBegins
from treadle.capture.integrations.recurrent import weights_in_place
from treadle.capture.python_state.changed_line import LineWatch
from treadle.capture.python_state.changes import LateError
from treadle.capture.python_state.containers.container_changes import (
    ChangedContainer,
    ContainersChanged,
)
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.symbolic.changing_numbers import Counted
from treadle.capture.symbolic.computations import Key
from treadle.capture.symbolic.deferred import AsksNumber
from treadle.capture.symbolic.held_functions import HeldFunction
from treadle.capture.symbolic.host_draws import held_draws
from treadle.capture.symbolic.number_calls import NumberCalls
from treadle.capture.symbolic.numbers import SourcePosition
from treadle.capture.tracing.request import Substitutes, TraceRequest
from treadle.capture.tracing.run import Run
from treadle.compat.operators.kernel_checks import KERNEL_CHECKS
from treadle.compat.operators.rng_operators import TRACED_AS
from treadle.compat.operators.schemas import ALL_TRUE
from treadle.compat.tracing import trace, without_functions
from treadle.compat.transforms import ForwardModeBegins
from treadle.compat.views import PADS, SPLITS
from treadle.graph.custom_ops.grouped import GROUPED
from treadle.util.errors import CaptureError

_INSTEAD = {**TRACED_AS, **SPLITS, **PADS, **GROUPED, **ALL_TRUE, **KERNEL_CHECKS}
"""The replacements of operators that a graph cannot hold, and the checks before others are
traced."""

_MOST_RUNS = 64
"""The most runs of one trace; each learns something about the step that the next one needs."""


@final
class RepeatedRuns:
    """The stand-ins and the rewritten code of the next run."""

    def __init__(
        self,
        request: TraceRequest,
        numbers: Sequence[Location],
        tried: list[Run],
        *,
        in_numbers: bool,
    ) -> None:
        """``numbers``: places whose numbers change from call to call; ``in_numbers``: whether any
        number may be stood in for. ``tried`` gets each run."""
        self._request = request
        self._tried = tried
        self._calls = NumberCalls(request.function)
        self._numbers = numbers
        self._likely: Sequence[Location] = ()
        self._in_numbers = in_numbers
        self._containers: Sequence[ChangedContainer] | None = ()
        self._counters: list[Location] = []
        self._refusal: Counted | None = None
        self._late: LateError | None = None  # of a run in which containers were stood in for
        self._failed: Exception | None = None  # in a run in which numbers stood in
        self._inputs: tuple[list[Tensor], bool] | None = None  # of ``last``
        self._whole: set[Key] = set()  # arrays whose numbers may not stand in
        self._given: set[CodeType] = set()  # code that gets numbers where it needs them
        self._draws: list[HeldFunction] = []  # which draw random numbers

    def last(self, inputs: list[Tensor], *, symbolic: bool) -> tuple[Run, fx.GraphModule]:
        """The last run, which meets nothing new, and its trace."""
        self._inputs = inputs, symbolic
        for _ in range(_MOST_RUNS):
            run = self._next()
            try:
                module = self._trace(inputs, symbolic, run)
                if self._is_last(run):
                    return run, module
            except Exception as error:
                self._learn(error, run)
        raise CaptureError(
            f"each of {_MOST_RUNS} runs of the step met something that the earlier runs had not "
            "met",
            code="TR-199",
            remedy="this is a bug in treadle; please report it, with the step",
        )

    def _trace(self, inputs: list[Tensor], symbolic: bool, run: Run) -> fx.GraphModule:
        for group in self._request.param_groups:
            group.taken.clear()
        with weights_in_place(), self._calls.rewritten():
            instead = {**_INSTEAD, **run.recorder.constants.answers()}
            return trace(run.traced, inputs, instead, symbolic=symbolic)

    def expects(self, likely: Iterable[Location]) -> bool:
        """Whether other runs follow, in which numbers stand in at these places too, as they are
        likely to change: without those if anything fails for that."""
        if not self._in_numbers:
            return False
        known = {_identity(place) for place in (*self._numbers, *self._counters)}
        self._likely = [place for place in likely if _identity(place) not in known]
        return bool(self._likely)

    def located(self, error: Exception) -> Exception:
        """An error that was found when the step's code was done with the user's line: that code
        runs once more as in the last run, and the error is found again."""
        if not isinstance(error, LateError) or error.where or self._inputs is None:
            return error
        run, look = Run(self._request, self._tried[-1].substitutes), error.look
        looks = without_functions(lambda: () if look is None else look(run))
        run.lines = LineWatch(looks)
        with contextlib.suppress(Exception):  # the same error
            self._trace(*self._inputs, run)
        line = run.lines.last if look is None else run.lines.changed
        return error if line is None else error.at(show_line(line))

    def _next(self) -> Run:
        numbers = (*self._numbers, *self._counters, *self._likely)
        parts = numbers, self._in_numbers, self._containers, self._calls.originals, self._given
        run = Run(self._request, Substitutes(*parts, self._draws))
        run.numbers.uses.whole |= self._whole
        self._tried.append(run)
        return run

    def _is_last(self, run: Run) -> bool:
        """Whether a run that ended normally met nothing new."""
        late = run.numbers.uses.written_late()
        self._whole |= late
        if late or self._covers_more(run):
            return False
        if not _asks_types(run):
            return True
        if self._refusal is not None and not self._in_numbers:
            raise self._refusal
        if self._likely:
            self._likely = ()
        else:
            self._numbers, self._in_numbers, self._containers = (), False, None
        return False

    def _covers_more(self, run: Run, error: Exception | None = None) -> bool:
        """Whether code that asked for real numbers is rewritten in the next run, or functions that
        draw are found in other places than their modules."""
        more = self._calls.cover(_asked(run, error), run.met(), _places(run))
        return self._covers_draws(run) or more

    def _covers_draws(self, run: Run) -> bool:
        if self._draws or not run.draws_otherwise():
            return False
        self._draws = held_draws(run.met())
        return bool(self._draws)

    def _learn(self, error: Exception, run: Run) -> None:
        """Prepare what the next run needs to get past ``error``; raise it if there is nothing."""
        match error:
            case ScalerBegins():
                error.begin()
            case ForwardModeBegins():
                error.load()
            case ContainersChanged():
                self._containers = error.containers
            case Counted():
                self._count(error, run)
            case AsksNumber():
                if not self._calls.cover([error.codes], run.met(), _places(run)):
                    code = run.originals.get(error.codes[0], error.codes[0])
                    if code not in self._given:
                        self._given.add(code)
                    elif not self._containers:
                        raise error
                    else:
                        self._containers = None
            case _:
                if not self._covers_more(run, error):
                    self._retreat(error, run)

    def _count(self, error: Counted, run: Run) -> None:
        """Note that the step computes with numbers at these places, which change from call to
        call."""
        new = error.places_beside(self._counters)
        if not self._covers_more(run) and not new:
            raise error
        self._refusal = self._refusal or error
        self._counters += new

    def _retreat(self, error: Exception, run: Run) -> None:
        """Stop using the stand-ins that may have caused the failure."""
        if self._likely:
            self._likely = ()
        elif self._containers:
            self._containers = None
            self._late = error if isinstance(error, LateError) else None
        elif not self._in_numbers and self._refusal is not None:
            if not _is_again(self._failed, error):
                raise self._refusal from error
            self._raise(error)  # whatever stands in
        elif run.numbers.uses.is_used and (self._in_numbers or self._numbers):
            self._numbers, self._in_numbers, self._failed = (), False, error
        else:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        if self._late is not None and isinstance(error, LateError):
            raise self._late from None  # this one is about a container: there is no stand-in for it
        raise error


def _is_again(before: Exception | None, error: Exception) -> bool:
    """Whether a run ended for the same reason as an earlier one."""
    return type(before) is type(error) and str(before) == str(error)


def _asked(run: Run, error: Exception | None) -> Iterable[tuple[CodeType, ...]]:
    """Where a real number was asked for and another stands in, or ``type`` of what may be a traced
    tensor: the codes of the frames. ``error``: what ended the run, where something of C++ may have
    refused what stands in."""
    types = () if run.external is None else run.external.calls_type
    refused = () if error is None else users_codes(error)
    asked = (*run.numbers.uses.asked.values(), *run.recorder.numbers.uses.asked.values())
    return [*asked, *types, *([refused] if refused else [])]


def _places(run: Run) -> set[SourcePosition]:
    """Where entries were looked for by such a number, or a function was called with one."""
    return run.numbers.uses.places | run.recorder.numbers.uses.places


def _asks_types(run: Run) -> bool:
    """Whether a number that stands in may have been asked for its type: then the run is one of
    another program."""
    if run.external is None or not run.external.asks_types:
        return False
    if run.containers.values:
        return True
    if not run.numbers.stand_in:
        return bool(run.numbers.changing.keys())
    return run.numbers.may_change() or run.external.is_named_in_code("param_groups")


def _identity(place: Location) -> tuple[object, ...]:
    return place.owner, place.at, place.name
