"""An order of a step's nodes by list scheduling.

At each position, the schedule puts, from the nodes whose operands are available,

1. a collective, if it is its turn and no more than a bound is on its way by then;
2. else the first that computes without having to wait;
3. else the one whose wait ends first.

Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from treadle.passes.comm.overlap.precedence import Precedence
from treadle.passes.comm.simulate import Work


@final
@dataclass(frozen=True, slots=True)
class Preference:
    """How an order is made. ``reach``: how many places ahead of the first node that is not placed
    another may be taken from. ``longest_first``: nodes with the longest way to the end of the step
    first, else in their present order. ``in_sequence``: no collective before one with a longer way
    to the end, which may come soon. ``in_flight_bytes``: that may be on their way at a time."""

    reach: int
    longest_first: bool
    in_sequence: bool
    in_flight_bytes: int


def list_schedule(work: Work, precedence: Precedence, preference: Preference) -> list[int]:
    """An order of all positions, definitions before uses; equal for equal arguments."""
    placing = _Placing(work, precedence, preference)
    while placing.place_one():
        pass
    return placing.finished()


def ways_to_end(work: Work, precedence: Precedence) -> list[float]:
    """Seconds of the longest chain of compute and collectives from each node on, itself included:
    none has a longer way than what comes before it."""
    ways = [0.0] * len(work.seconds)
    for i in reversed(precedence.placed):
        start = work.starts.get(i)
        ways[i] += work.seconds[i] if start is None else start.seconds
        for earlier in precedence.before[i]:
            ways[earlier] = max(ways[earlier], ways[i])
    return ways


class _Placing:
    """A partial order, and the time when it is done so far."""

    def __init__(self, work: Work, precedence: Precedence, preference: Preference) -> None:
        self._work, self._precedence, self._preference = work, precedence, preference
        self._rank = {i: rank for rank, i in enumerate(precedence.placed)}
        ways = ways_to_end(work, precedence)
        by_way = {i: (-ways[i], rank) for i, rank in self._rank.items()}
        by_place = {i: (0.0, rank) for i, rank in self._rank.items()}
        self._priority = by_way if preference.longest_first else by_place
        self._of_starts = by_way if preference.in_sequence else self._priority
        self._sequence = sorted(work.starts, key=by_way.__getitem__, reverse=True)
        self._missing = {i: len(precedence.before[i]) for i in precedence.placed}
        self._after: dict[int, list[int]] = {i: [] for i in precedence.placed}
        for i in precedence.placed:
            for earlier in precedence.before[i]:
                self._after[earlier].append(i)
        self._order = list(precedence.first)
        self._done: set[int] = set(self._order)
        self._frontier = 0
        self._now, self._flying = 0.0, 0
        self._free: dict[str, float] = {}
        self._ends: dict[int, float] = {}
        self._awaited: set[int] = set()
        # Ready nodes: out of reach by rank; that would have to wait by when; and the rest.
        self._far = [rank for i, rank in self._rank.items() if not self._missing[i]]
        self._waiting: list[tuple[float, tuple[float, int], int]] = []
        self._starts: list[tuple[tuple[float, int], int]] = []
        self._ready: list[tuple[tuple[float, int], int]] = []
        heapq.heapify(self._far)

    def place_one(self) -> bool:
        """Place a node, or let time pass; ``False`` if all are placed."""
        placed = self._precedence.placed
        while self._frontier < len(placed) and placed[self._frontier] in self._done:
            self._frontier += 1
        if self._frontier == len(placed):
            return False
        while self._far and self._far[0] <= self._frontier + self._preference.reach:
            self._admit(placed[heapq.heappop(self._far)])
        while self._waiting and self._waiting[0][0] <= self._now:
            _, _, i = heapq.heappop(self._waiting)
            self._offer(i)
        if self._starts and self._may_start(self._starts[0][1]):
            self._place(heapq.heappop(self._starts)[1])
        elif self._ready:
            self._place(heapq.heappop(self._ready)[1])
        elif self._waiting:
            self._now = self._waiting[0][0]
        else:  # one that is not its turn, or for which too much is on its way
            self._place(heapq.heappop(self._starts)[1])
        return True

    def finished(self) -> list[int]:
        """The order, with what nobody computes with at its end."""
        for i in self._precedence.late:
            self._show(i)
        return self._order

    def _admit(self, i: int) -> None:
        """A node in reach whose operands are placed."""
        end = max((self._ends[start] for start in self._precedence.awaited[i]), default=0.0)
        if end > self._now:
            heapq.heappush(self._waiting, (end, self._priority[i], i))
        else:
            self._offer(i)

    def _offer(self, i: int) -> None:
        if i in self._work.starts:
            heapq.heappush(self._starts, (self._of_starts[i], i))
        else:
            heapq.heappush(self._ready, (self._priority[i], i))

    def _may_start(self, i: int) -> bool:
        while self._sequence[-1] in self._done:
            self._sequence.pop()
        if self._preference.in_sequence and i != self._sequence[-1]:
            return False
        nbytes = self._flying + self._work.starts[i].nbytes
        return not self._flying or nbytes <= self._preference.in_flight_bytes

    def _place(self, i: int) -> None:
        for operand in self._precedence.shown[i]:
            self._show(operand)
        self._append(i)
        for later in self._precedence.behind[i]:
            self._append(later)
        start = self._work.starts.get(i)
        if start is None:
            self._now += self._work.seconds[i]
        else:
            begin = max(self._now, self._free.get(start.channel, 0.0))
            self._free[start.channel] = self._ends[i] = begin + start.seconds
            self._flying += start.nbytes
        for later in self._after[i]:
            self._missing[later] -= 1
            if not self._missing[later]:
                heapq.heappush(self._far, self._rank[later])

    def _show(self, i: int) -> None:
        """Place a node that has no place of its own, if it is not there yet."""
        if i in self._done:
            return
        self._append(i)
        source = self._work.awaits.get(i)
        if source is not None and source not in self._awaited:
            self._awaited.add(source)
            self._flying -= self._work.starts[source].nbytes

    def _append(self, i: int) -> None:
        self._order.append(i)
        self._done.add(i)


def moved(order: Sequence[int]) -> int:
    """How many nodes stand elsewhere than before."""
    return sum(at != i for at, i in enumerate(order))
