"""Operations that compute each element from the elements at the same place: ``out[i] = f(x[i])``.

Half precisions are computed in float32 and rounded once, as eager does.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from treadle.loop.expr import Array
from treadle.lower.registry import Decline, Value, aten_op, lowers
from treadle.lower.scalars import (
    Number,
    Operand,
    Term,
    cast,
    const,
    promoted_dtype,
)
from treadle.lower.site import Site, broadcast

aten = torch.ops.aten
Formula = Callable[..., Term]

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def pointwise(
    site: Site, formula: Formula, *operands: Operand, common: torch.dtype | None = None
) -> Array:
    """``out[i] = formula(x[i], y[i], ...)`` with operands promoted to ``common``."""
    axes = site.axes()
    common = site.dtype if common is None else common
    result = formula(*(site.term(operand, axes, common) for operand in operands))
    return Array(axes, cast(result.expr, site.dtype))


def _register_unary(op: OpOverload, formula: Formula) -> None:
    @lowers(op)
    def rule(site: Site, x: Value) -> Array:
        return pointwise(site, formula, x)


def _named(name: str) -> Formula:
    return lambda x: x.fn(name)


for _name in [
    "neg",
    "abs",
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
    "tanh",
    "erf",
    "sigmoid",
    "floor",
    "ceil",
    "round",
    "trunc",
]:
    _register_unary(aten_op(f"{_name}.default"), _named(_name))
_register_unary(aten.sign.default, _named("sign"))
_register_unary(aten.sgn.default, _named("sign"))
_register_unary(aten.erfc.default, lambda x: 1 - x.fn("erf"))
_register_unary(aten.square.default, lambda x: x * x)
_register_unary(aten.relu.default, lambda x: x.fn("maximum", 0))
_register_unary(aten.silu.default, lambda x: x / (1 + (-x).fn("exp")))
_register_unary(aten.mish.default, lambda x: x * _softplus(x).fn("tanh"))
_register_unary(aten.hardsigmoid.default, lambda x: _clamped(x + 3, 0, 6) / 6)
_register_unary(aten.hardswish.default, lambda x: x * _clamped(x + 3, 0, 6) / 6)


def _clamped(x: Term, low: Number, high: Number) -> Term:
    return x.fn("maximum", low).fn("minimum", high)


def _softplus(x: Term) -> Term:
    """``log(1 + e^x) = max(x, 0) + log1p(e^-|x|)``, which cannot overflow."""
    return x.fn("maximum", 0) + (-x.fn("abs")).fn("exp").fn("log1p")


@lowers(
    aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.lift_fresh.default
)
def same(site: Site, x: Value) -> Value:
    """The value itself: a functional graph never tells a copy from its source."""
    return x


@lowers(aten.clone.default, aten.contiguous.default)
def clone(site: Site, x: Value, **_format: Any) -> Array:
    """``out[i] = x[i]``, in the layout that eager gave."""
    return pointwise(site, lambda x: x, x)


@lowers(aten._to_copy.default, aten.to.dtype)
def to_copy(site: Site, x: Value, *_args: Any, **_kwargs: Any) -> Array:
    """``out[i] = cast(x[i])``."""
    axes = site.axes()
    return Array(axes, cast(broadcast(x, axes), site.dtype))


@lowers(aten.copy.default)
def copy(site: Site, x: Value, source: Value, non_blocking: bool = False) -> Array:
    """``out[i] = source[i]``, in the shape and dtype of ``x``."""
    return to_copy(site, source)


@lowers(aten._conj.default, aten._neg_view.default)
def unsupported_bit(site: Site, x: Value) -> Value:
    raise Decline("lazily conjugated and negated views have no formula")


@lowers(aten.logical_not.default)
def logical_not(site: Site, x: Value) -> Array:
    return pointwise(site, lambda x: x.fn("eq", 0), x, common=x.dtype)


@lowers(aten.bitwise_not.default)
def bitwise_not(site: Site, x: Value) -> Array:
    return pointwise(site, _named("not" if site.dtype is torch.bool else "bitnot"), x)


@lowers(aten.isnan.default)
def isnan(site: Site, x: Value) -> Array:
    return pointwise(site, lambda x: x.fn("ne", x), x, common=x.dtype)


@lowers(aten.isinf.default)
def isinf(site: Site, x: Value) -> Array:
    return pointwise(site, lambda x: x.fn("abs").fn("eq", math.inf), x, common=x.dtype)


@lowers(aten.isfinite.default)
def isfinite(site: Site, x: Value) -> Array:
    return pointwise(site, lambda x: x.fn("abs").fn("lt", math.inf), x, common=x.dtype)


# --- two operands ---------------------------------------------------------------------------


def _scaled(x: Term, alpha: Number) -> Term:
    return x if alpha == 1 else x * alpha


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(site: Site, x: Operand, y: Operand, alpha: Number = 1) -> Array:
    """``out[i] = x[i] + alpha * y[i]``."""
    if site.dtype is torch.bool:
        return pointwise(site, lambda x, y: x.fn("or", y), x, y)
    return pointwise(site, lambda x, y: x + _scaled(y, alpha), x, y)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(site: Site, x: Operand, y: Operand, alpha: Number = 1) -> Array:
    """``out[i] = x[i] - alpha * y[i]``."""
    return pointwise(site, lambda x, y: x - _scaled(y, alpha), x, y)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(site: Site, x: Operand, y: Operand, alpha: Number = 1) -> Array:
    """``out[i] = y[i] - alpha * x[i]``."""
    return pointwise(site, lambda x, y: y - _scaled(x, alpha), x, y)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(site: Site, x: Operand, y: Operand) -> Array:
    """``out[i] = x[i] * y[i]``."""
    if site.dtype is torch.bool:
        return pointwise(site, lambda x, y: x.fn("and", y), x, y)
    return pointwise(site, lambda x, y: x * y, x, y)


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(site: Site, x: Operand, y: Operand) -> Array:
    """``out[i] = x[i] / y[i]``, true division."""
    return pointwise(site, lambda x, y: x / y, x, y)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(site: Site, x: Operand, y: Operand, rounding_mode: str | None = None) -> Array:
    """``out[i] = round(x[i] / y[i])``, rounded down or to zero."""
    if rounding_mode is None:
        return div(site, x, y)
    if rounding_mode == "floor":
        return floor_divide(site, x, y)
    if not site.dtype.is_floating_point:
        return pointwise(site, lambda x, y: (x - x.fn("fmod", y)).fn("floordiv", y), x, y)
    return pointwise(site, lambda x, y: (x / y).fn("trunc"), x, y)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(site: Site, x: Operand, y: Operand) -> Array:
    return pointwise(site, lambda x, y: x.fn("floordiv", y), x, y)


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(site: Site, x: Operand, y: Operand) -> Array:
    return pointwise(site, lambda x, y: x.fn("mod", y), x, y)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(site: Site, x: Operand, y: Operand) -> Array:
    return pointwise(site, lambda x, y: x.fn("fmod", y), x, y)


@lowers(aten.maximum.default)
def maximum(site: Site, x: Operand, y: Operand) -> Array:
    if site.dtype is torch.bool:
        return pointwise(site, lambda x, y: x.fn("or", y), x, y)
    return pointwise(site, lambda x, y: x.fn("maximum", y), x, y)


@lowers(aten.minimum.default)
def minimum(site: Site, x: Operand, y: Operand) -> Array:
    if site.dtype is torch.bool:
        return pointwise(site, lambda x, y: x.fn("and", y), x, y)
    return pointwise(site, lambda x, y: x.fn("minimum", y), x, y)


_SMALL_POWERS: dict[float, Formula] = {
    0.5: lambda x: x.fn("sqrt"),
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -0.5: lambda x: x.fn("rsqrt"),
    -1.0: lambda x: 1 / x,
    -2.0: lambda x: 1 / (x * x),
}


@lowers(aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.pow.Tensor_Tensor)
def power(site: Site, x: Operand, y: Operand) -> Array:
    """``out[i] = x[i] ** y[i]``; small constant exponents become products and roots."""
    if isinstance(y, Number) and float(y) in _SMALL_POWERS:
        if site.dtype.is_floating_point or y > 0:
            return pointwise(site, _SMALL_POWERS[float(y)], x)
        raise Decline("a whole number to a negative power has no formula")
    return pointwise(site, lambda x, y: x.fn("pow", y), x, y)


def _register_comparison(name: str) -> None:
    @lowers(aten_op(f"{name}.Tensor"), aten_op(f"{name}.Scalar"))
    def rule(site: Site, x: Operand, y: Operand) -> Array:
        common = promoted_dtype((x, y))
        return pointwise(site, lambda x, y: x.fn(name, y), x, y, common=common)


for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    _register_comparison(_name)


def _register_logical(name: str) -> None:
    @lowers(aten_op(f"logical_{name}.default"))
    def rule(site: Site, x: Value, y: Value) -> Array:
        axes = site.axes()
        terms = [site.term(each, axes, each.dtype) for each in (x, y)]
        held = [t if t.expr.dtype is torch.bool else t.fn("ne", 0) for t in terms]
        return Array(axes, held[0].fn(name, held[1]).expr)


def _register_bitwise(name: str) -> None:
    packets = (f"bitwise_{name}", f"__{name}__")

    @lowers(*(aten_op(f"{each}.{kind}") for each in packets for kind in ("Tensor", "Scalar")))
    def rule(site: Site, x: Operand, y: Operand) -> Array:
        fn = name if site.dtype is torch.bool else f"bit{name}"
        return pointwise(site, lambda x, y: x.fn(fn, y), x, y)


for _name in ["and", "or", "xor"]:
    _register_logical(_name)
    _register_bitwise(_name)


# --- three operands -------------------------------------------------------------------------


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where_self(site: Site, condition: Value, x: Operand, y: Operand) -> Array:
    """``out[i] = x[i] if condition[i] else y[i]``."""
    axes = site.axes()
    chosen = site.term(condition, axes, torch.bool).choose(
        site.term(x, axes, site.dtype), site.term(y, axes, site.dtype)
    )
    return Array(axes, cast(chosen.expr, site.dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(site: Site, x: Value, mask: Value, value: Operand) -> Array:
    """``out[i] = value if mask[i] else x[i]``."""
    return where_self(site, mask, value, x)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(site: Site, x: Value, low: Operand | None = None, high: Operand | None = None) -> Array:
    """``out[i] = min(max(x[i], low), high)``."""
    if low is None and high is None:
        return clone(site, x)
    if low is None:
        return minimum(site, x, high) if high is not None else clone(site, x)
    if high is None:
        return maximum(site, x, low)
    return pointwise(site, lambda x, a, b: x.fn("maximum", a).fn("minimum", b), x, low, high)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(site: Site, x: Value, low: Operand) -> Array:
    return maximum(site, x, low)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(site: Site, x: Value, high: Operand) -> Array:
    return minimum(site, x, high)


@lowers(aten.addcmul.default)
def addcmul(site: Site, x: Operand, a: Operand, b: Operand, value: Number = 1) -> Array:
    """``out[i] = x[i] + value * a[i] * b[i]``."""
    return pointwise(site, lambda x, a, b: x + _scaled(a, value) * b, x, a, b)


@lowers(aten.addcdiv.default)
def addcdiv(site: Site, x: Operand, a: Operand, b: Operand, value: Number = 1) -> Array:
    """``out[i] = x[i] + value * a[i] / b[i]``."""
    return pointwise(site, lambda x, a, b: x + _scaled(a, value) / b, x, a, b)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(site: Site, x: Operand, end: Operand, weight: Operand) -> Array:
    """``out[i] = x + w * (end - x)``, from the nearer end, as eager does."""

    def formula(x: Term, end: Term, weight: Term) -> Term:
        from_start = x + weight * (end - x)
        from_end = end - (end - x) * (1 - weight)
        return weight.fn("abs").fn("lt", 0.5).choose(from_start, from_end)

    return pointwise(site, formula, x, end, weight)


# --- activations ----------------------------------------------------------------------------


def _gelu_tanh_inner(x: Term) -> Term:
    return SQRT_2_OVER_PI * (x + CUBIC * (x * x * x))


@lowers(aten.gelu.default)
def gelu(site: Site, x: Value, approximate: str = "none") -> Array:
    """``x * Phi(x)``, or its tanh approximation."""
    if approximate == "tanh":
        return pointwise(site, lambda x: 0.5 * x * (1 + _gelu_tanh_inner(x).fn("tanh")), x)
    return pointwise(site, lambda x: x * 0.5 * (1 + (x * SQRT_HALF).fn("erf")), x)


@lowers(aten.gelu_backward.default)
def gelu_backward(site: Site, grad: Value, x: Value, approximate: str = "none") -> Array:
    """``grad * (Phi(x) + x * phi(x))``, or the derivative of the tanh approximation."""

    def exact(grad: Term, x: Term) -> Term:
        cdf = 0.5 * (1 + (x * SQRT_HALF).fn("erf"))
        pdf = (x * x * -0.5).fn("exp") * (1 / math.sqrt(2 * math.pi))
        return grad * (cdf + x * pdf)

    def by_tanh(grad: Term, x: Term) -> Term:
        inner = _gelu_tanh_inner(x).fn("tanh")
        slope = SQRT_2_OVER_PI * (1 + (3 * CUBIC) * (x * x))
        return grad * (0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope)

    return pointwise(site, by_tanh if approximate == "tanh" else exact, grad, x)


@lowers(aten.silu_backward.default)
def silu_backward(site: Site, grad: Value, x: Value) -> Array:
    """``grad * s * (1 + x * (1 - s))`` where ``s = sigmoid(x)``."""

    def formula(grad: Term, x: Term) -> Term:
        gate = x.fn("sigmoid")
        return grad * gate * (1 + x * (1 - gate))

    return pointwise(site, formula, grad, x)


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(site: Site, grad: Value, y: Value) -> Array:
    return pointwise(site, lambda grad, y: grad * (1 - y) * y, grad, y)


@lowers(aten.tanh_backward.default)
def tanh_backward(site: Site, grad: Value, y: Value) -> Array:
    return pointwise(site, lambda grad, y: grad * (1 - y * y), grad, y)


@lowers(aten.threshold_backward.default)
def threshold_backward(site: Site, grad: Value, x: Value, threshold: Number) -> Array:
    """``grad`` where ``x > threshold``, else zero."""
    return pointwise(site, lambda grad, x: x.fn("le", threshold).choose(0, grad), grad, x)


@lowers(aten.threshold.default)
def threshold(site: Site, x: Value, at: Number, value: Number) -> Array:
    return pointwise(site, lambda x, other: x.fn("le", at).choose(other, x), x, value)


@lowers(aten.hardtanh.default)
def hardtanh(site: Site, x: Value, low: Number = -1, high: Number = 1) -> Array:
    return pointwise(site, lambda x: _clamped(x, low, high), x)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(site: Site, grad: Value, x: Value, low: Number, high: Number) -> Array:
    def formula(grad: Term, x: Term) -> Term:
        outside = x.fn("le", low).fn("or", x.fn("ge", high))
        return outside.choose(0, grad)

    return pointwise(site, formula, grad, x)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(site: Site, x: Value) -> tuple[Array, Array]:
    """``-log(1 + e^-x)``, and ``e^-|x|`` where eager keeps it for the backward."""
    kept = site.element_site(1)
    out = pointwise(site.element_site(0), lambda x: -_softplus(-x), x)
    if kept.shape != x.shape:
        return out, Array(kept.axes(), const(0, kept.dtype))
    return out, pointwise(kept, lambda x: (-x.fn("abs")).fn("exp"), x)


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(site: Site, grad: Value, x: Value, kept: Value) -> Array:
    return pointwise(site, lambda grad, x: grad * (-x).fn("sigmoid"), grad, x)


@lowers(aten.leaky_relu.default)
def leaky_relu(site: Site, x: Value, slope: Number = 0.01) -> Array:
    return pointwise(site, lambda x: x.fn("gt", 0).choose(x, x * slope), x)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    site: Site, grad: Value, x: Value, slope: Number, self_is_result: bool
) -> Array:
    return pointwise(site, lambda grad, x: x.fn("gt", 0).choose(grad, grad * slope), grad, x)


@lowers(aten.elu.default)
def elu(
    site: Site, x: Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1
) -> Array:
    def formula(x: Term) -> Term:
        below = (x * input_scale).fn("expm1") * (alpha * scale)
        return x.fn("gt", 0).choose(x * scale, below)

    return pointwise(site, formula, x)


@lowers(aten.softplus.default)
def softplus(site: Site, x: Value, beta: Number = 1, threshold: Number = 20) -> Array:
    """``log(1 + e^(beta x)) / beta``, and ``x`` itself beyond the threshold."""

    def formula(x: Term) -> Term:
        scaled = x * beta
        return scaled.fn("gt", threshold).choose(x, scaled.fn("exp").fn("log1p") / beta)

    return pointwise(site, formula, x)


@lowers(aten.softplus_backward.default)
def softplus_backward(site: Site, grad: Value, x: Value, beta: Number, threshold: Number) -> Array:
    def formula(grad: Term, x: Term) -> Term:
        scaled = x * beta
        return scaled.fn("gt", threshold).choose(grad, grad * scaled.fn("sigmoid"))

    return pointwise(site, formula, grad, x)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(site: Site, grad: Value, x: Value, target: Value, reduction: int) -> Array:
    """``2 (x - target) grad``, divided by the count for the mean."""
    elements = max(math.prod(x.shape), 1)
    factor = 2.0 / elements if reduction == 1 else 2.0
    return pointwise(site, lambda grad, x, target: factor * (x - target) * grad, grad, x, target)


# --- lists ----------------------------------------------------------------------------------


def _register_foreach(op: OpOverload, single: Callable[..., Array]) -> None:
    """``_foreach_f(xs, ys, k)`` is ``[f(x, y, k) for x, y in zip(xs, ys)]``."""

    @lowers(op)
    def rule(site: Site, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
        results: list[Value] = []
        for i in range(len(args[0])):
            each = [arg[i] if isinstance(arg, tuple | list) else arg for arg in args]
            named = {
                key: arg[i] if isinstance(arg, tuple | list) else arg for key, arg in kwargs.items()
            }
            results.append(single(site.element_site(i), *each, **named))
        return tuple(results)


def _foreach_rules() -> None:
    arithmetic = {"add": add, "sub": sub, "mul": mul, "div": div}
    bounds = {"maximum": maximum, "minimum": minimum, "clamp_min": maximum, "clamp_max": minimum}
    listed = ("List", "Scalar", "ScalarList")
    for name, rule in (arithmetic | bounds | {"pow": power}).items():
        for kind in listed:
            _register_foreach(aten_op(f"_foreach_{name}.{kind}"), rule)
    for name in ("add", "mul", "div"):
        _register_foreach(aten_op(f"_foreach_{name}.Tensor"), arithmetic[name])
    for name, rule in {"addcmul": addcmul, "addcdiv": addcdiv}.items():
        for kind in ("Scalar", "ScalarList"):
            _register_foreach(aten_op(f"_foreach_{name}.{kind}"), rule)
    for kind in listed:
        _register_foreach(aten_op(f"_foreach_lerp.{kind}"), lerp)
    for name in _FOREACH_UNARY:
        _register_foreach(aten_op(f"_foreach_{name}.default"), _unary(_named(name)))
    _register_foreach(aten._foreach_copy.default, copy)


_FOREACH_UNARY = (
    *("neg", "abs", "exp", "expm1", "log", "log1p", "log2"),
    *("sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "sign"),
)


def _unary(formula: Formula) -> Callable[[Site, Value], Array]:
    return lambda site, x: pointwise(site, formula, x)


_foreach_rules()
