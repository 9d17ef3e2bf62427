"""A valid order again, after a pass has moved or rewired nodes."""

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from treadle.util.errors import VerifyError

Earlier = Mapping[fx.Node, Collection[fx.Node]]
"""Which nodes must stand before a node, besides its operands: its order matters, and not its
value."""


def restore_order(graph: fx.Graph, earlier: Earlier | None = None) -> int:
    """Sort definitions before uses with the least movement; the number of nodes that moved.

    before:  c = add(a, b); a = neg(x); b = exp(x); d = relu(x)
    after:   a = neg(x); b = exp(x); c = add(a, b); d = relu(x)

    A node that stands before one of its operands waits until the last of them is defined; all
    others keep their order. So does one that stands before another of those that ``earlier`` has
    for it. ``VerifyError`` names the nodes of a cycle.
    """
    nodes = list(graph.nodes)
    needed = {node: _needed_by(node, earlier or {}) for node in nodes}
    order, late = _stable_order(nodes, needed)
    if len(order) < len(nodes):
        cycle = " -> ".join(str(node) for node in _cycle(nodes, needed, set(order)))
        raise VerifyError(f"values depend on each other in a circle: {cycle}")
    if late:
        arrange(nodes, order)
    return late


def _needed_by(node: fx.Node, earlier: Earlier) -> Sequence[fx.Node]:
    """What must stand before ``node``, each once."""
    operands, others = node.all_input_nodes, earlier.get(node, ())
    return list(dict.fromkeys([*operands, *others])) if others else operands


def _stable_order(
    nodes: list[fx.Node], needed: Mapping[fx.Node, Sequence[fx.Node]]
) -> tuple[list[fx.Node], int]:
    """Always the earliest node whose operands are all placed; how many had to wait."""
    position = {node: i for i, node in enumerate(nodes)}
    missing = {node: len(needed[node]) for node in nodes}
    readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for each in needed[node]:
            readers[each].append(node)
    ready = [i for i, node in enumerate(nodes) if not missing[node]]
    order: list[fx.Node] = []
    late, furthest = 0, -1
    while ready:
        at = heapq.heappop(ready)
        late += at < furthest
        furthest = max(furthest, at)
        order.append(nodes[at])
        for user in readers[nodes[at]]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    return order, late


def arrange(nodes: Sequence[fx.Node], order: Sequence[fx.Node]) -> None:
    """Move ``nodes``, which stand in this order from the first of their graph on, to ``order``."""
    if order[0] is not nodes[0]:
        nodes[0].prepend(order[0])
    for before, node in itertools.pairwise(order):
        if before.next is not node:
            before.append(node)


def _cycle(
    nodes: list[fx.Node],
    needed: Mapping[fx.Node, Sequence[fx.Node]],
    placed: set[fx.Node],
) -> list[fx.Node]:
    """Walk from use to missing definition until a node comes back."""
    node = next(each for each in nodes if each not in placed)
    path: list[fx.Node] = []
    while node not in path:
        path.append(node)
        node = next(each for each in needed[node] if each not in placed)
    return [node, *reversed(path[path.index(node) :])]
