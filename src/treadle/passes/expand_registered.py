"""Replacement of operations by their registered lowerings."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import is_mutable, is_random
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import show_type, tensors_in
from treadle.graph.rewrite.inline import put_in_place, traced_call
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.registered import has_meanings, registered_meaning
from treadle.util.errors import LoweringError


@dataclass(frozen=True)
class ExpandRegistered(GraphPass):
    """Replace each operation that has a registered lowering by it.

    before:  y = mine.scale(x, 2.0)
    after:   y = mul(x, 2.0)              register_lowering(torch.ops.mine.scale.default, ...)
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        calls = [
            node
            for node in step.graph.nodes
            if registered_meaning(node.target) is not None
            and not info(node).eager  # its kernel was chosen
        ]
        for node in calls:
            put_in_place(node, _meaning_of(node))
        return len(calls)


def expansion() -> tuple[GraphPass, ...]:
    """The pass for what is registered now; none if nothing is."""
    return (ExpandRegistered(),) if has_meanings() else ()


def _meaning_of(node: fx.Node) -> fx.Graph:
    meaning = registered_meaning(node.target)
    assert meaning is not None
    graph = traced_call(node, meaning).graph
    for call in graph.nodes:
        fault = _fault(call, node)
        if fault:
            raise _unfit(node, fault)
    (output,) = graph.find_nodes(op="output")
    result: object = output.args[0]
    new = [tensor for value in _listed(result) for tensor in tensors_in(_val(value))]
    old = tensors_in(value_of(node))
    if [_kind(tensor) for tensor in new] != [_kind(tensor) for tensor in old]:
        shown = [", ".join(map(show_type, results)) for results in (new, old)]
        raise _unfit(node, f"gives {shown[0]} instead of {shown[1]}")
    return graph


def _listed(result: object) -> list[object]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _val(value: object) -> object:
    return value_of(value) if isinstance(value, fx.Node) else None


def _kind(value: Any) -> tuple[object, ...]:
    return value.dtype, tuple(value.shape), value.device


def _fault(call: fx.Node, node: fx.Node) -> str:
    """Why a node may not be in a registered lowering, in words."""
    if call.op == "get_attr":
        return "makes a tensor from numbers (use torch.full)"
    if call.op == "call_function" and (is_mutable(call) or is_random(call)):
        return f"writes or draws: {call.target}"
    if call.target is node.target:
        return "calls the operation itself"
    return ""


def _unfit(node: fx.Node, words: str) -> LoweringError:
    return LoweringError(
        f"the registered lowering of {node.target} {words}",
        code="TR-307",
        where=info(node).where,
        remedy=(
            "register a function with the same arguments and results that uses tensor operations"
        ),
    )
