"""Temporaries outside the arena, if the arena would be mostly idle while library calls need most
memory.

The arena exists during the whole step, as large as its fullest moment. Library calls allocate in
addition, and their largest allocation is at another moment::

    peak  =  max over steps of (alive in the arena)  +  max over steps of (allocated by calls)
    floor =  max over steps of (alive in the arena   +   allocated by calls)

A block that is alive when the arena is full, and dead when calls need most, is allocated at its
first write and freed after its last use, like a call's result. The remaining arena is smaller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from treadle.loop.kernel import Kernel
from treadle.loop.program import Call
from treadle.schedule.arena import ALIGNMENT, Interval
from treadle.schedule.pressure import Bytes

_LEAST = 1 << 16
"""Bytes that are worth an allocation and a release in every call."""


def blocks_beside(blocks: Sequence[Interval], busy: Sequence[int]) -> frozenset[str]:
    """The names of blocks to allocate apart. ``busy``: what calls hold at each step, and after the
    last. No step holds more than the floor by it."""
    outside = np.array(busy, np.int64)
    alive = np.zeros(len(busy), np.int64)
    for block in blocks:
        alive[block.first : block.last + 1] += block.nbytes
    floor = int((alive + outside).max())
    room = floor - int(outside.max())
    moved: set[str] = set()
    if alive.max() - room < _LEAST:
        return frozenset()
    fullest = sorted(np.flatnonzero(alive > room).tolist(), key=lambda at: -alive[at])
    by_size = sorted(
        [block for block in blocks if block.nbytes >= ALIGNMENT],
        key=lambda block: (block.nbytes, block.name),
    )
    firsts, lasts, sizes = _columns(by_size)
    left = np.ones(len(by_size), np.bool_)
    for at in fullest:
        while alive[at] > room:
            here = np.flatnonzero(left & (firsts <= at) & (lasts >= at))
            fitting = _most_within(outside, firsts[here], lasts[here]) + sizes[here] <= floor - room
            left[here[~fitting]] = False  # there will only be more outside
            fits = here[fitting]
            if not fits.size:
                break
            chosen = _smallest_that_is_enough(fits, sizes, int(alive[at]) - room)
            left[chosen] = False
            block = by_size[chosen]
            moved.add(block.name)
            alive[block.first : block.last + 1] -= block.nbytes
            outside[block.first : block.last + 1] += block.nbytes
    return frozenset(moved)


def _columns(blocks: Sequence[Interval]) -> tuple[Bytes, Bytes, Bytes]:
    """The first step, the last step and the bytes of each block."""
    rows = [(block.first, block.last, block.nbytes) for block in blocks]
    firsts, lasts, sizes = np.array(rows, np.int64).reshape(-1, 3).T
    return firsts, lasts, sizes


def _most_within(held: Bytes, firsts: Bytes, lasts: Bytes) -> Bytes:
    """The most that is held at a step from each of ``firsts`` to its ``lasts``."""
    ends = np.stack([firsts, lasts + 1], axis=1).reshape(-1)
    return np.maximum.reduceat(np.append(held, 0), ends)[::2] if ends.size else ends


def _smallest_that_is_enough(fits: Bytes, sizes: Bytes, excess: int) -> int:
    """Of the places of blocks, which are in order of their sizes; the largest if none is."""
    enough = np.flatnonzero(sizes[fits] >= excess)
    return int(fits[enough[0] if enough.size else -1])


def lives_beside(
    lives: Mapping[str, Interval], steps: Sequence[Kernel | Call]
) -> dict[str, Interval]:
    """When such temporaries are allocated: kernels between two calls may start together, so from
    the first of them on."""
    starts: list[int] = []
    for at, step in enumerate(steps):
        follows = at > 0 and not isinstance(steps[at - 1], Call) and not isinstance(step, Call)
        starts.append(starts[-1] if follows else at)
    return {
        name: replace(interval, first=starts[interval.first]) for name, interval in lives.items()
    }
