"""``treadle::to_eight_bits`` and ``treadle::from_eight_bits``: numbers of a block as 8-bit codes.

::

    c = to_eight_bits(x, scale, int8)           the code nearest to x[i] / scale, in [-1, 1]
    c = to_eight_bits(x, scale, uint8, turn)    the code below it or above it, see ``dither``
    x = from_eight_bits(c, scale)               f32

Codes have a dynamic exponent (Dettmers et al., 2022, "8-bit Optimizers via Block-wise
Quantization", section 2.1): half of all codes are for the decade that ends at 1, and each decade
below has half as many. Between ends of decades the code is a linear function of the number, with a
smaller slope in each decade. So it is the minimum of those lines, and the number is the maximum of
their inverses: neither needs a table, a logarithm or a search.

``int8`` codes have a sign and reach down to ``1e-6``; ``uint8`` codes are for numbers that are not
negative, and reach down to ``1e-7``. A number above 0 never becomes the ``uint8`` code of 0: it is
a divisor's.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp

DECADES = {torch.int8: 7, torch.uint8: 8}
"""How many decades of numbers have codes of a dtype; the lowest one reaches from 0."""


def last_code(dtype: torch.dtype) -> int:
    """The code of 1."""
    return 2 ** DECADES[dtype] - 1


def code_of(number: Any, dtype: torch.dtype, least: Callable[[Any, Any], Any]) -> Any:
    """The code of a number from 0 to 1, before it is rounded. ``least``: the smaller of two."""
    lines = [number * (1.0 / step) + (at - end / step) for at, end, step in _lines(dtype)]
    return reduce(least, lines)


def number_of(code: Any, dtype: torch.dtype, largest: Callable[[Any, Any], Any]) -> Any:
    """The number of a code, from 0 to 1 and a rounding error. ``largest``: the larger of two."""
    return reduce(largest, [code * step + (end - at * step) for at, end, step in _lines(dtype)])


def dither(column: Any, turn: Any, floor: Callable[[Any], Any]) -> Any:
    """What is added to a code before it is rounded down: a number from 0 to 1 that is another one
    in each turn, and evenly spread over the turns of a column and over the columns of a turn.

    An average of squares moves by a thousandth of itself in a step, less than the distance of two
    codes. Rounded to the nearest it would stand still, or follow the scale of its block; so it is
    right on average instead. ``turn``: the fractional part of the step times ``TURN``.
    """
    sum_ = column * _COLUMN + turn
    return sum_ - floor(sum_)


TURN, _COLUMN = 0.5698402909980532, 0.6180339887498949
"""Irrational numbers that no small multiples bring close to whole ones."""
BELOW = 1e-4
"""How far below a whole number a code may come out of float32 arithmetic."""


def _lines(dtype: torch.dtype) -> list[tuple[float, float, float]]:
    """One for each decade: its last code, the number of that, and the distance of two numbers."""
    count = DECADES[dtype]
    ends = [0.0, *(10.0 ** (at - count) for at in range(1, count + 1))]
    return [
        (2.0**at - 1, ends[at], (ends[at] - ends[at - 1]) / 2 ** (at - 1))
        for at in range(1, count + 1)
    ]


def _encode(x: Tensor, scale: Tensor, dtype: torch.dtype, turn: Tensor | None = None) -> Tensor:
    magnitude = x.float().abs() * torch.where(scale > 0, scale.reciprocal(), 0.0)
    code = code_of(magnitude, dtype, torch.minimum)
    if turn is None:
        code = code.round()
    else:
        columns = torch.arange(x.shape[-1], device=x.device, dtype=torch.float32)
        code = (code + (dither(columns, turn.float(), torch.floor) + BELOW)).floor()
    code = code.clamp(max=last_code(dtype))
    if dtype is torch.uint8:
        code = torch.where(magnitude > 0, code.clamp(min=1), 0.0)
    return torch.where(code > 0, code.copysign(x), 0.0).to(dtype)  # NaN is in the scale


def _decode(codes: Tensor, scale: Tensor) -> Tensor:
    value = codes.float()
    number = number_of(value.abs(), codes.dtype, torch.maximum)
    number = torch.where(value.abs() < last_code(codes.dtype), number, 1.0)
    return torch.where(value < 0, -number, number) * scale


TO_EIGHT_BITS = CustomOp(
    "to_eight_bits(Tensor x, Tensor scale, ScalarType dtype, Tensor? turn=None) -> Tensor",
    fake=lambda x, dtype: torch.empty_like(x, dtype=dtype),
    kernel=_encode,
    tags=(torch.Tag.pointwise,),
)
FROM_EIGHT_BITS = CustomOp(
    "from_eight_bits(Tensor codes, Tensor scale) -> Tensor",
    fake=lambda codes: torch.empty_like(codes, dtype=torch.float32),
    kernel=_decode,
    tags=(torch.Tag.pointwise,),
)
