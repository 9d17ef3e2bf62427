"""Reductions: ``out[i] = sum{k} x[i, k]``.

A ``Reduce`` is at the root of its step. Half precisions are summed in float32. Whole-tensor
reductions are split in two steps, rows of partials and then the rest, so that rows run in parallel.
"""

import math
from collections.abc import Callable, Sequence

import torch

from treadle.algebra.extents import Size, ceil_div, divides, largest, same, sample_of, surely_less
from treadle.algebra.index import Axis, Index, unflatten
from treadle.algebra.strides import is_dense
from treadle.loop.expr import Array, Expr, Load, Position, Reduce, ReduceKind, identity
from treadle.loop.program import TensorRef
from treadle.lower.context import LoweringContext, broadcast_shapes, element, fresh_axes
from treadle.lower.operators.views import reshaped
from treadle.lower.registry import Unsupported, Value, lowers
from treadle.lower.scalars import Number, Operand, ScalarExpr, cast, compute_dtype, const, where

aten = torch.ops.aten

SPLIT_ABOVE = 16384
"""Reductions of more elements than this to one value are split."""
_CHUNK = 4096
Map = Callable[[ScalarExpr], ScalarExpr]


def wrapped(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """``(-1,)`` of rank 3 -> ``(2,)``; none or an empty list is every dim."""
    if dims is None or dims == [] or dims == ():
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(dim % max(rank, 1) for dim in listed)) if rank else ()


