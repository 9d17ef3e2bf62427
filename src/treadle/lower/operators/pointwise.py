"""Elementwise operations: ``out[i] = f(x[i])``.

Half precisions are computed in float32 and rounded once, as eager does.
"""

import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch

from treadle.algebra.index import Index
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.custom_ops.branches import taken
from treadle.graph.custom_ops.eight_bits import (
    BELOW,
    FROM_EIGHT_BITS,
    TO_EIGHT_BITS,
    code_of,
    dither,
    last_code,
    number_of,
)
from treadle.graph.custom_ops.float8 import TO_FLOAT8
from treadle.loop.expr import Apply, Array, Position
from treadle.lower.context import LoweringContext, broadcast, element
from treadle.lower.registry import Unsupported, Value, aten_op, lowers
from treadle.lower.scalars import Number, Operand, ScalarExpr, cast, number, promoted_dtype

aten = torch.ops.aten
Formula = Callable[..., ScalarExpr]


def pointwise(
    context: LoweringContext,
    formula: Formula,
    *operands: Operand,
    common: torch.dtype | None = None,
) -> Array:
    """``out[i] = formula(x[i], y[i], ...)`` with operands promoted to ``common``."""
    axes = context.axes()
    common = context.dtype if common is None else common
    result = formula(*(context.term(operand, axes, common) for operand in operands))
    return Array(axes, cast(result.expr, context.dtype))


def register_unary(op: OpOverload, formula: Formula) -> None:
    """``out[i] = formula(x[i])`` for ``op``. ``VerifyError`` where it has a rule already."""

    @lowers(op)
    def rule(context: LoweringContext, x: Value) -> Array:
        return pointwise(context, formula, x)


def elementwise(*ops: OpOverload) -> Callable[[Formula], Callable[..., Array]]:
    """The decorated formula is all that ``ops`` do: parameters that are a ``ScalarExpr`` are
    elements of operands, all behind them are arguments as the call has them."""

    def register(formula: Formula) -> Callable[..., Array]:
        *parameters, _result = get_type_hints(formula).values()
        count = sum(ScalarExpr in (kind, *get_args(kind)) for kind in parameters)

        @lowers(*ops)
        def rule(context: LoweringContext, *args: Any, **kwargs: object) -> Array:
            def applied(*elements: ScalarExpr) -> ScalarExpr:
                return formula(*elements, *args[count:], **kwargs)

            return pointwise(context, applied, *args[:count])

        return rule

    return register


def named(name: str) -> Formula:
    """The formula that applies the function called ``name``."""
    return lambda x: x.fn(name)


def at_least(x: ScalarExpr, low: ScalarExpr | Number) -> ScalarExpr:
    """``max(x, low)``, NaN where one is. Of equal ones it is ``x``: -0.0 is not raised to 0.0."""
    return _bound(x, low).fn("maximum", x)


def at_most(x: ScalarExpr, high: ScalarExpr | Number) -> ScalarExpr:
    """``min(x, high)``, NaN where one is. Of equal ones it is ``x``."""
    return _bound(x, high).fn("minimum", x)


def _bound(x: ScalarExpr, bound: ScalarExpr | Number) -> ScalarExpr:
    return bound if isinstance(bound, ScalarExpr) else _filled(x, bound)


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
    "erfc",
    "sigmoid",
    "floor",
    "ceil",
    "round",
    "trunc",
]:
    register_unary(aten_op(f"{_name}.default"), named(_name))
register_unary(aten.sign.default, named("sign"))
register_unary(aten.sgn.default, named("sign"))
register_unary(aten.square.default, lambda x: x * x)
register_unary(aten.relu.default, lambda x: at_least(x, 0))
register_unary(aten.log10.default, lambda x: x.fn("log2") * math.log10(2))
register_unary(aten.exp2.default, lambda x: _filled(x, 2).fn("pow", x))
register_unary(aten.frac.default, lambda x: x - x.fn("trunc"))  # PyTorch's own varies in zeros
register_unary(aten.tan.default, lambda x: x.fn("sin") / x.fn("cos"))


