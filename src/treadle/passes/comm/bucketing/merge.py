"""D1: what is communicated twice is communicated once."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from treadle.graph.analysis.alias import leaves_step
from treadle.graph.core.collectives import (
    collective_of,
    is_same_on_all_ranks,
    is_wait,
    started_by,
)
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import is_item
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import refresh
from treadle.graph.rewrite.passes import Contract, GraphPass


@dataclass(frozen=True)
class MergeEqualCollectives(GraphPass):
    """One collective for those that do the same to the same inputs, and one wait for each result.

    before:  a = all_reduce(g, "sum", "0"); b = all_reduce(g, "sum", "0")
             u = wait(a); v = wait(a); w = wait(b); x = wait(u)
    after:   a = all_reduce(g, "sum", "0"); u = wait(a)           v, w and x are u

    The first stays. Collectives of different phases or regions stay apart: a parameter that is
    gathered again for the backward pass is gathered again so that it need not be kept. So do two
    whose results are both returned: the caller gets two tensors. Where the graphs of ranks differ
    only waits are merged: a rank that has nothing of two parameters would send two equal paddings,
    and others two values.
    Memory: the first result lives until the last reader of both.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        first: dict[Hashable, fx.Node] = {}
        kept_nodes: dict[fx.Node, None] = {}
        merged = 0
        alike = is_same_on_all_ranks(step)
        for node in list(step.graph.nodes):
            if not alike and collective_of(node) is not None:
                continue
            kept = _equal_before(node, first)
            if kept is None or not _may_be(node, kept):
                continue
            node.replace_all_uses_with(kept)
            step.graph.erase_node(node)
            kept_nodes[kept] = None
            merged += 1
        refresh(step.graph, kept_nodes)
        return merged


def _equal_before(node: fx.Node, first: dict[Hashable, fx.Node]) -> fx.Node | None:
    """An equal earlier node, if any; ``first`` has the first of each kind, and gets ``node``."""
    if is_wait(node):
        started = started_by(node)
        if is_wait(started):
            return started
        key: Hashable = ("wait", started)
    elif collective := collective_of(node):
        known = info(node)
        key = collective.agreement, collective.inputs, known.phase, known.region
    elif _is_result(node):
        key = node.args
    else:
        return None
    kept = first.setdefault(key, node)
    return None if kept is node else kept


def _is_result(node: fx.Node) -> bool:
    """Whether the node is one of the results of a coalesced collective."""
    return is_item(node) and any(collective_of(operand) for operand in node.all_input_nodes)


def _may_be(node: fx.Node, kept: fx.Node) -> bool:
    """Whether ``kept`` may stand for ``node``: not if the caller gets both, as two tensors."""
    return not (_is_returned(node) and _is_returned(kept))


def _is_returned(node: fx.Node) -> bool:
    collective = collective_of(node)
    waits = _waits_behind(node) if collective is None else collective.waits
    return any(map(leaves_step, waits))


def _waits_behind(node: fx.Node) -> tuple[fx.Node, ...]:
    return (node,) if is_wait(node) else tuple([user for user in node.users if is_wait(user)])
