"""The fastest plan within a budget, with few exact evaluations.

Simulated peaks differ from exact ones by an error that changes little among the plans of one
version of the step, and much between versions. So each version has a reference that is evaluated
exactly: an end of the frontier if one belongs to it, otherwise its fastest plan, once the choice
reaches it. The reference of a version gives a lower estimate for its plans::

    miss(r)   = exact(r) - predicted(r)
    lowest(i) = predicted(i) + miss(reference), or less on the line to miss(last), less _TRUST

A plan is **admissible** if its exact peak is no smaller than that, and the choice is the fastest
admissible plan that fits. Only the order of evaluation depends on the budget: plans whose lower
estimate exceeds the budget are never evaluated, and neither are those after the choice. So::

    choice(budget) = the first i, from fastest to slowest, with lowest(i) <= exact(i) <= budget

A smaller budget excludes some of these plans. Therefore no smaller budget gives a faster plan, or
one with a larger peak; and the peak of any choice, passed as the budget, chooses the same plan.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from treadle.graph.core.node_info import info
from treadle.graph.core.operators import OpOverload
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass
from treadle.passes.memory.apply import passes_of
from treadle.passes.memory.bound import PeakBound, StepBound
from treadle.passes.memory.decisions import Decision, decisions, folded
from treadle.passes.memory.estimates.measured import NodeTimes
from treadle.passes.memory.offload import may_offload
from treadle.passes.memory.order import as_traced, facts_of
from treadle.passes.memory.search import (
    Candidate,
    StepCosts,
    candidates,
    fastest,
    pareto,
    worth_its_time,
)
from treadle.passes.memory.simulate import timeline
from treadle.passes.memory.solvers.exact import step_optimum
from treadle.targets.model import DeviceModel
from treadle.util.errors import PlanError
from treadle.util.planning.planner import Planner
from treadle.util.sizes import Budget, at_least, format_bytes

_DEFAULT = Planner()
_TRUST = 0.06
"""Share of the largest peak by which a plan may turn out smaller than expected: of the plans of the
16 models of ``benchmarks/budgets.py`` the furthest seen was 5.3 % below."""
_LAST_RESORTS = 4
"""Plans of the small end that are admissible whatever their peaks: by these a budget is called
impossible."""


class PeakEvaluator(Protocol):
    """Planning's call up into lowering and scheduling, which it may not import."""

    def __call__(self, step: StepGraph, /) -> int:
        """The exact peak of a candidate: of the kernels that it becomes, after fusion and
        packing."""
        ...


