"""Tensors created without operands. They stay formulas: no buffer contains a constant or a mask."""

from collections.abc import Sequence

import torch

from treadle.algebra.index import Index
from treadle.graph.custom_ops.masks import LOW, ROUNDS, WORD, counted_mask, limit
from treadle.loop.expr import Array, Position
from treadle.loop.program import TensorRef
from treadle.lower.context import LoweringContext, element
from treadle.lower.registry import Value, lowers
from treadle.lower.scalars import Number, Operand, ScalarExpr, cast, number

aten = torch.ops.aten


@lowers(counted_mask)
def counter_based_mask(
    context: LoweringContext, keys: Value, at: int, _size: object, p: float, _dtype: torch.dtype
) -> Array:
    """``out[i] = squares(position of i, keys[at]) < p * 2^32``."""
    axes = context.axes()
    key = ScalarExpr(element(keys, (at,)))
    place = Index.of(0)
    for axis in axes:
        place = place * axis.extent + axis
    first = ScalarExpr(Position(place)) * key
    x, terms = first, (first, first + key)
    for turn in range(ROUNDS):
        x = x * x + terms[turn % 2]
        high = x.fn("floordiv", 1 << WORD).fn("bitand", LOW)
        x = high if turn == ROUNDS - 1 else (x * (1 << WORD)).fn("bitor", high)
    return Array(axes, x.fn("lt", limit(p)).to(context.dtype).expr)


def _filled(context: LoweringContext, value: Operand) -> Array:
    axes = context.axes()
    if isinstance(value, Number):
        return Array(axes, number(value, context.dtype))
    return Array(axes, cast(context.term(value, axes, context.dtype).expr, context.dtype))


@lowers(aten.full.default, aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor)
def full(context: LoweringContext, _like: object, value: Operand, **_kwargs: object) -> Array:
    """``out[i] = value``."""
    return _filled(context, value)


@lowers(aten.new_full.default)
def new_full(
    context: LoweringContext, _like: object, _size: object, value: Operand, **_kwargs: object
) -> Array:
    """``out[i] = value``."""
    return _filled(context, value)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(context: LoweringContext, value: Number, **_kwargs: object) -> Array:
    """A number as a 0-dim tensor."""
    return _filled(context, value)


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zero.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._efficientzerotensor.default,
)
def zeros(context: LoweringContext, *_args: object, **_kwargs: object) -> Array:
    """``out[i] = 0``; memory that is not initialised is zero as well."""
    return _filled(context, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(context: LoweringContext, *_args: object, **_kwargs: object) -> Array:
    """``out[i] = 1``."""
    return _filled(context, 1)


@lowers(aten._foreach_zero.default)
def foreach_zero(context: LoweringContext, tensors: Sequence[Value]) -> tuple[Array, ...]:
    """Zeros in the shape of each tensor."""
    return tuple(_filled(context.element_context(i), 0) for i in range(len(tensors)))


def _range(context: LoweringContext, start: Number, step: Number) -> Array:
    """``out[i] = start + step * i``."""
    (axis,) = context.axes()
    if isinstance(start, int) and isinstance(step, int):
        return Array((axis,), cast(Position(Index.of(axis) * step + start), context.dtype))
    wide = ScalarExpr(cast(Position(Index.of(axis)), torch.float64))
    return Array((axis,), cast((wide * step + start).expr, context.dtype))


@lowers(aten.arange.default)
def arange(context: LoweringContext, end: Number, **_kwargs: object) -> Array:
    """0, 1, ... below ``end``."""
    return _range(context, 0, 1 if isinstance(end, int) else 1.0)


@lowers(aten.arange.start)
def arange_start(context: LoweringContext, start: Number, end: Number, **_kwargs: object) -> Array:
    """``start``, ``start + 1``, ... below ``end``."""
    return _range(context, start, 1)


@lowers(aten.arange.start_step)
def arange_step(
    context: LoweringContext, start: Number, end: Number, step: Number = 1, **_kwargs: object
) -> Array:
    """``start``, ``start + step``, ... short of ``end``."""
    return _range(context, start, step)


@lowers(aten.linspace.default)
def linspace(
    context: LoweringContext, start: Number, end: Number, steps: int, **_kwargs: object
) -> Array:
    """``start + i * step`` from the nearer end, as eager does; integers are cut off."""
    (axis,) = context.axes()
    place = ScalarExpr(cast(Position(Index.of(axis)), torch.float64))
    step = (end - start) / max(steps - 1, 1)
    low = place * step + float(start)
    high = (place * -1 + float(steps - 1)) * -step + float(end)
    value = place.fn("lt", steps // 2).choose(low, high) if steps > 1 else low
    return Array((axis,), cast(value.expr, context.dtype))


@lowers(aten.tril_indices.default, aten.triu_indices.default)
def triangle_indices(
    context: LoweringContext, rows: int, columns: int, offset: int = 0, **_kwargs: object
) -> TensorRef:
    """A table of constants."""
    is_lower = context.target is aten.tril_indices.default
    make = torch.tril_indices if is_lower else torch.triu_indices
    return context.builder.constant(context.name, make(rows, columns, offset, dtype=context.dtype))


@lowers(aten.eye.default, aten.eye.m)
def eye(context: LoweringContext, *_args: object, **_kwargs: object) -> Array:
    """``out[i, j] = 1 if i == j else 0``."""
    row, column = context.axes()
    on_diagonal = ScalarExpr(Position(Index.of(row))).fn(
        "eq", ScalarExpr(Position(Index.of(column)))
    )
    return Array((row, column), cast(on_diagonal.expr, context.dtype))


def _triangle(context: LoweringContext, x: Value, comparison: str, diagonal: int) -> Array:
    axes = context.axes()
    kept = ScalarExpr(Position(Index.of(axes[-1]) - axes[-2])).fn(comparison, diagonal)
    term = context.term(x, axes, context.dtype)
    return Array(axes, cast(kept.choose(term, 0).expr, context.dtype))


@lowers(aten.tril.default)
def tril(context: LoweringContext, x: Value, diagonal: int = 0) -> Array:
    """``out[i, j] = x[i, j] if j - i <= diagonal else 0``."""
    return _triangle(context, x, "le", diagonal)


@lowers(aten.triu.default)
def triu(context: LoweringContext, x: Value, diagonal: int = 0) -> Array:
    """``out[i, j] = x[i, j] if j - i >= diagonal else 0``."""
    return _triangle(context, x, "ge", diagonal)
