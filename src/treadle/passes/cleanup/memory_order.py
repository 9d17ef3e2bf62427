"""In-place random numbers, restored to memory order after functionalization."""

from dataclasses import dataclass

import torch
from torch import fx

from treadle.compat.operators.rng_operators import BERNOULLI, FUNCTIONAL
from treadle.graph.core.node_info import tensor_of, value_of
from treadle.graph.core.operators import OpOverload, arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import same_types
from treadle.graph.core.values import emit_ahead, refresh
from treadle.graph.rewrite.passes import Contract, GraphPass

aten = torch.ops.aten

_EMPTY = frozenset({
    aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided,
})  # fmt: skip


@dataclass(frozen=True)
class DrawInMemoryOrder(GraphPass):
    """For graphs that PyTorch functionalized: its functional draws are contiguous.

    before:  e = empty_like(t); d = bernoulli.p(e, 0.9)           t: f32[4, 3], strides (1, 4)
    after:   d = treadle.bernoulli([4, 3], [1, 4], f32, cpu, 0.9)

    The user wrote ``e.bernoulli_(0.9)``, which draws in the order of the memory of ``e``. Memory
    that nobody wrote to is what tells it from ``torch.bernoulli(t, 0.9)``, which gives a contiguous
    tensor; the other functional forms are PyTorch's own.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        nodes = [node for node in step.graph.nodes if _is_misplaced(node)]
        for node in nodes:
            _replace(node)
        return len(nodes)


def _is_misplaced(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    like = node.args[0]
    in_place = node.target in FUNCTIONAL
    if node.target is aten.bernoulli.p:
        in_place = isinstance(like.target, OpOverload) and like.target.overloadpacket in _EMPTY
    return in_place and not tensor_of(like).is_contiguous()


def _replace(node: fx.Node) -> None:
    value: object = arguments(node)
    like = tensor_of(value.pop("self"))
    target = BERNOULLI if node.target is aten.bernoulli.p else FUNCTIONAL[node.target]  # type: ignore[index]
    layout = list(like.shape), list(like.stride()), like.dtype, like.device
    named = {"generator": value.pop("generator")}
    laid_out = emit_ahead(node, node, target, *layout, *value.values(), **named)
    if not same_types(value_of(laid_out), value_of(node)):
        laid_out = _laid_out(laid_out, node)
    node.replace_all_uses_with(laid_out)
    node.graph.erase_node(node)
    refresh(laid_out.graph, [laid_out])


def _laid_out(draw: fx.Node, old: fx.Node) -> fx.Node:
    """The numbers in the strides that ``old`` had, which its readers were traced with."""
    contiguous = tensor_of(old).is_contiguous()
    form = torch.contiguous_format if contiguous else torch.preserve_format
    return emit_ahead(old, old, aten.clone.default, draw, memory_format=form)
