"""Hyperbolic functions, and the inverses of these and of sine, cosine and tangent.

Each is a formula of few functions, stable in the dtype that it is computed in: within a few units
in the last place for float32 and for float64. Coefficients are Chebyshev's approximations of what
the docstrings say.
"""

from collections.abc import Sequence
from math import log, pi

import torch

from treadle.lower.operators.pointwise import elementwise, is_negative, register_unary
from treadle.lower.scalars import ScalarExpr

aten = torch.ops.aten

_ATAN = (
    0.01628357235648259, -0.0345685906686069, 0.045515165635903104, -0.052304374642516874,
    0.05878926715756727, -0.066664246872465, 0.07692296363979952, -0.09090908753118594,
    0.11111111105147764, -0.14285714285659748, 0.19999999999999804, -0.3333333333333333,
)  # fmt: skip
_ASIN = (
    0.028757851367421566, -0.014851887071247204, 0.01740087944269402, 0.005457506718640358,
    0.01032281435018578, 0.011479177415184906, 0.013971212973552933, 0.017352392720869973,
    0.02237217294214989, 0.030381944138531247, 0.04464285714635543, 0.07499999999998433,
    0.16666666666666669,
)  # fmt: skip
_HALF_PI_LOW = 6.123233995736766e-17
"""``pi / 2`` minus its float64."""
_LARGE = 1e8
"""From here on ``x * x + 1`` is ``x * x``."""


def _half_pi(like: ScalarExpr) -> tuple[float, float]:
    """pi / 2 in the dtype of a term, and the rest that the dtype cannot hold."""
    high = torch.tensor(pi / 2, dtype=like.expr.dtype).double().item()
    return high, pi / 2 - high + _HALF_PI_LOW


def _polynomial(x: ScalarExpr, coefficients: Sequence[float]) -> ScalarExpr:
    """By Horner's rule, the highest coefficient first."""
    first, second, *rest = coefficients
    total = first * x + second
    for coefficient in rest:
        total = total * x + coefficient
    return total


def _with_sign(size: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
    return is_negative(x).choose(-size, size)


def _half_exp(x: ScalarExpr) -> ScalarExpr:
    """``exp(x) / 2``, which is finite where ``exp(x)`` is not yet."""
    root = (x * 0.5).fn("exp")
    return root * 0.5 * root


def sinh(x: ScalarExpr) -> ScalarExpr:
    """``(e + e / (e + 1)) / 2`` where ``e = exp(|x|) - 1``"""
    size = x.fn("abs")
    e = size.fn("expm1")
    return _with_sign(size.fn("gt", 20).choose(_half_exp(size), (e + e / (e + 1)) * 0.5), x)


def cosh(x: ScalarExpr) -> ScalarExpr:
    """``(e + 1 / e) / 2`` where ``e = exp(|x|)``"""
    size = x.fn("abs")
    e = size.fn("exp")
    return size.fn("gt", 20).choose(_half_exp(size), (e + 1 / e) * 0.5)


def asinh(x: ScalarExpr) -> ScalarExpr:
    """``log(1 + |x| + x^2 / (1 + sqrt(x^2 + 1)))``"""
    size = x.fn("abs")
    square = size * size
    near = (size + square / ((square + 1).fn("sqrt") + 1)).fn("log1p")
    return _with_sign(size.fn("gt", _LARGE).choose(size.fn("log") + log(2), near), x)


def acosh(x: ScalarExpr) -> ScalarExpr:
    """``log(1 + t + sqrt(2 t + t^2))`` where ``t = x - 1``"""
    t = x - 1
    near = (t + (t * 2 + t * t).fn("sqrt")).fn("log1p")
    known = x.fn("gt", _LARGE).choose(x.fn("log") + log(2), near)
    return x.fn("lt", 1).choose(float("nan"), known)


def atanh(x: ScalarExpr) -> ScalarExpr:
    """``log(1 + 2 |x| / (1 - |x|)) / 2``"""
    size = x.fn("abs")
    return _with_sign((size * 2 / (1 - size)).fn("log1p") * 0.5, x)


def _atan_of(above: ScalarExpr, below: ScalarExpr) -> ScalarExpr:
    """Of ``above / below``, both positive or zero and not both zero or infinite.

    With ``q`` the quotient, or ``(q - 1) / (q + 1)``, or ``-1 / q``, so that it is at most
    ``tan(pi / 8)``: ``q + q^3 p(q^2)`` beside a multiple of ``pi / 4``.
    """
    high, low = _half_pi(above)
    steep, middle = above.fn("gt", below * 2.414), above.fn("gt", below * 0.4142)
    turned = steep.choose(-below, middle.choose(above - below, above))
    q = turned / steep.choose(above, middle.choose(above + below, below))
    z = q * q
    rest = q * (z * _polynomial(z, _ATAN))
    zero = above * 0
    base = steep.choose(zero + high, middle.choose(zero + high / 2, zero))
    lost = steep.choose(zero + low, middle.choose(zero + low / 2, zero))
    return base + ((rest + lost) + q)


def atan(x: ScalarExpr) -> ScalarExpr:
    """``_atan_of(|x|, 1)``, with the sign of ``x``."""
    size = x.fn("abs")
    high, _ = _half_pi(x)
    finite = size.fn("gt", 1e18).choose(high, _atan_of(size, size * 0 + 1))
    return _with_sign(finite, x)


def _asin_part(z: ScalarExpr) -> ScalarExpr:
    """``asin(s) / s - 1`` of ``s = sqrt(z)``, at most 0.5"""
    return z * _polynomial(z, _ASIN)


def asin(x: ScalarExpr) -> ScalarExpr:
    """``x + x p(x^2)`` up to 0.5, then ``pi / 2 - 2 asin(sqrt((1 - x) / 2))``"""
    high, low = _half_pi(x)
    size = x.fn("abs")
    near = size.fn("le", 0.5)
    z = near.choose(x * x, (1 - size) * 0.5)
    s = near.choose(size, z.fn("sqrt"))
    part = s + s * _asin_part(z)
    return _with_sign(near.choose(part, high - (part * 2 - low)), x)


def acos(x: ScalarExpr) -> ScalarExpr:
    """``pi / 2 - asin(x)`` up to 0.5, then ``2 asin(sqrt((1 - x) / 2))``"""
    high, low = _half_pi(x)
    size = x.fn("abs")
    near = size.fn("le", 0.5)
    z = near.choose(x * x, (1 - size) * 0.5)
    s = near.choose(x, z.fn("sqrt"))
    rest = s * _asin_part(z)
    above = (s + rest) * 2
    below = (high - (s + (rest - low))) * 2
    return near.choose(high - (s - (low - rest)), x.fn("lt", 0).choose(below, above))


@elementwise(aten.atan2.default)
def atan2(y: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
    """The angle of ``(x, y)``: ``_atan_of`` their sizes, in the quarter that the signs say."""
    high, low = _half_pi(x)
    above, below = y.fn("abs"), x.fn("abs")
    large, small = above.fn("maximum", below), above.fn("minimum", below)
    both = large.fn("gt", 0).choose(1, large)  # where they are equal, zero or infinite
    ratio = small.fn("eq", large).choose(both, small / large)
    angle = _atan_of(ratio, ratio * 0 + 1)
    angle = above.fn("gt", below).choose(high - (angle - low), angle)
    angle = is_negative(x).choose(2 * high - (angle - 2 * low), angle)
    return _with_sign(angle, y)


for _formula in (sinh, cosh, asinh, acosh, atanh, atan, asin, acos):
    register_unary(getattr(aten, _formula.__name__).default, _formula)
