"""The peak bytes of a step in a given order, by which every plan is evaluated.

Inputs are alive all the time. Every other storage is counted once, from the operation that
fills it to the last one that reads it or any view of it; results live to the end.

Two rules approximate what scheduling does later:

- *fusion*: a fusible value is never stored if everything that reads it is fusible, in its own
  phase, and on one **level**: the number of unfusible operations on the longest path to it. The
  head of the forward pass, after its last unfusible operation, belongs to the backward pass. It is
  then computed where it is read, so its operands live until there. A full reduction is stored once
  it is computed.
- *in place*: a result that is written back reuses the bytes of its input, if nothing reads the old
  value later. A product that is added to a sum reuses the bytes of that in the same way.
"""

import itertools
from dataclasses import dataclass

from treadle.passes.memory.order import PHASE, Order

_FAR = 1 << 60


@dataclass(frozen=True)
class LiveBytes:
    """``at_peak``: the largest values of the peak first, as ``(bytes, operation)``."""

    order: Order
    peak_bytes: int
    peak: int
    peak_table: tuple[tuple[int, int], ...]

    @property
    def at_peak(self) -> list[tuple[int, str]]:
        """Bytes and names of what is alive at the peak, largest first."""
        facts, origin = self.order.facts, self.order.origin
        return [(size, str(facts.nodes[origin[k]])) for size, k in self.peak_table]


@dataclass(frozen=True)
class Lifetimes:
    """Of an order. ``place[k]``: where operation ``k`` really happens, and ``slots[k]`` its
    storages; of each storage ``start`` and ``end``, the places of the operation that fills it and
    of the last that reads it, the bytes ``size``, and the operation that is its ``owner``."""

    order: Order
    place: list[int]
    slots: list[tuple[int, ...]]
    start: list[int]
    end: list[int]
    size: list[int]
    owner: list[int]

    def alive(self) -> list[int]:
        """Bytes at each place."""
        count = len(self.order.origin)
        delta = [0] * (count + 2)
        for first, final, nbytes in zip(self.start, self.end, self.size, strict=True):
            delta[first] += nbytes
            delta[final + 1] -= nbytes
        delta[0] += self.order.facts.fixed_bytes
        return list(itertools.accumulate(delta[:count]))

    def readers(self) -> list[list[int]]:
        """The operations that read each storage, or a view of it, in order."""
        found: list[list[int]] = [[] for _ in self.size]
        for k, operands in enumerate(self.order.operands):
            for slot in {slot for operand in operands for slot in self.slots[operand]}:
                found[slot].append(k)
        return found


def timeline(order: Order) -> LiveBytes:
    """The bytes alive at each place of an order."""
    return _peak(lifetimes_of(order))


def lifetimes_of(order: Order) -> Lifetimes:
    """When each storage of an order is there."""
    place, stored = _fuse(order)
    slots, start, size, owner = _storages(order, place, stored)
    end = list(start)
    for k, operands in enumerate(order.operands):
        here = place[k]
        for operand in operands:
            for slot in slots[operand]:
                if end[slot] < here:
                    end[slot] = here
    lives = Lifetimes(order, place, slots, start, end, size, owner)
    _keep_results(lives)
    _continue_in_place(lives)
    return lives


def _fuse(order: Order) -> tuple[list[int], list[bool]]:
    """Where each operation really happens, and whether its value is stored.

    From the last operation to the first; of those that read a value: ``low`` and ``high`` are the
    lowest and highest of their levels, -1 for one that reads from memory, and ``last`` is the
    last of their places.
    """
    origin, count = order.origin, len(order.origin)
    levels = _levels(order)
    views, fusible, condensed = order.facts.views, order.facts.fusible, order.facts.condensed
    low, high, last = [_FAR] * count, [-1] * count, list(range(count))
    for result in order.returned:
        if result is not None:
            low[result] = -1
    place, stored = list(range(count)), [True] * count
    for k in range(count - 1, -1, -1):
        i = origin[k]
        if views[i]:
            reader, reader_high, end = low[k], high[k], last[k]
        elif fusible[i]:
            reader = levels[k]
            alike = low[k] == high[k] and low[k] // PHASE == reader // PHASE
            if alike and not condensed[i]:
                place[k], stored[k], reader = last[k], False, low[k]
            reader_high, end = reader, place[k]
        else:
            reader, reader_high, end = -1, -1, k
        for operand in order.operands[k]:
            if reader < low[operand]:
                low[operand] = reader
            if reader_high > high[operand]:
                high[operand] = reader_high
            if end > last[operand]:
                last[operand] = end
    return place, stored


def _levels(order: Order) -> list[int]:
    """The phase, the chunk of rows and the level of each operation, as one number."""
    first, again = order.facts.places
    return [
        again[i] if is_again else first[i]
        for i, is_again in zip(order.origin, order.again, strict=True)
    ]


def _storages(
    order: Order, place: list[int], stored: list[bool]
) -> tuple[list[tuple[int, ...]], list[int], list[int], list[int]]:
    """Per operation its storages; per storage its start, bytes, and the operation filling it."""
    inherits, filled, alone = order.facts.inherits, order.facts.filled, order.facts.alone
    slots: list[tuple[int, ...]] = []
    start: list[int] = []
    size: list[int] = []
    owner: list[int] = []
    for k, i in enumerate(order.origin):
        if alone[i]:
            slots.append((len(start),))
            start.append(place[k])
            size.append(filled[i][0] if stored[k] else 0)
            owner.append(k)
            continue
        mine: list[int] = []
        for source, nbytes in zip(inherits[i], filled[i], strict=True):
            if source is not None:
                mine.append(slots[order.operands[k][source[0]]][source[1]])
                continue
            mine.append(len(start))
            start.append(place[k])
            size.append(nbytes if stored[k] else 0)
            owner.append(k)
        slots.append(tuple(mine))
    return slots, start, size, owner


def _keep_results(lives: Lifetimes) -> None:
    """Results live to the end, except those that can be filled into the input they replace."""
    order, slots, place, end, size = lives.order, lives.slots, lives.place, lives.end, lives.size
    overwritten = order.facts.overwritten
    position = {i: k for k, i in enumerate(order.origin) if i in overwritten}
    for number, result in enumerate(order.returned):
        if result is None:
            continue
        target = order.facts.writes.get(number)
        held = slots[result]
        if target is not None and len(held) == 1:
            old = slots[position[target]]
            if all(end[slot] <= place[result] for slot in old):
                size[held[0]] = 0
                continue
        for slot in held:
            end[slot] = len(order.origin)


def _continue_in_place(lives: Lifetimes) -> None:
    """What a product is added to ends where the sum begins, if that is its last reader."""
    order, slots, end, size = lives.order, lives.slots, lives.end, lives.size
    continued = order.facts.continued
    if not continued:
        return
    for k, i in enumerate(order.origin):
        if i in continued:
            (old,), (new,) = slots[order.operands[k][continued[i]]], slots[k]
            if end[old] == lives.place[k] and 0 < size[old] == size[new]:
                end[old] -= 1


def _peak(lives: Lifetimes) -> LiveBytes:
    live = lives.alive()
    if not live:
        return LiveBytes(lives.order, lives.order.facts.fixed_bytes, 0, ())
    peak = live.index(max(live))
    start, end, size, owner = lives.start, lives.end, lives.size, lives.owner
    table = [
        (size[s], owner[s]) for s in range(len(size)) if size[s] and start[s] <= peak <= end[s]
    ]
    table.sort(key=lambda row: (-row[0], row[1]))
    return LiveBytes(lives.order, live[peak], peak, tuple(table))
