"""Functions of Python numbers, as functions of 0-dim tensors.

::

    a / b           a / b                   as long as b != 0
    math.log(a)     log(a)                  as long as that is finite
    round(a, 2)     round(a * 100) / 100    as long as a * 100 is no half

If the condition does not hold, Python raises an error, returns a number of another type, or rounds
differently: such a call runs in eager.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from treadle.capture.symbolic.numbers import is_number

Holds = Callable[..., Tensor]
_MOST_DIGITS = 15
"""The largest exponent for which the power of ten is taken as an exact float64."""


@final
@dataclass(frozen=True, slots=True)
class GraphForm:
    """``compute``: the function. ``holds``: of the result and the operands whether Python gives
    that. ``of_floats``: all operands are float64. ``is_exact``: the result is Python's to the last
    bit. ``is_stepped``: the last bit of an operand may make another result."""

    compute: Callable[..., Tensor]
    holds: Holds | None = None
    of_floats: bool = False
    is_exact: bool = True
    is_stepped: bool = False


def graph_form(function: object, operands: Sequence[object]) -> GraphForm | None:
    """The form of a function of numbers."""
    if function is operator.pow and not any(isinstance(operand, float) for operand in operands):
        return None  # a negative exponent would make a float of integers
    if function is round and len(operands) == 2:
        digits = operands[1]
        return _rounded(digits) if type(digits) is int and 0 <= digits <= _MOST_DIGITS else None
    if function is operator.truediv and not is_number(operands[1]):
        return GraphForm(torch.true_divide, of_floats=True)  # Python has refused a zero
    return _FORMS.get(function)


def is_apart(one: Tensor, other: Tensor) -> Tensor:
    """Whether two numbers compare alike whatever their last bits are."""
    distance = (one - other).abs()
    return ~((distance <= 1e-13 * (one.abs() + other.abs())) & torch.isfinite(distance))


def _is_finite(result: Tensor, *_: Tensor) -> Tensor:
    return torch.isfinite(result)


def _has_divisor(result: Tensor, dividend: Tensor, divisor: Tensor) -> Tensor:
    return divisor != 0


def _is_divisible(result: Tensor, dividend: Tensor, divisor: Tensor) -> Tensor:
    """NaN and infinite ones have remainders of their own."""
    return (divisor != 0) & torch.isfinite(dividend) & torch.isfinite(divisor)


def _is_whole_number(result: Tensor, number: Tensor) -> Tensor:
    return number.abs() < 2.0**62


def _to_whole(function: Callable[[Tensor], Tensor]) -> GraphForm:
    def compute(number: Tensor) -> Tensor:
        return function(number).to(torch.int64)

    return GraphForm(compute, _is_whole_number, of_floats=True, is_stepped=True)


def _by(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """``function`` with ones in place of zero divisors, at which an integer kernel would fail."""

    def compute(dividend: Tensor, divisor: Tensor) -> Tensor:
        return function(dividend, torch.where(divisor == 0, torch.ones_like(divisor), divisor))

    return compute


def _rounded(digits: int) -> GraphForm:
    scale = 10.0**digits

    def compute(number: Tensor, *_: Tensor) -> Tensor:
        return torch.round(number * scale) / scale

    def holds(result: Tensor, number: Tensor, *_: Tensor) -> Tensor:
        scaled = number * scale
        from_half = (scaled - torch.floor(scaled) - 0.5).abs()
        return (scaled.abs() < 2.0**50) & (from_half > 2.0**-50 * scaled.abs())

    return GraphForm(compute, holds, of_floats=True, is_stepped=True)


def _inexact(function: Callable[..., Tensor]) -> GraphForm:
    return GraphForm(function, _is_finite, of_floats=True, is_exact=False)


def _of_torch_too(*functions: Callable[..., Any]) -> dict[object, GraphForm]:
    """Of functions that take tensors as they take numbers."""
    return {function: GraphForm(function) for function in functions}


def is_close(one: float, other: float, relative: float, absolute: float) -> bool:
    """``math.isclose`` without names."""
    return math.isclose(one, other, rel_tol=relative, abs_tol=absolute)


def _is_close(one: Tensor, other: Tensor, relative: Tensor, absolute: Tensor) -> Tensor:
    apart = (one - other).abs()
    near = (apart <= (relative * one).abs()) | (apart <= (relative * other).abs())
    return (one == other) | ((near | (apart <= absolute)) & torch.isfinite(apart))


def _log(number: Tensor, base: Tensor | None = None) -> Tensor:
    return torch.log(number) if base is None else torch.log(number) / torch.log(base)


def _hypot(*numbers: Tensor) -> Tensor:
    return functools.reduce(torch.hypot, numbers).abs()


def _is_integer(number: Tensor) -> Tensor:
    return torch.isfinite(number) & (torch.floor(number) == number)


def _same(number: Tensor) -> Tensor:
    return number


def _extreme(is_before: Callable[[Tensor, Tensor], Tensor]) -> GraphForm:
    """As Python compares: each number with the best one so far, which stays where it is equal, and
    where one of them is NaN."""

    def compute(*numbers: Tensor) -> Tensor:
        return functools.reduce(lambda best, n: torch.where(is_before(n, best), n, best), numbers)

    return GraphForm(compute)


_ARITHMETIC: tuple[Callable[..., object], ...] = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.neg,
    operator.pos,
    abs,
)
COMPARISONS: frozenset[Callable[..., object]] = frozenset(
    {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
)
_INEXACT = {
    operator.pow: torch.pow, math.pow: torch.pow, math.exp: torch.exp, math.expm1: torch.expm1,
    math.log: _log, math.log1p: torch.log1p, math.log2: torch.log2, math.log10: torch.log10,
    math.hypot: _hypot,
    math.sin: torch.sin, math.cos: torch.cos, math.tanh: torch.tanh, math.atan: torch.atan,
    np.exp: torch.exp, np.log: torch.log, np.log1p: torch.log1p, np.log2: torch.log2,
    np.log10: torch.log10, np.tanh: torch.tanh, math.sqrt: torch.sqrt, np.sqrt: torch.sqrt,
}  # fmt: skip
_FORMS: dict[object, GraphForm] = {
    **_of_torch_too(*_ARITHMETIC, *COMPARISONS),
    **{function: _inexact(form) for function, form in _INEXACT.items()},
    is_close: GraphForm(_is_close, of_floats=True, is_stepped=True),
    float.is_integer: GraphForm(_is_integer, of_floats=True, is_stepped=True),
    **dict.fromkeys((math.isnan, np.isnan), GraphForm(torch.isnan, of_floats=True)),
    **dict.fromkeys((math.isinf, np.isinf), GraphForm(torch.isinf, of_floats=True)),
    **dict.fromkeys((math.isfinite, np.isfinite), GraphForm(torch.isfinite, of_floats=True)),
    **dict.fromkeys((int, math.trunc), _to_whole(torch.trunc)),
    math.fabs: GraphForm(torch.abs, of_floats=True),
    **dict.fromkeys((abs, np.absolute), GraphForm(torch.abs)),
    min: _extreme(torch.lt),
    max: _extreme(torch.gt),
    np.minimum: GraphForm(torch.minimum),
    np.maximum: GraphForm(torch.maximum),
    float: GraphForm(_same, of_floats=True),
    math.floor: _to_whole(torch.floor),
    math.ceil: _to_whole(torch.ceil),
    round: _to_whole(torch.round),
    operator.truediv: GraphForm(_by(torch.true_divide), _has_divisor, of_floats=True),
    operator.floordiv: GraphForm(_by(torch.floor_divide), _is_divisible, is_stepped=True),
    operator.mod: GraphForm(_by(torch.remainder), _is_divisible, is_stepped=True),
    math.fmod: GraphForm(_by(torch.fmod), _is_divisible, of_floats=True, is_stepped=True),
}  # fmt: skip
