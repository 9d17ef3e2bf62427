"""Gathers, concatenations and padding: ``out[i] = x[f(i)]``, where ``f`` may read an index
tensor."""

import math
from collections.abc import Sequence

import torch

from treadle.algebra.extents import same
from treadle.algebra.index import Axis, Index, linear, unflatten
from treadle.algebra.strides import contiguous_strides
from treadle.loop.expr import Array, Expr, Load, Position
from treadle.loop.traverse import value_index
from treadle.lower.context import LoweringContext, broadcast_shapes, element
from treadle.lower.operators.views import reshaped
from treadle.lower.registry import Unsupported, Value, lowers
from treadle.lower.scalars import Number, ScalarExpr, cast, const, number, where

aten = torch.ops.aten
Coordinate = Index | Axis | int


def _looked_up(indices: Value, at: Sequence[Coordinate], extent: int, negative: bool) -> Index:
    """``indices[at]`` as an index below ``extent``; negative ones count from the end."""
    wanted = ScalarExpr(cast(element(indices, at), torch.int64))
    if isinstance(wanted.expr, Position) and wanted.expr.index.bounds[0] >= 0:
        return wanted.expr.index  # indices that the graph has as formulas, such as a range
    if negative:
        wanted = wanted.fn("lt", 0).choose(wanted + extent, wanted)
    return value_index(wanted.expr, 0, max(extent - 1, 0))


def is_inside(low: Index, extent: int) -> Expr:
    """``0 <= low < extent``."""
    place = ScalarExpr(Position(low))
    return place.fn("ge", 0).fn("and", place.fn("lt", extent)).expr


def masked(value: Value, at: Sequence[Coordinate], mask: Expr, otherwise: Number) -> Expr:
    """``value[at]`` where ``mask`` holds, else ``otherwise``; nothing is read outside the mask."""
    read = element(value, at)
    if isinstance(read, Load):
        read = Load(read.buffer, read.index, read.dtype, mask)
        if otherwise == 0:
            return read
    return where(mask, read, const(otherwise, read.dtype))


