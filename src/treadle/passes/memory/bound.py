"""A proved lower bound of the peaks of all plans of a step that are equally fast.

**Claim.** Let ``p`` be a library call, or a sum of everything up to a number, that runs once. When
it starts, every value that later operations read is in memory, or is computed later from values in
memory::

    before p                      | p |   after p
    inputs -> ... -> v -> ...  -> | p | ->  d reads v, or v again

By then, each value ``v`` that ``p`` depends on has been computed once. Computing it later is a
second computation, and if ``v`` is a call, the plan pays ``again(v)`` seconds for it. Formulas, and
values that ``p`` does not depend on, cost nothing here: the schedule may move and repeat them.

Let ``K`` be the values in memory then, and ``A`` the calls that are made again::

    peak  >=  inputs + operands of p + bytes(K)     and     again(A) <= seconds - once

``K`` and ``A`` are a cut between the inputs and what reads after ``p``, in the network of
``cut.py``. For any ``rate >= 0``, in bytes a second, its capacity is at least the minimum::

    bytes(K) + rate * again(A) >= cut(rate)
    bytes(K) >= cut(rate) - rate * (seconds - once)

The bound is the largest right side over all ``p`` and rates. The operands of ``p`` are counted
once, so in ``K`` they cost nothing. Neither do results of the step, which may lie in the bytes of
an input. A part of a value may be kept without the rest, so a view costs what it shows.

Of a plan only its seconds enter, so the bound does not depend on the solver. It holds for plans
that compute ``p`` once, and supposes that what costs seconds (``CALLS``) becomes a library call. If
a step has several versions, the smallest of their bounds holds.

Where values may be on the host between two uses, ``K`` is nothing: only inputs and the operands of
the largest call are counted.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import tensors_in
from treadle.passes.memory.cost import CALLS, Kind, bytes_of
from treadle.passes.memory.cut import Edges, least_capacity, minimum_cut
from treadle.passes.memory.fused import RecomputeCost, recompute_costs
from treadle.passes.memory.masks import with_byte_masks
from treadle.passes.memory.order import Facts, facts_of
from treadle.targets.model import DeviceModel
from treadle.util.reach import reached

_RATES = 9
"""Rates tried for each call, between the least and the largest bytes a second of its values."""


@dataclass(frozen=True)
class PeakBound:
    """The bound for one version of a step on a device; ``offloads``: whether plans may have values
    on the host."""

    facts: Facts
    fused: RecomputeCost
    offloads: bool = False

    @classmethod
    def of(cls, step: StepGraph, device: DeviceModel) -> "PeakBound":
        """For ``step``; plans may read its masks as bytes."""
        facts = facts_of(with_byte_masks(step))
        return cls(facts, recompute_costs(facts, device))

    def within(self, seconds: float) -> int:
        """A lower bound, in bytes, of the peak of every plan that is estimated at ``seconds``."""
        if self.offloads:
            return self.fixed_bytes + self._largest_call
        spare = max(seconds - self.fused.once, 0.0)
        lines = (held - rate * spare for rate, held in self._lines if spare == 0 or rate < math.inf)
        return self.fixed_bytes + int(max((self._largest_call, *lines)))

    @functools.cached_property
    def _device(self) -> torch.device | None:
        """Where the first library call runs; what lies elsewhere is not counted."""
        calls = (i for i, kind in enumerate(self.facts.kinds) if kind in CALLS)
        return next((d for i in calls for d in self._devices(i)), None)

    def _devices(self, i: int) -> list[torch.device]:
        return [tensor.device for tensor in tensors_in(value_of(self.facts.nodes[i]))]

    def _is_near(self, i: int) -> bool:
        return all(device == self._device for device in self._devices(i))

    @functools.cached_property
    def fixed_bytes(self) -> int:
        """Bytes of inputs: alive all the time."""
        kinds = enumerate(self.facts.kinds)
        far = (i for i, kind in kinds if kind is Kind.INPUT and not self._is_near(i))
        return max(self.facts.fixed_bytes - sum(map(self.facts.held_bytes, far)), 0)

    @functools.cached_property
    def _largest_call(self) -> int:
        """Operands of the call that has the largest."""
        alive = self.alive
        calls = (i for i, kind in enumerate(self.facts.kinds) if kind in CALLS and i in alive)
        return max((self.operand_bytes(i) for i in calls), default=0)

    @functools.cached_property
    def alive(self) -> frozenset[int]:
        """What every plan computes."""
        facts = self.facts
        ends = [i for i in facts.returned if i is not None]
        ends += [i for i, kept in enumerate(facts.keep) if kept]
        return frozenset(reached(ends, facts.operands.__getitem__))

    @functools.cached_property
    def _lines(self) -> tuple[tuple[float, float], ...]:
        """Each rate with the minimum capacity of its cut, for all pivots."""
        return tuple(line for pivot in self._pivots() for line in _Moment(self, pivot).lines())

    def _pivots(self) -> tuple[int, ...]:
        """Operations at whose beginning much is likely to be alive: after the forward pass, the
        call with the longest chain of calls behind it, the call with the largest operands, and the
        last sum to a number, such as a gradient's norm. Any other choice is valid as well."""
        facts, alive = self.facts, self.alive
        late = [i for i, phase in enumerate(facts.phases) if phase > 0 and i in alive]
        calls = [i for i in late if facts.kinds[i] in CALLS]
        if not calls:
            return ()
        first = max(calls, key=self._following.__getitem__)
        largest = max(calls, key=self.operand_bytes)
        sums = [i for i in late if facts.condensed[i]]
        return tuple(dict.fromkeys((first, largest, *sums[-1:])))

    @functools.cached_property
    def _following(self) -> list[int]:
        """Calls on the longest path from each value to the end of the step."""
        following = [0] * len(self.facts.nodes)
        for i in range(len(following) - 1, -1, -1):
            behind = following[i] + (self.facts.kinds[i] in CALLS)
            for operand in self.facts.operands[i]:
                following[operand] = max(following[operand], behind)
        return following

    def operand_bytes(self, call: int) -> int:
        """Bytes of the operands that are not inputs; a shared storage counts once. A kernel may
        write only the part of a formula's result that the call reads."""
        shown: dict[int, int] = {}
        for operand in self.facts.operands[call]:
            base = self.base(operand)
            if self.facts.kinds[base] is not Kind.INPUT and base not in self._leaving:
                shown[base] = max(shown.get(base, 0), self.kept_bytes(operand))
        return sum(shown.values())

    def base(self, i: int) -> int:
        """What ``i`` is a view of, or itself."""
        while self.facts.kinds[i] is Kind.VIEW:
            i = self.facts.operands[i][0]
        return i

    @functools.cached_property
    def _leaving(self) -> frozenset[int]:
        returned = (i for i in self.facts.returned if i is not None)
        return frozenset(self.base(i) for i in returned)

    def is_leaving(self, i: int) -> bool:
        """Whether ``i`` is a result of the step, or a part of it is."""
        return self.base(i) in self._leaving

    def kept_bytes(self, i: int) -> int:
        """The fewest bytes that keeping ``i`` can take."""
        if self.base(i) in self._leaving or not self._is_near(i):
            return 0
        return min(bytes_of(self.facts.nodes[i]), self.facts.held_bytes(i))