def kept_shape(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with extent 1 at ``dims``."""
    return tuple(1 if dim in dims else n for dim, n in enumerate(shape))


def reduced(
    context: LoweringContext,
    tag: str,
    kind: ReduceKind,
    x: Value,
    dims: Sequence[int],
    dtype: torch.dtype,
    convert: Map = lambda x: x,
) -> Value:
    """``out[i, 0] = kind{k} convert(cast(x[i, k]))``: ``dims`` stay, with extent 1.

    More than one step where that runs in parallel: see ``_split`` and ``_inner_then_outer``.
    """
    guards = context.builder.guards
    if not dims or guards.equal(math.prod(x.shape[dim] for dim in dims), 1):
        axes = fresh_axes(x.shape)
        body = convert(ScalarExpr(cast(element(x, axes), dtype))).expr
        return context.temp(tag, Array(axes, body))
    if guards.equal(math.prod(x.shape), 0):
        axes = fresh_axes(kept_shape(x.shape, dims))
        return Array(axes, identity(kind, dtype))
    whole = all(same(n, 1) for n in kept_shape(x.shape, dims))
    if whole and largest(math.prod(x.shape)) > SPLIT_ABOVE and isinstance(x, TensorRef):
        partials = _partials(context, tag, kind, x, dtype, convert)
        if isinstance(partials.shape[0], Size):  # one for short calls: nothing to ask
            total = _one_step(context, tag, kind, partials, (0,), dtype, lambda x: x)
        else:
            total = reduced(context, tag, kind, partials, (0,), dtype)
        return reshaped(context, total, (1,) * len(x.shape))
    outer, inner = _groups(x, dims)
    if outer and inner:
        first = reduced(context, f"{tag}_inner", kind, x, inner, dtype, convert)
        return reduced(context, tag, kind, first, outer, dtype)
    return _one_step(context, tag, kind, x, dims, dtype, convert)


def _one_step(
    context: LoweringContext,
    tag: str,
    kind: ReduceKind,
    x: Value,
    dims: Sequence[int],
    dtype: torch.dtype,
    convert: Map,
) -> Value:
    axes = fresh_axes(x.shape)
    body = convert(ScalarExpr(cast(element(x, axes), dtype))).expr
    summed = tuple(axes[dim] for dim in dims)
    kept = tuple(Axis(1) if dim in dims else axis for dim, axis in enumerate(axes))
    return context.temp(tag, Array(kept, Reduce(kind, summed, body)))


def _groups(x: Value, dims: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(outer, inner) reduced dims when kept dims stand between them in memory, else one group.

    ``sum(x[n, c, h, w], (0, 2, 3))`` is quicker as rows of ``(h, w)`` and then ``n``: the rows are
    contiguous and there are ``n * c`` of them. In channels-last memory the groups are one.
    """
    real = [dim for dim in dims if not surely_less(x.shape[dim], 2)]
    strides = x.strides if isinstance(x, TensorRef) else tuple(range(len(x.shape), 0, -1))
    kept = [
        sample_of(strides[d])
        for d, n in enumerate(x.shape)
        if d not in dims and not surely_less(n, 2)
    ]
    if not kept:
        return (), tuple(dims)
    inner = tuple(dim for dim in real if sample_of(strides[dim]) < min(kept))
    outer = tuple(dim for dim in real if dim not in inner)
    rows = math.prod(x.shape[dim] for dim in inner)
    return (outer, inner) if sample_of(rows) >= 16 else ((), tuple(dims))


def _partials(
    context: LoweringContext,
    tag: str,
    kind: ReduceKind,
    x: TensorRef,
    dtype: torch.dtype,
    convert: Map,
) -> Value:
    """``part[r] = kind{c < chunk} x.flat[r * chunk + c]``, the tail masked."""
    total = x.numel
    divisors = [n for n in range(_CHUNK * 2, 255, -1) if divides(n, total)]
    chunk = divisors[0] if divisors else _CHUNK
    row, column = Axis(ceil_div(total, chunk)), Axis(chunk)
    flat = Index.of(row) * chunk + column
    inside = None if divisors else ScalarExpr(Position(flat)).fn("lt", total).expr
    if is_dense(x.shape, x.strides):  # any order will do, so take memory's
        load = Load(x.buffer, flat + x.offset, x.dtype, inside)
    else:
        bare = element(x, unflatten(flat, x.shape))
        assert isinstance(bare, Load)
        load = Load(bare.buffer, bare.index, bare.dtype, inside)
    body: Expr = convert(ScalarExpr(cast(load, dtype))).expr
    if inside is not None:
        body = where(inside, body, identity(kind, dtype))
    return context.temp(f"{tag}_part", Array((row,), Reduce(kind, (column,), body)))


def finish(context: LoweringContext, total: Value, convert: Map = lambda x: x) -> Value:
    """The value of the node from its reduction: converted, cast, and without the reduced dims."""
    flat = reshaped(context, total, context.shape)
    axes = context.axes()
    body = convert(ScalarExpr(element(flat, axes))).expr
    return Array(axes, cast(body, context.dtype))


def reduce_node(
    context: LoweringContext,
    kind: ReduceKind,
    x: Value,
    dims: Sequence[int],
    dtype: torch.dtype,
    before: Map = lambda x: x,
    after: Map | None = None,
) -> Value:
    """A node that is one reduction, with a map before and a map after."""
    total = reduced(context, "total", kind, x, dims, dtype, before)
    if after is None and dtype is context.dtype and isinstance(total, TensorRef):
        flat = reshaped(context, total, context.shape)
        if isinstance(flat, TensorRef) and flat.strides == context.strides:
            return flat
    return finish(context, total, after if after is not None else lambda x: x)


_TOTALS = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), ReduceKind.SUM),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), ReduceKind.PROD),
}
_EXTREMES = {
    **dict.fromkeys((aten.amax.default, aten.max.default), ReduceKind.MAX),
    **dict.fromkeys((aten.amin.default, aten.min.default), ReduceKind.MIN),
}
_PLACES = {
    **dict.fromkeys((aten.argmax.default, aten.max.dim), ReduceKind.ARGMAX),
    **dict.fromkeys((aten.argmin.default, aten.min.dim), ReduceKind.ARGMIN),
}


@lowers(*_TOTALS)
def total(
    context: LoweringContext,
    x: Value,
    dims: Sequence[int] | int | None = None,
    keepdim: bool = False,
    **_dtype: object,
) -> Value:
    """``out[i] = sum{k} x[i, k]``, or the product."""
    kind, wide = _TOTALS[context.target], compute_dtype(context.dtype)
    return reduce_node(context, kind, x, wrapped(dims, len(x.shape)), wide)