def _filled(like: ScalarExpr, value: Number) -> ScalarExpr:
    """``value`` as a term of the dtype of ``like``."""
    return ScalarExpr(number(value, like.expr.dtype))


@lowers(
    aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.lift_fresh.default
)
def same(context: LoweringContext, x: Value) -> Value:
    """The value itself: in a functional graph a copy cannot be told from its source."""
    return x


@lowers(aten.clone.default, aten.contiguous.default)
def clone(context: LoweringContext, x: Value, **_format: object) -> Array:
    """``out[i] = x[i]``, in the layout that eager gave."""
    return pointwise(context, lambda x: x, x)


@lowers(aten._to_copy.default, aten.to.dtype)
def to_copy(context: LoweringContext, x: Value, *_args: object, **_kwargs: object) -> Array:
    """``out[i] = cast(x[i])``."""
    axes = context.axes()
    return Array(axes, cast(broadcast(x, axes), context.dtype))


@lowers(TO_FLOAT8.op)
def to_float8(context: LoweringContext, x: Value, scale: Value, dtype: torch.dtype) -> Array:
    """``out[i] = cast(clamp(x[i] / scale))``."""
    axes, wide, most = context.axes(), torch.float32, torch.finfo(dtype).max
    times = ScalarExpr(cast(broadcast(scale, axes), wide)).fn("reciprocal")
    value = ScalarExpr(cast(broadcast(x, axes), wide)) * times
    value = at_most(at_least(value, -most), most)
    return Array(axes, Apply("cast", (value.expr,), dtype))


@lowers(TO_EIGHT_BITS.op)
def to_eight_bits(
    context: LoweringContext,
    x: Value,
    scale: Value,
    dtype: torch.dtype,
    turn: Value | None = None,
) -> Array:
    """``out[i] = code(x[i] / scale)``; 0 where that is NaN."""
    axes = context.axes()
    value, scale_ = (ScalarExpr(cast(broadcast(each, axes), torch.float32)) for each in (x, scale))
    times = scale_.fn("gt", 0).choose(scale_.fn("reciprocal"), 0)
    magnitude = value.fn("abs") * times
    code = code_of(magnitude, dtype, at_most)
    if turn is None:
        code = code.fn("round")
    else:
        column = ScalarExpr(cast(Position(Index.of(axes[-1])), torch.float32))
        offset = ScalarExpr(cast(broadcast(turn, axes), torch.float32))
        code = (code + (dither(column, offset, named("floor")) + BELOW)).fn("floor")
    code = at_most(code, last_code(dtype))
    if dtype is torch.uint8:
        code = magnitude.fn("gt", 0).choose(at_least(code, 1), 0)
    signed = value.fn("lt", 0).choose(-code, code)
    return Array(axes, cast(code.fn("gt", 0).choose(signed, 0).expr, dtype))


@lowers(FROM_EIGHT_BITS.op)
def from_eight_bits(context: LoweringContext, codes: Value, scale: Value) -> Array:
    """``out[i] = number(codes[i]) * scale``."""
    axes, wide = context.axes(), torch.float32
    code = ScalarExpr(cast(broadcast(codes, axes), wide))
    magnitude = code.fn("abs")
    number = number_of(magnitude, codes.dtype, at_least)
    number = magnitude.fn("lt", last_code(codes.dtype)).choose(number, 1)
    signed = code.fn("lt", 0).choose(-number, number)
    return Array(axes, (signed * ScalarExpr(cast(broadcast(scale, axes), wide))).expr)


@lowers(aten.copy.default)
def copy(context: LoweringContext, x: Value, source: Value, non_blocking: bool = False) -> Array:
    """``out[i] = source[i]``, in the shape and dtype of ``x``."""
    return to_copy(context, source)


@lowers(aten._conj.default, aten._neg_view.default)
def unsupported_bit(context: LoweringContext, x: Value) -> Value:
    """Refused: readers of a lazy conjugate or negative would have to resolve it."""
    raise Unsupported("lazily conjugated and negated views have no formula")


@lowers(aten.logical_not.default)
def logical_not(context: LoweringContext, x: Value) -> Array:
    """True where ``x`` is zero."""
    return pointwise(context, lambda x: x.fn("eq", 0), x, common=x.dtype)


