"""The requests of activation checkpointing, and how far a memory budget may override them.

A checkpointed region is traced twice: in the forward pass, and again in the backward pass, where
its nodes have a ``region``. As long as they have it, nothing merges the two, and the values of the
region are not kept. The request of a selective policy is in ``asked``.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from treadle.graph.core.arguments import map_nodes
from treadle.graph.core.node_info import info, with_info
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.memory.rematerialise import rematerialise


@dataclass(frozen=True)
class SettleCheckpoints(GraphPass):
    """Turn requests into rules, or drop them.

    ::

        asked for                        without a budget      with one (``budgeted``)
        must_save                        kept                  kept
        prefer_save                      kept                  the planner decides
        must_recompute                   computed again        computed again
        prefer_recompute, checkpoint()   computed again        the planner decides

    What is computed again keeps its ``region``; what is kept has ``must_save``.
    """

    contract = Contract()

    budgeted: bool = False

    def run(self, step: StepGraph) -> int:
        changes = 0
        for node in step.graph.nodes:
            if info(node).asked == "prefer_save":
                changes += 1
                with_info(node, asked="" if self.budgeted else "must_save")
        changes += _forget(step) if self.budgeted else 0
        if any(info(node).region is not None for node in step.graph.nodes):
            changes += _drop_marks(step)
        return changes


def _drop_marks(step: StepGraph) -> int:
    """Remove the requests: the graph recomputes what was requested."""
    marks = ("must_recompute", "prefer_recompute")
    first = (node for node in step.graph.nodes if info(node).region is None)
    done = [node for node in first if info(node).asked in marks]
    for node in done:
        with_info(node, asked="")
    return len(done)


def _forget(step: StepGraph) -> int:
    """Remove regions that only a request keeps apart; what must be is recomputed all the same."""
    first: dict[Hashable, fx.Node] = {}
    alike: dict[fx.Node, fx.Node] = {}
    forgotten = 0
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        original = first.setdefault(_key(node, alike), node)
        alike[node] = original
        if info(node).region is None:
            continue
        region = info(node).region
        with_info(node, region=None)
        forgotten += 1
        if info(original).asked == "must_recompute":
            with_info(original, checkpoint=region)
    return forgotten


def _key(node: fx.Node, alike: dict[fx.Node, fx.Node]) -> Hashable:
    return node.target, repr(
        map_nodes(lambda argument: alike.get(argument, argument), arguments(node))
    )


@dataclass(frozen=True)
class RecomputeMarked(GraphPass):
    """In a graph that was traced once, compute again what is marked for it.

    before:  h = mm(x, w); a = relu(h); ...; g = f(a)           | a: prefer_recompute
    after:   h = mm(x, w); a = relu(h); ...; a' = relu(h); g = f(a')

    A value that another region or the rest of the forward pass reads is kept, as the input of
    what reads it, whatever its mark. ``budgeted``: only what must be, the planner decides the rest.
    """

    contract = Contract(after=(SettleCheckpoints, RemoveCommonSubexpressions))  # it merges them

    budgeted: bool = False

    def run(self, step: StepGraph) -> int:
        again = {"must_recompute"} if self.budgeted else {"must_recompute", "prefer_recompute"}
        marked = {node for node in step.graph.nodes if info(node).asked in again}
        if not marked:
            return 0
        forward = [node for node in step.graph.nodes if info(node).phase == "forward"]
        kept = [node for node in forward if node not in marked or _is_read_outside(node)]
        step.graph = rematerialise(step, kept).graph
        return _drop_marks(step)


def _is_read_outside(node: fx.Node) -> bool:
    region = info(node).checkpoint
    readers = [user for user in node.users if info(user).phase == "forward"]
    return any(info(user).checkpoint != region for user in readers)


__all__ = ["RecomputeMarked", "SettleCheckpoints"]
