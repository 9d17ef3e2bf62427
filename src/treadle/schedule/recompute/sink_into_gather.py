"""A reader that selects a few elements computes them, instead of storing all of them.

::

    before:  y[n, c] = x[n, c] - m[n];   picked[n] = y[n, label[n]]          | all of y stored
    after:   y[n, c] = x[n, c] - m[n];   picked[n] = x[n, label[n]] - m[n]   | y only if others ask

The cross-entropy of a language model picks one log-probability of each row of the vocabulary.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import prod

import torch

from treadle.algebra.extents import same, sample_of
from treadle.algebra.index import Axis, Index
from treadle.loop.expr import (
    Apply,
    Array,
    Const,
    Expr,
    Load,
    Position,
    Reduce,
    ReduceKind,
    identity,
)
from treadle.loop.program import Buffer, Compute, Step
from treadle.loop.simplify import simplify
from treadle.loop.traverse import conjuncts, loads, map_expr, substitute, substitute_index, walk
from treadle.schedule.recompute.values import GATHERED, Values

_SHARE = 8
"""A reader is sparse if it reads at most one element in this many."""
_MAX_DEPTH = 8


def sink_into_gather(steps: Sequence[Step], buffers: Mapping[str, Buffer]) -> tuple[Step, ...]:
    """Every sparse load of a pointwise value replaced by the value's formula at that place, and
    sums over values of which one element at most is not zero by that element.

    Values with a reduction, and values whose operands are written more than once, stay loads.
    """
    work = _GatherSinker(Values(steps, buffers))
    return tuple(work.sunk(step) if isinstance(step, Compute) else step for step in steps)


class _GatherSinker:
    def __init__(self, values: Values) -> None:
        self._values = values
        self._known_places: dict[Array, int] = {}
        self._stay_sums: set[Hashable] = set()

    def sunk(self, step: Compute) -> Compute:
        """``step`` with its sparse loads resolved, and those that appear by that as well."""
        for _ in range(_MAX_DEPTH):
            read = {name: self._sparse_source(step, name) for name in step.reads}
            sparse = {name: source for name, source in read.items() if source is not None}
            new = {
                load: formula_at(sparse[load.buffer], load.index)
                for load in (loads(step.array.body) if sparse else ())
                if load.buffer in sparse and load.mask is None
            }
            if not new:
                break
            step = with_formulas(step, new)
        return self._of_one_term(step)

    def _of_one_term(self, step: Compute) -> Compute:
        """A sum over a value of which one element at most is not zero: its formula at that."""
        match step.template.body:
            case Reduce(kind=ReduceKind.SUM, body=Load(buffer=name, mask=None)):
                source = self._cheap_source(step.names[name])
            case _:
                return step
        if source is None:
            return step
        output = source.output
        key = step.template, source.template, output.shape, output.strides, output.offset
        if key in self._stay_sums:
            return step
        body = step.array.body
        assert isinstance(body, Reduce)
        assert isinstance(body.body, Load)
        formula = formula_at(source, body.body.index)
        found = simplify(Reduce(body.kind, body.axes, formula))
        if any(isinstance(part, Reduce) for part in walk(found)):
            self._stay_sums.add(key)  # so do those of equal steps
            return step
        return Compute(step.output, Array(step.array.axes, found), step.origin)

    def _sparse_source(self, reader: Compute, name: str) -> Compute | None:
        """What fills a buffer of which the reader reads few elements, if those are cheap."""
        source = self._values.source(name)
        if source is None:
            return None
        few = self._places(reader.template) * _SHARE <= sample_of(source.output.numel)
        return self._cheap_source(name) if few else None

    def _cheap_source(self, name: str) -> Compute | None:
        """What fills a buffer, if each element is cheap and is the same whenever it is computed."""
        source = self._values.source(name)
        if source is None or not self._values.is_whole(source):
            return None
        cheap = self._values.is_simple(source.template, GATHERED)
        fixed = all(map(self._values.is_fixed, (name, *source.reads)))
        return source if cheap and fixed else None

    def _places(self, template: Array) -> int:
        """How many elements a formula is evaluated for, inside its reductions."""
        if template not in self._known_places:
            axes = {*template.axes}
            for node in walk(template.body):
                axes |= {*node.axes} if isinstance(node, Reduce) else set()
            self._known_places[template] = prod(sample_of(a.extent) for a in axes)
        return self._known_places[template]


def formula_at(source: Compute, place: Index, mask: Expr | None = None) -> Expr:
    """The formula of ``source`` at a flat place of its buffer: its strides, undone. With ``mask``
    what a load has: zero, without reading, where it is false."""
    output = source.output
    inside, outside = _narrowed(mask)
    rest = substitute_index(place, inside) - output.offset
    position: dict[int, Index] = {}
    for dim in sorted(range(len(output.shape)), key=lambda d: -sample_of(output.strides[d])):
        if same(output.shape[dim], 1):
            position[dim] = Index.of(0)
            continue
        position[dim] = substitute_index(rest // output.strides[dim], outside)
        rest = rest % output.strides[dim]
    array = source.array
    found = substitute(array.body, {axis: position[d] for d, axis in enumerate(array.axes)})
    return found if mask is None else _masked(found, mask)


def _narrowed(mask: Expr | None) -> tuple[Mapping[Axis, Index], Mapping[Axis, Index]]:
    """Axes as axes of what they are where ``mask`` holds, and those as the axes they stand for::

    i < 4 and i >= 1, of i < 8:    i -> a + 1, a -> i - 1, with a < 3
    """
    limits: dict[Axis, tuple[int, int]] = {}
    for part in conjuncts(mask) if mask is not None else ():
        match part:
            case Apply(("lt" | "ge") as relation, (Position(index), Const(int(bound), _))):
                (axis, factor), *others = index.terms or ((None, 0),)
            case _:
                continue
        if not isinstance(axis, Axis) or others or not same(factor, 1):
            continue
        low, high = limits.get(axis, (0, axis.extent))
        limit = bound - index.const
        limits[axis] = (low, min(high, limit)) if relation == "lt" else (max(low, limit), high)
    inside: dict[Axis, Index] = {}
    outside: dict[Axis, Index] = {}
    for axis, (low, high) in limits.items():
        narrow = Axis(max(high - low, 0))
        inside[axis], outside[narrow] = narrow + low, axis - low
    return inside, outside


def _masked(expr: Expr, mask: Expr) -> Expr:
    """``expr`` where ``mask`` holds, and zero elsewhere; nothing is read there."""

    def guarded(node: Expr) -> Expr:
        match node:
            case Load(buffer, index, dtype, None):
                return Load(buffer, index, dtype, mask)
            case Load(buffer, index, dtype, inner) if inner is not None and inner != mask:
                return Load(buffer, index, dtype, Apply("and", (inner, mask), torch.bool))
            case Apply("where", (condition, found, _)) if condition == mask:
                return found
            case _:
                return node

    zero = identity(ReduceKind.SUM, expr.dtype)
    return Apply("where", (mask, map_expr(expr, guarded), zero), expr.dtype)


def with_formulas(step: Compute, new: Mapping[Load, Expr]) -> Compute:
    """The step with formulas in place of loads."""

    def picked(node: Expr) -> Expr:
        return new.get(node, node) if isinstance(node, Load) else node

    array = step.array
    return Compute(step.output, Array(array.axes, map_expr(array.body, picked)), step.origin)
