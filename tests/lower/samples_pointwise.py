"""Samples: pointwise."""

import torch
import torch.nn.functional as F

from lower.operator_table import Family, away, normal, positive, truth, whole

POINTWISE = Family("pointwise")


_ANYWHERE = """
    abs neg exp expm1 sin cos tan tanh sinh cosh sigmoid erf erfc square atan asinh exp2
    sgn sign floor ceil round trunc frac sinc deg2rad rad2deg nan_to_num isnan isinf
    isfinite isposinf isneginf logical_not signbit relu erfinv lgamma digamma asin acos
    atanh log1p i0
"""


def _pointwise() -> None:
    for name in _ANYWHERE.split():
        POINTWISE.add(name, getattr(torch, name), away(3, 7))
    for name in ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "logit"):
        POINTWISE.add(name, getattr(torch, name), positive(3, 7))
    POINTWISE.add("acosh", torch.acosh, lambda: torch.rand(3, 7) + 1.5)
    for name in (
        "silu",
        "mish",
        "hardswish",
        "hardsigmoid",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "softplus",
        "logsigmoid",
        "hardtanh",
        "gelu",
        "relu6",
        "softsign",
        "tanhshrink",
        "softshrink",
        "hardshrink",
        "glu",
    ):
        POINTWISE.add(name, getattr(F, name), normal(3, 8))
    POINTWISE.add("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), normal(3, 7))
    POINTWISE.add("threshold", lambda x: F.threshold(x, 0.1, 20.0), normal(3, 7))
    POINTWISE.add("prelu", F.prelu, normal(3, 5, 4), normal(5))
    POINTWISE.add("prelu, one slope", F.prelu, normal(3, 5), normal(1))
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
        "fmax",
        "atan2",
        "hypot",
        "copysign",
        "logaddexp",
        "logaddexp2",
        "remainder",
        "fmod",
        "xlogy",
        "fmin",
    ):
        POINTWISE.add(name, getattr(torch, name), away(3, 1, 5), positive(4, 1))
    for name in ("floor_divide", "heaviside"):
        POINTWISE.add(name, getattr(torch, name), away(3, 1, 5), positive(4, 1), grad=False)
    POINTWISE.add("pow", torch.pow, positive(3, 4), normal(4))
    POINTWISE.add("pow of a number", lambda x: [x**3, x**2.5, 2.0**x, x**-2, x**0], positive(3, 4))
    POINTWISE.add("float_power", lambda x: torch.float_power(x, 2.5), positive(3, 4))
    POINTWISE.add(
        "addcmul, addcdiv, lerp",
        lambda x, y: [
            torch.addcmul(x, x, y, value=0.5),
            torch.addcdiv(x, x, y, value=0.5),
            x.lerp(y, 0.3),
            torch.lerp(x, y, y),
        ],
        positive(3, 4),
        positive(4),
    )
    POINTWISE.add(
        "comparisons",
        lambda x, y: [x > y, x >= y, x < y, x <= y, x == y, x != y, x > 0],
        normal(3, 4),
        normal(4),
    )
    POINTWISE.add("isclose", lambda x, y: torch.isclose(x, y), normal(3, 4), normal(4))
    POINTWISE.add(
        "clamp",
        lambda x, y: [x.clamp(-0.5, 0.5), x.clamp(min=y), x.clamp(y, y + 1)],
        normal(3, 4),
        normal(4),
    )
    POINTWISE.add(
        "where",
        lambda c, x, y: [torch.where(c, x, y), torch.where(c, x, 0.0)],
        truth(3, 4),
        normal(3, 4),
        normal(4),
    )
    POINTWISE.add(
        "masked_fill",
        lambda x, m, v: [x.masked_fill(m, -1.0), x.masked_fill(m, v)],
        normal(3, 4),
        truth(4),
        normal(),
    )
    POINTWISE.add(
        "logical",
        lambda a, b: [a & b, a | b, a ^ b, ~a, torch.logical_xor(a, b)],
        truth(3, 4),
        truth(4),
    )
    POINTWISE.add(
        "whole numbers",
        lambda x, y: [
            x + y,
            x - y,
            x * y,
            x // y,
            x % y,
            x / y,
            x & y,
            x | y,
            x ^ y,
            ~x,
            x**2,
            -x,
            abs(x),
            torch.div(x, y, rounding_mode="trunc"),
            x << 2,
            x >> 1,
            torch.gcd(x, y),
            torch.sign(x),
            x.clamp(-2, 2),
            torch.bitwise_left_shift(y, 1),
            x.float(),
            x > y,
        ],
        whole(9, 3, 4, low=-9),
        whole(9, 4, low=1),
    )
    POINTWISE.add(
        "conversions",
        lambda x: [
            x.double(),
            x.half(),
            x.bfloat16(),
            x.int(),
            x.long(),
            x.to(torch.int8),
            x.bool(),
            x.to(torch.uint8),
        ],
        lambda: torch.rand(3, 5) * 9,
    )
    POINTWISE.add("nextafter", torch.nextafter, normal(3), normal(3), grad=False)


_pointwise()
