"""Gathers, joins, pads and pooling: ``out[i] = x[f(i)]``, where ``f`` may read an index tensor."""

import math
from collections.abc import Sequence

import torch

from treadle.loop.expr import Array, Expr, Load, Position, Reduce, ReduceKind
from treadle.loop.index import Axis, Index, linear, unflatten, value_index
from treadle.lower.reductions import mean
from treadle.lower.registry import Decline, Value, lowers
from treadle.lower.scalars import Number, Operand, Term, cast, compute_dtype, const, where
from treadle.lower.site import Site, broadcast, element, is_dense
from treadle.lower.views import reshaped

aten = torch.ops.aten
Place = Index | Axis | int


def _looked_up(indices: Value, at: Sequence[Place], extent: int, negative: bool) -> Index:
    """``indices[at]`` as an index below ``extent``; negative ones count from the end."""
    wanted = Term(cast(element(indices, at), torch.int64))
    if isinstance(wanted.expr, Position) and wanted.expr.index.bounds[0] >= 0:
        return wanted.expr.index  # known places, such as a range
    if negative:
        wanted = wanted.fn("lt", 0).choose(wanted + extent, wanted)
    return value_index(wanted.expr, 0, max(extent - 1, 0))


def _inside(low: Index, extent: int) -> Expr:
    """``0 <= low < extent``."""
    place = Term(Position(low))
    return place.fn("ge", 0).fn("and", place.fn("lt", extent)).expr


def masked(value: Value, at: Sequence[Place], mask: Expr, otherwise: Number) -> Expr:
    """``value[at]`` where ``mask`` holds, else ``otherwise``; nothing is read outside the mask."""
    read = element(value, at)
    if isinstance(read, Load):
        read = Load(read.buffer, read.index, read.dtype, mask)
        if otherwise == 0:
            return read
    return where(mask, read, const(otherwise, read.dtype))


