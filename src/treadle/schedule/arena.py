"""Bytes for temporaries: one arena, offsets fixed at compile time.

A buffer lives from the first step that writes it to the last that uses it. Blocks are placed
largest first, each at the smallest gap that fits between the blocks alive at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
Places = npt.NDArray[np.int64]


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
    firsts, lasts, begins, ends = np.zeros((4, len(intervals)), dtype=np.int64)
    size = 0
    ordered = sorted(
        intervals, key=lambda interval: (-interval.nbytes, interval.first, interval.name)
    )
    for count, interval in enumerate(ordered):
        need = _aligned(interval.nbytes)
        alive = (firsts[:count] <= interval.last) & (lasts[:count] >= interval.first)
        begin = _best_gap(begins[:count][alive], ends[:count][alive], need, size)
        offsets[interval.name] = begin
        firsts[count], lasts[count] = interval.first, interval.last
        begins[count], ends[count] = begin, begin + need
        size = max(size, begin + need)
    return offsets, size


def _best_gap(begins: Places, ends: Places, need: int, size: int) -> int:
    """Begin of the smallest gap of at least ``need`` bytes, the first of several; past the last
    block if there is none. Blocks are from ``begins`` to ``ends``.

    The space up to ``size`` counts as a gap as well: it costs nothing.
    """
    order = np.argsort(begins)
    free = np.concatenate(([0], np.maximum.accumulate(ends[order])))
    gaps = np.append(begins[order], size) - free
    wide = gaps >= need
    if not wide.any():
        return int(free[-1])
    return int(free[np.where(wide, gaps, size + 1).argmin()])


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
