"""``min`` and ``max`` of numbers that stand in: numbers again, and no branch.

::

    best = min(best, loss.item())          best = min(best, the number), after the launch
    weight = min(1.0, self.step / 100)     a number of the call; the graph has an input

Python compares the numbers, so its own functions would take one path for each outcome. Numbers of
several types are left to them: the type of the result is then a branch indeed.
"""

import builtins
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.numbers import is_number, lead_of
from treadle.util.frames.branch_analysis import called_name

_FUNCTIONS: tuple[Callable[..., object], ...] = (min, max)


def _extreme(function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        numbers: Sequence[object] = args
        if len(args) == 1 and type(args[0]) in (list, tuple):
            numbers = tuple(args[0])  # type: ignore[arg-type]
        if not kwargs and len(numbers) > 1 and any(map(is_number, numbers)):
            kinds = {number.__class__ for number in numbers}
            if all(is_number(e) or is_real(e) for e in numbers) and len(kinds) == 1:
                return lead_of(numbers).combined(function, numbers)  # type: ignore[arg-type]
        return function(*args, **kwargs)

    return call


EXTREMES: Mapping[Callable[..., object], Callable[..., object]] = {
    function: _extreme(function) for function in _FUNCTIONS
}
"""What is called in their places."""


def asks_extreme(frame: FrameType) -> bool:
    """Whether ``frame`` calls one of them just now, by its own name."""
    name = called_name(frame)
    function = frame.f_globals.get(name, vars(builtins).get(name)) if name else None
    return any(function is other for other in _FUNCTIONS)
