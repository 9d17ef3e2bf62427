"""Writes into part of a tensor, as reads: ``out[i] = source[j] if i is written else x[i]``.

If data selects several elements per row, several writes may hit the same element: those are library
calls.
"""

import math
from collections.abc import Sequence

import torch

from treadle.algebra.extents import greater, lesser, surely_less
from treadle.algebra.index import Axis, Index, linear
from treadle.algebra.strides import is_dense
from treadle.graph.analysis.dynamic import layout_of, offset_of
from treadle.graph.core.node_info import value_of
from treadle.loop.expr import Array, Position
from treadle.lower.context import LoweringContext, broadcast, element
from treadle.lower.operators.indexing import Coordinate, is_inside, masked
from treadle.lower.registry import Unsupported, Value, lowers
from treadle.lower.scalars import Number, Operand, ScalarExpr, cast, const, number, where

aten = torch.ops.aten


def _hit(
    axes: Sequence[Axis], x: Value, dim: int, indices: Value
) -> tuple[ScalarExpr, list[Coordinate]]:
    """Whether ``axes`` is the one written place of its line, and where ``indices`` says so."""
    if not x.shape or indices.shape[dim] != 1:
        raise Unsupported("scattered writes of more than one element a line have no formula")
    if any(n != m for d, (n, m) in enumerate(zip(x.shape, indices.shape, strict=True)) if d != dim):
        raise Unsupported("scattered writes to part of the lines have no formula")
    at: list[Coordinate] = [0 if d == dim else axis for d, axis in enumerate(axes)]
    wanted = ScalarExpr(cast(element(indices, at), torch.int64))
    return wanted.fn("eq", ScalarExpr(Position(Index.of(axes[dim])))), at


@lowers(aten.scatter.value, aten.scatter.src)
def scatter(context: LoweringContext, x: Value, dim: int, indices: Value, source: Operand) -> Array:
    """``out[i, j] = source[i] if j == indices[i] else x[i, j]``: one write a line."""
    axes = context.axes()
    dim %= max(len(x.shape), 1)
    hit, at = _hit(axes, x, dim, indices)
    old = ScalarExpr(element(x, axes))
    if isinstance(source, Number):
        return Array(axes, where(hit.expr, number(source, context.dtype), old.expr))
    return Array(axes, where(hit.expr, element(source, at), old.expr))


@lowers(aten.scatter_add.default)
def scatter_add(
    context: LoweringContext, x: Value, dim: int, indices: Value, source: Value
) -> Array:
    """``out[i, j] = x[i, j] + (source[i] if j == indices[i] else 0)``: one write a line."""
    axes = context.axes()
    dim %= max(len(x.shape), 1)
    hit, at = _hit(axes, x, dim, indices)
    added = where(hit.expr, element(source, at), const(0, context.dtype))
    total = context.term(x, axes, context.dtype) + ScalarExpr(cast(added, context.dtype)).to(
        context.term(x, axes, context.dtype).expr.dtype
    )
    return Array(axes, cast(total.expr, context.dtype))


def slice_bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """``slice(start, end).indices(size)``, also of a size that calls decide: ``x[:-1]`` of ``n``
    ends at ``n - 1``. ``VerifyError`` where it is not the same place for all sizes."""

    def place(at: int) -> int:
        return greater(0, lesser(at + size if at < 0 else at, size))

    return 0 if start is None else place(start), size if end is None else place(end)


