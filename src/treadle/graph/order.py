"""A valid order again, after a pass has moved or rewired nodes."""

import heapq
import itertools
from collections.abc import Sequence

from torch import fx

from treadle.util.errors import VerifyError


def restore_order(graph: fx.Graph) -> int:
    """Sort definitions before uses with the least movement; the number of nodes that moved.

    before:  c = add(a, b); a = neg(x); b = exp(x); d = relu(x)
    after:   a = neg(x); b = exp(x); c = add(a, b); d = relu(x)

    A node that stands before one of its operands waits until the last of them is defined; all
    others keep their order. ``VerifyError`` names the nodes of a cycle.
    """
    nodes = list(graph.nodes)
    order, late = _stable_order(nodes)
    if len(order) < len(nodes):
        cycle = " -> ".join(str(node) for node in _cycle(nodes, set(order)))
        raise VerifyError(f"values depend on each other in a circle: {cycle}")
    if late:
        arrange(nodes, order)
    return late


def _stable_order(nodes: list[fx.Node]) -> tuple[list[fx.Node], int]:
    """Always the earliest node whose operands are all placed; how many had to wait."""
    position = {node: i for i, node in enumerate(nodes)}
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [i for i, node in enumerate(nodes) if not missing[node]]
    order: list[fx.Node] = []
    late, furthest = 0, -1
    while ready:
        at = heapq.heappop(ready)
        late += at < furthest
        furthest = max(furthest, at)
        order.append(nodes[at])
        for user in nodes[at].users:
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


def _cycle(nodes: list[fx.Node], placed: set[fx.Node]) -> list[fx.Node]:
    """Walk from use to missing definition until a node comes back."""
    node = next(each for each in nodes if each not in placed)
    path: list[fx.Node] = []
    while node not in path:
        path.append(node)
        node = next(each for each in node.all_input_nodes if each not in placed)
    return [node, *reversed(path[path.index(node) :])]
