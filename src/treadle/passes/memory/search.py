"""The memory/time frontier of a step, by simulation."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from treadle.graph.core.signature import StepGraph
from treadle.passes.memory.after import finished
from treadle.passes.memory.classify import SaveCandidates, classify, must_save
from treadle.passes.memory.cost import Kind
from treadle.passes.memory.cut import cheapest_cut, keeping_costs
from treadle.passes.memory.estimates.costs import costs_of
from treadle.passes.memory.estimates.measured import NodeTimes
from treadle.passes.memory.fused import RecomputeCost
from treadle.passes.memory.masks import with_byte_masks
from treadle.passes.memory.offload import (
    OffloadedValue,
    may_offload,
    offload,
    offloaded_plans,
    seconds_in,
)
from treadle.passes.memory.order import Facts, Order, as_traced, facts_of
from treadle.passes.memory.rematerialise import build, extra_seconds, recompute
from treadle.passes.memory.reorder import update_early
from treadle.passes.memory.simulate import LiveBytes, timeline
from treadle.passes.memory.solvers.choose import Solver, solver_of
from treadle.passes.memory.solvers.problem import SaveProblemOf
from treadle.targets.model import DeviceModel
from treadle.util.planning.planner import Planner
from treadle.util.reach import reached

_DEFAULT = Planner()
_CAPACITIES = 16  # byte limits for which another solver than the cut is asked
_LAMBDAS = (*(2.0 ** (-half / 2) for half in range(9)), *(2.0**-whole for whole in range(5, 9)))
"""Bytes kept rather than to move one when computing again, from 1, which is the fastest; closer to
each other where budgets usually are."""
_GAP = 0.03  # frontier points further apart than this share of the peak are mixed
_WIDE = 0.05  # and further apart than this, after that, one value at a time is dropped between them
_NEAR = 0.02  # and closer than this only one is kept, since each is scheduled to be evaluated
_WORTH = 50
"""How much larger the share of the peak must be that a plan saves than the share of the time that
it takes longer, where time is what counts: a hundredth for half of the peak. Estimates are not that
exact. With 25, ResNet-50 took 4 % longer on an H200 for 13 % of its peak."""
_SHORT_CHAINS = "long-chains=8"
"""For plans with values on the host. A chain of sums that is computed again begins before backward,
and what is made then, all at once, has no time to leave."""
_WORK = 150_000  # operations simulated by the local search, which bounds its time


@dataclass(frozen=True)
class Candidate:
    """One plan. ``price``: the λ of its cut, infinite for keeping everything and for what other
    solvers propose.

    ``seconds``: estimated time of the step; ``saved``: positions of the kept values;
    ``offloaded``: those that are on the host meanwhile.
    """

    price: float
    order: Order
    saved: frozenset[int]
    predicted_peak: int
    seconds: float
    offloaded: tuple[OffloadedValue, ...] = ()

    @functools.cached_property
    def step(self) -> StepGraph:
        """The graph of this plan."""
        step = build(self.order)
        offload(step, self.offloaded)
        return finished(step)


@dataclass(frozen=True)
class StepCosts:
    """What is known of a step whatever its plan: its values, those with masks as bytes, and what
    they cost."""

    traced: Facts
    masked: Facts
    fused: RecomputeCost

    @classmethod
    def of(
        cls,
        step: StepGraph,
        device: DeviceModel,
        method: Planner = _DEFAULT,
        times: NodeTimes | None = None,
    ) -> "StepCosts":
        """For ``step`` on a device, as ``costs_of`` estimates it."""
        traced, masked = facts_of(step), with_byte_masks(step)
        facts = traced if masked is step else facts_of(masked)
        return cls(traced, facts, costs_of(facts, device, method, times))


class _Planner:
    """Everything about one step that the candidates share."""

    def __init__(
        self,
        step: StepGraph,
        device: DeviceModel,
        costs: StepCosts | None = None,
        method: Planner = _DEFAULT,
    ) -> None:
        costs = costs or StepCosts.of(step, device, method)
        self.traced = as_traced(costs.traced)
        self.facts: Facts = costs.masked
        self.claims: SaveCandidates = classify(self.facts, method.bans)
        self.fused = costs.fused
        self.costs = keeping_costs(self.facts, self.claims, self.fused.stored)
        self.once = frozenset(
            i
            for i in self.claims.candidates
            if not self.facts.keep[i]
            and must_save(self.facts, i, products=True, banned=self.claims.banned)
        )
        self.bandwidth = device.bandwidth
        self.seen: dict[frozenset[int], Candidate] = {}

    def keep_all(self) -> Candidate:
        """The step as it was traced, its masks as they are: a node has another position there. Its
        time is that with masks as bytes, so that of two plans that differ in them the smaller wins.
        """
        seconds = self._seconds(self.traced, self.claims.needed)
        kept, peak = classify(self.traced.facts).needed, timeline(self.traced).peak_bytes
        return Candidate(float("inf"), self.traced, kept, peak, seconds)

    def fastest(self) -> Candidate:
        """What moves the fewest bytes once fused: free recomputation, products kept."""
        prices = [nbytes * self.bandwidth for nbytes in self.fused.again]
        return self.candidate(float("inf"), self._cut(prices, products=False))

    def _cut(self, prices: list[float], *, products: bool) -> frozenset[int]:
        costs = self.costs
        return cheapest_cut(self.facts, self.claims, prices, products=products, costs=costs)

    def _seconds(self, order: Order, saved: frozenset[int]) -> float:
        """Estimated time: every operation once, what happens again, what is kept only to be."""
        again = extra_seconds(order, self.fused.again)
        return self.fused.once + again + sum(self.fused.keep[i] for i in saved)

    def candidate(self, price: float, saved: frozenset[int]) -> Candidate:
        if saved not in self.seen:
            order, peak = smaller_peak(recompute(self.facts, saved))
            seconds = self._seconds(order, saved)
            self.seen[saved] = Candidate(price, order, saved, peak.peak_bytes, seconds)
        return self.seen[saved]

    def solved(self, solver: Solver) -> Iterator[Candidate]:
        """What a solver keeps for several capacities, from what must be kept to what the fastest
        plan keeps."""
        of_step = SaveProblemOf.of(self.facts, self.claims, self.fused, self.fastest().saved)
        least = self._cut([0.0] * len(self.facts.nodes), products=True)
        low, high = (
            sum(self.facts.held_bytes(i) for i in saved if self.costs[i])
            for saved in (least, self.fastest().saved)
        )
        for capacity in dict.fromkeys(
            low + (high - low) * k // _CAPACITIES for k in range(_CAPACITIES + 1)
        ):
            kept = solver(of_step.problem, capacity)
            if kept is not None:
                yield self.candidate(math.inf, of_step.saved(kept))

    def hull(self) -> Iterator[Candidate]:
        """One cut per price, first with products kept, then with products priced as well."""
        for products in (False, True):
            for price in _LAMBDAS:
                prices = [price * nbytes * self.bandwidth for nbytes in self.fused.again]
                yield self.candidate(price, self._cut(prices, products=products))

    def between(self, fast: Candidate, small: Candidate) -> Iterator[Candidate]:
        """The small plan for the first layers, which wait longest, the fast one for the rest."""
        forward = self.claims.forward
        for eighth in range(1, 8):
            border = forward[len(forward) * eighth // 8]
            early = frozenset(i for i in small.saved if i < border)
            late = frozenset(i for i in fast.saved if i >= border)
            if self._allows(early | late):
                yield self.candidate(small.price, early | late)

    def improved(self, start: Candidate, trials: int) -> Iterator[Candidate]:
        """Drop one kept value of the peak at a time, always the one that helps most."""
        current = start
        while trials > 0:
            kept = self._droppable(current)[: min(4, trials)]
            trials -= len(kept)
            without = [current.saved - {i} for i in kept]
            tried = [self.candidate(current.price, s) for s in without if self._allows(s)]
            better = [trial for trial in tried if trial.predicted_peak < current.predicted_peak]
            if not better:
                return
            current = max(better, key=lambda trial: _gain(current, trial))
            yield current

    def down_to(self, peak: int, start: Candidate, trials: int) -> Iterator[Candidate]:
        """Less and less than ``start`` keeps, up to the first that has no more than ``peak``."""
        for plan in self.improved(start, trials):
            yield plan
            if plan.predicted_peak <= peak:
                return

    def offloading(self, points: Sequence[Candidate], device: DeviceModel) -> Iterator[Candidate]:
        """Plans with values on the host, of those that no two others lie around."""
        of_masked = [plan for plan in points if plan.order.facts is self.facts]
        for plan in convex(of_masked):
            times = seconds_in(plan.order, self.fused.again, plan.seconds)
            for found in offloaded_plans(plan.order, times, device.host_link):
                seconds = plan.seconds + 2 * found.nbytes / device.bandwidth + found.waiting
                yield replace(
                    plan,
                    predicted_peak=found.peak_bytes,
                    seconds=seconds,
                    offloaded=found.values,
                )

    def _allows(self, saved: frozenset[int]) -> bool:
        """Whether no ban or mark is broken if only this is kept. A cut breaks none, but what is
        made of two cuts, or less than one, may compute again what neither did."""
        if not self.once:
            return True
        facts = self.facts
        there = saved.union(i for i in facts.returned if i is not None)
        lost = (i for i in self.claims.needed if i not in there and not facts.keep[i])
        again = reached(
            lost,
            lambda i: (o for o in facts.operands[i] if o not in there and not facts.keep[o]),
        )
        return self.once.isdisjoint(again)

    def _droppable(self, plan: Candidate) -> list[int]:
        origin = plan.order.origin
        at_peak = [origin[k] for _, k in timeline(plan.order).peak_table]
        return [
            i
            for i in dict.fromkeys(at_peak)
            if i in plan.saved
            and self.facts.kinds[i] is not Kind.INPUT
            and not must_save(self.facts, i, products=True, banned=self.claims.banned)
        ]


def _gain(old: Candidate, new: Candidate) -> float:
    return (old.predicted_peak - new.predicted_peak) / max(new.seconds - old.seconds, 1e-12)


def smaller_peak(order: Order) -> tuple[Order, LiveBytes]:
    """The order, with its updates early if that helps."""
    plain = timeline(order)
    early = update_early(order)
    if early.origin == order.origin:
        return order, plain
    moved = timeline(early)
    best = moved if moved.peak_bytes < plain.peak_bytes else plain
    return best.order, best


def pareto(tried: Iterable[Candidate]) -> list[Candidate]:
    """From fastest to slowest, each with a smaller peak than all before it."""
    kept: list[Candidate] = []
    for candidate in sorted(tried, key=lambda c: (c.seconds, c.predicted_peak)):
        if not kept or candidate.predicted_peak < kept[-1].predicted_peak:
            kept.append(candidate)
    return kept


def convex(points: Iterable[Candidate]) -> list[Candidate]:
    """Of the points of a frontier those that are below every line between two others. A plan that
    does what one does in some layers and another in the rest is about on their line, so a point
    above it is worse than such a mixture."""
    kept: list[Candidate] = []
    for point in points:
        while len(kept) > 1 and _slope(kept[-2], point) <= _slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(point)
    return kept


def _slope(fast: Candidate, small: Candidate) -> float:
    """Peak that a second more changes."""
    seconds = max(small.seconds - fast.seconds, 1e-12)
    return (small.predicted_peak - fast.predicted_peak) / seconds


def candidates(
    step: StepGraph,
    device: DeviceModel,
    method: Planner = _DEFAULT,
    costs: StepCosts | None = None,
) -> Iterator[Candidate]:
    """The simulated frontier, from keeping everything to the smallest peak found. ``costs``: those
    of the step, if they are known."""
    planner = _Planner(step, device, costs, method)
    points = list(_recomputing(planner, method))
    if method.offload and may_offload(step, device):
        short = _Planner(step, device, costs, replace(method, bans=(*method.bans, _SHORT_CHAINS)))
        bases = *points, *_recomputing(short, method)
        points = pareto([*points, *planner.offloading(bases, device)])
    yield from points


def _recomputing(planner: _Planner, method: Planner) -> Iterator[Candidate]:
    """The frontier of plans that keep their values on the device."""
    first = planner.keep_all()
    if method.solver != "cut":
        points = pareto([first, planner.fastest(), *planner.solved(solver_of(method))])
        yield from _thinned(points, _NEAR * first.predicted_peak)
        return
    points = pareto([first, planner.fastest(), *planner.hull()])
    trials = max(2, _WORK // max(len(planner.facts.nodes), 1))
    points = pareto([*points, *planner.improved(points[-1], trials)])
    for fast, small in itertools.pairwise(convex(points)):
        if fast.predicted_peak - small.predicted_peak > _GAP * first.predicted_peak:
            points = [*points, *planner.between(fast, small)]
    points = pareto(points)
    for fast, small in itertools.pairwise(points):
        if fast.predicted_peak - small.predicted_peak > _WIDE * first.predicted_peak:
            points = [*points, *planner.down_to(small.predicted_peak, fast, trials // 4)]
    yield from _thinned(pareto(points), _NEAR * first.predicted_peak)


def _thinned(points: list[Candidate], gap: float) -> list[Candidate]:
    """Without points that save next to nothing over the one before; both ends stay."""
    kept = points[:1]
    for point in points[1:-1]:
        saves = kept[-1].predicted_peak - point.predicted_peak
        if saves >= gap and point.predicted_peak - points[-1].predicted_peak >= gap:
            kept.append(point)
    return kept + points[1:][-1:]


def fastest(
    step: StepGraph,
    device: DeviceModel,
    method: Planner = _DEFAULT,
    times: NodeTimes | None = None,
) -> Candidate:
    """The plan that is estimated to be the fastest, or one that is ``worth_its_time``."""
    costs = StepCosts.of(step, device, method, times)
    planner = _Planner(step, device, costs, method)
    return worth_its_time(pareto([planner.keep_all(), planner.fastest()]))


def worth_its_time(plans: Sequence[Candidate]) -> Candidate:
    """Of ``plans``, from fastest to slowest and from large to small, the smallest that takes next
    to no longer than the first for what it saves."""
    first = plans[0]

    def is_worth(plan: Candidate) -> bool:
        longer = plan.seconds / max(first.seconds, 1e-12) - 1
        return _WORTH * longer <= 1 - plan.predicted_peak / max(first.predicted_peak, 1)

    return [plan for plan in plans if is_worth(plan)][-1]
