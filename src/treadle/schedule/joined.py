"""Products that a concatenation reads are written directly into it.

::

    before:  p = mm(x, v);  q = mm(x, w);  r = sin(y)
             c[i, j] <- where(j < 3, p[i, j], where(j < 8, q[i, j - 3], r[i, j - 8]))
    after:   c[:, 0:3] = mm(x, v);  c[:, 3:8] = mm(x, w);  r = sin(y);  c[i, j + 8] <- r[i, j]

A concatenation is a formula that differs between ranges of one axis: a cat, a stack, padding, the
target of a scattered slice. The products are then not copied, and not in memory twice. A library
writes a matrix with any leading dimension, so each product must be such a matrix inside the
concatenation.
"""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.algebra.extents import same, sample_of, size_key, surely_less
from treadle.algebra.index import Axis, Index
from treadle.compat.operators.operator_facts import writes_strided
from treadle.loop.expr import Apply, Array, Const, Expr, Load, Position, Reduce
from treadle.loop.program import Buffer, Call, Compute, Program, Step, TensorRef
from treadle.loop.simplify import simplify
from treadle.loop.traverse import buffers_in, substitute, walk
from treadle.schedule.recompute.values import Values

_SHARE = 2
"""One element of this many at least is a product's: what else is in a join is written by kernels of
its own then, and no reader has it in a register."""

_RETURNED = 1 << 17
"""Bytes of a result from which not copying it repays the views of it that every call makes."""


