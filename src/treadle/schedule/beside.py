"""Temporaries beside the arena, where the arena would lie idle while library calls need most.

The arena is there during the whole step, as large as its fullest moment. What calls allocate comes
beside it, and its fullest moment is another one::

    peak  =  max over steps of (alive in the arena)  +  max over steps of (allocated by calls)
    floor =  max over steps of (alive in the arena   +   allocated by calls)

A block that is alive where the arena is full, and dead where calls need most, is allocated at its
first write and freed after its last use, as a call's result is. The rest of the arena is smaller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from treadle.loop.kernel import Kernel
from treadle.loop.program import Call
from treadle.schedule.arena import ALIGNMENT, Interval

_LEAST = 1 << 16
"""Bytes that are worth an allocation and a release in every call."""


def blocks_beside(blocks: Sequence[Interval], busy: Sequence[int]) -> frozenset[str]:
    """The names of blocks to allocate apart. ``busy``: what calls hold at each step, and after the
    last. No step holds more than the floor by it."""
    alive = [0] * len(busy)
    for free in blocks:
        for at in range(free.first, min(free.last + 1, len(busy))):
            alive[at] += free.nbytes
    floor = max(a + b for a, b in zip(alive, busy, strict=True))
    room = floor - max(busy)
    moved: set[str] = set()
    if max(alive) - room < _LEAST:
        return frozenset()
    outside = list(busy)
    fullest = sorted((at for at, size in enumerate(alive) if size > room), key=lambda i: -alive[i])
    for at in fullest:
        here = [b for b in blocks if b.first <= at <= b.last and b.name not in moved]
        while alive[at] > room:
            block = _next(here, alive[at] - room, outside, floor - room)
            if block is None:
                break
            here.remove(block)
            moved.add(block.name)
            for i in range(block.first, min(block.last + 1, len(busy))):
                alive[i] -= block.nbytes
                outside[i] += block.nbytes
    return frozenset(moved)


def _next(
    here: Sequence[Interval], excess: int, outside: Sequence[int], most: int
) -> Interval | None:
    """The smallest block that is enough, or the largest, of those that fit beside the others."""
    fits = [
        interval
        for interval in here
        if interval.nbytes >= ALIGNMENT
        and max(outside[interval.first : interval.last + 1]) + interval.nbytes <= most
    ]
    enough = [interval for interval in fits if interval.nbytes >= excess]
    if enough:
        return min(enough, key=lambda interval: (interval.nbytes, interval.name))
    return max(fits, key=lambda interval: (interval.nbytes, interval.name), default=None)


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
