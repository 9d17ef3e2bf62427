"""A reader that needs a cheap value in another order computes it itself.

::

    before:  y[b, h, t] = x[b, t, h] * s[t];   z[b, t, h] = x[b, t, h] * c[t] + y[b, h, t]
    after:   z[b, t, h] = x[b, t, h] * c[t] + x[b, t, h] * s[t]

A value stays in a register only for a reader at the same position of a nest; for one that
transposes, slices or concatenates, it would be stored and read again. Rotary embeddings of
attention consist of such values. The formula is the same, so the results are the same.
"""

from collections.abc import Mapping, Sequence

from treadle.algebra.extents import same, sample_of
from treadle.loop.expr import Apply, Array, Expr, Load, Reduce
from treadle.loop.program import Buffer, Compute, Step
from treadle.loop.simplify import simplify_array
from treadle.loop.traverse import loads, map_expr
from treadle.schedule.loop_nest import LoopNests
from treadle.schedule.recompute.sink_into_gather import formula_at, with_formulas
from treadle.schedule.recompute.values import REORDERED, Values

_MAX_READS = 3
"""Loads of a value, all readers together: each computes it again."""
_MAX_LOADS = 12
"""Of a reader, when all is put in its place."""
_MAX_DEPTH = 8
_MOST = 4
"""Times as many elements as the value has, that a reader may compute it for."""


def inline_reordered(
    steps: Sequence[Step],
    buffers: Mapping[str, Buffer],
    nests: LoopNests,
    results: frozenset[str],
) -> tuple[Step, ...]:
    """Every pointwise step with the formulas of cheap values that it reads in another order, where
    none of their readers needs them stored."""
    return _Inliner(steps, Values(steps, buffers, results), nests).inlined()


class _Inliner:
    def __init__(self, steps: Sequence[Step], values: Values, nests: LoopNests) -> None:
        self._steps = list(steps)  # from the first on with formulas in place of loads
        self._values = values
        self._nests = nests
        self._cheap: set[str] = set()
        for step in steps:
            if isinstance(step, Compute) and self._is_cheap(step):
                self._cheap.add(step.output.buffer)

    def inlined(self) -> tuple[Step, ...]:
        for i, step in enumerate(self._steps):
            if isinstance(step, Compute) and not self._cheap.isdisjoint(step.reads):
                self._steps[i] = self._resolved(i, step)
        return tuple(self._steps)

    def _resolved(self, i: int, step: Compute) -> Compute:
        """The reader with formulas in the place of loads: of all depths one that has the fewest
        bytes stored for it. Where formulas get too long, operands of theirs may be larger."""
        if isinstance(step.template.body, Reduce):
            return step
        names = self._elsewhere(i, step)
        best, least = step, self._values.nbytes(names)
        for _ in range(_MAX_DEPTH):
            if not names:
                break
            found = [load for load in loads(step.array.body) if load.buffer in names]
            changed = with_formulas(step, {load: self._formula(load) for load in found})
            if sum(1 for _ in loads(changed.array.body)) > _MAX_LOADS:
                break
            array = changed.array
            body = map_expr(array.body, _asked_once)
            smaller = simplify_array(Array(array.axes, body))
            step = Compute(step.output, smaller, step.origin)
            names = self._elsewhere(i, step)
            stored = self._values.nbytes(names)
            if stored <= least:
                best, least = step, stored
        return best

    def _elsewhere(self, i: int, reader: Compute) -> list[str]:
        """The cheap values that the reader wants in another order."""
        return [name for name in reader.reads if self._is_elsewhere(i, reader, name)]

    def _formula(self, load: Load) -> Expr:
        source = self._steps[self._values.writers[load.buffer][-1]]
        assert isinstance(source, Compute)
        return formula_at(source, load.index, load.mask)

    def _is_elsewhere(self, i: int, reader: Compute, name: str) -> bool:
        """Whether the value is cheap, its operands are still what they were, and the reader does
        not find it at its own place."""
        if name not in self._cheap:
            return False
        writers = self._values.writers
        made = writers[name][-1]
        source = self._steps[made]
        assert isinstance(source, Compute)
        if any(made < at <= i for read in source.reads for at in writers.get(read, ())):
            return False
        elements = reader.output.numel
        if not same(elements, source.output.numel):
            return sample_of(elements) <= _MOST * sample_of(source.output.numel)
        nest, number = self._nests.plain(1, elements), reader.reads.index(name)
        mine, theirs = (self._nests.placement(step, nest) for step in (reader, source))
        assert mine is not None
        assert theirs is not None
        return any(read == number and index != theirs.index for read, index in mine.reads)

    def _is_cheap(self, step: Compute) -> bool:
        """Whether to compute the step's value where it is read costs no more than to read it, and
        nobody needs it stored."""
        name = step.output.buffer
        return (
            self._values.is_whole(step)
            and self._values.is_simple(step.template, REORDERED)
            and self._is_passing(name)
            and all(self._is_in_memory(name, read) for read in step.reads)
        )

    def _is_passing(self, name: str) -> bool:
        """Whether a value is a temporary that few pointwise steps close by read, and no other."""
        if not self._values.may_vanish(name) or self._values.is_late(name):
            return False
        readers = [self._steps[at] for at in self._values.readers.get(name, ())]
        pointwise = all(
            isinstance(reader, Compute) and not isinstance(reader.template.body, Reduce)
            for reader in readers
        )
        return pointwise and sum(_count(reader, name) for reader in readers) <= _MAX_READS

    def _is_in_memory(self, name: str, operand: str) -> bool:
        """Whether an operand is in memory anyway, or small, or cheap itself. What an input is may
        change until the reader; a temporary that is written in parts is none of these."""
        values = self._values
        if not values.is_temporary(operand):
            return True
        if not values.is_fixed(operand):
            return False
        if operand in values.pinned or operand in self._cheap:
            return True
        if values.source(operand) is None or values.is_late(operand):
            return True
        return values.is_small(values.nbytes((operand,)), values.nbytes((name,)))


def _asked_once(node: Expr) -> Expr:
    """``where(c, f(where(c, x, y)), z)`` as ``where(c, f(x), z)``."""
    if not (isinstance(node, Apply) and node.fn == "where"):
        return node
    condition, yes, no = node.operands

    def simplified(inner: Expr) -> Expr:
        match inner:
            case Apply("where", (asked, found, _)) if asked == condition:
                return found
            case _:
                return inner

    return Apply("where", (condition, map_expr(yes, simplified), no), node.dtype)


def _count(step: Step, name: str) -> int:
    """How many loads of a step are of that buffer."""
    if not isinstance(step, Compute):
        return 0
    names = step.names
    return sum(names[load.buffer] == name for load in loads(step.template.body))