@lowers(aten.bitwise_not.default)
def bitwise_not(context: LoweringContext, x: Value) -> Array:
    """Every bit inverted; ``not x`` for booleans."""
    return pointwise(context, named("not" if context.dtype is torch.bool else "bitnot"), x)


@lowers(aten.isnan.default)
def isnan(context: LoweringContext, x: Value) -> Array:
    """True where ``x`` differs from itself."""
    return pointwise(context, lambda x: x.fn("ne", x), x, common=x.dtype)


@lowers(aten.isinf.default)
def isinf(context: LoweringContext, x: Value) -> Array:
    """True at infinities of either sign; nowhere of integers."""
    if not x.dtype.is_floating_point:
        return pointwise(context, lambda x: x.fn("ne", x), x, common=x.dtype)
    return pointwise(context, lambda x: x.fn("abs").fn("eq", math.inf), x, common=x.dtype)


@lowers(aten.isfinite.default)
def isfinite(context: LoweringContext, x: Value) -> Array:
    """False at infinities and NaN; true everywhere of integers."""
    if not x.dtype.is_floating_point:
        return pointwise(context, lambda x: x.fn("eq", x), x, common=x.dtype)
    return pointwise(context, lambda x: x.fn("abs").fn("lt", math.inf), x, common=x.dtype)


# --- two operands ---------------------------------------------------------------------------


def is_negative(x: ScalarExpr) -> ScalarExpr:
    """The sign bit, except of NaN: ``-0.0`` is recognised by ``1 / -0.0 < 0``."""
    return x.fn("lt", 0).fn("or", x.fn("eq", 0).fn("and", x.fn("reciprocal").fn("lt", 0)))


@lowers(aten.signbit.default)
def signbit(context: LoweringContext, x: Value) -> Array:
    """``out[i] = x[i] < 0``, true of ``-0.0``."""
    if not x.dtype.is_floating_point:
        return pointwise(context, lambda x: x.fn("lt", 0), x, common=x.dtype)
    return pointwise(context, is_negative, x, common=x.dtype)


