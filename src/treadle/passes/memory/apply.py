"""A memory plan as passes: they apply the search's decisions to the graph of the step.

The search compares orders of operations, hundreds of them, and builds the graphs of few; these
passes make the graph of the chosen order, visibly. They produce the graph by which the candidate
was evaluated, node for node; ``require_same`` checks this.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.order import arrange
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.memory.after import passes_after
from treadle.passes.memory.masks import ReadMasksAsBytes
from treadle.passes.memory.offload import OffloadedValue, offload
from treadle.passes.memory.order import as_traced, facts_of
from treadle.passes.memory.rematerialise import build, recompute
from treadle.passes.memory.reorder import update_early
from treadle.passes.memory.search import Candidate
from treadle.util.errors import VerifyError


@dataclass(frozen=True)
class Recompute(GraphPass):
    """Keep ``saved`` for the later phases, and compute again what else they read.

    before:  h = mm(x, w); a = relu(h); ...; g = mm(t(a), d)           | saved: h
    after:   h = mm(x, w); a = relu(h); ...; a' = relu(h); g = mm(t(a'), d)

    Views of what is kept, inputs, results and random numbers are never computed again; what
    nothing reads any more is gone. Each change is a node that is computed again, or, where none
    is, one that is gone.
    """

    contract = Contract(after=(ReadMasksAsBytes, RemoveCommonSubexpressions))  # it merges them

    saved: frozenset[str]

    def __repr__(self) -> str:
        return f"Recompute(all but {len(self.saved)} values)"

    def run(self, step: StepGraph) -> int:
        facts = facts_of(step)
        kept = {i for i, node in enumerate(facts.nodes) if node.name in self.saved}
        order = recompute(facts, kept)
        again, gone = sum(order.again), len(facts.nodes) + sum(order.again) - len(order.origin)
        if again or gone:
            step.graph = build(order).graph
        return again or gone


@dataclass(frozen=True)
class UpdateEarly(GraphPass):
    """Run each update of the optimizer as soon as its gradient is final.

    before:  g1 = mm(..); g2 = mm(..); n1 = sub(w1, g1); n2 = sub(w2, g2)
    after:   g1 = mm(..); n1 = sub(w1, g1); g2 = mm(..); n2 = sub(w2, g2)

    Only places change; how many nodes move at least is the number of changes.
    """

    contract = Contract(after=(Recompute,))

    def run(self, step: StepGraph) -> int:
        order = as_traced(facts_of(step))
        places = update_early(order).origin
        moved = len(places) - _longest_rise(places)
        if moved:
            nodes = order.facts.nodes
            arrange(nodes, [nodes[i] for i in places])
        return moved


@dataclass(frozen=True)
class Offload(GraphPass):
    """Put values on the host between two uses.

    before:  a = relu(h); ...; g = mm(t(a), d)
    after:   a = relu(h); s = to_host(a); ...; w = arrived(s, a); ...; r = from_host(w); ...;
             b = arrived(r, w); g = mm(t(b), d)

    Each value is a change.
    """

    contract = Contract(after=(Recompute, UpdateEarly), repeatable=False)

    values: tuple[OffloadedValue, ...]

    def __repr__(self) -> str:
        return f"Offload({len(self.values)} values)"

    def run(self, step: StepGraph) -> int:
        return offload(step, self.values)


def _longest_rise(numbers: Sequence[int]) -> int:
    """The length of the longest increasing subsequence: what can stay where it is."""
    ends: list[int] = []  # the smallest end of a rise of each length
    for number in numbers:
        at = bisect.bisect_left(ends, number)
        ends[at : at + 1] = [number]
    return len(ends)


def passes_of(step: StepGraph, chosen: Candidate) -> tuple[GraphPass, ...]:
    """What turns ``step`` into the graph of ``chosen``, one of its candidates."""
    order, facts = chosen.order, chosen.order.facts
    away = (Offload(chosen.offloaded),) if chosen.offloaded else ()
    if order.origin == as_traced(facts).origin and facts.step is step:
        return (*away, *passes_after())
    names = frozenset(facts.nodes[i].name for i in chosen.saved)
    masks = (ReadMasksAsBytes(),) if facts.step is not step else ()
    early = (UpdateEarly(),) if order.origin != recompute(facts, chosen.saved).origin else ()
    return (
        *masks,  # first: a mask that is kept is kept in bytes
        Recompute(names),
        *early,  # after it: an update may wait for what is computed again
        *away,  # after both: it counts places
        *passes_after(),  # last: they need the plan
    )


def require_same(step: StepGraph, evaluated: StepGraph) -> None:
    """``VerifyError`` names the first node by which a graph is not the one that was evaluated."""
    pairs = zip(step.graph.nodes, evaluated.graph.nodes, strict=False)
    for one, other in pairs:
        ours, theirs = (
            (node.name, node.target, repr((node.args, node.kwargs))) for node in (one, other)
        )
        if ours != theirs:
            raise VerifyError(f"the plan was evaluated with {other}, and runs with {one}")
    if len(step.graph.nodes) != len(evaluated.graph.nodes):
        raise VerifyError("the plan was evaluated with another number of nodes than it runs with")
