"""Recompute values that were not kept, just before the operation that needs them."""

from collections.abc import Collection
from typing import Any

from torch import fx

from treadle.graph.core.arguments import map_nodes
from treadle.graph.core.copying import make_node
from treadle.graph.core.node_info import set_value, value_of, with_info
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import compute, like
from treadle.graph.core.verify import verify
from treadle.passes.memory.cost import CALLS, Kind
from treadle.passes.memory.order import Facts, Order, facts_of
from treadle.util.reach import reached


def rematerialise(step: StepGraph, saved: Collection[fx.Node]) -> StepGraph:
    """A new step in which backward and optimizer read of the forward pass only ``saved``
    values, views of them, inputs and random numbers; everything else is computed again.

    before:  h = mm(x, w); a = relu(h); ...; g = mm(t(a), d)           | a kept
    after:   h = mm(x, w); a = relu(h); ...; a' = relu(h); g = mm(t(a'), d)   | h kept

    Second computations are noted as ``recomputed``. Random operations are never repeated, so
    the outputs are the same.
    """
    facts = facts_of(step)
    index = {node: i for i, node in enumerate(facts.nodes)}
    return build(recompute(facts, {index[node] for node in saved}))


def recompute(facts: Facts, saved: Collection[int]) -> Order:
    """Second computations inserted before their first reader; what nothing reads is gone."""
    return _Writer(facts, frozenset(saved)).write()


class _Writer:
    """Appends operations one by one; ``copy`` maps a forward value to its second computation.

    ``near``: no library call of a later phase yet, so that what the head of the forward pass
    computed can still be in registers. ``at``: the operation that is written; a forward pass that
    is still to come (of another micro-batch) keeps what it reads until then.
    """

    def __init__(self, facts: Facts, saved: frozenset[int]) -> None:
        self.facts = facts
        self.there = _available(facts, saved)
        self.kept_until = facts.last_forward_readers
        self.at = 0
        self.origin: list[int] = []
        self.operands: list[tuple[int, ...]] = []
        self.again: list[bool] = []
        self.first: list[int] = []
        self.copy: dict[int, int] = {}
        self.near = True

    def write(self) -> Order:
        facts = self.facts
        same = facts.first_late  # up to there the order is the step's own
        self.origin, self.operands = list(range(same)), list(facts.operands[:same])
        self.again, self.first = [False] * same, list(range(same))
        for i in range(same, len(facts.operands)):
            operands = facts.operands[i]
            self.at = i
            if facts.phases[i] == 0:
                reads = tuple([self.first[operand] for operand in operands])
            else:
                reads = tuple(
                    [
                        self.first[operand] if self._is_there(operand) else self._late(operand)
                        for operand in operands
                    ]
                )
            self.first.append(self._emit(i, reads, again=False))
        returned = tuple(None if i is None else self.first[i] for i in facts.returned)
        order = Order(facts, tuple(self.origin), tuple(self.operands), tuple(self.again), returned)
        return prune(order)

    def _emit(self, i: int, reads: tuple[int, ...], *, again: bool) -> int:
        if self.near and (again or self.facts.phases[i] > 0):
            self.near = self.facts.kinds[i] not in CALLS
        self.origin.append(i)
        self.operands.append(reads)
        self.again.append(again)
        return len(self.origin) - 1

    def _is_there(self, i: int) -> bool:
        return self.there[i] or self.kept_until[i] > self.at

    def _known(self, i: int) -> int | None:
        available = self._is_there(i) or (self.near and i >= self.facts.head)
        return self.first[i] if available else self.copy.get(i)

    def _late(self, i: int) -> int:
        """Value ``i`` after the forward pass."""
        available = self._known(i)
        if available is not None:
            return available
        for node_index in self._missing(i):
            reads = [self._known(operand) for operand in self.facts.operands[node_index]]
            operands = tuple(read for read in reads if read is not None)
            self.copy[node_index] = self._emit(node_index, operands, again=True)
        known = self._known(i)
        assert known is not None
        return known

    def _missing(self, i: int) -> list[int]:
        """What has to be computed again for ``i``, in forward order."""
        lost = [i] if self._known(i) is None else []
        operands = self.facts.operands
        return sorted(reached(lost, lambda i: (o for o in operands[i] if self._known(o) is None)))


def _available(facts: Facts, saved: frozenset[int]) -> list[bool]:
    """Kept values, inputs, results, random numbers, later phases' values, and their views."""
    there = list(facts.lasting)
    for i in saved:
        there[i] = True
    for i, is_view in enumerate(facts.views):
        if is_view and not there[i]:
            there[i] = all(map(there.__getitem__, facts.operands[i]))
    return there


def prune(order: Order) -> Order:
    """Without operations that nothing reads; inputs, random operations and effects stay."""
    alive = [order.facts.keep[i] for i in order.origin]
    for result in order.returned:
        if result is not None:
            alive[result] = True
    for k in range(len(alive) - 1, -1, -1):
        if alive[k]:
            for operand in order.operands[k]:
                alive[operand] = True
    if all(alive):
        return order
    return order.permuted(k for k, kept in enumerate(alive) if kept)


def build(order: Order) -> StepGraph:
    """The order as a graph of its own, with values whose storages tell who shares bytes."""
    facts = order.facts
    graph = fx.Graph(facts.step.graph.owning_module)
    nodes: list[fx.Node] = []
    fresh: list[bool] = []  # whether the value is not the original's
    for k, i in enumerate(order.origin):
        node, operands = facts.nodes[i], order.operands[k]
        new = dict(zip(facts.operands[i], (nodes[operand] for operand in operands), strict=True))
        by_node = {facts.nodes[old]: replacement for old, replacement in new.items()}
        name = f"{node.name}_again" if order.again[k] else node.name
        args, kwargs = (map_nodes(by_node.__getitem__, x) for x in (node.args, node.kwargs))
        copied = make_node(graph, node, args, kwargs, name)
        moved = facts.kinds[i] is Kind.VIEW and any(fresh[operand] for operand in operands)
        fresh.append(order.again[k] or moved)
        if order.again[k]:
            with_info(copied, phase="backward", recomputed=True)
        if fresh[k]:
            set_value(copied, _value(copied, view=facts.kinds[i] is Kind.VIEW))
        nodes.append(copied)
    graph.output(tuple(None if k is None else nodes[k] for k in order.returned))
    step = StepGraph(graph, facts.step.signature, list(facts.step.history))
    verify(step)
    return step


def _value(node: fx.Node, *, view: bool) -> Any:
    """A value like the original's: in its operand's bytes for a view, in new ones otherwise."""
    return compute(node) if view else like(value_of(node))


def extra_seconds(order: Order, seconds: tuple[float, ...]) -> float:
    """Time for what is computed a second time."""
    return sum(seconds[i] for i, again in zip(order.origin, order.again, strict=True) if again)