@lowers(aten.mean.default, aten.mean.dim)
def mean(
    context: LoweringContext,
    x: Value,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    **_dtype: object,
) -> Value:
    """``out[i] = sum{k} x[i, k] / n``."""
    where_ = wrapped(dims, len(x.shape))
    count = math.prod(x.shape[dim] for dim in where_)
    wide = compute_dtype(context.dtype)
    return reduce_node(context, ReduceKind.SUM, x, where_, wide, after=lambda t: t / count)


@lowers(*_EXTREMES)
def extreme(
    context: LoweringContext, x: Value, dims: Sequence[int] = (), keepdim: bool = False
) -> Value:
    """The largest along ``dims``, or the smallest; none means all."""
    kind = _EXTREMES[context.target]
    return reduce_node(context, kind, x, wrapped(dims, len(x.shape)), context.dtype)


def _arg(context: LoweringContext, kind: ReduceKind, x: Value, dim: int) -> Value:
    """``out[i] = argmax{k} x[i, k]``."""
    if not x.shape:
        return Array(context.axes(), const(0, torch.int64))
    axes = fresh_axes(x.shape)
    body = element(x, axes)
    if body.dtype is torch.bool:
        body = cast(body, torch.int64)
    kept = tuple(Axis(1) if d == dim else axis for d, axis in enumerate(axes))
    place = context.temp("place", Array(kept, Reduce(kind, (axes[dim],), body)))
    return reshaped(context, place, context.shape)


@lowers(aten.max.dim, aten.min.dim)
def extreme_and_place(
    context: LoweringContext, x: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value]:
    """The largest along ``dim``, or the smallest, and its place."""
    values, indices = context.element_context(0), context.element_context(1)
    place = _PLACES[context.target]
    kind = ReduceKind.MAX if place is ReduceKind.ARGMAX else ReduceKind.MIN
    dims = wrapped(dim, len(x.shape))
    best = reduce_node(values, kind, x, dims, values.dtype)
    return best, _arg(indices, place, x, dims[0] if dims else 0)


@lowers(aten.argmax.default, aten.argmin.default)
def place_of_extreme(
    context: LoweringContext, x: Value, dim: int | None = None, keepdim: bool = False
) -> Value:
    """The place of the largest, or of the smallest; of equal ones the first."""
    if dim is None:
        x, dim = reshaped(context, x, (math.prod(x.shape),)), 0
    return _arg(context, _PLACES[context.target], x, dim % max(len(x.shape), 1))


_ALL = (aten.all.default, aten.all.dim, aten.all.dims)


@lowers(*_ALL, aten.any.default, aten.any.dim, aten.any.dims)
def any_or_all(
    context: LoweringContext,
    x: Value,
    dims: Sequence[int] | int | None = None,
    keepdim: bool = False,
) -> Value:
    """``out[i] = any{k} x[i, k] != 0``, or ``not any{k} x[i, k] == 0``."""
    if context.dtype is not torch.bool:
        name = "all" if context.target in _ALL else "any"
        raise Unsupported(f"{name} of bytes gives bytes")

    def holds(t: ScalarExpr) -> ScalarExpr:
        return t if x.dtype is torch.bool else t.fn("ne", 0)

    def negated(t: ScalarExpr) -> ScalarExpr:
        return t.fn("not")

    kind, where_ = ReduceKind.ANY, wrapped(dims, len(x.shape))
    if context.target not in _ALL:
        return reduce_node(context, kind, x, where_, x.dtype, holds)
    return reduce_node(context, kind, x, where_, x.dtype, lambda t: negated(holds(t)), negated)


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    context: LoweringContext,
    x: Value,
    order: Number = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    **_dtype: object,
) -> Value:
    """``(sum |x|^order)^(1/order)`` over ``dims``; the limits of it for 0 and infinities."""
    where_ = wrapped(dims, len(x.shape))
    wide = compute_dtype(context.dtype)
    kind, before, after = _norm_parts(order)
    return reduce_node(context, kind, x, where_, wide, before, after)