@elementwise(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``-|x| if y < 0 else |x|``"""
    return is_negative(y).choose(-x.fn("abs"), x.fn("abs"))


@elementwise(aten.hypot.default)
def hypot(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``sqrt(x^2 + y^2)`` as ``m * sqrt(1 + (n / m)^2)``, which cannot overflow early. Infinite
    where one is, even if the other is NaN."""
    x, y = x.fn("abs"), y.fn("abs")
    large, small = x.fn("maximum", y), x.fn("minimum", y)
    ratio = small / large
    scaled = large * (1 + ratio * ratio).fn("sqrt")
    infinite = x.fn("eq", math.inf).fn("or", y.fn("eq", math.inf))
    return infinite.choose(math.inf, large.fn("eq", 0).choose(large, scaled))


@elementwise(aten.logaddexp2.default)
def logaddexp2(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``log2(2^x + 2^y) = max + log2(1 + 2^-|x - y|)``"""
    large = x.fn("maximum", y)
    gap = (x - y).fn("abs") * -math.log(2)
    total = large + gap.fn("exp").fn("log1p") * (1 / math.log(2))
    same = x.fn("eq", y).fn("and", x.fn("abs").fn("eq", math.inf))
    return same.choose(x, total)


def _register_ignoring_nan(op: OpOverload, name: str) -> None:
    @lowers(op)
    def rule(context: LoweringContext, x: Value, y: Value) -> Array:
        """If one of the two is NaN, the other one."""
        if not context.dtype.is_floating_point:
            return (maximum if name == "maximum" else minimum)(context, x, y)

        def formula(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
            best = y.fn("ne", y).choose(x, y.fn(name, x))  # of equal ones x
            return x.fn("ne", x).choose(y, best)

        return pointwise(context, formula, x, y)


_register_ignoring_nan(aten.fmax.default, "maximum")
_register_ignoring_nan(aten.fmin.default, "minimum")


@lowers(aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar)
def left_shift(context: LoweringContext, x: Value, places: Number) -> Array:
    """``out[i] = x[i] * 2^places``."""
    _check_shift(context, places)
    return pointwise(context, lambda x: x * (1 << int(places)), x)


@lowers(aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)
def right_shift(context: LoweringContext, x: Value, places: Number) -> Array:
    """``out[i] = x[i] // 2^places``."""
    _check_shift(context, places)
    return pointwise(context, lambda x: x.fn("floordiv", 1 << int(places)), x)


def _check_shift(context: LoweringContext, places: Number) -> None:
    bits = 0 if context.dtype.is_floating_point else torch.iinfo(context.dtype).bits
    if not 0 <= places < bits - 1:
        raise Unsupported(f"a shift of {context.dtype} by {places} places has no formula")


_BYTES = frozenset({torch.int8, torch.uint8})


@lowers(aten.view.dtype)
def view_dtype(context: LoweringContext, x: Value, dtype: torch.dtype) -> Array:
    """``out[i] = x[i] mod 256``: a byte with a sign as one without, or the other way round."""
    if x.dtype not in _BYTES or dtype not in _BYTES:
        raise Unsupported(f"the bits of {x.dtype} as {dtype} have no formula")
    axes = context.axes()
    return Array(axes, cast(element(x, axes), dtype))


def _scaled(x: ScalarExpr, alpha: Number) -> ScalarExpr:
    return x if alpha == 1 else x * alpha


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(context: LoweringContext, x: Operand, y: Operand, alpha: Number = 1) -> Array:
    """``out[i] = x[i] + alpha * y[i]``."""
    if context.dtype is torch.bool:
        return pointwise(context, lambda x, y: x.fn("or", y), x, y)
    return pointwise(context, lambda x, y: x + _scaled(y, alpha), x, y)


@elementwise(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: ScalarExpr, y: ScalarExpr, alpha: Number = 1) -> ScalarExpr:
    """``x - alpha * y``"""
    return x - _scaled(y, alpha)


@elementwise(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: ScalarExpr, y: ScalarExpr, alpha: Number = 1) -> ScalarExpr:
    """``y - alpha * x``"""
    return y - _scaled(x, alpha)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(context: LoweringContext, x: Operand, y: Operand) -> Array:
    """``out[i] = x[i] * y[i]``."""
    if context.dtype is torch.bool:
        return pointwise(context, lambda x, y: x.fn("and", y), x, y)
    return pointwise(context, lambda x, y: x * y, x, y)


@elementwise(aten.div.Tensor, aten.div.Scalar)
def div(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``x / y``, true division."""
    return x / y


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(
    context: LoweringContext, x: Operand, y: Operand, rounding_mode: str | None = None
) -> Array:
    """``out[i] = round(x[i] / y[i])``, rounded down or to zero."""
    if rounding_mode is None:
        return div(context, x, y)
    if rounding_mode == "floor":
        return floor_divide(context, x, y)
    if not context.dtype.is_floating_point:
        return pointwise(context, lambda x, y: (x - x.fn("fmod", y)).fn("floordiv", y), x, y)
    return pointwise(context, lambda x, y: (x / y).fn("trunc"), x, y)


@elementwise(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """The quotient rounded down."""
    return x.fn("floordiv", y)


@elementwise(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``x - floor(x / y) * y``, with the sign of ``y``."""
    return x.fn("mod", y)


@elementwise(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x: ScalarExpr, y: ScalarExpr) -> ScalarExpr:
    """``x - trunc(x / y) * y``, with the sign of ``x``."""
    return x.fn("fmod", y)


@lowers(aten.maximum.default)
def maximum(context: LoweringContext, x: Operand, y: Operand) -> Array:
    """The larger one; NaN where one is."""
    if context.dtype is torch.bool:
        return pointwise(context, lambda x, y: x.fn("or", y), x, y)
    return pointwise(context, lambda x, y: x.fn("maximum", y), x, y)


@lowers(aten.minimum.default)
def minimum(context: LoweringContext, x: Operand, y: Operand) -> Array:
    """The smaller one; NaN where one is."""
    if context.dtype is torch.bool:
        return pointwise(context, lambda x, y: x.fn("and", y), x, y)
    return pointwise(context, lambda x, y: x.fn("minimum", y), x, y)


def _register_comparison(name: str) -> None:
    @lowers(aten_op(f"{name}.Tensor"), aten_op(f"{name}.Scalar"))
    def rule(context: LoweringContext, x: Operand, y: Operand) -> Array:
        common = promoted_dtype((x, y))
        return pointwise(context, lambda x, y: x.fn(name, y), x, y, common=common)


for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    _register_comparison(_name)


def _register_logical(name: str) -> None:
    @lowers(aten_op(f"logical_{name}.default"))
    def rule(context: LoweringContext, x: Value, y: Value) -> Array:
        axes = context.axes()
        terms = [context.term(operand, axes, operand.dtype) for operand in (x, y)]
        held = [t if t.expr.dtype is torch.bool else t.fn("ne", 0) for t in terms]
        return Array(axes, held[0].fn(name, held[1]).expr)


def _register_bitwise(name: str) -> None:
    packets = (f"bitwise_{name}", f"__{name}__")

    @lowers(*(aten_op(f"{packet}.{kind}") for packet in packets for kind in ("Tensor", "Scalar")))
    def rule(context: LoweringContext, x: Operand, y: Operand) -> Array:
        fn = name if context.dtype is torch.bool else f"bit{name}"
        return pointwise(context, lambda x, y: x.fn(fn, y), x, y)


for _name in ["and", "or", "xor"]:
    _register_logical(_name)
    _register_bitwise(_name)


# --- three operands -------------------------------------------------------------------------


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where_self(context: LoweringContext, condition: Value, x: Operand, y: Operand) -> Array:
    """``out[i] = x[i] if condition[i] else y[i]``."""
    axes = context.axes()
    chosen = context.term(condition, axes, torch.bool).choose(
        context.term(x, axes, context.dtype), context.term(y, axes, context.dtype)
    )
    return Array(axes, cast(chosen.expr, context.dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(context: LoweringContext, x: Value, mask: Value, value: Operand) -> Array:
    """``out[i] = value if mask[i] else x[i]``."""
    return where_self(context, mask, value, x)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(
    context: LoweringContext, x: Value, low: Operand | None = None, high: Operand | None = None
) -> Array:
    """``out[i] = min(max(x[i], low), high)``."""
    if low is None and high is None:
        return clone(context, x)
    if low is None:
        return clamp_max(context, x, high) if high is not None else clone(context, x)
    if high is None:
        return clamp_min(context, x, low)
    return pointwise(context, lambda x, a, b: at_most(at_least(x, a), b), x, low, high)


clamp_min = elementwise(aten.clamp_min.default, aten.clamp_min.Tensor)(at_least)
clamp_max = elementwise(aten.clamp_max.default, aten.clamp_max.Tensor)(at_most)


@lowers(aten.addcmul.default)
def addcmul(
    context: LoweringContext, x: Operand, a: Operand, b: Operand, value: Number = 1
) -> Array:
    """``out[i] = x[i] + value * a[i] * b[i]``, associated as eager's kernel for the device does."""
    if context.builder.target.on_host:
        return pointwise(context, lambda x, a, b: x + _scaled(a, value) * b, x, a, b)
    return pointwise(context, lambda x, a, b: x + _scaled(a * b, value), x, a, b)


@lowers(aten.addcdiv.default)
def addcdiv(
    context: LoweringContext, x: Operand, a: Operand, b: Operand, value: Number = 1
) -> Array:
    """``out[i] = x[i] + value * a[i] / b[i]``, associated as eager's kernel for the device does."""
    if context.builder.target.on_host:
        return pointwise(context, lambda x, a, b: x + _scaled(a, value) / b, x, a, b)
    return pointwise(context, lambda x, a, b: x + _scaled(a / b, value), x, a, b)


@elementwise(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(x: ScalarExpr, end: ScalarExpr, weight: ScalarExpr) -> ScalarExpr:
    """``x + w * (end - x)``, from the nearer end, as eager does."""
    from_start = x + weight * (end - x)
    from_end = end - (end - x) * (1 - weight)
    return weight.fn("abs").fn("lt", 0.5).choose(from_start, from_end)


register_unary(taken, lambda condition: condition)
