"""The fastest plan within a budget, by the word of an exact judge who is asked rarely.

Simulated peaks miss exact ones by an amount that changes little among the plans of one version of
the step, and much from one version to another. So each version has a reference that is judged: an
end of the frontier if one belongs to it, otherwise its fastest plan, once the choice reaches it.
What is expected of all other plans follows from the reference of their version::

    miss(r)     = exact(r) - predicted(r)
    expected(i) = predicted(i) + miss(reference), or less on the line to miss(last)

and a plan is chosen only once it has been judged itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from treadle.graph.core.node_info import info
from treadle.graph.core.operators import OpOverload
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass
from treadle.passes.memory.apply import passes_of
from treadle.passes.memory.decisions import Decision, decisions, folded
from treadle.passes.memory.search import Candidate, candidates, fastest, pareto
from treadle.passes.memory.simulate import timeline
from treadle.targets.model import DeviceModel
from treadle.util.errors import PlanError
from treadle.util.sizes import Budget, at_least, format_bytes

_TRUST = 0.005
"""Share of the largest peak by which a plan may turn out smaller than expected."""
_LAST_RESORTS = 4
"""Plans of the small end judged before a budget is called impossible."""


class PeakEvaluator(Protocol):
    """Planning's call up into lowering and scheduling, which it may not import."""

    def __call__(self, step: StepGraph, /) -> int:
        """The exact peak of a candidate: of the kernels that it becomes, after fusion and
        packing."""
        ...


