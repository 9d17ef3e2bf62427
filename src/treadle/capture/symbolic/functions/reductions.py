"""``sum``, ``min`` and ``max`` of numbers that stand in: numbers again, and no branch.

::

    best = min(best, loss.item())          best = min(best, the number), after the launch
    weight = min(1.0, self.step / 100)     a number of the call; the graph has an input
    mean = sum(losses) / len(losses)       of a list that grows: what was there is one number

Python compares the numbers, so its own functions would take one path for each outcome; and what
iterates over a list depends on each of its entries. Numbers of several types are left to Python:
the type of the result is then a branch indeed.
"""

import builtins
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import FrameType
from typing import Any

from treadle.capture.python_state.containers.container_recorders import reduced_recorded
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.numbers import is_number, lead_of
from treadle.util.frames.branch_analysis import called_name

_EXTREMES: tuple[Callable[..., object], ...] = (min, max)


def _extreme(function: Callable[..., Any]) -> Callable[..., object]:
    def call(*args: Any, **kwargs: object) -> object:
        numbers: Sequence[Any] = args
        if len(args) == 1 and type(args[0]) in (list, tuple):
            numbers = tuple(args[0])
        elif len(args) == 1 and not kwargs:
            found = reduced_recorded(function, args[0])
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
    numbers = reduced_recorded(sum, args[0]) if len(args) == 1 and not kwargs else None
    return sum(*args, **kwargs) if numbers is None else reduce(operator.add, numbers)


REDUCTIONS: Mapping[Callable[..., object], Callable[..., object]] = {
    **{function: _extreme(function) for function in _EXTREMES},
    sum: _sum,
}
"""What is called in their places."""


def asks_extreme(frame: FrameType) -> bool:
    """Whether ``frame`` calls ``min`` or ``max`` just now, by its own name."""
    return any(_called(frame) is other for other in _EXTREMES)


def asks_reduction(frame: FrameType) -> bool:
    """Whether ``frame`` calls one of ``REDUCTIONS`` just now, by its own name."""
    return any(_called(frame) is other for other in REDUCTIONS)


def _called(frame: FrameType) -> object:
    name = called_name(frame)
    return frame.f_globals.get(name, vars(builtins).get(name)) if name else None
