"""Functions of lists of numbers that stand in: numbers again, and no branch.

::

    best = min(best, loss.item())          best = min(best, the number), after the launch
    weight = min(1.0, self.step / 100)     a number of the call; the graph has an input
    mean = sum(losses) / len(losses)       of a list that grows: what was there is one number
    mean = statistics.fmean(losses)        as Python computes it, of the list that a call finds
    best = self.better(losses)             likewise: code that calls a function by another name than
                                           its own is rewritten (``source_rewriting``)

Python compares the numbers, so its own functions would take one path for each outcome; and what
iterates over a list depends on each of its entries. Numbers of several types are left to Python:
the type of the result is then a branch indeed.
"""

import builtins
import math
import operator
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import FrameType, ModuleType
from typing import Any, final

import numpy as np

from treadle.capture.python_state.containers.container_recorders import recorded_numbers
from treadle.capture.python_state.plain_values import NUMBERS, is_plain, is_real
from treadle.capture.symbolic.arrays.array_functions import maker
from treadle.capture.symbolic.deferred import OF_NUMBERS, DeferredNumber, is_deferred
from treadle.capture.symbolic.functions.number_lists import (
    NEEDS_ALL,
    NumberList,
)
from treadle.capture.symbolic.numbers import (
    Key,
    Number,
    SourcePosition,
    computation,
    is_number,
    is_stand_in,
    lead_of,
    operand_key,
    position,
    value_now,
)
from treadle.util.frames.branch_analysis import called_name, calls_value

_EXTREMES: tuple[Callable[..., object], ...] = (min, max)


def _extreme(function: Callable[..., Any]) -> Callable[..., object]:
    def call(*args: Any, **kwargs: object) -> object:
        numbers: Sequence[Any] = args
        if len(args) == 1 and type(args[0]) in (list, tuple):
            numbers = tuple(args[0])
        elif len(args) == 1 and not kwargs:
            found = _reduced(function, args[0])
            if found is not None and len(found) == 1:
                return found[0]
            numbers = found or args
        if not kwargs and len(numbers) > 1 and any(map(is_number, numbers)):
            kinds = {number.__class__ for number in numbers}
            if all(is_number(e) or is_real(e) for e in numbers) and len(kinds) == 1:
                return lead_of(numbers).combined(function, numbers)
        return function(*args, **kwargs)

    return call


def _sum(*args: Any, **kwargs: Any) -> object:
    """Of entries that stand in as their sum, and those that the run has put behind them. From
    Python 3.12 on, whose own function rounds once, its result may differ in the last bit."""
    numbers = _reduced(sum, args[0]) if len(args) == 1 and not kwargs else None
    return sum(*args, **kwargs) if numbers is None else reduce(operator.add, numbers)


def _reduced(function: Callable[..., Any], value: object) -> list[Any] | None:
    """Numbers of which ``function`` gives what it gives of a list or deque of the user's; ``None``
    where ``value`` stands in for none, or each call could not tell."""
    found = recorded_numbers(value)
    if found is None:
        return None
    before, put = found
    if before is None:
        return put
    instead = before.reduced(function, frozenset(entry.__class__ for entry in put))
    return None if instead is None else [instead, *put]


def _of_all(
    function: Callable[..., Any], otherwise: Callable[..., object]
) -> Callable[..., object]:
    """``function`` of a list of numbers; ``otherwise`` of anything else."""

    def call(*args: Any, **kwargs: Any) -> object:
        options = (*args[1:], *kwargs.values())
        if args and all(type(value) in NUMBERS or is_plain(value) for value in options):
            figure = _Figure(NEEDS_ALL[function], tuple(args[1:]), tuple(kwargs.items()))
            result = _figure(figure, args[0])
            if result is not None:
                return result
        return otherwise(*args, **kwargs)

    return call


_BY_NAME = {name: function for function, name in NEEDS_ALL.items()}


@final
@dataclass(frozen=True, slots=True)
class _Figure:
    """``function(numbers, *options, **named)``, of the function that has this name in a module."""

    name: tuple[str, str]
    options: tuple[object, ...]
    named: tuple[tuple[str, Any], ...]

    @property
    def function(self) -> Callable[..., Any]:
        """Itself, whatever stands in its place just now."""
        return _BY_NAME[self.name]

    def __call__(self, before: Any, *put: Any) -> Any:
        return self.function([*before, *put], *self.options, **dict(self.named))


def _figure(figure: _Figure, numbers: Any) -> Number | None:
    """What a function gives of all of ``numbers``; ``None`` where they are not numbers of which
    some stand in, or it gives no number of a type that is known."""
    before: NumberList | None = None
    put: Sequence[Any] = ()
    if type(numbers) in _SEQUENCES:
        put = list(numbers)
    elif (found := recorded_numbers(numbers)) is not None:
        before, put = found
    stand_in = [number for number in put if is_number(number)]
    if not (stand_in or before) or not all(is_number(e) or type(e) in _KNOWN for e in put):
        return None
    kinds = _kinds(figure.function, put, () if before is None else before.value)
    if kinds is None or (before is not None and not before.are_of(kinds, least=not put)):
        return None
    later = [number for number in stand_in if is_deferred(number)]
    return _known_later(figure, before, put, later) if later else _of_call(figure, before, put)


def _kinds(
    function: Callable[..., Any], put: Sequence[object], before: Sequence[object]
) -> frozenset[type] | None:
    """Types that the numbers may have, so that ``function`` of them has the type that it has in
    this run; ``None`` where that is not known."""
    module, _ = NEEDS_ALL[function]
    is_numpy, is_python = module == np.__name__, module == statistics.__name__
    behind = frozenset(number.__class__ for number in put)
    kinds = behind | frozenset(map(type, before))
    if behind & _FLOATS and kinds <= _REAL and (is_numpy or function in _OF_FLOATS):
        return _REAL
    is_known = len(kinds) == 1 and (not is_python or kinds == frozenset({float}))
    return kinds if is_known else None


