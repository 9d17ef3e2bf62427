"""Which items to take for the largest value within a capacity: a knapsack.

The items are what the fastest plan keeps. An item is as large as its bytes; its value is the time
to compute it again while all others are kept. So the values of two items that are dropped together
are only about right; a plan is evaluated as a whole afterwards.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.passes.memory.solvers.problem import SaveProblem

_BUCKETS = 8192
"""Sizes that the dynamic program tells apart."""
_BITS = 1 << 27
"""Entries of its table, a bit each: 16 MiB."""


def greedy(sizes: Sequence[int], values: Sequence[float], capacity: int) -> frozenset[int]:
    """The items with most value per byte that fit, or the best single one if that is better: at
    least half of the best value."""
    taken: set[int] = set()
    left = capacity
    order = sorted(range(len(sizes)), key=lambda i: (-values[i] / max(sizes[i], 1), i))
    for i in order:
        if sizes[i] <= left:
            taken.add(i)
            left -= sizes[i]
    single = max(
        (i for i in range(len(sizes)) if sizes[i] <= capacity),
        key=values.__getitem__,
        default=None,
    )
    if single is not None and values[single] > sum(values[i] for i in taken):
        return frozenset({single})
    return frozenset(taken)


def dynamic(
    sizes: Sequence[int], values: Sequence[float], capacity: int, buckets: int = _BUCKETS
) -> frozenset[int]:
    """By dynamic programming over capacities, in a table of at most 16 MiB.

    Sizes are multiples of a quantum, rounded up, so the capacity is never exceeded. The result is
    the best if the quantum divides all sizes; otherwise it is at least as good as the best of a
    capacity that is smaller by a quantum an item.
    """
    if sum(sizes) <= capacity:
        return frozenset(range(len(sizes)))
    if capacity <= 0:
        return frozenset(i for i, size in enumerate(sizes) if size == 0)
    quantum = _quantum(sizes, capacity, min(buckets, _BITS // len(sizes)))
    room = capacity // quantum
    best = np.zeros(room + 1)
    took: list[NDArray[np.uint8]] = []
    for size, value in zip(sizes, values, strict=True):
        weight = -(-size // quantum)
        takes = np.zeros(room + 1, dtype=np.bool_)
        if weight <= room:
            trial = best[: room + 1 - weight] + value
            takes[weight:] = trial > best[weight:]
            best[weight:] = np.where(takes[weight:], trial, best[weight:])
        took.append(np.packbits(takes))
    return _traced_back(took, [-(-size // quantum) for size in sizes], room)


def _quantum(sizes: Sequence[int], capacity: int, buckets: int) -> int:
    exact = math.gcd(*sizes)
    return exact if exact and capacity // exact <= buckets else -(-capacity // buckets)


def _traced_back(
    took: Sequence[NDArray[np.uint8]], weights: Sequence[int], room: int
) -> frozenset[int]:
    taken: set[int] = set()
    for i in range(len(took) - 1, -1, -1):
        if took[i][room // 8] >> (7 - room % 8) & 1:
            taken.add(i)
            room -= weights[i]
    return frozenset(taken)


def by_greedy(problem: SaveProblem, capacity: int) -> Collection[int]:
    """What to keep, by ``greedy``."""
    fixed, free, sizes, values = _items(problem)
    taken = greedy(sizes, values, capacity - problem.kept_bytes(fixed))
    return fixed.union(free[i] for i in taken)


def by_dynamic_program(problem: SaveProblem, capacity: int) -> Collection[int]:
    """What to keep, by ``dynamic``."""
    fixed, free, sizes, values = _items(problem)
    taken = dynamic(sizes, values, capacity - problem.kept_bytes(fixed))
    return fixed.union(free[i] for i in taken)


def _items(problem: SaveProblem) -> tuple[frozenset[int], list[int], list[int], list[float]]:
    """What cannot be dropped; the items, their sizes and values."""
    start = problem.start
    free = [i for i in sorted(start - problem.once) if problem.allows(start - {i})]
    sizes = [problem.sizes[i] or 0 for i in free]
    least = problem.recompute_seconds(start)
    values = [max(problem.recompute_seconds(start - {i}) - least, 0.0) for i in free]
    return start.difference(free), free, sizes, values
