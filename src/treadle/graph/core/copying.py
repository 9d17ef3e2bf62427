"""Copies of graphs, over the same values.

``fx.Graph.create_node`` checks all arguments of a node for symbols, which takes half of the time of
a copy. Here nodes are created without arguments, which are set afterwards.
"""

from typing import Any

from torch import fx

from treadle.graph.core.arguments import Argument, map_nodes
from treadle.graph.core.node_info import copy_notes


def make_node(
    graph: fx.Graph, like: fx.Node, args: Argument, kwargs: Argument, name: str
) -> fx.Node:
    """A node where the graph inserts them: the operation and the notes of ``like``, of any graph,
    with these arguments."""
    made = graph.create_node(like.op, like.target, (), {}, name, like.type)
    if args:
        made.args = args  # pyright: ignore[reportAttributeAccessIssue]
    if kwargs:
        made.kwargs = kwargs  # pyright: ignore[reportAttributeAccessIssue]
    copy_notes(made, like)
    return made


def copy_nodes(graph: fx.Graph, into: fx.Graph, twins: dict[fx.Node, fx.Node]) -> Argument:
    """All nodes but the output, under their names, at the end of ``into``; what the output would
    have. ``twins`` gets which node became which."""
    for node in graph.nodes:
        args = map_nodes(twins.__getitem__, node.args)
        if node.op == "output":
            return args[0]
        kwargs = map_nodes(twins.__getitem__, node.kwargs) if node.kwargs else node.kwargs
        twins[node] = make_node(into, node, args, kwargs, node.name)
    return None


def copied(graph: fx.Graph, owner: Any = None) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph once more over the same values, and which node became which. ``owner``: the module
    of the copy's constants, if not that of the graph."""
    twins: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph(owning_module=graph.owning_module if owner is None else owner)
    copy.output(copy_nodes(graph, copy, twins))
    return copy, twins
