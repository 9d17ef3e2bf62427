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
    left = [block for block in blocks if block.nbytes >= ALIGNMENT]
    for at in fullest:
        while alive[at] > room:
            here = [block for block in left if block.first <= at <= block.last]
            fits = [block for block in here if _fits(block, outside, floor - room)]
            gone = {block.name for block in here} - {block.name for block in fits}
            if fits:
                block = _smallest_that_is_enough(fits, int(alive[at]) - room)
                gone.add(block.name)
                moved.add(block.name)
                alive[block.first : block.last + 1] -= block.nbytes
                outside[block.first : block.last + 1] += block.nbytes
            # what does not fit now never will: there is only more outside
            left = [block for block in left if block.name not in gone]
            if not fits:
                break
    return frozenset(moved)


def _fits(block: Interval, outside: Bytes, most: int) -> bool:
    """Whether a block fits beside the others that are outside the arena."""
    return int(outside[block.first : block.last + 1].max()) + block.nbytes <= most


def _smallest_that_is_enough(blocks: Sequence[Interval], excess: int) -> Interval:
    """The largest if none is."""
    enough = [block for block in blocks if block.nbytes >= excess]
    if enough:
        return min(enough, key=lambda block: (block.nbytes, block.name))
    return max(blocks, key=lambda block: (block.nbytes, block.name))


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
