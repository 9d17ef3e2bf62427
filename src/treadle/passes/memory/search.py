"""The memory/time frontier of a step, and the fastest plan within a budget."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from treadle.graph.signature import StepGraph
from treadle.passes.memory.classify import Claims, classify, must_save
from treadle.passes.memory.cost import Device, Kind
from treadle.passes.memory.cut import cheapest_cut
from treadle.passes.memory.decisions import Decision, decisions, folded
from treadle.passes.memory.fused import traffic
from treadle.passes.memory.masks import with_byte_masks
from treadle.passes.memory.order import Facts, Order, as_traced, facts_of
from treadle.passes.memory.rematerialise import build, extra_seconds, recompute
from treadle.passes.memory.reorder import update_early
from treadle.passes.memory.simulate import Timeline, timeline
from treadle.util.errors import PlanError
from treadle.util.sizes import format_bytes

_LAMBDAS = tuple(2.0**exponent for exponent in range(5, -9, -1))
_COARSE = 6  # plans judged before looking closer
_FINE = 3  # plans judged between two of those
_GAP = 0.03  # frontier points closer than this share of the peak are not told apart
_WORK = 150_000  # operations simulated by the local search, which bounds its time


@dataclass(frozen=True)
class Candidate:
    """One plan. ``price``: the λ of its cut, infinite for keeping everything.

    ``seconds``: estimated time of the step; ``saved``: positions of the kept values.
    """

    price: float
    order: Order
    saved: frozenset[int]
    predicted_peak: int
    seconds: float

    @functools.cached_property
    def step(self) -> StepGraph:
        return build(self.order)


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen step. ``peak_bytes`` is the judge's word; ``table`` one entry per value."""

    step: StepGraph
    saved: frozenset[str]
    peak_bytes: int
    seconds: float
    table: tuple[Decision, ...]

    def rows(self) -> list[str]:
        """What became of each activation and why, equal layers folded, largest first."""
        return folded(self.table)