def write_where_joined(program: Program, aligned: int = 1) -> Program:
    """The program with products written into joins, where only the join reads them and is stored
    in any case, and their rows begin at multiples of ``aligned`` bytes there; the same one if there
    are none."""
    return _Joiner(program, aligned).joined()


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A join from ``start`` to ``stop`` of one axis: what it is there, with the names of its
    template."""

    start: int
    stop: int
    array: Array


@dataclass(frozen=True, slots=True)
class _Join:
    """What becomes of a join: calls by number with the part that each writes, and the rest."""

    calls: Mapping[int, TensorRef]
    rest: tuple[Compute, ...]


class _Joiner:
    def __init__(self, program: Program, aligned: int) -> None:
        self._program = program
        self._aligned = aligned
        self._buffers = program.buffers
        self._kept = {ref.buffer for ref in program.results if ref is not None}
        self._values = Values(program.steps, program.buffers, frozenset(self._kept))
        self._bounds: dict[tuple[Array, int], list[int]] = {}
        self._made: dict[Hashable, _Stretch] = {}

    def joined(self) -> Program:
        found: dict[int, _Join] = {}
        for i, step in enumerate(self._program.steps):
            join = self._join(i, step) if isinstance(step, Compute) else None
            if join is not None:
                found[i] = join
        if not found:
            return self._program
        into = {call: ref for join in found.values() for call, ref in join.calls.items()}
        steps: list[Step] = []
        gone: set[str] = set()
        for i, step in enumerate(self._program.steps):
            if i in found:
                steps += found[i].rest
            elif i in into and isinstance(step, Call):
                gone.update(step.writes)
                steps.append(replace(step, outputs=(into[i].buffer,), into=into[i]))
            else:
                steps.append(step)
        buffers = {name: buffer for name, buffer in self._buffers.items() if name not in gone}
        return replace(self._program, steps=tuple(steps), buffers=buffers)

    def _join(self, i: int, step: Compute) -> _Join | None:
        products = {name for name in step.reads if self._is_product_for(i, name, step.output)}
        if not products or isinstance(step.template.body, Reduce) or not self._is_stored(step):
            return None
        for dim in range(len(step.template.axes)):
            join = self._along(step, dim, products)
            if join is not None:
                return join
        return None

    def _is_product_for(self, reader: int, name: str, output: TensorRef) -> bool:
        """Whether ``name`` is a product, all of its buffer, that the join alone reads."""
        buffer, target = self._buffers[name], self._buffers[output.buffer]
        alone = self._values.may_vanish(name) and self._values.readers[name] == [reader]
        if not alone or buffer.dtype is not output.dtype or buffer.device != target.device:
            return False
        call = self._program.steps[self._values.writers[name][0]]
        known = isinstance(call, Call) and call.into is None and writes_strided(call.out)
        return known and not buffer.unsized

    def _is_stored(self, step: Compute) -> bool:
        """Whether a join is all that is ever in its buffer, and is there whatever is fused: it is
        returned, a call reads it, or another phase does."""
        name, values = step.output.buffer, self._values
        ours = values.is_temporary(name) and len(values.writers[name]) == 1
        if not ours or not values.is_whole(step):
            return False
        if name in self._kept:
            return sample_of(self._buffers[name].nbytes) >= _RETURNED
        readers = [self._program.steps[at] for at in values.readers.get(name, ())]
        return any(
            isinstance(reader, Call) or reader.origin.phase != step.origin.phase
            for reader in readers
        )

    def _along(self, step: Compute, dim: int, products: set[str]) -> _Join | None:
        """The join as one along ``dim``; ``None`` where that makes too few products its own."""
        calls: dict[int, TensorRef] = {}
        left: list[_Stretch] = []
        names = step.names
        stretches = self._stretches(step.template, dim)
        for stretch in stretches:
            part = _part(step.output, dim, stretch)
            place = self._place(stretch.array, part, names, products)
            if place is None or place[0] in calls:
                left.append(stretch)
            else:
                calls[place[0]] = place[1]
        taken = sum(sample_of(ref.numel) for ref in calls.values())
        if not calls or taken * _SHARE < sample_of(step.output.numel):
            return None
        rest = tuple(self._rest(step, dim, run) for run in _runs(left))
        read = {name for other in rest for name in other.reads}
        written = {name for call in calls for name in self._program.steps[call].writes}
        return None if read & written else _Join(calls, rest)

    def _stretches(self, template: Array, dim: int) -> list[_Stretch]:
        """A formula cut where its conditions on one axis change; none if nothing is cut."""
        key = template, dim
        if key not in self._bounds:
            self._bounds[key] = _bounds(template, template.axes[dim])
        pairs = list(itertools.pairwise(self._bounds[key]))
        return [self._stretch(template, dim, *pair) for pair in pairs] if len(pairs) > 1 else []

    def _stretch(self, template: Array, dim: int, start: int, stop: int) -> _Stretch:
        """One formula for the stretches of one template, so that equal blocks stay equal."""
        key = template, dim, size_key(start), size_key(stop)
        if key not in self._made:
            self._made[key] = _stretch(template, dim, start, stop)
        return self._made[key]

    def _place(
        self, array: Array, part: TensorRef, names: Mapping[str, str], products: set[str]
    ) -> tuple[int, TensorRef] | None:
        """The call whose product the stretch is, and where it is to write it."""
        match array.body:
            case Load(buffer, index, dtype, None) if names[buffer] in products:
                name = names[buffer]
            case _:
                return None
        if dtype is not part.dtype:
            return None
        target = _inside(self._buffers[name], index, array.axes, part)
        if target is None or not self._is_aligned(target):
            return None
        return self._values.writers[name][0], target

    def _is_aligned(self, part: TensorRef) -> bool:
        """Whether every row of ``part``, or column, begins at a multiple of the bytes."""
        if self._aligned == 1:
            return True
        distances = (part.offset, *(stride for stride in part.strides if not same(stride, 1)))
        fixed = all(type(distance) is int for distance in distances)
        return fixed and all(
            distance * part.dtype.itemsize % self._aligned == 0 for distance in distances
        )

    def _rest(self, step: Compute, dim: int, run: tuple[int, int]) -> Compute:
        """The formula of the join on a stretch that no product fills."""
        stretch = self._stretch(step.template, dim, *run)
        names = step.names
        reads = tuple(names[name] for name in buffers_in(stretch.array.body))
        return Compute(_part(step.output, dim, stretch), stretch.array, step.origin, reads)


def _bounds(template: Array, axis: Axis) -> list[int]:
    """The places along ``axis`` where a condition of the formula changes, both ends included; none
    where their order depends on sizes."""
    found = [0, axis.extent]
    for place in _conditions(template.body, axis):
        inside = surely_less(0, place) and surely_less(place, axis.extent)
        if inside and not any(same(place, known) for known in found):
            found.append(place)
    found.sort(key=sample_of)
    ordered = all(surely_less(a, b) for a, b in itertools.pairwise(found))
    return found if ordered else []


def _conditions(body: Expr, axis: Axis) -> Iterator[int]:
    """``n`` for each ``axis < n`` and ``axis >= n``."""
    for node in walk(body):
        match node:
            case Apply(("lt" | "ge"), (Position(left), (Position() | Const()) as right)):
                difference = left - _index(right)
            case _:
                continue
        if len(difference.terms) == 1 and difference.terms[0] == (axis, 1):
            yield -difference.const


def _index(expr: Position | Const) -> Index:
    return expr.index if isinstance(expr, Position) else Index.of(int(expr.value))


def _stretch(template: Array, dim: int, start: int, stop: int) -> _Stretch:
    axis = Axis(stop - start)
    axes = (*template.axes[:dim], axis, *template.axes[dim + 1 :])
    body = simplify(substitute(template.body, {template.axes[dim]: axis + start}))
    return _Stretch(start, stop, Array(axes, body))


def _part(output: TensorRef, dim: int, stretch: _Stretch) -> TensorRef:
    shape = (*output.shape[:dim], stretch.stop - stretch.start, *output.shape[dim + 1 :])
    offset = output.offset + stretch.start * output.strides[dim]
    return replace(output, shape=shape, offset=offset)


def _runs(stretches: Sequence[_Stretch]) -> list[tuple[int, int]]:
    """Start and stop of stretches, neighbours together."""
    runs: list[tuple[int, int]] = []
    for stretch in stretches:
        if runs and same(runs[-1][1], stretch.start):
            runs[-1] = runs[-1][0], stretch.stop
        else:
            runs.append((stretch.start, stretch.stop))
    return runs


def _inside(
    product: Buffer, index: Index, axes: Sequence[Axis], part: TensorRef
) -> TensorRef | None:
    """The product as a view of ``part``, which reads ``index`` of it; ``None`` where it is not all
    of the product, or no matrix of evenly spaced rows or columns::

        p: [6, 3], c[b, t, j] <- p[12*b + 3*t + j], part strides [40, 10, 1]  ->  strides [10, 1]
    """
    if not same(index.const, 0) or any(not isinstance(atom, Axis) for atom, _ in index.terms):
        return None
    steps = dict(index.terms)
    left = [
        (steps.get(axis, 0), axis.extent, stride)
        for axis, stride in zip(axes, part.strides, strict=True)
        if not same(axis.extent, 1)
    ]
    strides: list[int] = []
    for extent, stride in zip(product.shape, product.strides, strict=True):
        found = _spaced(left, extent, stride)
        if found is None:
            return None
        strides.append(found)
    if left or not _is_matrix(strides):
        return None
    return TensorRef(part.buffer, part.dtype, product.shape, tuple(strides), part.offset)


def _spaced(left: list[tuple[int, int, int]], extent: int, stride: int) -> int | None:
    """The distance of the elements of a dim of the product in the join; what it takes of ``left``,
    the axes with both strides, goes."""
    if same(extent, 1):
        return stride
    first: int | None = None
    far, count = 0, 1
    while not same(count, extent):
        at = next((n for n, dim in enumerate(left) if same(dim[0], stride * count)), None)
        if at is None:
            return None
        _, size, distance = left.pop(at)
        if first is None:
            first = distance
        elif not same(distance, far):
            return None
        far, count = distance * size, count * size
    return first


def _is_matrix(strides: Sequence[int]) -> bool:
    """Whether a library writes such a result itself, and no copy of it: in each matrix, rows or
    columns have no gaps between their elements."""
    return any(same(stride, 1) for stride in strides[-2:])
