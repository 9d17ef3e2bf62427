"""A reader that wants a cheap value in another order computes it there.

::

    before:  y[b, h, t] = x[b, t, h] * s[t];   z[b, t, h] = x[b, t, h] * c[t] + y[b, h, t]
    after:   z[b, t, h] = x[b, t, h] * c[t] + x[b, t, h] * s[t]

A value stays in a register only for a reader at its own place of a nest; for one that transposes,
slices or joins it would be stored, and read again. Rotary embeddings of attention are made of such
values. The formula is the same one, so the numbers are.
"""

from collections.abc import Mapping, Sequence

from treadle.algebra.extents import same, sample_of
from treadle.loop.expr import Apply, Array, Expr, Load, Reduce
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Step, TensorRef
from treadle.loop.simplify import simplify_array
from treadle.loop.traverse import loads, map_expr
from treadle.schedule.cheap import is_simple
from treadle.schedule.depend import read_buffers, written_buffers
from treadle.schedule.loop_nest import LoopNests
from treadle.schedule.sparse import formula_at, with_formulas

_NEAR = 48  # steps; a reader further away finds the value stored
_MAX_READS = 3
"""Loads of a value, all readers together: each computes it again."""
_MAX_APPLIES = 8
_MAX_LOADS = 12
"""Of a reader, when all is put in its place."""
_MAX_DEPTH = 8
_SMALL = 4
"""What has that many times fewer bytes than a value is read along with it for next to nothing."""


def compute_where_read(
    steps: Sequence[Step],
    buffers: Mapping[str, Buffer],
    nests: LoopNests,
    results: frozenset[str],
) -> tuple[Step, ...]:
    """Every pointwise step with the formulas of cheap values that it reads in another order, where
    none of their readers needs them stored."""
    return _Mover(steps, buffers, nests, results).moved()


