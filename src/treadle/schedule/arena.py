"""Bytes for temporaries: one arena, offsets fixed at compile time.

A buffer lives from the step that first writes it to the last that touches it. Blocks are placed
largest first, each at the smallest gap that fits between the blocks alive at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Interval:
    """``nbytes`` needed from step ``first`` to step ``last``, both included."""

    name: str
    nbytes: int
    first: int
    last: int


def pack(intervals: Sequence[Interval]) -> tuple[dict[str, int], int]:
    """Offsets by name, and the size of the arena. No two blocks overlap in time and bytes."""
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, Interval]] = []  # begin, end, interval
    size = 0
    for interval in sorted(
        intervals, key=lambda interval: (-interval.nbytes, interval.first, interval.name)
    ):
        need = _aligned(interval.nbytes)
        busy = sorted(
            (begin, end)
            for begin, end, other in placed
            if other.first <= interval.last and interval.first <= other.last
        )
        begin = _best_gap(busy, need, size)
        offsets[interval.name] = begin
        placed.append((begin, begin + need, interval))
        size = max(size, begin + need)
    return offsets, size


def _best_gap(busy: list[tuple[int, int]], need: int, size: int) -> int:
    """Begin of the smallest gap of at least ``need`` bytes; past the last block if there is none.

    The space up to ``size`` counts as a gap as well: it costs nothing.
    """
    best: tuple[int, int] | None = None
    cursor = 0
    for begin, end in [*busy, (size, size)]:
        gap = begin - cursor
        if gap >= need and (best is None or gap < best[0]):
            best = (gap, cursor)
        if end > cursor and begin < size:
            cursor = max(cursor, end)
    return cursor if best is None else best[1]


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def chained(
    intervals: Mapping[str, Interval], reuse: Mapping[str, str]
) -> tuple[list[Interval], dict[str, str]]:
    """Blocks for values that take over the bytes of a dying input.

    ``reuse[new] = old``: ``new`` is born at the step where ``old`` dies. Gives the merged
    intervals and, for each buffer, the block it lives in.
    """
    block: dict[str, str] = {}
    merged: dict[str, Interval] = {}
    for name, interval in sorted(intervals.items(), key=lambda item: (item[1].first, item[0])):
        source = reuse.get(name)
        root = block[source] if source is not None and source in block else name
        block[name] = root
        if root == name:
            merged[name] = interval
        else:
            old = merged[root]
            nbytes = max(old.nbytes, interval.nbytes)
            merged[root] = Interval(root, nbytes, old.first, max(old.last, interval.last))
    return list(merged.values()), block
