"""Activations and their derivatives: ``out[i] = f(x[i])``, ``out[i] = grad[i] * f'(x[i])``."""

import math

import torch

from treadle.loop.expr import Array
from treadle.lower.context import LoweringContext
from treadle.lower.operators.pointwise import (
    at_least,
    at_most,
    elementwise,
    pointwise,
    register_unary,
)
from treadle.lower.registry import Value, lowers
from treadle.lower.scalars import Number, ScalarExpr, const

aten = torch.ops.aten

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def softplus_of(x: ScalarExpr) -> ScalarExpr:
    """``log(1 + e^x) = max(x, 0) + log1p(e^-|x|)``, which cannot overflow."""
    return x.fn("maximum", 0) + (-x.fn("abs")).fn("exp").fn("log1p")


register_unary(aten.silu.default, lambda x: x / (1 + (-x).fn("exp")))
register_unary(aten.mish.default, lambda x: x * softplus_of(x).fn("tanh"))
register_unary(aten.hardsigmoid.default, lambda x: at_most(at_least(x + 3, 0), 6) / 6)
register_unary(aten.hardswish.default, lambda x: x * at_most(at_least(x + 3, 0), 6) / 6)


def _gelu_tanh_inner(x: ScalarExpr) -> ScalarExpr:
    return SQRT_2_OVER_PI * (x + CUBIC * (x * x * x))


@elementwise(aten.gelu.default)
def gelu(x: ScalarExpr, approximate: str = "none") -> ScalarExpr:
    """``x * Phi(x)``, or its tanh approximation."""
    if approximate == "tanh":
        return 0.5 * x * (1 + _gelu_tanh_inner(x).fn("tanh"))
    return x * 0.5 * (1 + (x * SQRT_HALF).fn("erf"))


@elementwise(aten.gelu_backward.default)
def gelu_backward(grad: ScalarExpr, x: ScalarExpr, approximate: str = "none") -> ScalarExpr:
    """``grad * (Phi(x) + x * phi(x))``, or the derivative of the tanh approximation."""
    if approximate == "tanh":
        inner = _gelu_tanh_inner(x).fn("tanh")
        slope = SQRT_2_OVER_PI * (1 + (3 * CUBIC) * (x * x))
        return grad * (0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope)
    cdf = 0.5 * (1 + (x * SQRT_HALF).fn("erf"))
    pdf = (x * x * -0.5).fn("exp") * (1 / math.sqrt(2 * math.pi))
    return grad * (cdf + x * pdf)