class _Mover:
    def __init__(
        self,
        steps: Sequence[Step],
        buffers: Mapping[str, Buffer],
        nests: LoopNests,
        results: frozenset[str],
    ) -> None:
        self._steps = list(steps)
        self._buffers = buffers
        self._nests = nests
        self._stored = set(results)  # whatever is done here
        self._source: dict[str, int] = {}
        self._writes: dict[str, list[int]] = {}
        self._readers: dict[str, list[int]] = {}
        for i, step in enumerate(steps):
            for name in written_buffers(step):
                self._source[name] = i
                self._writes.setdefault(name, []).append(i)
            for name in read_buffers(step):
                self._readers.setdefault(name, []).append(i)
            if isinstance(step, Call):
                self._stored.update(read_buffers(step))
        self._simple: dict[Array, bool] = {}
        self._cheap: set[str] = set()
        for i, step in enumerate(steps):
            if isinstance(step, Compute) and self._is_cheap(i, step):
                self._cheap.add(step.output.buffer)

    def moved(self) -> tuple[Step, ...]:
        for i, step in enumerate(self._steps):
            if isinstance(step, Compute) and not self._cheap.isdisjoint(step.reads):
                self._steps[i] = self._resolved(i, step)
        return tuple(self._steps)

    def _resolved(self, i: int, step: Compute) -> Compute:
        """The reader with formulas in the place of loads: of all depths one that has the fewest
        bytes stored for it. Where formulas get too long, operands of theirs may be larger."""
        if isinstance(step.template.body, Reduce):
            return step
        best, least = step, self._stored_for(i, step)
        for _ in range(_MAX_DEPTH):
            names = {name for name in step.reads if self._is_elsewhere(i, step, name)}
            found = [each for each in loads(step.array.body) if each.buffer in names]
            new = {each: self._formula(each) for each in found}
            changed = with_formulas(step, new)
            if not new or sum(1 for _ in loads(changed.array.body)) > _MAX_LOADS:
                break
            array = changed.array
            body = map_expr(array.body, _asked_once)
            smaller = simplify_array(Array(array.axes, body))
            step = Compute(step.output, smaller, step.origin)
            stored = self._stored_for(i, step)
            if stored <= least:
                best, least = step, stored
        return best

    def _stored_for(self, i: int, reader: Compute) -> int:
        """Bytes of the cheap values that the reader wants in another order."""
        wanted = (each for each in reader.reads if self._is_elsewhere(i, reader, each))
        return sum(sample_of(self._buffers[each].nbytes) for each in wanted)

    def _formula(self, load: Load) -> Expr:
        source = self._steps[self._source[load.buffer]]
        assert isinstance(source, Compute)
        return formula_at(source, load.index, load.mask)

    def _is_elsewhere(self, i: int, reader: Compute, name: str) -> bool:
        """Whether the value is cheap, its operands are still what they were, and the reader does
        not find it at its own place."""
        if name not in self._cheap:
            return False
        made = self._source[name]
        source = self._steps[made]
        assert isinstance(source, Compute)
        if any(made < at <= i for each in source.reads for at in self._writes.get(each, ())):
            return False
        elements = reader.output.numel
        if not same(elements, source.output.numel):
            return sample_of(elements) <= _SMALL * sample_of(source.output.numel)
        nest = self._nests.plain(1, elements)
        mine, theirs = self._nests.place(i, reader, nest), self._nests.place(0, source, nest)
        assert mine is not None
        assert theirs is not None
        places = [index for read, index in mine.reads if read == name]
        return any(index != theirs.index for index in places)

    def _is_cheap(self, i: int, step: Compute) -> bool:
        """Whether to compute the step's value where it is read costs no more than to read it, and
        nobody needs it stored."""
        name = step.output.buffer
        buffer = self._buffers[name]
        return (
            step.output == TensorRef(name, buffer.dtype, buffer.shape, buffer.strides)
            and self._is_simple(step.template)
            and self._is_passing(i, name)
            and all(self._is_at_hand(i, name, each) for each in read_buffers(step))
        )

    def _is_simple(self, template: Array) -> bool:
        if template not in self._simple:
            self._simple[template] = is_simple(template.body, _MAX_APPLIES)
        return self._simple[template]

    def _is_passing(self, i: int, name: str) -> bool:
        """Whether a value is a temporary that few pointwise steps close by read, and no other."""
        ours = self._buffers[name].kind is BufferKind.TEMPORARY
        if (
            not ours
            or len(self._writes[name]) != 1
            or name in self._stored
            or self._is_late(i, name)
        ):
            return False
        readers = [self._steps[at] for at in self._readers.get(name, ())]
        pointwise = all(
            isinstance(each, Compute) and not isinstance(each.template.body, Reduce)
            for each in readers
        )
        return pointwise and sum(_count(each, name) for each in readers) <= _MAX_READS

    def _is_late(self, i: int, name: str) -> bool:
        """Whether a reader far away, or of another phase, wants the value."""
        last = self._readers.get(name, [i])[-1]
        return last - i > _NEAR or self._steps[last].origin.phase != self._steps[i].origin.phase

    def _is_at_hand(self, i: int, name: str, operand: str) -> bool:
        """Whether an operand is in memory anyway, or small, or cheap itself. What an input is may
        change until the reader; a temporary that is written in parts is none of these."""
        if self._buffers[operand].kind is not BufferKind.TEMPORARY:
            return True
        if len(self._writes.get(operand, ())) != 1:
            return False
        made = self._source.get(operand)
        if made is None or operand in self._stored or operand in self._cheap:
            return True
        if isinstance(self._steps[made], Call) or self._is_late(made, operand):
            return True
        sizes = [sample_of(self._buffers[each].nbytes) for each in (operand, name)]
        return sizes[0] * _SMALL <= sizes[1]


def _asked_once(node: Expr) -> Expr:
    """``where(c, f(where(c, x, y)), z)`` as ``where(c, f(x), z)``."""
    if not (isinstance(node, Apply) and node.fn == "where"):
        return node
    condition, yes, no = node.operands

    def settled(inner: Expr) -> Expr:
        match inner:
            case Apply("where", (asked, found, _)) if asked == condition:
                return found
            case _:
                return inner

    return Apply("where", (condition, map_expr(yes, settled), no), node.dtype)


def _count(step: Step, name: str) -> int:
    """How many loads of a step are of that buffer."""
    if not isinstance(step, Compute):
        return 0
    names = step.names
    return sum(names[each.buffer] == name for each in loads(step.template.body))
