"""Removal of effect tokens: AOTAutograd orders effects by data, a step by position.

::

    before:  t1, r = with_effects(t0, op, x); t2, _ = with_effects(t1, check, r); return t2, r
    after:   r = op(x); check(r); return t0, r
"""

import operator
from collections.abc import Callable

from torch import fx

from treadle.compat.operators.schemas import schema_of
from treadle.graph.core.arguments import Argument, map_nodes
from treadle.graph.core.node_info import copy_notes, set_value, value_of
from treadle.graph.core.operators import WITH_EFFECTS, OpOverload


def remove_tokens(graph: fx.Graph) -> None:
    """Call what the tokens order directly; the tokens that are left are those the graph is given,
    which nobody reads and which have no value."""
    tokens: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is WITH_EFFECTS:
            token, target, *args = node.args
            assert token is None or isinstance(token, fx.Node), node  # none: traced for known sizes
            assert callable(target), node
            called = _called(graph, node, target, tuple(args))
            _replace_results(graph, node, token, target, called)
            if token is not None and token.op == "placeholder":
                tokens.add(token)
    for token in tokens:
        if all(user.op == "output" for user in token.users):
            set_value(token, None)


def _called(
    graph: fx.Graph, node: fx.Node, target: Callable[..., object], args: tuple[Argument, ...]
) -> fx.Node:
    with graph.inserting_before(node):
        call = graph.call_function(target, args, dict(node.kwargs))
    copy_notes(call, node)
    results = value_of(node)[1:]
    count = _result_count(target, len(results))
    set_value(call, results if count > 1 else results[0] if results else None)
    return call


def _replace_results(
    graph: fx.Graph,
    node: fx.Node,
    token: fx.Node | None,
    target: Callable[..., object],
    replacement: fx.Node,
) -> None:
    count = _result_count(target, len(value_of(node)) - 1)
    for user in list(node.users):
        assert user.target is operator.getitem, user
        at = user.args[1]
        assert isinstance(at, int), user
        if at == 0:
            _replace(user, token)
        elif count == 1:
            user.replace_all_uses_with(replacement)
        else:
            user.args = (replacement, at - 1)
            continue
        graph.erase_node(user)
    graph.erase_node(node)


def _replace(node: fx.Node, token: fx.Node | None) -> None:
    for reader in list(node.users):
        reader.args = map_nodes(lambda read: token if read is node else read, reader.args)


def _result_count(target: object, count: int) -> int:
    """How many results ``target`` has by itself; a list of tensors is one."""
    return len(schema_of(target).returns) if isinstance(target, OpOverload) else count