@dataclass(frozen=True)
class Version:
    """The step to plan, which the passes of ``first`` made of the one that is compiled."""

    step: StepGraph
    first: tuple[GraphPass, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen candidate, and the ``passes`` that make its graph of the step. ``peak_bytes`` is
    the judge's word, or the simulator's if it was not ``judged``; ``table`` one entry per value.
    """

    chosen: Candidate
    passes: tuple[GraphPass, ...]
    saved: frozenset[str]
    peak_bytes: int
    seconds: float
    table: tuple[Decision, ...]
    judged: bool

    @property
    def step(self) -> StepGraph:
        """The graph of the chosen candidate, which the judge was asked about."""
        return self.chosen.step

    def rows(self) -> list[str]:
        """What became of each activation and why, equal layers folded, largest first."""
        return folded(self.table)


@dataclass(frozen=True)
class _Judged:
    """The frontier from fastest to smallest, up to ``last``, and behind it the ends of versions
    that are not part of it; the version of each plan, and the exact peaks asked for so far."""

    points: Sequence[Candidate]
    last: int
    versions: Sequence[Version]
    judge: PeakEvaluator
    peaks: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(
        cls, versions: Sequence[Version], device: DeviceModel, judge: PeakEvaluator
    ) -> "_Judged":
        of_each = [list(candidates(version.step, device)) for version in versions]
        tried = [(plan, v) for v, plans in zip(versions, of_each, strict=True) for plan in plans]
        points = pareto([plan for plan, _ in tried]) if len(versions) > 1 else of_each[0]
        ends = [end for plans in of_each for end in (*plans[:1], *plans[1:][-1:])]
        beside = [end for end in ends if not any(end is point for point in points)]
        origins = [next(v for plan, v in tried if plan is point) for point in (*points, *beside)]
        return cls((*points, *beside), len(points) - 1, origins, judge)

    def exact(self, i: int) -> int:
        if i not in self.peaks:
            self.peaks[i] = self.judge(self.points[i].step)
        return self.peaks[i]

    def lowest_expected(self, i: int) -> float:
        """Plans that turn out smaller than this are passed over, so that the plans of two budgets
        cannot cross; see ``_first_fitting``. It does not depend on what was judged before."""
        expected = self.points[i].predicted_peak + self._missed(i)
        return max(expected - _TRUST * self.exact(0), self.exact(self.last))

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


def plan_memory(
    step: StepGraph | Sequence[Version],
    budget: Budget,
    device: DeviceModel,
    judge: PeakEvaluator,
) -> MemoryPlan:
    """The fastest plan whose peak, by ``judge``, is at most ``budget``; of a step, or of several
    versions of one.

    A smaller budget never gives a larger peak. ``PlanError`` TR-202 names the smallest one that
    can be met.
    """
    versions = _versions(step)
    judged = _Judged.of(versions, device, judge)
    budget_bytes = _as_bytes(budget, judged)
    if judged.exact(0) <= budget_bytes:
        chosen = 0
    elif judged.exact(judged.last) <= budget_bytes:
        chosen = _first_fitting(judged, budget_bytes)
    else:
        chosen = _last_resort(judged, budget_bytes)
    peak = judged.exact(chosen)
    return _plan(judged.versions[chosen], judged.points[chosen], peak, judged=True)


def fastest_plan(step: StepGraph | Sequence[Version], device: DeviceModel) -> MemoryPlan:
    """The plan that is estimated to be the fastest, of the first version; its peak is the
    simulator's word."""
    version = _versions(step)[0]
    chosen = fastest(version.step, device)
    return _plan(version, chosen, chosen.predicted_peak, judged=False)


def _versions(step: StepGraph | Sequence[Version]) -> Sequence[Version]:
    return (Version(step),) if isinstance(step, StepGraph) else step


def _as_bytes(budget: Budget, judged: _Judged) -> int:
    """The smallest plan is judged only where the budget depends on it."""
    fastest = judged.exact(0)
    needs_smallest = budget.nbytes is None and budget.limit < 1
    smallest = min(fastest, judged.exact(judged.last)) if needs_smallest else fastest
    return budget.between(smallest, fastest)


def _first_fitting(judged: _Judged, budget: int) -> int:
    """The first plan, from fastest to smallest, that is not expected to be too large, and is not.

    With plans passed over that are smaller than ``lowest_expected``, peaks are monotone in the
    budget. Let budgets a < b choose i and k. If k comes before the first that a looks at, then
    ``exact(k) >= lowest_expected(k) > a >= exact(i)``. If not, either a accepts k too, and i = k
    as b would have accepted all that a does, or ``exact(k) > a >= exact(i)``.
    """
    for i in range(1, judged.last):
        low = judged.lowest_expected(i)
        if low <= budget and low <= judged.exact(i) <= budget:
            return i
    return judged.last


def _last_resort(judged: _Judged, budget: int) -> int:
    """A plan near the small end that is smaller than the last one, or one of a version that was
    simulated to be larger; or the end of the road."""
    tried = [0, *range(max(judged.last - _LAST_RESORTS, 0), len(judged.points))]
    fitting = next((i for i in tried if judged.exact(i) <= budget), None)
    if fitting is not None:
        return fitting
    best = min(tried, key=judged.exact)
    raise _impossible(judged.points[best], judged.exact(best), budget)


def _impossible(best: Candidate, peak: int, budget: int) -> PlanError:
    facts = best.order.facts
    largest = timeline(best.order).peak_table[:3]
    values = [
        f"{format_bytes(size)} of {_in_words(facts.nodes[best.order.origin[k]])}"
        for size, k in largest
    ]
    parts = [f"{format_bytes(facts.fixed_bytes)} of inputs and state", *values]
    return PlanError(
        f"no plan fits {format_bytes(budget)}: the smallest possible peak is "
        f"{format_bytes(peak)}. Most of it:\n    " + "\n    ".join(parts),
        code="TR-202",
        remedy=f'give at least memory="{at_least(peak)}", or make the batch smaller',
    )


def _in_words(node: fx.Node) -> str:
    """The operation that makes a value, and the user's line."""
    op, where = node.target, info(node).where
    name = op.overloadpacket.__name__ if isinstance(op, OpOverload) else node.name
    return f"{name}, {where}" if where else name


def _plan(version: Version, chosen: Candidate, peak: int, *, judged: bool) -> MemoryPlan:
    facts = chosen.order.facts
    names = frozenset(str(facts.nodes[i]) for i in chosen.saved)
    table = decisions(chosen.order, chosen.saved)
    passes = (*version.first, *passes_of(version.step, chosen))
    return MemoryPlan(chosen, passes, names, peak, chosen.seconds, table, judged)
