"""Keep dropout masks as one byte an element."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treadle.graph.passes import GraphPass
from treadle.graph.signature import StepGraph
from treadle.graph.types import type_of
from treadle.graph.values import inherit

aten = torch.ops.aten
_DRAWS = (aten.bernoulli.p, aten.bernoulli.default)
_SCALINGS = (aten.div.Scalar, aten.div.Tensor, aten.mul.Scalar, aten.mul.Tensor)


@dataclass(frozen=True)
class StoreDropoutMasksAsBool(GraphPass):
    """Let other phases read a mask of zeros and ones through a bool copy of it.

    before:  m = bernoulli(e, 0.9); s = div(m, 0.9); y = mul(x, s)    | forward
             g = mul(dy, s)                                           | backward
    after:   m = bernoulli(e, 0.9); b = bool(m); s = div(m, 0.9); y = mul(x, s)
             f = float(b); t = div(f, 0.9); g = mul(dy, t)

    Between the phases one byte an element lives where four did. Exact: zero and one survive
    the conversions, and the scalings are repeated on the same numbers.
    """

    def run(self, step: StepGraph) -> int:
        draws = [node for node in step.graph.nodes if node.target in _DRAWS and _is_float(node)]
        plans = [(chain, far) for chain in map(_chain, draws) if (far := _far_readers(chain))]
        for chain, far in plans:
            _store_as_bool(chain, far)
        return len(plans)


def _is_float(node: fx.Node) -> bool:
    return type_of(node).dtype.is_floating_point


def _chain(draw: fx.Node) -> list[fx.Node]:
    """The draw and what its own phase makes of it by constants alone, in order."""
    chain = [draw]
    for node in chain:
        chain += [user for user in node.users if _is_scaling(user, node) and user not in chain]
    return chain


def _is_scaling(user: fx.Node, node: fx.Node) -> bool:
    if user.target not in _SCALINGS or user.meta["phase"] != node.meta["phase"]:
        return False
    return user.args[0] is node and isinstance(user.args[1], int | float) and not user.kwargs


def _far_readers(chain: list[fx.Node]) -> dict[str, list[fx.Node]]:
    """Readers of the chain in other phases, by phase."""
    home = chain[0].meta["phase"]
    far: dict[str, list[fx.Node]] = {}
    for node in chain:
        for user in node.users:
            if user.op == "call_function" and user.meta["phase"] != home:
                far.setdefault(user.meta["phase"], []).append(user)
    return far


def _store_as_bool(chain: list[fx.Node], far: dict[str, list[fx.Node]]) -> None:
    draw = chain[0]
    graph, dtype = draw.graph, type_of(draw).dtype
    with graph.inserting_after(draw):
        stored = _convert(draw, torch.bool, like=draw)
    for readers in far.values():
        first = _first(graph, readers)
        with graph.inserting_before(first):
            again = {draw: _convert(stored, dtype, like=first)}
            for node in chain[1:]:
                again[node] = _repeat(node, again, like=first)
        for reader in set(readers):
            for node, copy in again.items():
                reader.replace_input_with(node, copy)
        for copy in reversed(again.values()):
            if not copy.users:
                graph.erase_node(copy)


def _first(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    wanted = set(nodes)
    return next(node for node in graph.nodes if node in wanted)


def _convert(node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    result = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    inherit(result, like)
    return result


def _repeat(node: fx.Node, again: dict[fx.Node, fx.Node], like: fx.Node) -> fx.Node:
    source, *rest = node.args
    assert isinstance(source, fx.Node)
    result = node.graph.call_function(_callable(node), (again[source], *rest))
    inherit(result, like)
    return result


def _callable(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target), node
    return node.target