def _of_call(figure: _Figure, before: NumberList | None, put: Sequence[object]) -> Number | None:
    """Of numbers of the call: one of the call as well."""
    operands = (() if before is None else before, *put)
    value = figure(*map(value_now, operands))
    if not is_real(value):
        return None
    stand_ins = [operand for operand in operands if is_stand_in(operand)]
    uses = lead_of(put).uses if before is None else before.uses
    first: Key = None if before is None else before.key
    return Number(
        value,
        computation(figure, operands),
        frozenset[Key]().union(*(operand.roots for operand in stand_ins)),
        uses,
        scales=all(number.scales for number in put if is_number(number)),
        key=uses.decisions.key_of(figure, first, *map(operand_key, put)),
    )


def _known_later(
    figure: _Figure,
    before: NumberList | None,
    put: Sequence[Any],
    later: Sequence[DeferredNumber],
) -> Number | None:
    """Where some are known after the launch: one that is known then. In the graph it is made of
    the same numbers in another order."""
    operands = (() if before is None else before, *put)
    kind = _kind_of(figure, operands)
    if kind not in NUMBERS:
        return None
    rounded = _in_graph(figure, before, put)
    result = DeferredNumber(
        kind,
        computation(figure, operands),
        later[0].deferred,
        tuple(dict.fromkeys(at for number in later for at in number.parts)),
        rounded.in_graph if is_deferred(rounded) else None,
    )
    result.is_exact = figure.function in _EXTREMES_OF_NUMPY
    return result


def _kind_of(figure: _Figure, operands: Sequence[object]) -> type:
    """Of what a figure is, by samples in the places of numbers that are not known."""
    error: Exception | None = None
    for sample in (1, 2, 0.5):
        try:
            values = [type(e.value)(sample) if is_deferred(e) else value_now(e) for e in operands]
            return type(figure(*values))
        except (ArithmeticError, ValueError) as failed:
            error = failed
    assert error is not None
    raise error


def _in_graph(figure: _Figure, before: NumberList | None, put: Sequence[Any]) -> object:
    """The same number, but for rounding, by arithmetic that the graph can do; ``None`` where there
    is none."""
    function = figure.function
    if figure.options or figure.named:
        return None
    if function in _EXTREMES_OF_NUMPY:
        return _extreme_in_graph(figure, before, put)
    if function not in _TOTALS and function not in _MEANS:
        return None
    first = None if before is None else _of_call(_SUM, before, ())
    numbers: list[Any] = [each if is_number(each) else float(each) for each in put]
    if first is not None:
        numbers.insert(0, first)
    total = reduce(operator.add, numbers)
    if function in _TOTALS:
        return total
    count: Any = 0 if before is None else before.count()
    return total / (count + len(put))


def _extreme_in_graph(figure: _Figure, before: NumberList | None, put: Sequence[Any]) -> object:
    """``np.min`` or ``np.max``: NaN where one of them is."""
    first = None
    if before is not None and not before.are_none():
        first = _of_call(figure, before, ())
    numbers = put if first is None else [first, *put]
    return reduce(_EXTREMES_OF_NUMPY[figure.function], numbers)


_SUM = _Figure(NEEDS_ALL[np.sum], (), (("dtype", float),))
_SEQUENCES = (list, tuple, deque)
_FLOATS = frozenset({float, np.float64})
_REAL = _FLOATS | {int, bool}
_KNOWN = NUMBERS | {bool}
_OF_FLOATS = frozenset({math.fsum, statistics.fmean})
"""What gives a float of any numbers, as NumPy does where one of them is one."""
_TOTALS = frozenset({math.fsum, np.sum})
_MEANS = frozenset({statistics.fmean, statistics.mean, np.mean, np.average})
_EXTREMES_OF_NUMPY: Mapping[object, Callable[..., Any]] = {np.min: np.minimum, np.max: np.maximum}


def _otherwise(function: Callable[..., object]) -> Callable[..., object]:
    """What is called of anything else."""
    if function in OF_NUMBERS:
        return OF_NUMBERS[function]
    return maker(function) if NEEDS_ALL[function][0] == np.__name__ else function


REDUCTIONS: Mapping[Callable[..., object], Callable[..., object]] = {
    **{function: _extreme(function) for function in _EXTREMES},
    sum: _sum,
    **{function: _of_all(function, _otherwise(function)) for function in NEEDS_ALL},
}
"""What is called in their places."""


def functions_of_lists() -> Iterator[tuple[ModuleType, str, Callable[..., object]]]:
    """In the places of those of modules."""
    modules = {module.__name__: module for module in (math, statistics, np)}
    for function, (module, name) in NEEDS_ALL.items():
        yield modules[module], name, REDUCTIONS[function]


def asked_call(frame: FrameType) -> SourcePosition | None:
    """Where ``frame`` calls just now what may be one of ``REDUCTIONS`` by another name; ``None`` if
    it calls nothing, or something else."""
    return position(frame) if calls_value(frame) else None


def asks_extreme(frame: FrameType) -> bool:
    """Whether ``frame`` calls ``min`` or ``max`` just now, by its own name."""
    return any(_called(frame) is other for other in _EXTREMES)


def asks_reduction(frame: FrameType) -> bool:
    """Whether ``frame`` calls one of ``REDUCTIONS`` just now, by its own name."""
    called = _called(frame)
    return any(called is other for other in REDUCTIONS)


def _called(frame: FrameType) -> object:
    name = called_name(frame)
    return frame.f_globals.get(name, vars(builtins).get(name)) if name else None
