"""Loop nests, and how one step's axes become the rows and columns of a nest.

A nest has ``rows`` and ``cols`` and defines which element of a tensor, counted in storage order, is
at (r, c): ``order`` (for plain rows kernels ``r * N + c``). A pointwise step of ``R * N`` elements
fits any such nest::

    step:   y[i, j, k] <- exp(x[i, j, k])            i < 2, j < 3, k < 4
    nest:  r < 6, c < 4, order = 4 r + c
    placed: i = r // 3, j = r % 3, k = c:            y[4 r + c] <- exp(x[4 r + c])
"""

import enum
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from treadle.algebra.extents import same, sample_of
from treadle.algebra.index import Axis, Index, linear, unflatten
from treadle.algebra.strides import contiguous_strides
from treadle.loop.expr import Array, Expr, Load, Position, Reduce, values_of
from treadle.loop.kernel import KernelKind
from treadle.loop.program import Compute, TensorRef
from treadle.loop.traverse import buffers_in, loads, substitute, walk


class Level(enum.StrEnum):
    """Over which axes of the nest a value varies."""

    FULL = "full"
    ROW = "row"
    COL = "col"


@dataclass(frozen=True, slots=True)
class LoopNest:
    """Two axes, and which element of a tensor stands where: ``order`` counts them in storage."""

    kind: KernelKind
    rows: Axis
    cols: Axis
    order: Index
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        key = self.kind, self.rows, self.cols, self.order
        object.__setattr__(self, "_hash", hash(key))  # each step asks for its place in a few

    def __hash__(self) -> int:
        return self._hash

    @property
    def elements(self) -> int:
        """Places of the nest."""
        return self.rows.extent * self.cols.extent

    def axes(self, level: Level) -> tuple[Axis, ...]:
        """The axes over which a value of that level varies."""
        match level:
            case Level.FULL:
                return (self.rows, self.cols)
            case Level.ROW:
                return (self.rows,)
            case Level.COL:
                return (self.cols,)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a template stands in a nest: at ``axes(level)``, ``output[index] = expr``, with the
    names that its buffers have in the template. ``reads``: which of these, and where; nowhere if
    it is read to form an index."""

    level: Level
    expr: Expr
    index: Index
    reads: tuple[tuple[int, Index | None], ...]


@dataclass(frozen=True, slots=True)
class ScheduledOp:
    """One step inside a nest, ``reads`` with the names that its buffers have there."""

    step: int
    compute: Compute
    place: Placement
    reads: tuple[tuple[str, Index | None], ...]

    @property
    def level(self) -> Level:
        """Over which axes of the nest it varies."""
        return self.place.level

    @property
    def index(self) -> Index:
        """Where in its buffer it is written."""
        return self.place.index

    @property
    def buffer(self) -> str:
        """Where it is written."""
        return self.compute.output.buffer

    @property
    def reduces(self) -> bool:
        """Whether it combines values along an axis."""
        return isinstance(self.place.expr, Reduce)

    def over(self, axis: Axis) -> bool:
        """Whether it combines values along this one."""
        return isinstance(self.place.expr, Reduce) and self.place.expr.axes == (axis,)


Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of what a step writes: with its template all that decides its place."""