@lowers(aten.embedding.default)
def embedding(
    context: LoweringContext,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """``out[..., c] = weight[indices[...], c]``."""
    axes = context.axes()
    row = _looked_up(indices, axes[:-1], weight.shape[0], negative=False)
    return Array(axes, element(weight, (row, axes[-1])))


@lowers(aten.gather.default)
def gather(
    context: LoweringContext, x: Value, dim: int, indices: Value, sparse_grad: bool = False
) -> Array:
    """``out[i, j] = x[i, indices[i, j]]`` along ``dim``."""
    if not x.shape:
        raise Unsupported("gather of a 0-dim tensor")
    axes = context.axes()
    dim %= len(x.shape)
    place = _looked_up(indices, axes, x.shape[dim], negative=False)
    return Array(axes, element(x, (*axes[:dim], place, *axes[dim + 1 :])))


@lowers(aten.index_select.default)
def index_select(context: LoweringContext, x: Value, dim: int, indices: Value) -> Array:
    """``out[i, j] = x[i, indices[j]]`` along ``dim``."""
    if not x.shape or not indices.shape:
        raise Unsupported("index_select of or by a 0-dim tensor")
    axes = context.axes()
    dim %= len(x.shape)
    place = _looked_up(indices, (axes[dim],), x.shape[dim], negative=False)
    return Array(axes, element(x, (*axes[:dim], place, *axes[dim + 1 :])))


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(context: LoweringContext, x: Value, indices: Sequence[Value | None]) -> Array:
    """``out[i, k, j] = x[i, a[k], b[k], j]``; the looked-up dims come first unless adjacent."""
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        raise Unsupported("indexing by a mask has a shape that depends on data")
    axes = context.axes()
    shared = len(broadcast_shapes([index.shape for index in given.values()]))
    dims = sorted(given)
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    start = dims[0] if adjacent else 0
    looked = axes[start : start + shared]
    rest = iter(axes[:start] + axes[start + shared :])
    places: list[Coordinate] = []
    for dim, extent in enumerate(x.shape):
        if dim not in given:
            places.append(next(rest))
            continue
        index = given[dim]
        aligned = looked[shared - len(index.shape) :]
        at = [0 if same(n, 1) else axis for n, axis in zip(index.shape, aligned, strict=True)]
        places.append(_looked_up(index, at, extent, negative=True))
    return Array(axes, element(x, places))


# --- joins and pads -------------------------------------------------------------------------


@lowers(aten.cat.default)
def cat(context: LoweringContext, tensors: Sequence[Value], dim: int = 0) -> Array:
    """``out[i, j] = tensors[k][i, j - start[k]]`` for the ``k`` that ``j`` falls in."""
    axes = context.axes()
    dim %= len(axes)
    pieces = [tensor for tensor in tensors if tensor.shape != (0,)] or list(tensors[:1])
    if len(pieces) > _MOST_PIECES:
        raise Unsupported(f"a concatenation of {len(pieces)} tensors")
    start = 0
    chosen: Expr | None = None
    for piece in pieces:
        extent = piece.shape[dim]
        if extent == 0:
            continue
        local = Index.of(axes[dim]) - start
        at = (*axes[:dim], local, *axes[dim + 1 :])
        mask = is_inside(local, extent)
        read = cast(masked(piece, at, mask, 0), context.dtype)
        chosen = read if chosen is None else where(mask, read, chosen)
        start += extent
    if len(pieces) == 1 and pieces[0].shape == context.shape:
        return Array(axes, cast(element(pieces[0], axes), context.dtype))
    return Array(axes, const(0, context.dtype) if chosen is None else chosen)


_MOST_PIECES = 64
"""A kernel asks of each element which piece it falls in, one after the other, and takes the address
of each as an argument. The norms of all gradients of 12 layers are a join of 148 pieces, on which
Triton spent half of what all 60 functions of the step took (decision 8)."""


@lowers(aten.stack.default)
def stack(context: LoweringContext, tensors: Sequence[Value], dim: int = 0) -> Array:
    """``out[i, k, j] = tensors[k][i, j]``."""
    dim %= len(context.shape)
    lifted = [reshaped(context, t, (*t.shape[:dim], 1, *t.shape[dim:])) for t in tensors]
    return cat(context, lifted, dim)


@lowers(aten.constant_pad_nd.default)
def constant_pad(
    context: LoweringContext, x: Value, pad: Sequence[int], value: Number = 0
) -> Array:
    """``out[i] = x[i - before]`` inside ``x``, else ``value``; ``pad`` starts at the last dim."""
    axes = context.axes()
    places: list[Coordinate] = list(axes)
    inside: ScalarExpr | None = None
    for count in range(len(pad) // 2):
        dim = len(axes) - 1 - count
        place = Index.of(axes[dim]) - pad[2 * count]
        here = ScalarExpr(is_inside(place, x.shape[dim]))
        inside = here if inside is None else inside.fn("and", here)
        places[dim] = place
    if inside is None or 0 in x.shape:
        body = element(x, axes) if inside is None else number(value, context.dtype)
        return Array(axes, body)
    return Array(axes, masked(x, places, inside.expr, value))


@lowers(aten.repeat.default)
def repeat(context: LoweringContext, x: Value, repeats: Sequence[int]) -> Array:
    """``out[i] = x[i % n]``."""
    axes = context.axes()
    aligned = axes[len(axes) - len(x.shape) :]
    return Array(
        axes,
        element(x, [Index.of(a) % n if n else 0 for a, n in zip(aligned, x.shape, strict=True)]),
    )


@lowers(aten.flip.default)
def flip(context: LoweringContext, x: Value, dims: Sequence[int]) -> Array:
    """``out[i] = x[n - 1 - i]`` along ``dims``."""
    axes = context.axes()
    flipped = {dim % len(axes) for dim in dims}
    at = [
        Index.of(axis) * -1 + (axis.extent - 1) if dim in flipped else axis
        for dim, axis in enumerate(axes)
    ]
    return Array(axes, element(x, at))


@lowers(aten.roll.default)
def roll(
    context: LoweringContext, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()
) -> Array:
    """``out[i] = x[(i - shift) % n]``."""
    axes = context.axes()
    at: list[Coordinate] = list(axes)
    if not dims:
        count = math.prod(x.shape)
        flat = linear(axes, contiguous_strides(x.shape))
        turned = (flat + (-shifts[0]) % max(count, 1)) % max(count, 1)
        return Array(axes, element(x, unflatten(turned, x.shape)))
    for shift, dim in zip(shifts, dims, strict=True):
        extent = max(x.shape[dim], 1)
        at[dim % len(axes)] = (Index.of(axes[dim]) + (-shift) % extent) % extent
    return Array(axes, element(x, at))
