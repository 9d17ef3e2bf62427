"""The peak bytes of a step in a given order: what every plan is judged by.

Inputs are alive all the time. Every other storage is counted once, from the operation that
fills it to the last one that reads it or any view of it; results live to the end.

Two rules stand for what scheduling does later, each with a switch in ``Model``:

- *fusion*: a fusible value is never stored if everything that reads it is fusible, in its own
  phase, and on one **level**: the number of unfusible operations on the longest path to it.
  The head of the forward pass, after its last unfusible operation, belongs to the backward pass.
  It is then computed where it is read, so its operands live until there.
- *in place*: a result that is written back takes the bytes of its input, if nothing reads the
  old value later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from treadle.graph.signature import StepGraph
from treadle.passes.memory.cost import FUSIBLE, Kind
from treadle.passes.memory.order import Order, as_traced, facts_of

_FAR = 1 << 40
_PHASE = 1 << 20  # levels of different phases never meet


@dataclass(frozen=True, slots=True)
class Model:
    """What scheduling is expected to do."""

    fusion: bool = True
    in_place: bool = True


@dataclass(frozen=True)
class LiveBytes:
    """``live[k]``: bytes alive during operation ``k``, inputs included.

    ``at_peak``: the largest values of the peak first, as ``(bytes, operation)``.
    """

    order: Order
    peak_bytes: int
    peak: int
    live: tuple[int, ...]
    peak_table: tuple[tuple[int, int], ...]

    @property
    def at_peak(self) -> list[tuple[int, str]]:
        facts, origin = self.order.facts, self.order.origin
        return [(size, str(facts.nodes[origin[k]])) for size, k in self.peak_table]


def simulate(
    step: StepGraph, *, order: Sequence[fx.Node] | None = None, model: Model = Model()
) -> LiveBytes:
    """The timeline of a step, in graph order unless another order of its nodes is given."""
    facts = facts_of(step)
    traced = as_traced(facts)
    if order is not None:
        index = {node: i for i, node in enumerate(facts.nodes)}
        traced = traced.permuted(index[node] for node in order)
    return timeline(traced, model)


def timeline(order: Order, model: Model = Model()) -> LiveBytes:
    place, stored = _fuse(order) if model.fusion else _unfused(order)
    slots, start, size, owner = _storages(order, place, stored)
    end = list(start)
    for k, operands in enumerate(order.operands):
        for operand in operands:
            for slot in slots[operand]:
                end[slot] = max(end[slot], place[k])
    _keep_results(order, slots, place, end, size, model)
    return _sweep(order, start, end, size, owner)


def _unfused(order: Order) -> tuple[list[int], list[bool]]:
    count = len(order.origin)
    return list(range(count)), [True] * count


def _fuse(order: Order) -> tuple[list[int], list[bool]]:
    """Where each operation really happens, and whether its value is stored."""
    facts, origin = order.facts, order.origin
    count = len(origin)
    level = [0] * count
    for k, operands in enumerate(order.operands):
        step = level[k]
        for operand in operands:
            kind = facts.kinds[origin[operand]]
            fresh = kind not in FUSIBLE and kind is not Kind.VIEW and kind is not Kind.INPUT
            step = max(step, level[operand] + fresh)
        level[k] = step
    low, high, last = [_FAR] * count, [-1] * count, list(range(count))
    for result in order.returned:
        if result is not None:
            low[result] = -1
    place, stored = list(range(count)), [True] * count
    for k in range(count - 1, -1, -1):
        kind = facts.kinds[origin[k]]
        late = order.again[k] or origin[k] >= facts.head
        phase = max(facts.phases[origin[k]], late) * _PHASE
        if kind is Kind.VIEW:
            reader, reader_high = low[k], high[k]
        elif kind in FUSIBLE:
            if low[k] == high[k] and low[k] // _PHASE == phase // _PHASE:
                place[k], stored[k], reader = last[k], False, low[k]
            else:
                reader = phase + level[k]
            reader_high = reader
        else:
            reader = reader_high = -1  # reads from memory
        for operand in order.operands[k]:
            low[operand] = min(low[operand], reader)
            high[operand] = max(high[operand], reader_high)
            last[operand] = max(last[operand], last[k] if kind is Kind.VIEW else place[k])
    return place, stored


def _storages(
    order: Order, place: list[int], stored: list[bool]
) -> tuple[list[tuple[int, ...]], list[int], list[int], list[int]]:
    """Per operation its storages; per storage its start, bytes, and the operation filling it."""
    facts = order.facts
    slots: list[tuple[int, ...]] = []
    start: list[int] = []
    size: list[int] = []
    owner: list[int] = []
    for k, i in enumerate(order.origin):
        mine: list[int] = []
        for source, nbytes in zip(facts.inherits[i], facts.sizes[i], strict=True):
            if source is not None:
                mine.append(slots[order.operands[k][source[0]]][source[1]])
                continue
            mine.append(len(start))
            start.append(place[k])
            size.append(nbytes if stored[k] and facts.kinds[i] is not Kind.INPUT else 0)
            owner.append(k)
        slots.append(tuple(mine))
    return slots, start, size, owner


def _keep_results(
    order: Order,
    slots: list[tuple[int, ...]],
    place: list[int],
    end: list[int],
    size: list[int],
    model: Model,
) -> None:
    """Results live to the end, except those that can be filled into the input they replace."""
    position = {i: k for k, i in enumerate(order.origin) if order.facts.kinds[i] is Kind.INPUT}
    for number, result in enumerate(order.returned):
        if result is None:
            continue
        target = order.facts.writes.get(number)
        held = slots[result]
        if target is not None and model.in_place and len(held) == 1:
            old = slots[position[target]]
            if all(end[slot] <= place[result] for slot in old):
                size[held[0]] = 0
                continue
        for slot in held:
            end[slot] = len(order.origin)


def _sweep(
    order: Order, start: list[int], end: list[int], size: list[int], owner: list[int]
) -> LiveBytes:
    count = len(order.origin)
    delta = [0] * (count + 2)
    for first, final, nbytes in zip(start, end, size, strict=True):
        delta[first] += nbytes
        delta[final + 1] -= nbytes
    live: list[int] = []
    current = order.facts.fixed_bytes
    for k in range(count):
        current += delta[k]
        live.append(current)
    if not live:
        return LiveBytes(order, current, 0, (), ())
    peak = max(range(count), key=live.__getitem__)
    table = [
        (size[s], owner[s]) for s in range(len(size)) if size[s] and start[s] <= peak <= end[s]
    ]
    table.sort(key=lambda row: (-row[0], row[1]))
    return LiveBytes(order, live[peak], peak, tuple(live), tuple(table))