def _norm_parts(order: Number) -> tuple[ReduceKind, Map, Map | None]:
    """What a norm reduces by, the map before, and the map after."""
    if order == 2:
        return ReduceKind.SUM, lambda t: t * t, lambda t: t.fn("sqrt")
    if order == 1:
        return ReduceKind.SUM, lambda t: t.fn("abs"), None
    if order == 0:
        return ReduceKind.SUM, lambda t: t.fn("ne", 0).choose(_one(t), 0), None
    if math.isinf(order):
        kind = ReduceKind.MAX if order > 0 else ReduceKind.MIN
        return kind, lambda t: t.fn("abs"), None
    power = float(order)
    return (
        ReduceKind.SUM,
        lambda t: t.fn("abs").fn("pow", power),
        lambda t: t.fn("pow", 1 / power),
    )


def _one(like: ScalarExpr) -> ScalarExpr:
    return ScalarExpr(const(1, like.expr.dtype))


def step(
    context: LoweringContext,
    tag: str,
    dtype: torch.dtype,
    formula: Callable[..., ScalarExpr],
    *operands: Operand,
) -> Value:
    """A pointwise intermediate in the compute dtype of ``dtype``, broadcast over its operands."""
    shapes = [operand.shape for operand in operands if not isinstance(operand, Number)]
    axes = fresh_axes(broadcast_shapes(shapes))
    terms = [context.term(operand, axes, dtype) for operand in operands]
    return context.temp(tag, Array(axes, formula(*terms).expr))


def mean_and_spread(
    context: LoweringContext, x: Value, dims: Sequence[int], dtype: torch.dtype
) -> tuple[Value, Value, int]:
    """Mean and sum of squared differences from it, ``dims`` kept, in two passes; and the count."""
    total = reduced(context, "sum", ReduceKind.SUM, x, dims, dtype)
    return spread_from(context, x, total, dims, dtype)


def spread_from(
    context: LoweringContext, x: Value, total: Value, dims: Sequence[int], dtype: torch.dtype
) -> tuple[Value, Value, int]:
    """``mean_and_spread`` where the sum is known, ``dims`` kept."""
    count = math.prod(x.shape[dim] for dim in dims)
    axes = fresh_axes(total.shape)
    average = context.temp(
        "mean", Array(axes, (ScalarExpr(element(total, axes)) / max(count, 1)).expr)
    )
    axes = fresh_axes(x.shape)
    away = ScalarExpr(cast(element(x, axes), dtype)) - context.term(average, axes, dtype)
    difference = context.temp("away", Array(axes, away.expr))
    spread = reduced(context, "spread", ReduceKind.SUM, difference, dims, dtype, lambda t: t * t)
    return average, spread, count


_ROOTS = (aten.std.correction, aten.std_mean.correction)


@lowers(*_ROOTS, aten.var.correction, aten.var_mean.correction)
def variance(
    context: LoweringContext,
    x: Value,
    dims: Sequence[int] | None = None,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Value | tuple[Value, Value]:
    """``sum{k} (x[i, k] - mean[i])^2 / (n - correction)``, or the root of it; with the mean where
    that is a result too."""
    with_mean = isinstance(context.val, tuple | list)
    first = context.element_context(0) if with_mean else context
    where_ = wrapped(dims, len(x.shape))
    average, spread, count = mean_and_spread(context, x, where_, compute_dtype(first.dtype))
    less = 1 if correction is None else correction
    freedom = max(count - (int(less) if less == int(less) else less), 0)
    is_root = context.target in _ROOTS

    def divided(t: ScalarExpr) -> ScalarExpr:
        return (t / freedom).fn("sqrt") if is_root else t / freedom

    found = finish(first, spread, divided)
    return (found, finish(context.element_context(1), average)) if with_mean else found