@lowers(aten.slice_scatter.default)
def slice_scatter(
    context: LoweringContext,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    """``out[i, j] = source[i, (j - start) // step]`` for ``j`` in the slice, else ``x[i, j]``."""
    axes = context.axes()
    dim %= len(axes)
    if 0 in x.shape:
        return Array(axes, element(x, axes))
    first, last = slice_bounds(start, end, x.shape[dim])
    if surely_less(last, first + 1):
        return Array(axes, element(x, axes))
    away = Index.of(axes[dim]) - first
    inside = ScalarExpr(is_inside(away, last - first))
    if step != 1:
        inside = inside.fn("and", ScalarExpr(Position(away % step)).fn("eq", 0))
    at = (*axes[:dim], away // step, *axes[dim + 1 :])
    aligned = at[len(at) - len(source.shape) :]
    read = cast(masked(source, aligned, inside.expr, 0), context.dtype)
    return Array(axes, where(inside.expr, read, element(x, axes)))


@lowers(aten.select_scatter.default)
def select_scatter(
    context: LoweringContext, x: Value, source: Value, dim: int, index: int
) -> Array:
    """``out[i, j] = source[i] if j == index else x[i, j]``."""
    axes = context.axes()
    dim %= len(axes)
    chosen = ScalarExpr(Position(Index.of(axes[dim]))).fn("eq", index % x.shape[dim])
    read = cast(broadcast(source, (*axes[:dim], *axes[dim + 1 :])), context.dtype)
    return Array(axes, where(chosen.expr, read, element(x, axes)))


@lowers(aten.slice_backward.default)
def slice_backward(
    context: LoweringContext,
    grad: Value,
    sizes: Sequence[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> Array:
    """``out[i, j] = grad[i, (j - start) // step]`` for ``j`` in the slice, else zero."""
    nothing = Array(context.axes(), const(0, context.dtype))
    return slice_scatter(context, nothing, grad, dim, start, end, step)


@lowers(aten.select_backward.default)
def select_backward(
    context: LoweringContext, grad: Value, sizes: Sequence[int], dim: int, index: int
) -> Array:
    """``out[i, j] = grad[i] if j == index else 0``."""
    return select_scatter(context, Array(context.axes(), const(0, context.dtype)), grad, dim, index)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    context: LoweringContext,
    grad: Value,
    indices: Value,
    rows: int,
    padding_idx: int,
    by_frequency: bool,
) -> Array:
    """``out[v, c] = grad[v, c]`` for the rows that a plain range ``0, 1, ...`` looked up."""
    row, column = context.axes()
    count = indices.shape[-1] if indices.shape else 0
    if not isinstance(indices, Array) or math.prod(indices.shape) != count or padding_idx >= 0:
        raise Unsupported("rows that data chooses are summed by the library")
    place = Axis(max(count, 1))
    looked = cast(element(indices, (*(0,) * (len(indices.shape) - 1), place)), torch.int64)
    if not isinstance(looked, Position) or looked.index != Index.of(place) or by_frequency:
        raise Unsupported("rows that data chooses are summed by the library")
    at = (*(0,) * (len(indices.shape) - 1), row, column)
    return Array((row, column), masked(grad, at, is_inside(Index.of(row), count), 0))


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    context: LoweringContext,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Array:
    """``out[i] = value if mask[i] else x[i]``: a mask over the leading dims, and one value."""
    mask = indices[0] if indices else None
    if mask is None or len(indices) != 1 or mask.dtype is not torch.bool or accumulate:
        raise Unsupported("writes to places that data chooses have no formula")
    if math.prod(values.shape) != 1:
        raise Unsupported("how many values a mask takes depends on data")
    axes = context.axes()
    chosen = element(mask, axes[: len(mask.shape)])
    value = cast(element(values, (0,) * len(values.shape)), context.dtype)
    return Array(axes, where(chosen, value, element(x, axes)))


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(
    context: LoweringContext, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    """``out[.., r, c] = source[.., min(r, c)] if c - r == offset else x[.., r, c]``."""
    axes = context.axes()
    row, column = axes[dim1 % len(axes)], axes[dim2 % len(axes)]
    others = [axis for axis in axes if axis is not row and axis is not column]
    chosen = ScalarExpr(Position(Index.of(column) - row)).fn("eq", offset)
    along = Index.of(row) if offset >= 0 else Index.of(column)
    held = chosen.fn("and", ScalarExpr(is_inside(along, source.shape[-1])))
    read = cast(masked(source, (*others, along), held.expr, 0), context.dtype)
    return Array(axes, where(chosen.expr, read, element(x, axes)))


@lowers(aten.diagonal_backward.default)
def diagonal_backward(
    context: LoweringContext, grad: Value, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Array:
    """``out[.., r, c] = grad[.., min(r, c)] if c - r == offset else 0``."""
    nothing = Array(context.axes(), const(0, context.dtype))
    return diagonal_scatter(context, nothing, grad, offset, dim1, dim2)


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(
    context: LoweringContext,
    x: Value,
    source: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Array:
    """``out[i] = source[k]`` where ``flat(i) = offset + k . stride``, else ``x[i]``.

    ``flat`` is eager's place of an element. The strides must nest, so that ``k`` is unique:
    ``k[0] = rest // stride[0]``, then the same with ``rest % stride[0]``.
    """
    base = value_of(context.node.all_input_nodes[0])
    (shape, strides), first = layout_of(base), offset_of(base)
    axes = context.axes()
    order = sorted((d for d, n in enumerate(size) if n != 1), key=lambda d: -stride[d])
    spans = [(size[d] - 1) * stride[d] for d in order]
    nested = all(stride[d] > sum(spans[n + 1 :]) for n, d in enumerate(order))
    if not nested or not is_dense(shape, strides) or 0 in size:
        raise Unsupported("as_strided_scatter over places that overlap")
    start = first if storage_offset is None else storage_offset
    rest = linear(axes, strides, first - start)
    inside = ScalarExpr(Position(rest)).fn("ge", 0)
    at = [Index.of(0)] * len(size)
    for d in order:
        at[d], rest = rest // stride[d], rest % stride[d]
        inside = inside.fn("and", ScalarExpr(Position(at[d])).fn("lt", size[d]))
    inside = inside.fn("and", ScalarExpr(Position(rest)).fn("eq", 0))
    read = cast(masked(source, tuple(at), inside.expr, 0), context.dtype)
    return Array(axes, where(inside.expr, read, element(x, axes)))