@lowers(aten.embedding.default)
def embedding(
    site: Site,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """``out[..., c] = weight[indices[...], c]``."""
    axes = site.axes()
    row = _looked_up(indices, axes[:-1], weight.shape[0], negative=False)
    return Array(axes, element(weight, (row, axes[-1])))


@lowers(aten.gather.default)
def gather(site: Site, x: Value, dim: int, indices: Value, sparse_grad: bool = False) -> Array:
    """``out[i, j] = x[i, indices[i, j]]`` along ``dim``."""
    if not x.shape:
        raise Decline("gather of a 0-dim tensor")
    axes = site.axes()
    dim %= len(x.shape)
    place = _looked_up(indices, axes, x.shape[dim], negative=False)
    return Array(axes, element(x, (*axes[:dim], place, *axes[dim + 1 :])))


@lowers(aten.index_select.default)
def index_select(site: Site, x: Value, dim: int, indices: Value) -> Array:
    """``out[i, j] = x[i, indices[j]]`` along ``dim``."""
    if not x.shape or not indices.shape:
        raise Decline("index_select of or by a 0-dim tensor")
    axes = site.axes()
    dim %= len(x.shape)
    place = _looked_up(indices, (axes[dim],), x.shape[dim], negative=False)
    return Array(axes, element(x, (*axes[:dim], place, *axes[dim + 1 :])))


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(site: Site, x: Value, indices: Sequence[Value | None]) -> Array:
    """``out[i, k, j] = x[i, a[k], b[k], j]``; the looked-up dims come first unless adjacent."""
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        raise Decline("indexing by a mask has a shape that depends on data")
    axes = site.axes()
    shared = len(torch.broadcast_shapes(*(index.shape for index in given.values())))
    dims = sorted(given)
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    start = dims[0] if adjacent else 0
    looked = axes[start : start + shared]
    rest = iter(axes[:start] + axes[start + shared :])
    places: list[Place] = []
    for dim, extent in enumerate(x.shape):
        if dim not in given:
            places.append(next(rest))
            continue
        index = given[dim]
        aligned = looked[shared - len(index.shape) :]
        at = [0 if n == 1 else axis for n, axis in zip(index.shape, aligned, strict=True)]
        places.append(_looked_up(index, at, extent, negative=True))
    return Array(axes, element(x, places))


def _hit(
    site: Site, axes: Sequence[Axis], x: Value, dim: int, indices: Value
) -> tuple[Term, list[Place]]:
    """Whether ``axes`` is the one written place of its line, and where ``indices`` says so."""
    if not x.shape or indices.shape[dim] != 1:
        raise Decline("scattered writes of more than one element a line have no formula")
    if any(n != m for d, (n, m) in enumerate(zip(x.shape, indices.shape, strict=True)) if d != dim):
        raise Decline("scattered writes to part of the lines have no formula")
    at: list[Place] = [0 if d == dim else axis for d, axis in enumerate(axes)]
    wanted = Term(cast(element(indices, at), torch.int64))
    return wanted.fn("eq", Term(Position(Index.of(axes[dim])))), at


@lowers(aten.scatter.value, aten.scatter.src)
def scatter(site: Site, x: Value, dim: int, indices: Value, source: Operand) -> Array:
    """``out[i, j] = source[i] if j == indices[i] else x[i, j]``: one write a line."""
    axes = site.axes()
    dim %= max(len(x.shape), 1)
    hit, at = _hit(site, axes, x, dim, indices)
    old = Term(element(x, axes))
    if isinstance(source, Number):
        return Array(axes, where(hit.expr, const(source, site.dtype), old.expr))
    return Array(axes, where(hit.expr, element(source, at), old.expr))


@lowers(aten.scatter_add.default)
def scatter_add(site: Site, x: Value, dim: int, indices: Value, source: Value) -> Array:
    """``out[i, j] = x[i, j] + (source[i] if j == indices[i] else 0)``: one write a line."""
    axes = site.axes()
    dim %= max(len(x.shape), 1)
    hit, at = _hit(site, axes, x, dim, indices)
    added = where(hit.expr, element(source, at), const(0, site.dtype))
    total = site.term(x, axes, site.dtype) + Term(cast(added, site.dtype)).to(
        site.term(x, axes, site.dtype).expr.dtype
    )
    return Array(axes, cast(total.expr, site.dtype))


# --- joins and pads -------------------------------------------------------------------------


@lowers(aten.cat.default)
def cat(site: Site, tensors: Sequence[Value], dim: int = 0) -> Array:
    """``out[i, j] = tensors[k][i, j - start[k]]`` for the ``k`` that ``j`` falls in."""
    axes = site.axes()
    dim %= len(axes)
    pieces = [each for each in tensors if each.shape != (0,)] or list(tensors[:1])
    start = 0
    chosen: Expr | None = None
    for piece in pieces:
        extent = piece.shape[dim]
        if extent == 0:
            continue
        local = Index.of(axes[dim]) - start
        at = (*axes[:dim], local, *axes[dim + 1 :])
        mask = _inside(local, extent)
        read = cast(masked(piece, at, mask, 0), site.dtype)
        chosen = read if chosen is None else where(mask, read, chosen)
        start += extent
    if len(pieces) == 1 and pieces[0].shape == site.shape:
        return Array(axes, cast(element(pieces[0], axes), site.dtype))
    return Array(axes, const(0, site.dtype) if chosen is None else chosen)


@lowers(aten.stack.default)
def stack(site: Site, tensors: Sequence[Value], dim: int = 0) -> Array:
    """``out[i, k, j] = tensors[k][i, j]``."""
    dim %= len(site.shape)
    lifted = [reshaped(t, (*t.shape[:dim], 1, *t.shape[dim:])) for t in tensors]
    return cat(site, lifted, dim)


@lowers(aten.constant_pad_nd.default)
def constant_pad(site: Site, x: Value, pad: Sequence[int], value: Number = 0) -> Array:
    """``out[i] = x[i - before]`` inside ``x``, else ``value``; ``pad`` starts at the last dim."""
    axes = site.axes()
    places: list[Place] = list(axes)
    inside: Term | None = None
    for count in range(len(pad) // 2):
        dim = len(axes) - 1 - count
        place = Index.of(axes[dim]) - pad[2 * count]
        here = Term(_inside(place, x.shape[dim]))
        inside = here if inside is None else inside.fn("and", here)
        places[dim] = place
    if inside is None or 0 in x.shape:
        body = element(x, axes) if inside is None else const(value, site.dtype)
        return Array(axes, body)
    return Array(axes, masked(x, places, inside.expr, value))


@lowers(aten.slice_scatter.default)
def slice_scatter(
    site: Site,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    """``out[i, j] = source[i, (j - start) // step]`` for ``j`` in the slice, else ``x[i, j]``."""
    axes = site.axes()
    dim %= len(axes)
    if 0 in x.shape:
        return Array(axes, element(x, axes))
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    if first >= last:
        return Array(axes, element(x, axes))
    away = Index.of(axes[dim]) - first
    inside = Term(_inside(away, last - first))
    if step != 1:
        inside = inside.fn("and", Term(Position(away % step)).fn("eq", 0))
    at = (*axes[:dim], away // step, *axes[dim + 1 :])
    aligned = at[len(at) - len(source.shape) :]
    read = cast(masked(source, aligned, inside.expr, 0), site.dtype)
    return Array(axes, where(inside.expr, read, element(x, axes)))


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(
    site: Site,
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
    base = site.node.all_input_nodes[0].meta["val"]
    axes = site.axes()
    order = sorted((d for d, n in enumerate(size) if n != 1), key=lambda d: -stride[d])
    spans = [(size[d] - 1) * stride[d] for d in order]
    nested = all(stride[d] > sum(spans[n + 1 :]) for n, d in enumerate(order))
    if not nested or not is_dense(base.shape, base.stride()) or 0 in size:
        raise Decline("as_strided_scatter over places that overlap")
    start = base.storage_offset() if storage_offset is None else storage_offset
    rest = linear(axes, base.stride(), base.storage_offset() - start)
    inside = Term(Position(rest)).fn("ge", 0)
    at = [Index.of(0)] * len(size)
    for d in order:
        at[d], rest = rest // stride[d], rest % stride[d]
        inside = inside.fn("and", Term(Position(at[d])).fn("lt", size[d]))
    inside = inside.fn("and", Term(Position(rest)).fn("eq", 0))
    read = cast(masked(source, tuple(at), inside.expr, 0), site.dtype)
    return Array(axes, where(inside.expr, read, element(x, axes)))


@lowers(aten.select_scatter.default)
def select_scatter(site: Site, x: Value, source: Value, dim: int, index: int) -> Array:
    """``out[i, j] = source[i] if j == index else x[i, j]``."""
    axes = site.axes()
    dim %= len(axes)
    chosen = Term(Position(Index.of(axes[dim]))).fn("eq", index % x.shape[dim])
    read = cast(broadcast(source, (*axes[:dim], *axes[dim + 1 :])), site.dtype)
    return Array(axes, where(chosen.expr, read, element(x, axes)))


@lowers(aten.slice_backward.default)
def slice_backward(
    site: Site, grad: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Array:
    """``out[i, j] = grad[i, (j - start) // step]`` for ``j`` in the slice, else zero."""
    nothing = Array(site.axes(), const(0, site.dtype))
    return slice_scatter(site, nothing, grad, dim, start, end, step)


@lowers(aten.select_backward.default)
def select_backward(site: Site, grad: Value, sizes: Sequence[int], dim: int, index: int) -> Array:
    """``out[i, j] = grad[i] if j == index else 0``."""
    return select_scatter(site, Array(site.axes(), const(0, site.dtype)), grad, dim, index)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    site: Site, grad: Value, indices: Value, rows: int, padding_idx: int, by_frequency: bool
) -> Array:
    """``out[v, c] = grad[v, c]`` for the rows that a plain range ``0, 1, ...`` looked up."""
    row, column = site.axes()
    count = indices.shape[-1] if indices.shape else 0
    if not isinstance(indices, Array) or math.prod(indices.shape) != count or padding_idx >= 0:
        raise Decline("rows that data chooses are summed by the library")
    place = Axis(max(count, 1))
    looked = cast(element(indices, (*(0,) * (len(indices.shape) - 1), place)), torch.int64)
    if not isinstance(looked, Position) or looked.index != Index.of(place) or by_frequency:
        raise Decline("rows that data chooses are summed by the library")
    at = (*(0,) * (len(indices.shape) - 1), row, column)
    return Array((row, column), masked(grad, at, _inside(Index.of(row), count), 0))


@lowers(aten.repeat.default)
def repeat(site: Site, x: Value, repeats: Sequence[int]) -> Array:
    """``out[i] = x[i % n]``."""
    axes = site.axes()
    aligned = axes[len(axes) - len(x.shape) :]
    return Array(
        axes,
        element(x, [Index.of(a) % n if n else 0 for a, n in zip(aligned, x.shape, strict=True)]),
    )


@lowers(aten.flip.default)
def flip(site: Site, x: Value, dims: Sequence[int]) -> Array:
    """``out[i] = x[n - 1 - i]`` along ``dims``."""
    axes = site.axes()
    flipped = {dim % len(axes) for dim in dims}
    at = [
        Index.of(axis) * -1 + (axis.extent - 1) if dim in flipped else axis
        for dim, axis in enumerate(axes)
    ]
    return Array(axes, element(x, at))


@lowers(aten.roll.default)
def roll(site: Site, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    """``out[i] = x[(i - shift) % n]``."""
    if not dims:
        raise Decline("roll of the flattened tensor")
    axes = site.axes()
    at: list[Place] = list(axes)
    for shift, dim in zip(shifts, dims, strict=True):
        extent = max(x.shape[dim], 1)
        at[dim % len(axes)] = (Index.of(axes[dim]) + (-shift) % extent) % extent
    return Array(axes, element(x, at))


# --- pooling --------------------------------------------------------------------------------


def _pair(values: Sequence[int], default: tuple[int, int]) -> tuple[int, int]:
    if not values:
        return default
    return (values[0], values[-1])


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d(
    site: Site,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    """``out[i, h, w] = max{k} x[i, h*sh - ph + dh*(k // kw), w*sw - pw + dw*(k % kw)]``."""
    values, places = site.element_site(0), site.element_site(1)
    size = _pair(kernel, (1, 1))
    steps = _pair(stride, size)
    pads, gaps = _pair(padding, (0, 0)), _pair(dilation, (1, 1))
    axes = values.axes()
    window = Axis(size[0] * size[1])
    cell = unflatten(Index.of(window), size)
    at = [
        Index.of(axis) * step - pad + Index.of(c) * gap
        for axis, step, pad, c, gap in zip(axes[-2:], steps, pads, cell, gaps, strict=True)
    ]
    mask = Term(_inside(at[0], x.shape[-2])).fn("and", Term(_inside(at[1], x.shape[-1])))
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    read = masked(x, (*axes[:-2], *at), mask.expr, lowest)
    best = Array(axes, Reduce(ReduceKind.MAX, (window,), read))
    winner = site.temp("winner", Array(axes, Reduce(ReduceKind.ARGMAX, (window,), read)))
    return values.result(best), _flat_place(places, x, winner, size, (steps, pads, gaps))


def _flat_place(
    site: Site,
    x: Value,
    winner: Value,
    size: tuple[int, int],
    geometry: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
) -> Array:
    """The winner of each window as ``h * width + w`` into its plane."""
    steps, pads, gaps = geometry
    axes = site.axes()
    won = Term(element(winner, axes))
    row, column = won.fn("floordiv", size[1]), won.fn("mod", size[1])
    high = Term(Position(Index.of(axes[-2]) * steps[0] - pads[0])) + row * gaps[0]
    across = Term(Position(Index.of(axes[-1]) * steps[1] - pads[1])) + column * gaps[1]
    return Array(axes, (high * x.shape[-1] + across).expr)


@lowers(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    site: Site,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    places: Value,
) -> Value:
    """``out[i, h, w] = sum{k} grad[i, window k] if window k chose (h, w)``.

    The windows that cover a row ``h`` end at ``(h + pad) // stride`` and go up from there.
    """
    size = _pair(kernel, (1, 1))
    steps, pads = _pair(stride, size), _pair(padding, (0, 0))
    gaps = _pair(dilation, (1, 1))
    axes = site.axes()
    counts = [gap * (n - 1) // step + 1 for n, step, gap in zip(size, steps, gaps, strict=True)]
    window = Axis(counts[0] * counts[1])
    back = unflatten(Index.of(window), counts)
    at = [
        (Index.of(axis) + pad) // step - up
        for axis, pad, step, up in zip(axes[-2:], pads, steps, back, strict=True)
    ]
    inside = Term(_inside(at[0], grad.shape[-2])).fn("and", Term(_inside(at[1], grad.shape[-1])))
    read_at = (*axes[:-2], *at)
    here = Term(Position(Index.of(axes[-2]) * x.shape[-1] + axes[-1]))
    chosen = Term(masked(places, read_at, inside.expr, -1)).fn("eq", here)
    wide = compute_dtype(site.dtype)
    given = Term(cast(masked(grad, read_at, inside.expr, 0), wide))
    total = Reduce(ReduceKind.SUM, (window,), chosen.choose(given, 0).expr)
    if wide is site.dtype:
        return Array(axes, total)
    stored = site.temp("total", Array(axes, total))
    fresh = site.axes()
    return Array(fresh, cast(element(stored, fresh), site.dtype))


@lowers(aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(site: Site, x: Value, size: Sequence[int]) -> Value:
    """The mean over the plane, when one element is left of it."""
    if tuple(size) != (1, 1):
        raise Decline("adaptive pooling to more than one element has no formula yet")
    rank = len(x.shape)
    return mean(site, x, (rank - 2, rank - 1), True)
