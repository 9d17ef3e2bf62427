"""Compute equal values once."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from treadle.graph.analysis.alias import Aliases, analyse
from treadle.graph.analysis.joined_storages import JoinedStorages
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, may_recompute
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import gather_results, refresh
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.util.nested import map_leaves


@dataclass(frozen=True)
class RemoveCommonSubexpressions(GraphPass):
    """Replace a value by an earlier equal one: same operation, same arguments, same region.

    before:  a = exp(x); b = exp(x); c = add(a, b)
    after:   a = exp(x); c = add(a, a)

    Phase and source line are those of the first. Random operations are never merged. Nodes
    whose regions differ stay apart: recomputation for memory's sake is not undone.
    Two results that the caller gets as separate tensors stay separate tensors. A result that
    only the second of two equal operations had read becomes one of the first.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        first: dict[Hashable, fx.Node] = {}
        alike: dict[fx.Node, fx.Node] = {}
        results = _Results(step)
        for node in step.graph.nodes:
            if not may_recompute(node):
                continue
            kept = first.setdefault(_key(node, alike), node)
            if kept is not node and results.may_merge(kept, node):
                alike[node] = kept
        for node, kept in alike.items():
            node.replace_all_uses_with(kept)
        for node in reversed(alike):
            step.graph.erase_node(node)
        gather_results(alike.values())
        refresh(step.graph, alike.values())
        return len(alike)


class _Results:
    """Keeps two returned tensors from becoming one. It records which values a merge returns
    and which storages it joins."""

    def __init__(self, step: StepGraph) -> None:
        self._aliases: Aliases = analyse(step)
        self._returned = set(self._aliases.returned)
        self._joined = JoinedStorages()

    def may_merge(self, kept: fx.Node, node: fx.Node) -> bool:
        left, right = self._held(kept), self._held(node)
        if left == right:  # views of one value: no bytes become shared that were not
            return True
        if not left.isdisjoint(self._returned) and not right.isdisjoint(self._returned):
            return False
        if not right.isdisjoint(self._returned):
            self._returned |= left
        if len(left) == len(right) == 1:
            self._joined.join(*right, *left)
        return True

    def _held(self, node: fx.Node) -> frozenset[int]:
        return frozenset(map(self._joined.root, self._aliases.of[node]))


def _key(node: fx.Node, alike: dict[fx.Node, fx.Node]) -> Hashable:
    def frozen(leaf: object) -> object:
        return _frozen(leaf, alike)

    operands = tuple((name, map_leaves(frozen, value)) for name, value in arguments(node).items())
    return node.op, node.target, operands, info(node).region


def _frozen(leaf: object, alike: dict[fx.Node, fx.Node]) -> object:
    match leaf:
        case fx.Node():
            return alike.get(leaf, leaf)
        case bool() | int() | float() | complex():
            return type(leaf), repr(leaf)  # 1, 1.0 and True differ; so do 0.0 and -0.0
        case slice():
            return "slice", repr(leaf)
        case _:
            return leaf