class LoopNests:
    """Makes nests; nests of equal extents share their axes, so that nests compare equal. A template
    is placed once, also from one program to the next that has steps of it."""

    def __init__(self) -> None:
        self._rows: dict[int, Axis] = {}
        self._cols: dict[int, Axis] = {}
        self._plain: dict[tuple[int, int, KernelKind], LoopNest] = {}
        self._reducing: dict[tuple[Layout, Array], LoopNest] = {}
        self._placed: dict[Hashable, Placement | None] = {}

    def rows(self, extent: int) -> Axis:
        """The outer axis of this extent."""
        return self._rows.setdefault(extent, Axis(extent))

    def cols(self, extent: int) -> Axis:
        """The inner axis of this extent."""
        return self._cols.setdefault(extent, Axis(extent))

    def plain(self, rows: int, cols: int, kind: KernelKind = KernelKind.ROWS) -> LoopNest:
        """``order = r * cols + c``."""
        key = rows, cols, kind
        if key not in self._plain:
            r, c = self.rows(rows), self.cols(cols)
            self._plain[key] = LoopNest(kind, r, c, Index.of(r) * cols + Index.of(c))
        return self._plain[key]

    def of(self, compute: Compute) -> LoopNest:
        """The nest that suits a step best when it stands alone."""
        body = compute.template.body
        if not isinstance(body, Reduce):
            return self.plain(1, compute.output.numel)
        key = _layout(compute.output), compute.template
        if key not in self._reducing:
            self._reducing[key] = self._of_reduce(compute, body)
        return self._reducing[key]

    def _of_reduce(self, compute: Compute, reduce: Reduce) -> LoopNest:
        free = tuple(a for a in storage_order(compute) if not same(a.extent, 1))
        main = _main_index(reduce)
        kind = _kind(reduce, free)
        by_stride = sorted(
            (*free, *reduce.axes), key=lambda a: -abs(sample_of(main.coefficient(a)))
        )
        inner = tuple(a for a in by_stride if a in reduce.axes)
        place = self._places(kind, free, inner)
        shape = tuple(a.extent for a in by_stride)
        order = linear([place[a] for a in by_stride], contiguous_strides(shape))
        rows, cols = (free, inner) if kind is KernelKind.ROWS else (inner, free)
        return LoopNest(kind, self.rows(_numel(rows)), self.cols(_numel(cols)), order)

    def _places(
        self, kind: KernelKind, free: tuple[Axis, ...], inner: tuple[Axis, ...]
    ) -> dict[Axis, Index]:
        """Each axis of a reduction as a formula of the nest's two."""
        rows, cols = (free, inner) if kind is KernelKind.ROWS else (inner, free)
        r, c = self.rows(_numel(rows)), self.cols(_numel(cols))
        by_rows = unflatten(Index.of(r), tuple(a.extent for a in rows))
        by_cols = unflatten(Index.of(c), tuple(a.extent for a in cols))
        return {
            **dict(zip(rows, by_rows, strict=True)),
            **dict(zip(cols, by_cols, strict=True)),
        }

    def placement(self, compute: Compute, nest: LoopNest) -> Placement | None:
        """Where the template of a step stands in that nest, or ``None`` where it does not fit."""
        output = compute.output
        key = output.shape, output.strides, output.offset, compute.template, nest
        if key not in self._placed:
            self._placed[key] = self._place(compute, nest)
        return self._placed[key]

    def place(self, step: int, compute: Compute, nest: LoopNest) -> ScheduledOp | None:
        """The step in that nest, or ``None`` where it does not fit."""
        found = self.placement(compute, nest)
        if found is None:
            return None
        names = compute.reads
        reads = tuple([(names[number], index) for number, index in found.reads])
        return ScheduledOp(step, compute, found, reads)

    def _place(self, compute: Compute, nest: LoopNest) -> Placement | None:
        if isinstance(compute.template.body, Reduce):
            return self._place_reduce(compute, compute.template.body, nest)
        axes = tuple(a for a in storage_order(compute) if not same(a.extent, 1))
        shape = tuple(a.extent for a in axes)
        numel = compute.output.numel
        if same(numel, nest.elements):
            level, position = Level.FULL, nest.order
        elif nest.kind is not KernelKind.COLUMNS and same(numel, nest.rows.extent):
            level, position = Level.ROW, Index.of(nest.rows)
        elif nest.kind is KernelKind.COLUMNS and same(numel, nest.cols.extent):
            level, position = Level.COL, Index.of(nest.cols)
        else:
            return None
        values = dict(zip(axes, unflatten(position, shape), strict=True))
        return _placed(level, compute, _with_units(compute.template, values))

    def _place_reduce(self, compute: Compute, reduce: Reduce, nest: LoopNest) -> Placement | None:
        if self.of(compute) != nest:
            return None
        free = tuple(a for a in storage_order(compute) if not same(a.extent, 1))
        main = _main_index(reduce)
        inner = tuple(sorted(reduce.axes, key=lambda a: -abs(sample_of(main.coefficient(a)))))
        values = self._places(nest.kind, free, inner)
        values = _with_units(compute.template, values)
        body = substitute(reduce.body, values)
        over, level = (
            (nest.cols, Level.ROW) if nest.kind is KernelKind.ROWS else (nest.rows, Level.COL)
        )
        root = Reduce(reduce.kind, (over,), body)
        return _placed(level, compute, values, root)


def _layout(ref: TensorRef) -> Layout:
    return ref.shape, ref.strides, ref.offset


def storage_order(compute: Compute) -> tuple[Axis, ...]:
    """The axes of the output, from the largest stride to the smallest."""
    strides = compute.output.strides
    dims = sorted(range(len(strides)), key=lambda d: (-sample_of(strides[d]), d))
    return tuple(compute.template.axes[d] for d in dims)


def _placed(
    level: Level, compute: Compute, values: dict[Axis, Index], expr: Expr | None = None
) -> Placement:
    ref = compute.output
    body = substitute(compute.template.body, values) if expr is None else expr
    position = [values[axis] for axis in compute.template.axes]
    index = linear(position, ref.strides, ref.offset)
    numbers = {name: number for number, name in enumerate(buffers_in(compute.template.body))}
    reads = tuple([(numbers[name], where) for name, where in _reads(body)])
    return Placement(level, body, index, reads)


def _reads(body: Expr) -> Iterator[tuple[str, Index | None]]:
    for node in walk(body):
        if isinstance(node, Load):
            yield node.buffer, node.index
        if isinstance(node, Load | Position):
            for value in values_of(node.index):
                yield from ((load.buffer, None) for load in loads(value))


def _with_units(array: Array, values: dict[Axis, Index]) -> dict[Axis, Index]:
    zero = Index.of(0)
    return {**{a: zero for a in array.axes if a not in values}, **values}


def _main_index(reduce: Reduce) -> Index:
    """The read that touches most axes: it decides the order of the loops."""
    indices = [load.index for load in loads(reduce.body)]
    return max(indices, key=lambda index: len(index.terms), default=Index.of(0))


def _kind(reduce: Reduce, free: tuple[Axis, ...]) -> KernelKind:
    """Columns when neighbours in memory are neighbours in the output, rows otherwise."""
    inner = outer = 0
    for load in loads(reduce.body):
        inner += any(_is_unit(load.index.coefficient(a)) for a in reduce.axes)
        outer += any(_is_unit(load.index.coefficient(a)) for a in free)
    return KernelKind.COLUMNS if outer > inner else KernelKind.ROWS


def _is_unit(factor: int) -> bool:
    return same(factor, 1) or same(factor, -1)


def _numel(axes: Iterable[Axis]) -> int:
    return math.prod(a.extent for a in axes)