class _Planner:
    """Everything about one step that the candidates share."""

    def __init__(self, step: StepGraph, device: Device) -> None:
        self.traced = as_traced(facts_of(step))
        self.facts: Facts = facts_of(with_byte_masks(step))
        self.claims: Claims = classify(self.facts)
        self.cost = self.facts.seconds(device)
        self.fused = traffic(self.facts, device)
        self.bandwidth = device.bandwidth
        self.base = sum(self.cost)
        self.seen: dict[frozenset[int], Candidate] = {}

    def keep_all(self) -> Candidate:
        peak, kept = timeline(self.traced).peak_bytes, self.claims.needed
        return Candidate(float("inf"), self.traced, kept, peak, self._seconds(self.traced, kept))

    def fastest(self) -> Candidate:
        """What moves the fewest bytes once fused: free recomputation, products kept."""
        prices = [each * self.bandwidth for each in self.fused.again]
        return self.candidate(float("inf"), cheapest_cut(self.facts, self.claims, prices))

    def _seconds(self, order: Order, saved: frozenset[int]) -> float:
        """Estimated time: every operation once, what happens again, what is kept only to be."""
        again = extra_seconds(order, self.fused.again)
        return self.base + again + sum(self.fused.keep[i] for i in saved)

    def candidate(self, price: float, saved: frozenset[int]) -> Candidate:
        if saved not in self.seen:
            order, found = smaller_peak(recompute(self.facts, saved))
            seconds = self._seconds(order, saved)
            self.seen[saved] = Candidate(price, order, saved, found.peak_bytes, seconds)
        return self.seen[saved]

    def hull(self) -> Iterator[Candidate]:
        """One cut per price, first with products kept, then with products priced as well."""
        for products in (False, True):
            for price in _LAMBDAS:
                prices = [price * each * self.bandwidth for each in self.cost]
                saved = cheapest_cut(self.facts, self.claims, prices, products=products)
                yield self.candidate(price, saved)

    def between(self, fast: Candidate, small: Candidate) -> Iterator[Candidate]:
        """The small plan for the first layers, which wait longest, the fast one for the rest."""
        forward = self.claims.forward
        for eighth in range(1, 8):
            border = forward[len(forward) * eighth // 8]
            early = frozenset(i for i in small.saved if i < border)
            late = frozenset(i for i in fast.saved if i >= border)
            yield self.candidate(small.price, early | late)

    def improved(self, start: Candidate, trials: int) -> Iterator[Candidate]:
        """Drop one kept value of the peak at a time, always the one that helps most."""
        current = start
        while trials > 0:
            kept = self._droppable(current)[: min(4, trials)]
            trials -= len(kept)
            tried = [self.candidate(current.price, current.saved - {i}) for i in kept]
            better = [each for each in tried if each.predicted_peak < current.predicted_peak]
            if not better:
                return
            current = max(better, key=lambda each: _gain(current, each))
            yield current

    def _droppable(self, plan: Candidate) -> list[int]:
        origin = plan.order.origin
        found = [origin[k] for _, k in timeline(plan.order).peak_table]
        return [
            i
            for i in dict.fromkeys(found)
            if i in plan.saved
            and self.facts.kinds[i] is not Kind.INPUT
            and not must_save(self.facts, i, products=True)
        ]


def _gain(old: Candidate, new: Candidate) -> float:
    return (old.predicted_peak - new.predicted_peak) / max(new.seconds - old.seconds, 1e-12)


def smaller_peak(order: Order) -> tuple[Order, Timeline]:
    """The order, with its updates early if that helps."""
    plain = timeline(order)
    early = update_early(order)
    if early.origin == order.origin:
        return order, plain
    moved = timeline(early)
    best = moved if moved.peak_bytes < plain.peak_bytes else plain
    return best.order, best


def pareto(found: Iterable[Candidate]) -> list[Candidate]:
    """From fastest to slowest, each with a smaller peak than all before it."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda c: (c.seconds, c.predicted_peak)):
        if not kept or each.predicted_peak < kept[-1].predicted_peak:
            kept.append(each)
    return kept


def candidates(step: StepGraph, device: Device) -> Iterator[Candidate]:
    """The simulated frontier, from keeping everything to the smallest peak found."""
    planner = _Planner(step, device)
    first = planner.keep_all()
    points = pareto([first, planner.fastest(), *planner.hull()])
    trials = max(2, _WORK // max(len(planner.facts.nodes), 1))
    points = pareto([*points, *planner.improved(points[-1], trials)])
    for fast, small in itertools.pairwise(points):
        if fast.predicted_peak - small.predicted_peak > _GAP * first.predicted_peak:
            points = [*points, *planner.between(fast, small)]
    yield from _thinned(pareto(points), _GAP / 3 * first.predicted_peak)


def _thinned(points: list[Candidate], gap: float) -> list[Candidate]:
    """Without points that save next to nothing over the one before; both ends stay."""
    kept = points[:1]
    for each in points[1:-1]:
        saves = kept[-1].predicted_peak - each.predicted_peak
        if saves >= gap and each.predicted_peak - points[-1].predicted_peak >= gap:
            kept.append(each)
    return kept + points[1:][-1:]


def spread(points: list[Candidate], count: int) -> list[int]:
    """Positions of at most ``count`` points, both ends included, evenly spaced in peak."""
    first, last = points[0].predicted_peak, points[-1].predicted_peak
    wanted = [first + (last - first) * k / (count - 1) for k in range(count)]
    nearest = (
        min(range(len(points)), key=lambda i: abs(points[i].predicted_peak - peak))
        for peak in wanted
    )
    return sorted({0, len(points) - 1, *nearest})


def fastest_plan(step: StepGraph, device: Device) -> MemoryPlan:
    """The plan that is estimated to be the fastest; of equal ones, the smaller."""
    planner = _Planner(step, device)
    chosen = pareto([planner.keep_all(), planner.fastest()])[0]
    return _plan(chosen, chosen.predicted_peak)


def frontier(step: StepGraph, device: Device) -> list[Candidate]:
    """A few points of the frontier, both ends included."""
    points = list(candidates(step, device))
    return [points[i] for i in spread(points, _COARSE)]


def plan_memory(
    step: StepGraph,
    budget: int | float,
    device: Device,
    judge: Callable[[StepGraph], int],
) -> MemoryPlan:
    """The fastest plan whose peak, by ``judge``, is at most ``budget``.

    ``budget``: bytes as an ``int``, or a ``float`` between 0.0, the smallest peak, and 1.0,
    the peak of the fastest plan. At most ten plans are judged, fastest first: a few over the
    whole frontier, then those between the last that is too large and the first that fits.
    A smaller budget never gives a larger peak.
    """
    points = list(candidates(step, device))
    places = spread(points, _COARSE)
    peak_of = functools.cache(lambda i: judge(points[i].step))
    budget_bytes = _as_bytes(budget, places, peak_of)
    fitting = next((n for n, i in enumerate(places) if peak_of(i) <= budget_bytes), None)
    if fitting is None:
        raise _impossible(points, places, peak_of, budget_bytes)
    chosen = _closer(points, places, fitting, peak_of, budget_bytes)
    return _plan(points[chosen], peak_of(chosen))


def _as_bytes(budget: int | float, places: list[int], peak_of: Callable[[int], int]) -> int:
    if not isinstance(budget, float):
        return budget
    if not 0.0 <= budget <= 1.0:
        raise PlanError(
            f"{budget} is not a ratio",
            code="TR-201",
            remedy='a float is a ratio from 0.0 to 1.0; write bytes as an int or as "12GiB"',
        )
    smallest = min(map(peak_of, places))
    return round(smallest + budget * (max(peak_of(0), smallest) - smallest))


def _closer(
    points: list[Candidate],
    places: list[int],
    fitting: int,
    peak_of: Callable[[int], int],
    budget: int,
) -> int:
    """A faster plan than ``places[fitting]`` that fits too, if there is one.

    Never one with a smaller peak than that: the plans of two budgets could cross otherwise.
    """
    right = places[fitting]
    if fitting == 0:
        return right
    inner = range(places[fitting - 1] + 1, right)
    tried = sorted({inner[len(inner) * k // _FINE] for k in range(_FINE)}) if inner else []
    floor = peak_of(right)
    return next((i for i in tried if floor <= peak_of(i) <= budget), right)


def _impossible(
    points: list[Candidate], places: list[int], peak_of: Callable[[int], int], budget: int
) -> PlanError:
    best = min(places, key=peak_of)
    facts = points[best].order.facts
    largest = timeline(points[best].order).peak_table[:3]
    values = [f"{facts.nodes[points[best].order.origin[k]]} {format_bytes(s)}" for s, k in largest]
    parts = [f"inputs and state {format_bytes(facts.fixed_bytes)}", *values]
    return PlanError(
        f"no plan fits {format_bytes(budget)}: the smallest possible peak is "
        f"{format_bytes(peak_of(best))}, dominated by {', '.join(parts)}",
        code="TR-202",
        remedy=f"give at least memory={peak_of(best)}, or make the batch smaller",
    )


def _plan(chosen: Candidate, peak: int) -> MemoryPlan:
    facts = chosen.order.facts
    names = frozenset(str(facts.nodes[i]) for i in chosen.saved)
    table = decisions(chosen.order, chosen.saved)
    return MemoryPlan(chosen.step, names, peak, chosen.seconds, table)