@dataclass(frozen=True)
class Version:
    """The step to plan, which the passes of ``first`` made of the one that is compiled. ``why``:
    what there is to say of that, for people."""

    step: StepGraph
    first: tuple[GraphPass, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen candidate, and the ``passes`` that make its graph of the step. ``peak_bytes`` is
    exact if the plan was ``evaluated``, else the simulator's; ``table`` one entry per value.
    ``bound``: of the peaks of all plans of the step, if the plan was evaluated. ``why``: of the
    version of the step.
    """

    chosen: Candidate
    passes: tuple[GraphPass, ...]
    saved: frozenset[str]
    peak_bytes: int
    seconds: float
    table: tuple[Decision, ...]
    bound: StepBound | None = None
    why: str = ""

    @property
    def evaluated(self) -> bool:
        """Whether the peak is exact."""
        return self.bound is not None

    @property
    def bound_bytes(self) -> int | None:
        """A lower bound of all plans estimated to be as fast; ``None`` if not ``evaluated``."""
        return None if self.bound is None else self.bound.within(self.seconds)

    @property
    def step(self) -> StepGraph:
        """The graph of the chosen candidate, whose peak was evaluated."""
        return self.chosen.step

    def rows(self) -> list[str]:
        """What became of each activation and why, equal layers folded, largest first."""
        return folded(self.table)


@dataclass(frozen=True)
class Plans:
    """The plans of a step, from fastest to slowest. ``last``: the smallest, as simulated;
    ``always``: those that are admissible whatever their peaks; the version of each plan, the bound
    of all versions, and the exact peaks asked for so far."""

    points: Sequence[Candidate]
    last: int
    always: frozenset[int]
    versions: Sequence[Version]
    evaluator: PeakEvaluator
    step_bound: StepBound
    peaks: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(
        cls,
        step: StepGraph | Sequence[Version],
        device: DeviceModel,
        evaluator: PeakEvaluator,
        method: Planner = _DEFAULT,
        times: NodeTimes | None = None,
    ) -> "Plans":
        """The frontier of all versions together, and the ends of each. ``times``: as of
        ``costs_of``."""
        versions = _versions(step)
        costs = [StepCosts.of(version.step, device, method, times) for version in versions]
        of_each = [
            list(candidates(version.step, device, method, known))
            for version, known in zip(versions, costs, strict=True)
        ]
        tried = [(plan, v) for v, plans in zip(versions, of_each, strict=True) for plan in plans]
        front = pareto([plan for plan, _ in tried]) if len(versions) > 1 else of_each[0]
        ends = [end for plans in of_each for end in (*plans[:1], *plans[1:][-1:])]
        kept = {id(plan) for plan in (*front, *ends)}
        of_frontier = {id(plan) for plan in front}
        wanted = {id(of_each[0][0]), *(id(plans[-1]) for plans in of_each)}
        wanted |= {id(plan) for plan in front[-1 - _LAST_RESORTS :]}
        found = [(plan, version) for plan, version in tried if id(plan) in kept]
        found.sort(key=lambda each: (each[0].seconds, each[0].predicted_peak))
        points = [plan for plan, _ in found]
        offloads = method.offload and may_offload(versions[0].step, device)
        return cls(
            points,
            max(i for i, plan in enumerate(points) if id(plan) in of_frontier),
            frozenset(i for i, plan in enumerate(points) if id(plan) in wanted),
            [version for _, version in found],
            evaluator,
            StepBound(tuple(PeakBound(each.masked, each.fused, offloads) for each in costs)),
        )

    def exact(self, i: int) -> int:
        """The exact peak of a plan, evaluated once."""
        if i not in self.peaks:
            self.peaks[i] = self.evaluator(self.points[i].step)
        return self.peaks[i]

    def as_bytes(self, budget: Budget) -> int:
        """The smallest plan is evaluated only if the budget depends on it."""
        fastest = self.exact(0)
        needs_smallest = budget.nbytes is None and budget.limit < 1
        smallest = min(fastest, self.exact(self.last)) if needs_smallest else fastest
        return budget.between(smallest, fastest)

    def within(self, budget: int) -> int | None:
        """The fastest admissible plan of at most ``budget`` bytes; ``None`` if there is none."""
        if self.exact(0) <= budget:
            return 0
        for i in range(1, len(self.points)):
            lowest = self.lowest(i)
            if lowest <= budget and lowest <= self.exact(i) <= budget:
                return i
        return None

    def without_budget(self) -> int:
        """What ``fastest_plan`` chooses, if the frontier has it."""
        mine = [
            plan
            for plan, version in zip(self.points, self.versions, strict=True)
            if version is self.versions[0] and math.isinf(plan.price) and not plan.offloaded
        ]
        chosen = worth_its_time(mine) if mine else self.points[0]
        return next(i for i, plan in enumerate(self.points) if plan is chosen)

    def smallest(self) -> int:
        """Of the plans that are admissible whatever their peaks the one that has the least."""
        return min(sorted(self.always), key=self.exact)

    def spread(self, count: int) -> tuple[int, ...]:
        """What ``count`` budgets choose, evenly spaced from the peak of the fastest plan to the
        smallest possible; from fastest to smallest."""
        first, least = self.exact(0), self.exact(self.smallest())
        budgets = [first + (least - first) * k // (count - 1) for k in range(count)]
        chosen = [self.within(max(budget, least)) for budget in budgets]
        return tuple(dict.fromkeys(i for i in chosen if i is not None))

    def bound(self, i: int) -> int:
        """A lower bound of the peak of every plan, of any version, that is as fast as plan ``i``
        (``bound.py``)."""
        return self.step_bound.within(self.points[i].seconds)

    def optimum(self, i: int) -> int | None:
        """The smallest peak, as simulated, of plans as fast as plan ``i``: ``solvers/exact.py``.
        ``None`` where plans may have values on the host, which that does not know."""
        if any(bound.offloads for bound in self.step_bound.bounds):
            return None
        return step_optimum(self.step_bound, self.points[i].seconds)

    def lowest(self, i: int) -> float:
        """The smallest exact peak with which the plan is admissible. It does not depend on which
        plans were evaluated before."""
        if i in self.always:
            return 0.0
        return self.points[i].predicted_peak + self._missed(i) - _TRUST * self.exact(0)

    def _missed(self, i: int) -> float:
        """Bytes that the exact peak has at least, as expected, beside the simulated one: what the
        reference of its version has, or less, if the smallest plan of all has."""
        reference = self._reference(i)
        if reference == i:
            return self._miss(i)
        high, low = (self.points[k].predicted_peak for k in (reference, self.last))
        share = (high - self.points[i].predicted_peak) / max(high - low, 1)
        return self._miss(reference) + share * min(self._miss(self.last) - self._miss(reference), 0)

    def _reference(self, i: int) -> int:
        """The end of the frontier that is of the version of ``i``, or else its fastest plan."""
        alike = [k for k, version in enumerate(self.versions) if version is self.versions[i]]
        return next(k for k in (0, self.last, alike[0]) if k in alike)

    def _miss(self, i: int) -> int:
        return self.exact(i) - self.points[i].predicted_peak


@dataclass(frozen=True)
class ChosenPlan:
    """The plan at ``index`` of ``plans``, and whether its peak is within ``limit``, in bytes."""

    plans: Plans
    index: int
    limit: int | None
    fits: bool

    @property
    def peak_bytes(self) -> int:
        """The exact peak."""
        return self.plans.exact(self.index)

    @property
    def plan(self) -> Candidate:
        """The plan itself."""
        return self.plans.points[self.index]

    @property
    def version(self) -> Version:
        """The version of the step that it plans."""
        return self.plans.versions[self.index]


def choose(groups: Iterable[Plans], budget: Budget) -> ChosenPlan:
    """The fastest plan within the budget, of the first group that has one: later groups are not
    looked at. If none has, the plan with the smallest peak. A ratio is one of the first group."""
    limit: int | None = None
    smallest: list[ChosenPlan] = []
    for plans in groups:
        if limit is None:
            limit = plans.as_bytes(budget)
        index = plans.within(limit)
        if index is not None:
            return ChosenPlan(plans, index, limit, fits=True)
        smallest.append(ChosenPlan(plans, plans.smallest(), limit, fits=False))
    return min(smallest, key=lambda each: each.peak_bytes)


def plan_memory(
    step: StepGraph | Iterable[Sequence[Version]],
    budget: Budget,
    device: DeviceModel,
    evaluator: PeakEvaluator,
    method: Planner = _DEFAULT,
    times: NodeTimes | None = None,
) -> MemoryPlan:
    """The fastest plan whose peak, by ``evaluator``, is at most ``budget``; of one step, or of
    groups of versions, which ``choose`` looks at in turn.

    A smaller budget never gives a larger peak, nor a faster plan. ``PlanError`` TR-202 names the
    smallest one that can be met.
    """
    groups = [_versions(step)] if isinstance(step, StepGraph) else step
    plans = (Plans.of(versions, device, evaluator, method, times) for versions in groups)
    chosen = choose(plans, budget)
    if not chosen.fits:
        is_left = not method.offload and may_offload(chosen.version.step, device)
        raise _impossible(chosen, offload_is_left=is_left)
    return _plan(chosen.version, chosen.plan, chosen.peak_bytes, method, chosen.plans.step_bound)


def fastest_plan(
    step: StepGraph | Sequence[Version],
    device: DeviceModel,
    method: Planner = _DEFAULT,
    times: NodeTimes | None = None,
) -> MemoryPlan:
    """The plan that is estimated to be the fastest, of the first version; its peak is the
    simulator's word."""
    version = _versions(step)[0]
    chosen = fastest(version.step, device, method, times)
    return _plan(version, chosen, chosen.predicted_peak, method)


def _versions(step: StepGraph | Sequence[Version]) -> Sequence[Version]:
    return (Version(step),) if isinstance(step, StepGraph) else step


def _impossible(chosen: ChosenPlan, *, offload_is_left: bool) -> PlanError:
    """TR-202. ``offload_is_left``: whether plans with activations on the host were not tried."""
    assert chosen.limit is not None
    best, peak = chosen.plan, chosen.peak_bytes
    order = as_traced(facts_of(best.step)) if best.offloaded else best.order
    facts = order.facts
    largest = timeline(order).peak_table[:3]
    values = [
        f"{format_bytes(size)} of {_in_words(facts.nodes[order.origin[k]])}" for size, k in largest
    ]
    more = ", try planner=treadle.Planner(offload=True)" if offload_is_left else ""
    parts = [f"{format_bytes(facts.fixed_bytes)} of inputs and state", *values]
    return PlanError(
        f"no plan fits {format_bytes(chosen.limit)}: the smallest possible peak is "
        f"{format_bytes(peak)}. Most of it:\n    " + "\n    ".join(parts),
        code="TR-202",
        remedy=f'give at least memory="{at_least(peak)}"{more}, or make the batch smaller',
    )


def _in_words(node: fx.Node) -> str:
    """The operation that makes a value, and the user's line."""
    op, where = node.target, info(node).where
    name = op.overloadpacket.__name__ if isinstance(op, OpOverload) else node.name
    return f"{name}, {where}" if where else name


def _plan(
    version: Version,
    chosen: Candidate,
    peak: int,
    method: Planner,
    bound: StepBound | None = None,
) -> MemoryPlan:
    """``bound``: of a plan that was evaluated."""
    facts = chosen.order.facts
    names = frozenset(str(facts.nodes[i]) for i in chosen.saved)
    order = chosen.order
    places = (each.value for each in chosen.offloaded)
    away = frozenset(order.origin[place] for place in places if not order.again[place])
    table = decisions(chosen.order, chosen.saved, method.bans, away)
    passes = (*version.first, *passes_of(version.step, chosen))
    return MemoryPlan(chosen, passes, names, peak, chosen.seconds, table, bound, version.why)
