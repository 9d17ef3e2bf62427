"""The fewest seconds of recomputation within so many bytes, as an integer program for HiGHS.

::

    kept(v), again(v) in {0, 1}
    minimise    sum(seconds(v) * again(v))
    so that     kept(v) + again(v) >= 1              v is needed
                kept(u) + again(u) >= again(v)       v is computed from u
                sum(size(v) * kept(v)) <= capacity
                kept(v) = 0                          v cannot be kept
                again(v) = 0                         v happens once

Minimum cuts with a price give the corners of the convex hull of what this gives. It is the best for
the problem, to a gap of 1e-4, unless the limit of branches was reached.
"""

import math
from collections.abc import Collection

import numpy as np

from treadle.passes.memory.solvers.problem import SaveProblem

_BRANCHES = 2000
"""Nodes of the search tree. A limit of seconds would make plans depend on the machine."""
_GAP = 1e-4
_CAPACITIES = (1.0, 1 - 1e-6)
"""Shares of the capacity that are tried: HiGHS may exceed a limit by so little as its tolerance."""


def by_integer_program(problem: SaveProblem, capacity: int) -> Collection[int] | None:
    """What to keep; ``None`` if nothing fits, or nothing was found within the limit."""
    found = (_solved(problem, capacity, share) for share in _CAPACITIES)
    fits = (kept for kept in found if kept is None or problem.kept_bytes(kept) <= capacity)
    kept = next(fits, None)
    return kept if kept is not None and problem.allows(kept) else None


def _solved(problem: SaveProblem, capacity: int, share: float) -> frozenset[int] | None:
    from scipy.optimize import milp  # late, as in ``minimum_cut``
    from scipy.sparse import csr_matrix

    count = len(problem.sizes)
    if not count:
        return frozenset()
    sizes = np.array([size or 0 for size in problem.sizes], dtype=np.float64)
    unit = max(float(capacity), 1.0)
    rows, columns, entries, least = _demands(problem)
    number = len(least)
    rows += [number] * count
    columns += list(range(count))
    entries += list(sizes / unit)
    low = np.array([*least, -math.inf])
    high = np.array([*([math.inf] * number), max(capacity, 0) / unit * share])
    matrix = csr_matrix((entries, (rows, columns)), shape=(number + 1, 2 * count))
    upper = [0.0 if size is None else 1.0 for size in problem.sizes]
    upper += [0.0 if i in problem.once else 1.0 for i in range(count)]
    total = max(sum(problem.seconds), 1e-30)
    ties = 1e-6 * sizes / max(sizes.sum(), 1.0)  # of equal plans the one that keeps less
    costs = np.concatenate((ties, np.array(problem.seconds) / total))
    found = milp(
        costs,
        integrality=np.ones(2 * count),
        bounds=(np.zeros(2 * count), np.array(upper)),
        constraints=(matrix, low, high),
        options={"mip_rel_gap": _GAP, "node_limit": _BRANCHES},
    )
    if found.x is None:
        return None
    return frozenset(np.flatnonzero(found.x[:count] > 0.5).tolist())


def _demands(problem: SaveProblem) -> tuple[list[int], list[int], list[float], list[float]]:
    """Rows, columns and entries of the first two kinds of constraints, and their left sides."""
    count = len(problem.sizes)
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    least: list[float] = []
    for i in sorted(problem.needed):
        rows += [len(least)] * 2
        columns += [i, count + i]
        entries += [1.0, 1.0]
        least.append(1.0)
    for i, operands in enumerate(problem.operands):
        for operand in operands:
            rows += [len(least)] * 3
            columns += [operand, count + operand, count + i]
            entries += [1.0, 1.0, -1.0]
            least.append(0.0)
    return rows, columns, entries, least
