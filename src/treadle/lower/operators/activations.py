"""Activations and their derivatives: ``out[i] = f(x[i])``, ``out[i] = grad[i] * f'(x[i])``."""

import math

import torch

from treadle.loop.expr import Array
from treadle.lower.context import LoweringContext
from treadle.lower.operators.pointwise import at_least, at_most, pointwise, register_unary
from treadle.lower.registry import Value, lowers
from treadle.lower.scalars import Number, ScalarExpr, const

aten = torch.ops.aten

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def _clamped(x: ScalarExpr, low: Number, high: Number) -> ScalarExpr:
    return at_most(at_least(x, low), high)


def softplus_of(x: ScalarExpr) -> ScalarExpr:
    """``log(1 + e^x) = max(x, 0) + log1p(e^-|x|)``, which cannot overflow."""
    return x.fn("maximum", 0) + (-x.fn("abs")).fn("exp").fn("log1p")


register_unary(aten.silu.default, lambda x: x / (1 + (-x).fn("exp")))
register_unary(aten.mish.default, lambda x: x * softplus_of(x).fn("tanh"))
register_unary(aten.hardsigmoid.default, lambda x: _clamped(x + 3, 0, 6) / 6)
register_unary(aten.hardswish.default, lambda x: x * _clamped(x + 3, 0, 6) / 6)


def _gelu_tanh_inner(x: ScalarExpr) -> ScalarExpr:
    return SQRT_2_OVER_PI * (x + CUBIC * (x * x * x))


@lowers(aten.gelu.default)
def gelu(context: LoweringContext, x: Value, approximate: str = "none") -> Array:
    """``x * Phi(x)``, or its tanh approximation."""
    if approximate == "tanh":
        return pointwise(context, lambda x: 0.5 * x * (1 + _gelu_tanh_inner(x).fn("tanh")), x)
    return pointwise(context, lambda x: x * 0.5 * (1 + (x * SQRT_HALF).fn("erf")), x)