@elementwise(aten.silu_backward.default)
def silu_backward(grad: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
    """``grad * s * (1 + x * (1 - s))`` where ``s = sigmoid(x)``"""
    gate = x.fn("sigmoid")
    return grad * gate * (1 + x * (1 - gate))


@elementwise(aten.sigmoid_backward.default)
def sigmoid_backward(grad: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``grad * (1 - y) * y``"""
    return grad * (1 - y) * y


@elementwise(aten.tanh_backward.default)
def tanh_backward(grad: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``grad * (1 - y * y)``"""
    return grad * (1 - y * y)


@elementwise(aten.threshold_backward.default)
def threshold_backward(grad: ScalarExpr, x: ScalarExpr, threshold: Number) -> ScalarExpr:
    """``grad`` where ``x > threshold``, else zero."""
    return x.fn("le", threshold).choose(0, grad)


@elementwise(aten.threshold.default)
def threshold(x: ScalarExpr, at: Number, value: Number) -> ScalarExpr:
    """``value`` where ``x <= at``, else ``x``."""
    return x.fn("le", at).choose(value, x)


@elementwise(aten.hardtanh.default)
def hardtanh(x: ScalarExpr, low: Number = -1, high: Number = 1) -> ScalarExpr:
    """``x`` between ``low`` and ``high``."""
    return at_most(at_least(x, low), high)


@elementwise(aten.hardtanh_backward.default)
def hardtanh_backward(grad: ScalarExpr, x: ScalarExpr, low: Number, high: Number) -> ScalarExpr:
    """``grad`` where ``low < x < high``, else zero."""
    return x.fn("le", low).fn("or", x.fn("ge", high)).choose(0, grad)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(context: LoweringContext, x: Value) -> tuple[Array, Array]:
    """``min(x, 0) - log1p(e^-|x|)``, and ``e^-|x|`` where eager keeps it for the backward."""
    kept = context.element_context(1)

    def formula(x: ScalarExpr) -> ScalarExpr:
        return at_most(x, 0) - _far(x).fn("log1p")

    out = pointwise(context.element_context(0), formula, x)
    if kept.shape != x.shape:
        return out, Array(kept.axes(), const(0, kept.dtype))
    return out, pointwise(kept, _far, x)


def _far(x: ScalarExpr) -> ScalarExpr:
    return (-x.fn("abs")).fn("exp")


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(context: LoweringContext, grad: Value, x: Value, kept: Value) -> Array:
    """``grad * (1 - z / (1 + z))`` where ``x < 0``, else ``grad * z / (1 + z)``; ``z = e^-|x|``,
    rounded as the forward pass kept it, if it did."""

    def slope(grad: ScalarExpr, x: ScalarExpr, z: ScalarExpr) -> ScalarExpr:
        part = z / (1 + z)
        return grad * x.fn("lt", 0).choose(1 - part, part)

    if kept.shape != x.shape:
        return pointwise(context, lambda grad, x: slope(grad, x, _far(x)), grad, x)
    return pointwise(context, slope, grad, x, kept)


@elementwise(aten.leaky_relu.default)
def leaky_relu(x: ScalarExpr, slope: Number = 0.01) -> ScalarExpr:
    """``x`` where it is positive, else ``x * slope``."""
    return x.fn("gt", 0).choose(x, x * slope)


@elementwise(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    grad: ScalarExpr, x: ScalarExpr, slope: Number, self_is_result: bool
) -> ScalarExpr:
    """``grad`` where ``x`` is positive, else ``grad * slope``."""
    return x.fn("gt", 0).choose(grad, grad * slope)


@elementwise(aten.elu.default)
def elu(x: ScalarExpr, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> ScalarExpr:
    """``scale * x`` where it is positive, else ``scale * alpha * (exp(x * input_scale) - 1)``."""
    below = (x * input_scale).fn("expm1") * (alpha * scale)
    return x.fn("gt", 0).choose(x * scale, below)


@elementwise(aten.softplus.default)
def softplus(x: ScalarExpr, beta: Number = 1, threshold: Number = 20) -> ScalarExpr:
    """``log(1 + e^(beta x)) / beta``, and ``x`` itself beyond the threshold."""
    scaled = x * beta
    return scaled.fn("gt", threshold).choose(x, scaled.fn("exp").fn("log1p") / beta)


@elementwise(aten.softplus_backward.default)
def softplus_backward(
    grad: ScalarExpr, x: ScalarExpr, beta: Number, threshold: Number
) -> ScalarExpr:
    """``grad * z / (z + 1)`` where ``z = e^(x * beta)``, and ``grad`` past the threshold."""
    scaled = x * beta
    power = scaled.fn("exp")
    return scaled.fn("gt", threshold).choose(grad, grad * power / (power + 1))


@elementwise(aten.hardshrink.default)
def hardshrink(x: ScalarExpr, bound: Number = 0.5) -> ScalarExpr:
    """``x`` where ``|x| > bound``, else zero; NaN stays."""
    return x.fn("abs").fn("le", bound).choose(0, x)


@elementwise(aten.softshrink.default)
def softshrink(x: ScalarExpr, bound: Number = 0.5) -> ScalarExpr:
    """``x`` nearer to zero by ``bound``, zero where ``|x| <= bound``; NaN stays."""
    nearer = x.fn("gt", 0).choose(x - bound, x + bound)
    return x.fn("abs").fn("le", bound).choose(0, nearer)


@elementwise(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(grad: ScalarExpr, x: ScalarExpr, bound: Number) -> ScalarExpr:
    """``grad`` where ``|x| > bound``, else zero."""
    return x.fn("abs").fn("le", bound).choose(0, grad)


@elementwise(aten.native_dropout_backward.default)
def dropout_backward(grad: ScalarExpr, mask: ScalarExpr, scale: Number) -> ScalarExpr:
    """``grad * mask * scale``"""
    return grad * mask * scale
