"""Dropout masks as a function of position: nothing is stored, and nothing is drawn in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from treadle.algebra.extents import sample_of
from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.rng import ZeroOneDraw, zero_one_draw
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.custom_ops.masks import counted_mask
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.cleanup.memory_order import DrawInMemoryOrder

aten = torch.ops.aten


@dataclass(frozen=True)
class UseCounterBasedRng(GraphPass):
    """Compute the mask of each draw wherever it is read, from a key and the position.

    before:  m = bernoulli(x, 0.9)
    after:   keys = randint(...)[1]                  once a step, for all draws
             m = counted_mask(keys, 0, [4, 8], 0.9)  as often as it is read

    A draw and a step have a key of their own, from PyTorch's generator: the same seed gives the
    same masks, which are not eager's.
    """

    contract = Contract(after=(DrawInMemoryOrder,))  # which tells draws by what they draw from

    def run(self, step: StepGraph) -> int:
        draws = [node for node in step.graph.nodes if _is_replaced(node)]
        if not draws:
            return 0
        keys = _keys(draws)
        for at, node in enumerate(draws):
            mask = _mask(node, keys, at)
            node.replace_all_uses_with(mask)
            step.graph.erase_node(node)
        return len(draws)


def _is_replaced(node: fx.Node) -> bool:
    """A draw of zeros and ones, neither of which is certain, from the device's generator; in memory
    without gaps."""
    draw = zero_one_draw(node)
    if draw is None or draw.generator is not None or not 0.0 < draw.p < 1.0:
        return False
    return tensor_of(node).permute(_order(draw)).is_contiguous()


def _order(draw: ZeroOneDraw) -> list[int]:
    """The dims from the one that takes the longest steps in memory."""
    return sorted(range(len(draw.stride)), key=lambda dim: -sample_of(draw.stride[dim]))


def _mask(node: fx.Node, keys: fx.Node, at: int) -> fx.Node:
    """Counted in the order of memory, and then the shape of ``node``."""
    draw = zero_one_draw(node)
    assert draw is not None
    plain = tensor_of(node).is_contiguous()
    order = list(range(len(draw.size))) if plain else _order(draw)
    shape = [draw.size[dim] for dim in order]
    build = ReplacementBuilder(node)
    mask = build.call(counted_mask, keys, at, shape, draw.p, type_of(node).dtype)
    if plain:
        return mask
    return build.call(aten.permute.default, mask, [order.index(dim) for dim in range(len(order))])


def _keys(draws: Sequence[fx.Node]) -> fx.Node:
    """An odd number of 62 bits for each draw: one draw of PyTorch's, whatever their number."""
    kind = {"dtype": torch.int64, "device": type_of(draws[0]).device, "pin_memory": False}
    build = ReplacementBuilder(draws[0])
    drawn = build.call(aten.randint.low, 1, 1 << 62, [len(draws)], **kind)
    return build.call(aten.bitwise_or.Scalar, drawn, 1)


__all__ = ["UseCounterBasedRng"]