@lowers(aten.gelu_backward.default)
def gelu_backward(
    context: LoweringContext, grad: Value, x: Value, approximate: str = "none"
) -> Array:
    """``grad * (Phi(x) + x * phi(x))``, or the derivative of the tanh approximation."""

    def exact(grad: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
        cdf = 0.5 * (1 + (x * SQRT_HALF).fn("erf"))
        pdf = (x * x * -0.5).fn("exp") * (1 / math.sqrt(2 * math.pi))
        return grad * (cdf + x * pdf)

    def by_tanh(grad: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
        inner = _gelu_tanh_inner(x).fn("tanh")
        slope = SQRT_2_OVER_PI * (1 + (3 * CUBIC) * (x * x))
        return grad * (0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope)

    return pointwise(context, by_tanh if approximate == "tanh" else exact, grad, x)


@lowers(aten.silu_backward.default)
def silu_backward(context: LoweringContext, grad: Value, x: Value) -> Array:
    """``grad * s * (1 + x * (1 - s))`` where ``s = sigmoid(x)``."""

    def formula(grad: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
        gate = x.fn("sigmoid")
        return grad * gate * (1 + x * (1 - gate))

    return pointwise(context, formula, grad, x)


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(context: LoweringContext, grad: Value, y: Value) -> Array:
    """``grad * (1 - y) * y``"""
    return pointwise(context, lambda grad, y: grad * (1 - y) * y, grad, y)


@lowers(aten.tanh_backward.default)
def tanh_backward(context: LoweringContext, grad: Value, y: Value) -> Array:
    """``grad * (1 - y * y)``"""
    return pointwise(context, lambda grad, y: grad * (1 - y * y), grad, y)


@lowers(aten.threshold_backward.default)
def threshold_backward(context: LoweringContext, grad: Value, x: Value, threshold: Number) -> Array:
    """``grad`` where ``x > threshold``, else zero."""
    return pointwise(context, lambda grad, x: x.fn("le", threshold).choose(0, grad), grad, x)


@lowers(aten.threshold.default)
def threshold(context: LoweringContext, x: Value, at: Number, value: Number) -> Array:
    """``value`` where ``x <= at``, else ``x``."""
    return pointwise(context, lambda x, other: x.fn("le", at).choose(other, x), x, value)


@lowers(aten.hardtanh.default)
def hardtanh(context: LoweringContext, x: Value, low: Number = -1, high: Number = 1) -> Array:
    """``x`` between ``low`` and ``high``."""
    return pointwise(context, lambda x: _clamped(x, low, high), x)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(
    context: LoweringContext, grad: Value, x: Value, low: Number, high: Number
) -> Array:
    """``grad`` where ``low < x < high``, else zero."""

    def formula(grad: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
        outside = x.fn("le", low).fn("or", x.fn("ge", high))
        return outside.choose(0, grad)

    return pointwise(context, formula, grad, x)


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


@lowers(aten.leaky_relu.default)
def leaky_relu(context: LoweringContext, x: Value, slope: Number = 0.01) -> Array:
    """``x`` where it is positive, else ``x * slope``."""
    return pointwise(context, lambda x: x.fn("gt", 0).choose(x, x * slope), x)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    context: LoweringContext, grad: Value, x: Value, slope: Number, self_is_result: bool
) -> Array:
    """``grad`` where ``x`` is positive, else ``grad * slope``."""
    return pointwise(context, lambda grad, x: x.fn("gt", 0).choose(grad, grad * slope), grad, x)


@lowers(aten.elu.default)
def elu(
    context: LoweringContext,
    x: Value,
    alpha: Number = 1,
    scale: Number = 1,
    input_scale: Number = 1,
) -> Array:
    """``scale * x`` where it is positive, else ``scale * alpha * (exp(x * input_scale) - 1)``."""

    def formula(x: ScalarExpr) -> ScalarExpr:
        below = (x * input_scale).fn("expm1") * (alpha * scale)
        return x.fn("gt", 0).choose(x * scale, below)

    return pointwise(context, formula, x)


@lowers(aten.softplus.default)
def softplus(context: LoweringContext, x: Value, beta: Number = 1, threshold: Number = 20) -> Array:
    """``log(1 + e^(beta x)) / beta``, and ``x`` itself beyond the threshold."""

    def formula(x: ScalarExpr) -> ScalarExpr:
        scaled = x * beta
        return scaled.fn("gt", threshold).choose(x, scaled.fn("exp").fn("log1p") / beta)

    return pointwise(context, formula, x)


@lowers(aten.softplus_backward.default)
def softplus_backward(
    context: LoweringContext, grad: Value, x: Value, beta: Number, threshold: Number
) -> Array:
    """``grad * z / (z + 1)`` where ``z = e^(x * beta)``, and ``grad`` past the threshold."""

    def formula(grad: ScalarExpr, x: ScalarExpr) -> ScalarExpr:
        scaled = x * beta
        power = scaled.fn("exp")
        return scaled.fn("gt", threshold).choose(grad, grad * power / (power + 1))

    return pointwise(context, formula, grad, x)


@lowers(aten.hardshrink.default)
def hardshrink(context: LoweringContext, x: Value, bound: Number = 0.5) -> Array:
    """``x`` where ``|x| > bound``, else zero; NaN stays."""
    return pointwise(context, lambda x: x.fn("abs").fn("le", bound).choose(0, x), x)


@lowers(aten.softshrink.default)
def softshrink(context: LoweringContext, x: Value, bound: Number = 0.5) -> Array:
    """``x`` nearer to zero by ``bound``, zero where ``|x| <= bound``; NaN stays."""

    def formula(x: ScalarExpr) -> ScalarExpr:
        nearer = x.fn("gt", 0).choose(x - bound, x + bound)
        return x.fn("abs").fn("le", bound).choose(0, nearer)

    return pointwise(context, formula, x)


@lowers(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(context: LoweringContext, grad: Value, x: Value, bound: Number) -> Array:
    """``grad`` where ``|x| > bound``, else zero."""
    return pointwise(context, lambda g, x: x.fn("abs").fn("le", bound).choose(0, g), grad, x)


@lowers(aten.native_dropout_backward.default)
def dropout_backward(context: LoweringContext, grad: Value, mask: Value, scale: Number) -> Array:
    """``grad * mask * scale``."""
    return pointwise(context, lambda g, m: g * m * scale, grad, mask)
