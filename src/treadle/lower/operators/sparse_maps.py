"""Linear maps with few entries per row, one matrix per dim: mean pooling, resizing, padding.

::

    out[j] = sum{k < width} weight[j, k] * x[first(j) + k]

Over several dims the matrices multiply. The derivative is the same map with each matrix transposed,
so each of these operations takes two lines: which inputs an output reads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import final

import torch

from treadle.algebra.extents import Size, surely_less
from treadle.algebra.index import Axis, Index, unflatten
from treadle.loop.expr import Array, Expr, Load, Position, Reduce, ReduceKind
from treadle.lower.context import LoweringContext, element
from treadle.lower.registry import Unsupported, Value
from treadle.lower.scalars import ScalarExpr, cast, compute_dtype

UNROLLED = 8
"""Sums of at most this many terms are written out; longer ones are a reduction."""
_WIDEST = 1 << 16

Row = dict[int, float]


def require_known(*extents: int) -> None:
    """``Unsupported`` where a call decides one of them, and so which inputs an output reads."""
    if any(isinstance(extent, Size) for extent in extents):
        raise Unsupported("the inputs that an output reads depend on dynamic sizes")


@final
@dataclass(frozen=True, slots=True)
class SparseMap:
    """``rows[j]`` is what output ``j`` reads: ``{input: weight}``, none of it zero.

    ``first(j) = (slope * j + shift) // unit`` is at or before the first of them, and ``width``
    places from there hold them all.
    """

    extent: int
    rows: tuple[Row, ...]
    slope: int
    unit: int
    shift: int
    width: int

    @staticmethod
    def of(extent: int, rows: Sequence[Row]) -> "SparseMap":
        """The map of these rows: the line below their first places that needs the least width."""
        lines = {Fraction(extent, max(len(rows), 1)), Fraction(1)}
        middle = [min(row) for row in rows if row][len(rows) // 3 :][:2]
        if len(middle) == 2:
            lines.add(Fraction(middle[1] - middle[0]))
        candidates = [SparseMap._along(line, extent, rows) for line in lines if line > 0]
        return min(candidates, key=lambda sparse_map: (sparse_map.width, sparse_map.unit))

    @staticmethod
    def _along(line: Fraction, extent: int, rows: Sequence[Row]) -> "SparseMap":
        slope, unit = line.numerator, line.denominator
        used = [(j, row) for j, row in enumerate(rows) if row]
        shift = min(((min(row) + 1) * unit - slope * j - 1 for j, row in used), default=0)
        width = max((max(row) - (slope * j + shift) // unit + 1 for j, row in used), default=1)
        return SparseMap(extent, tuple(rows), slope, unit, shift, width)

    def transposed(self) -> "SparseMap":
        """``entry[i, j] -> entry[j, i]``."""
        columns: list[Row] = [{} for _ in range(self.extent)]
        for j, row in enumerate(self.rows):
            for i, weight in row.items():
                columns[i][j] = weight
        return SparseMap.of(len(self.rows), columns)

    def first(self, place: Axis | Index) -> Index:
        """The first place of the window of an output."""
        return (Index.of(place) * self.slope + self.shift) // self.unit

    def table(self) -> list[list[float]]:
        """The weights by output and window place; zero where nothing is read."""
        starts = [(self.slope * j + self.shift) // self.unit for j in range(len(self.rows))]
        return [
            [row.get(start + k, 0.0) for k in range(self.width)]
            for start, row in zip(starts, self.rows, strict=True)
        ]

    @property
    def constant(self) -> float | None:
        """The weight of all places inside, if they have the same one and none is skipped."""
        weights = {weight for row in self.rows for weight in row.values()}
        starts = [(self.slope * j + self.shift) // self.unit for j in range(len(self.rows))]
        holes = any(
            0 <= start + k < self.extent and start + k not in row
            for start, row in zip(starts, self.rows, strict=True)
            for k in range(self.width)
        )
        return weights.pop() if len(weights) == 1 and not holes else None


def resampled(
    context: LoweringContext, x: Value, sparse_maps: Sequence[SparseMap], factor: float = 1.0
) -> Array:
    """``out[i, j...] = factor * sum{k...} weight[j, k]... * x[i, first(j) + k, ...]`` over the
    last dims of ``x``, one band for each."""
    axes = context.axes()
    wide = compute_dtype(context.dtype)
    if not wide.is_floating_point:
        raise Unsupported(f"weights of {wide} would be rounded")
    if 0 in x.shape:
        return Array(axes, cast(ScalarExpr(Position(Index.of(0))).expr, context.dtype))
    sizes = [sparse_map.width for sparse_map in sparse_maps]
    window = Axis(_product(sizes))
    if window.extent > _WIDEST:
        raise Unsupported("a window this wide is the library's")
    taps = _Taps(context, x, sparse_maps, wide)
    if window.extent <= UNROLLED:
        cells = itertools.product(*(range(size) for size in sizes))
        parts = [taps.at(axes, [Index.of(k) for k in cell]) for cell in cells]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return Array(axes, cast((total * factor if factor != 1 else total).expr, context.dtype))
    body = taps.at(axes, unflatten(Index.of(window), sizes))
    total = context.temp("sum", Array(axes, Reduce(ReduceKind.SUM, (window,), body.expr)))
    fresh = context.axes()
    scaled = ScalarExpr(element(total, fresh))
    return Array(fresh, cast((scaled * factor if factor != 1 else scaled).expr, context.dtype))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


@final
@dataclass(frozen=True, slots=True)
class _Taps:
    """One term of the sum: a weighted element of ``x``."""

    context: LoweringContext
    x: Value
    sparse_maps: Sequence[SparseMap]
    wide: torch.dtype

    def at(self, axes: Sequence[Axis], cell: Sequence[Index]) -> ScalarExpr:
        lead = len(axes) - len(self.sparse_maps)
        places: list[Index | Axis] = list(axes[:lead])
        inside: ScalarExpr | None = None
        weight: ScalarExpr | None = None
        factor = 1.0
        for sparse_map, axis, k in zip(self.sparse_maps, axes[lead:], cell, strict=True):
            place = sparse_map.first(axis) + k
            places.append(place)
            held = within(place, sparse_map.extent)
            if sparse_map.constant is None:
                found = self._weight(sparse_map, axis, k)
                held = found.fn("ne", 0)
                weight = found if weight is None else weight * found
            else:
                factor *= sparse_map.constant
            if held is not None:
                inside = held if inside is None else inside.fn("and", held)
        read = ScalarExpr(cast(self._read(places, inside), self.wide))
        if weight is not None:
            read = read * weight
        return read * factor if factor != 1 else read

    def _read(self, places: Sequence[Index | Axis], inside: ScalarExpr | None) -> Expr:
        read = element(self.x, places)
        if inside is None:
            return read
        if isinstance(read, Load):
            return Load(read.buffer, read.index, read.dtype, inside.expr)
        return inside.choose(ScalarExpr(read), 0).expr

    def _weight(self, sparse_map: SparseMap, axis: Axis, k: Index) -> ScalarExpr:
        """The entry of the matrix, from a small table."""
        table = torch.tensor(sparse_map.table(), dtype=self.wide)
        ref = self.context.builder.constant(f"{self.context.name}_weights", table)
        return ScalarExpr(element(ref, (axis, k)))


def within(place: Index, extent: int) -> ScalarExpr | None:
    """``0 <= place < extent``; ``None`` where the range of ``place`` says so for all sizes."""
    low, high = place.bounds
    at = ScalarExpr(Position(place))
    checks: list[ScalarExpr] = []
    if not surely_less(-1, low):
        checks.append(at.fn("ge", 0))
    if not surely_less(high, extent):
        checks.append(at.fn("lt", extent))
    if not checks:
        return None
    return checks[0] if len(checks) == 1 else checks[0].fn("and", checks[1])