@dataclass(frozen=True)
class StepBound:
    """The bound of a step that may be planned in several versions; ``bounds``: one for each."""

    bounds: tuple[PeakBound, ...]

    def within(self, seconds: float) -> int:
        """Of all plans, of any version, that are estimated at ``seconds``."""
        return min(bound.within(seconds) for bound in self.bounds)


class _Moment:
    """The beginning of ``pivot``: the network of what is in memory then."""

    def __init__(self, bound: PeakBound, pivot: int) -> None:
        self.facts, self.bound, self.pivot = bound.facts, bound, pivot
        self.before = frozenset(reached([pivot], self.facts.operands.__getitem__)) - {pivot}
        self.after = self._readers()
        self.wanted = self._wanted()
        self.members = self._members()

    def _readers(self) -> frozenset[int]:
        """The pivot, and everything that depends on it."""
        after = {self.pivot}
        for i, operands in enumerate(self.facts.operands):
            if i in self.bound.alive and not after.isdisjoint(operands):
                after.add(i)
        return frozenset(after)

    def _wanted(self) -> set[int]:
        """What others than the pivot read after it has begun."""
        readers = (self.facts.operands[i] for i in self.after if i != self.pivot)
        return {
            operand for operands in readers for operand in operands if self._takes_part(operand)
        }

    def _takes_part(self, i: int) -> bool:
        return i not in self.after and self.facts.kinds[i] is not Kind.INPUT

    def _members(self) -> list[int]:
        operands = self.facts.operands
        return sorted(
            reached(self.wanted, lambda i: [o for o in operands[i] if self._takes_part(o)])
        )

    def lines(self) -> Iterator[tuple[float, float]]:
        """Rates, and the least that ``bytes(K) + rate * again(A)`` can be."""
        if not self.members:
            return
        extra = self.bound.operand_bytes(self.pivot) if self.facts.kinds[self.pivot] in CALLS else 0
        edges, priced = self._network()
        for rate in (*self._rates(priced), math.inf):
            for edge, seconds in priced:
                edges.capacity[edge] = seconds * rate
            sink_side = minimum_cut(edges, 2 + 2 * len(self.members))
            yield rate, extra + least_capacity(edges, sink_side)

    def _network(self) -> tuple[Edges, list[tuple[int, float]]]:
        """The edges, and which of them cost seconds to cut."""
        facts, place = self.facts, {i: 2 + 2 * k for k, i in enumerate(self.members)}
        there = {self.bound.base(operand) for operand in facts.operands[self.pivot]}
        edges, priced = Edges([], [], []), list[tuple[int, float]]()
        for i in self.members:
            inner, first = place[i], i in self.before
            if first and not facts.keep[i] and facts.kinds[i] in CALLS:
                priced.append((len(edges.capacity), self.bound.fused.again[i]))
            edges.add(0, inner, math.inf if first and facts.keep[i] else 0.0)
            edges.add(inner, inner + 1, 0.0 if self.bound.base(i) in there else self._cost(i))
            for operand in set(facts.operands[i]) & place.keys():
                edges.add(place[operand] + 1, inner, math.inf)
            if i in self.wanted:
                edges.add(inner + 1, 1, math.inf)
        return edges, priced

    def _cost(self, i: int) -> float:
        is_container = isinstance(value_of(self.facts.nodes[i]), tuple | list)
        return math.inf if is_container else self.bound.kept_bytes(i)

    def _rates(self, priced: Sequence[tuple[int, float]]) -> list[float]:
        """From an eighth of the smallest ratio of a result's bytes to its seconds (computing it
        again computes others too) to the largest."""
        calls = (i for i in self.members if i in self.before and self.facts.kinds[i] in CALLS)
        pairs = ((self.facts.held_bytes(i), self.bound.fused.again[i]) for i in calls)
        worth = sorted(size / seconds for size, seconds in pairs if size and seconds)
        if not worth:
            return []
        low, high = worth[0] / 8, worth[-1]
        step = (high / low) ** (1 / (_RATES - 1))
        return [low * step**k for k in range(_RATES)]
