"""The smallest peak of a small step within a time, over retention intervals, as an integer program.

**What it is the minimum of.** All plans that run the library calls of the later phases once, in the
order of the graph, and after the forward pass. Between two of them, any value of the forward pass
may be computed again, any number of times. A plan decides for each value at which of these calls it
is in memory. The peak is counted at the calls ``p``, as ``simulate`` counts it::

    peak  =  max over p of  inputs + operands and result of p + bytes in memory for later

For each call ``p``, ``q`` the one before it, and each value ``v``::

    held(v, p)    v is in memory while p runs, for something after p
    now(v, p)     v is computed again between q and p

    minimise  peak  so that
    held(v, q) + now(v, p) >= 1              p reads v
    held(v, p) <= held(v, q) + now(v, p)
    now(v, p)  <= held(u, q) + now(u, p)     v is computed from u
    now(v, p)  =  0                          v happens once, or is a call of a later phase
    sum(seconds(v) * now(v, p)) <= seconds of the plan - seconds if each value is computed once

Everything that the forward pass computes is there for the first call, and so is the result of ``q``
for ``p``. After the last call the results of the step are needed. Formulas are computed again for
nothing, so the minimum is a **lower bound** of the peak of every such plan. In a step of library
calls alone, it leaves out only what is in memory between two calls while others are made again.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from treadle.graph.core.node_info import value_of
from treadle.passes.memory.bound import PeakBound, StepBound
from treadle.passes.memory.classify import can_keep
from treadle.passes.memory.cost import CALLS, Kind
from treadle.util.errors import PlanError

MOST_VARIABLES = 40_000
"""Of the program; a larger one would take hours."""
_BRANCHES = 20_000
_GAP = 1e-3
_TOLERANCE = 1e-6
"""Of HiGHS, by which constraints may be missed."""


@dataclass(frozen=True, slots=True)
class RetentionOptimum:
    """``bound_bytes``: no plan of the kind has a smaller peak within the time. ``saved``: positions
    of what the plan found keeps; ``is_optimal``: whether the program was solved to its end."""

    bound_bytes: int
    saved: frozenset[int]
    is_optimal: bool


def retention_optimum(bound: PeakBound, seconds: float) -> RetentionOptimum | None:
    """The minimum for plans that are estimated at ``seconds``; ``None`` if nothing was found within
    the limit of branches. ``PlanError`` TR-208 for a step that is too large."""
    return _Retention(bound, seconds).solved()


@dataclass
class _Rows:
    """Constraints ``low <= entries . variables``, as lists."""

    row: list[int] = field(default_factory=list[int])
    column: list[int] = field(default_factory=list[int])
    entry: list[float] = field(default_factory=list[float])
    low: list[float] = field(default_factory=list[float])

    def add(self, terms: Iterable[tuple[int, float]], low: float) -> None:
        for column, entry in terms:
            self.row.append(len(self.low))
            self.column.append(column)
            self.entry.append(entry)
        self.low.append(low)


class _Retention:
    """Variables: the peak, then ``held`` and ``now`` of each value for each call ``p``; after the
    last one ``now`` alone, for the end."""

    def __init__(self, bound: PeakBound, seconds: float) -> None:
        self.bound, self.facts = bound, bound.facts
        self.spare = max(seconds - bound.fused.once, 0.0)
        facts = self.facts
        self.members = [i for i in sorted(bound.alive) if facts.kinds[i] is not Kind.INPUT]
        self.late = [i for i in self.members if self._is_late_call(i)]
        self.place = {i: 1 + 2 * n for n, i in enumerate(self.members)}
        self.count = 1 + 2 * len(self.members) * (len(self.late) + 1)
        if self.count > MOST_VARIABLES:
            raise PlanError(
                f"the step is too large for an exact answer: the integer program would have "
                f"{self.count} variables, more than {MOST_VARIABLES}",
                code="TR-208",
                remedy="leave exact out; the lower bound (bound_bytes) needs no integer program",
            )
        self.unit = float(max(facts.fixed_bytes, *map(facts.held_bytes, self.members), 1))
        self.upper = np.ones(self.count)
        self.upper[0] = math.inf
        self.rows = _Rows()

    def _is_late_call(self, i: int) -> bool:
        return self.facts.phases[i] > 0 and self.facts.kinds[i] in CALLS

    def held(self, i: int, at: int) -> int:
        return self.place[i] + 2 * at * len(self.members)

    def now(self, i: int, at: int) -> int:
        return self.held(i, at) + 1

    def solved(self) -> RetentionOptimum | None:
        from scipy.optimize import milp  # late, as in ``minimum_cut``
        from scipy.sparse import csr_matrix

        if not self.late:
            return None
        for at in range(len(self.late) + 1):
            self._between(at)
        for at in range(len(self.late)):
            self._count_bytes(at)
        self._limit_seconds()
        rows = self.rows
        shape = len(rows.low), self.count
        matrix = csr_matrix((rows.entry, (rows.row, rows.column)), shape=shape)
        costs, whole = np.zeros(self.count), np.ones(self.count)
        costs[0], whole[0] = 1, 0
        found = milp(
            costs,
            integrality=whole,
            bounds=(np.zeros(self.count), self.upper),
            constraints=(matrix, np.array(rows.low), np.full(len(rows.low), math.inf)),
            options={"mip_rel_gap": _GAP, "node_limit": _BRANCHES},
        )
        if found.x is None or found.mip_dual_bound is None:
            return None
        least = max(int(found.mip_dual_bound * self.unit * (1 - _TOLERANCE)), 0)
        return RetentionOptimum(least, self._saved(found.x), found.status == 0)

    def _is_there(self, i: int, at: int) -> bool:
        """Whether ``i`` is in memory right after call ``at - 1`` whatever is held: an input, its
        result, or at the beginning what the forward pass has computed."""
        if i not in self.place or (at and i == self.late[at - 1]):
            return True
        return at == 0 and self.facts.phases[i] == 0

    def _sources(self, i: int, at: int) -> list[tuple[int, float]]:
        """What makes ``i`` available between call ``at - 1`` and call ``at``."""
        held = [(self.held(i, at - 1), 1.0)] if at else []
        return [*held, (self.now(i, at), 1.0)]

    def _between(self, at: int) -> None:
        """The constraints between call ``at - 1`` and call ``at``, or the end."""
        facts, is_end = self.facts, at == len(self.late)
        ends = [i for i in facts.returned if i is not None]
        for i in self.members:
            now, held = self.now(i, at), self.held(i, at)
            if self._is_late_call(i) or (facts.keep[i] and not self._is_there(i, at)):
                self.upper[now] = 0
            for operand in dict.fromkeys(facts.operands[i]):
                if not self._is_there(operand, at) and not self._is_there(i, at):
                    self.rows.add((*self._sources(operand, at), (now, -1.0)), 0.0)
            if is_end or isinstance(value_of(facts.nodes[i]), tuple | list):
                self.upper[held] = 0
            elif not self._is_there(i, at):
                self.rows.add((*self._sources(i, at), (held, -1.0)), 0.0)
        for i in dict.fromkeys(ends if is_end else facts.operands[self.late[at]]):
            if not self._is_there(i, at):
                self.rows.add(self._sources(i, at), 1.0)

    def _count_bytes(self, at: int) -> None:
        bound, p = self.bound, self.late[at]
        there = {bound.base(operand) for operand in self.facts.operands[p]}
        result = 0 if bound.is_leaving(p) else self.facts.new_bytes(p)
        fixed = bound.fixed_bytes + bound.operand_bytes(p) + result
        sizes = ((i, bound.kept_bytes(i)) for i in self.members if bound.base(i) not in there)
        terms = [(self.held(i, at), -size / self.unit) for i, size in sizes if size]
        self.rows.add([(0, 1.0), *terms], fixed / self.unit)

    def _limit_seconds(self) -> None:
        """What the forward pass computes is paid for from the first call on."""
        again, kinds = self.bound.fused.again, self.facts.kinds
        calls = [i for i in self.members if kinds[i] in CALLS and not self._is_late_call(i)]
        total = max(sum(again[i] for i in calls), 1e-30)
        terms = [
            (self.now(i, at), -again[i] / total)
            for i in calls
            for at in range(1, len(self.late) + 1)
        ]
        self.rows.add(terms, -self.spare / total)

    def _saved(self, x: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> frozenset[int]:
        """Calls that are never made again, and formulas that are in memory at the first call."""
        facts, places = self.facts, range(1, len(self.late) + 1)
        forward = [i for i in self.members if facts.phases[i] == 0 and can_keep(facts, i)]
        return frozenset(
            i
            for i in forward
            if (facts.kinds[i] in CALLS or x[self.held(i, 0)] > 0.5)
            and not any(x[self.now(i, at)] > 0.5 for at in places)
        )


def step_optimum(bound: StepBound, seconds: float) -> int:
    """The minimum of all versions of a step; of one without an answer, its bound."""
    return min(_of_version(version, seconds) for version in bound.bounds)


def _of_version(bound: PeakBound, seconds: float) -> int:
    found = retention_optimum(bound, seconds)
    return max(bound.within(seconds), found.bound_bytes if found else 0)
