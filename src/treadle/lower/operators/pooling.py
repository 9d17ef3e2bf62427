"""Max pooling: the maximum of each window and its position, and the derivative by positions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from treadle.algebra.extents import Size
from treadle.algebra.index import Axis, Index, linear, unflatten
from treadle.algebra.strides import contiguous_strides
from treadle.loop.expr import Array, Position, Reduce, ReduceKind, identity
from treadle.lower.context import LoweringContext, element
from treadle.lower.operators.indexing import masked
from treadle.lower.operators.resize import spread
from treadle.lower.operators.sparse_maps import Row, SparseMap, require_known, within
from treadle.lower.registry import Value, aten_op, lowers
from treadle.lower.scalars import ScalarExpr, cast, compute_dtype

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class _Window:
    """Output ``j`` looks at ``(j * slope + shift) // unit + gap * k`` for ``k < size``, inside
    ``extent``; an adaptive one stops before ``ceil((j + 1) * slope / unit)``."""

    extent: int
    outputs: int
    size: int
    slope: int
    shift: int = 0
    unit: int = 1
    gap: int = 1
    adaptive: bool = False

    def place(self, output: Axis, k: Index) -> Index:
        return (Index.of(output) * self.slope + self.shift) // self.unit + k * self.gap

    def holds(self, output: Axis, k: Index) -> ScalarExpr | None:
        place = self.place(output, k)
        inside = within(place, self.extent)
        if not self.adaptive or self.slope % self.unit == 0:
            return inside
        end = ((Index.of(output) + 1) * self.slope + (self.unit - 1)) // self.unit
        before = ScalarExpr(Position(place)).fn("lt", ScalarExpr(Position(end)))
        return before if inside is None else inside.fn("and", before)

    def cover(self) -> "SparseMap | _Cover":
        """Which outputs look at an input."""
        if not self.adaptive and isinstance(self.extent, Size):
            reach = self.gap * (self.size - 1)
            first = -self.shift - reach + self.slope - 1
            return _Cover(reach // self.slope + 1, self.outputs, self.slope, first)
        return self._sparse_map()

    def _sparse_map(self) -> SparseMap:
        rows: list[Row] = []
        for j in range(self.outputs):
            start = (j * self.slope + self.shift) // self.unit
            stop = -(-(j + 1) * self.slope // self.unit) if self.adaptive else self.extent
            places = [start + k * self.gap for k in range(self.size)]
            rows.append({place: 1.0 for place in places if 0 <= place < min(stop, self.extent)})
        return SparseMap.of(self.extent, rows).transposed()


@final
@dataclass(frozen=True, slots=True)
class _Cover:
    """The ``width`` outputs from ``(i + shift) // slope`` on, as far as there are any, may look at
    input ``i``; no other does."""

    width: int
    extent: int
    slope: int
    shift: int

    def first(self, place: Axis) -> Index:
        return (Index.of(place) + self.shift) // self.slope


def _strided(
    shape: Sequence[int],
    out: Sequence[int],
    rank: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[_Window]:
    sizes = spread(kernel, rank)
    steps = spread(stride, rank, sizes)
    pads, gaps = spread(padding, rank, (0,)), spread(dilation, rank, (1,))
    parts = zip(shape[-rank:], out[-rank:], sizes, steps, pads, gaps, strict=True)
    return [_Window(n, m, k, s, -p, 1, gap) for n, m, k, s, p, gap in parts]


def _adaptive(shape: Sequence[int], out: Sequence[int], rank: int) -> list[_Window]:
    windows: list[_Window] = []
    require_known(*shape[-rank:], *out[-rank:])
    for n, m in zip(shape[-rank:], out[-rank:], strict=True):
        sizes = [-(-(j + 1) * n // m) - j * n // m for j in range(m)]
        windows.append(_Window(n, m, max(sizes, default=1), n, 0, max(m, 1), adaptive=True))
    return windows


def _largest(context: LoweringContext, x: Value, windows: Sequence[_Window]) -> tuple[Value, Value]:
    """``out[j] = max{k} x[place(j, k)]``, and the flat place in the plane of the first one."""
    values, places = context.element_context(0), context.element_context(1)
    axes, rank = values.axes(), len(windows)
    sizes = [window.size for window in windows]
    cell = Axis(math.prod(sizes))
    coordinates = unflatten(Index.of(cell), sizes)
    at, mask = _cells(axes[-rank:], coordinates, windows)
    lowest = identity(ReduceKind.MAX, x.dtype).value
    spot = (*axes[:-rank], *at)
    read = element(x, spot) if mask is None else masked(x, spot, mask.expr, lowest)
    best = Array(axes, Reduce(ReduceKind.MAX, (cell,), read))
    winner = context.temp("winner", Array(axes, Reduce(ReduceKind.ARGMAX, (cell,), read)))
    return values.result(best), _flat_place(places, x, winner, windows)


def _cells(
    axes: Sequence[Axis], cell: Sequence[Index], windows: Sequence[_Window]
) -> tuple[list[Index], ScalarExpr | None]:
    places: list[Index] = []
    mask: ScalarExpr | None = None
    for window, axis, k in zip(windows, axes, cell, strict=True):
        places.append(window.place(axis, k))
        held = window.holds(axis, k)
        if held is not None:
            mask = held if mask is None else mask.fn("and", held)
    return places, mask


def _flat_place(
    context: LoweringContext, x: Value, winner: Value, windows: Sequence[_Window]
) -> Array:
    """The winner of each window as its offset into the plane. Where all values of a window are the
    least there is, padding wins; then the first element inside is taken."""
    axes, rank = context.axes(), len(windows)
    steps = contiguous_strides([window.size for window in windows])
    strides = contiguous_strides(x.shape[-rank:])
    won = ScalarExpr(element(winner, axes))
    start = linear(
        [window.place(a, Index.of(0)) for window, a in zip(windows, axes[-rank:], strict=True)],
        strides,
    )
    flat = ScalarExpr(Position(start))
    places = zip(windows, axes[-rank:], steps, strides, strict=True)
    for window, axis, step, stride in places:
        k = won.fn("floordiv", step).fn("mod", window.size)
        if window.shift < 0:
            first = (window.gap - 1 - window.place(axis, Index.of(0))) // window.gap
            k = k.fn("maximum", ScalarExpr(Position(first)))
        flat = flat + k * (window.gap * stride)
    return Array(axes, flat.expr)


def _chosen(
    context: LoweringContext, grad: Value, x: Value, places: Value, windows: Sequence[_Window]
) -> Value:
    """``out[i] = sum{k} grad[j] if places[j] == i``, over the windows ``j`` that look at ``i``."""
    axes, rank = context.axes(), len(windows)
    covers = [window.cover() for window in windows]
    sizes = [each.width for each in covers]
    cover = Axis(math.prod(sizes))
    at: list[Index] = []
    mask: ScalarExpr | None = None
    for each, axis, k in zip(covers, axes[-rank:], unflatten(Index.of(cover), sizes), strict=True):
        at.append(each.first(axis) + k)
        held = within(at[-1], each.extent)
        if held is not None:
            mask = held if mask is None else mask.fn("and", held)
    spot = (*axes[:-rank], *at)
    here = ScalarExpr(Position(linear(axes[-rank:], contiguous_strides(x.shape[-rank:]))))
    if mask is None:
        chosen, given = ScalarExpr(element(places, spot)).fn("eq", here), element(grad, spot)
    else:
        chosen = ScalarExpr(masked(places, spot, mask.expr, -1)).fn("eq", here)
        given = masked(grad, spot, mask.expr, 0)
    wide = compute_dtype(context.dtype)
    body = chosen.choose(ScalarExpr(cast(given, wide)), 0).expr
    total = Array(axes, Reduce(ReduceKind.SUM, (cover,), body))
    if wide is context.dtype:
        return total
    stored, fresh = context.temp("total", total), context.axes()
    return Array(fresh, cast(element(stored, fresh), context.dtype))


def _register(rank: int) -> None:
    @lowers(aten_op(f"max_pool{rank}d_with_indices.default"))
    def forward(
        context: LoweringContext,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        """``out[j] = max{k} x[j * stride - pad + dilation * k]``."""
        out = context.val[0].shape
        return _largest(context, x, _strided(x.shape, out, rank, kernel, stride, padding, dilation))

    @lowers(aten_op(f"max_pool{rank}d_with_indices_backward.default"))
    def backward(
        context: LoweringContext,
        grad: Value,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        places: Value,
    ) -> Value:
        windows = _strided(x.shape, grad.shape, rank, kernel, stride, padding, dilation)
        return _chosen(context, grad, x, places, windows)

    @lowers(aten_op(f"adaptive_max_pool{rank}d.default"))
    def adaptive(context: LoweringContext, x: Value, size: Sequence[int]) -> tuple[Value, Value]:
        """``out[j] = max x[j * n // m ... ceil((j + 1) * n / m)]``."""
        return _largest(context, x, _adaptive(x.shape, context.val[0].shape, rank))

    @lowers(aten_op(f"adaptive_max_pool{rank}d_backward.default"))
    def adaptive_backward(context: LoweringContext, grad: Value, x: Value, places: Value) -> Value:
        return _chosen(context, grad, x, places, _adaptive(x.shape, grad.shape, rank))


for _rank in (2, 3):
    _register(_rank)
