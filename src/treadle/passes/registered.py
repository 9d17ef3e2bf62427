"""What users add: passes of their own, and operations as other operations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import OpOverload, is_mutable, is_random
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import show_type, tensors_in
from treadle.graph.rewrite.inline import put_in_place, traced_call
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.util.errors import LoweringError

Meaning = Callable[..., object]

STAGES = ("extend", "clean", "plan memory")
"""The stages at whose end users' passes may run."""

_passes: list[tuple[str, GraphPass]] = []
_meanings: dict[OpOverload, Meaning] = {}


def register_pass(each: GraphPass, *, stage: str = "extend") -> None:
    """Run ``each`` on every step that is compiled or planned from now on, at the end of ``stage``:

    - ``extend``: on what was captured, once no-ops, repetitions and dead code are gone; before
      the cache is asked;
    - ``clean``: after the cleaning of treadle's own, before memory is planned;
    - ``plan memory``: on every plan before it is judged, and so on the graph that is lowered.

    Passes of a stage run in the order of their registration. The graph is verified after each. A
    second run must find nothing to do, and equal graphs must become equal graphs. What is compiled
    while a pass is registered at one of the later stages is neither taken from the cache nor kept
    there, as nothing could tell whether the code of the pass is what it was.
    ``LoweringError`` TR-307 for what is no pass or no stage, or is registered there.
    """
    value: Any = each  # users' code is not always typed
    if stage not in STAGES:
        raise LoweringError(
            f"there is no stage {stage!r} for passes",
            code="TR-307",
            remedy=f"one of {', '.join(STAGES)}",
        )
    if not isinstance(value, GraphPass) or (stage, each) in _passes:
        raise LoweringError(
            f"{each!r} is no GraphPass, or is registered already",
            code="TR-307",
            remedy="register an instance of a subclass of treadle.GraphPass, once",
        )
    _passes.append((stage, each))


def register_lowering(op: OpOverload, meaning: Meaning) -> None:
    """Let ``op`` be fused: ``meaning(*args, **kwargs)``, with the operation's own arguments,
    computes the same from PyTorch's operations on tensors, without writing to any of them.

    ``LoweringError`` TR-307 for what is no operation (``torch.ops.library.name.overload``), or has
    a meaning already; at compile time, if the meaning's type is not the operation's.
    """
    value: Any = op
    if not isinstance(value, OpOverload) or not callable(meaning) or op in _meanings:
        raise LoweringError(
            f"{op!r} is no operation with an overload, or has a meaning already",
            code="TR-307",
            remedy="register torch.ops.<library>.<name>.<overload> with a function, once",
        )
    _meanings[op] = meaning


def registered(stage: str) -> tuple[GraphPass, ...]:
    """The passes for what is registered now and runs at a stage; none if nothing is."""
    expansion = (ExpandRegistered(),) if _meanings and stage == "extend" else ()
    return (*expansion, *(graph_pass for where, graph_pass in _passes if where == stage))


def registered_late() -> tuple[GraphPass, ...]:
    """Users' passes that run after the cache has been asked: what they make is not kept there."""
    return tuple(graph_pass for where, graph_pass in _passes if where != "extend")


@dataclass(frozen=True)
class ExpandRegistered(GraphPass):
    """Each operation with a registered meaning becomes that.

    before:  y = mine.scale(x, 2.0)
    after:   y = mul(x, 2.0)              register_lowering(torch.ops.mine.scale.default, ...)
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        calls = [
            node
            for node in step.graph.nodes
            if node.target in _meanings and not info(node).eager  # its kernel was chosen
        ]
        for node in calls:
            put_in_place(node, _meaning_of(node))
        return len(calls)


def _meaning_of(node: fx.Node) -> fx.Graph:
    assert isinstance(node.target, OpOverload)
    graph = traced_call(node, _meanings[node.target]).graph
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
    """What keeps a node out of a meaning, in words."""
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
        remedy="register a function of the same arguments and results, in operations on tensors",
    )


__all__ = [
    "ExpandRegistered",
    "register_lowering",
    "register_pass",
    "registered",
    "registered_late",
]
