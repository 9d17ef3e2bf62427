"""Dropout as it is computed on CPUs: random numbers and two products."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treadle.compat.operators.rng_operators import BERNOULLI
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.targets.registry import target_for

aten = torch.ops.aten


@dataclass(frozen=True)
class ExpandDropout(GraphPass):
    """Split a fused dropout into its draw and its products, which can be fused and planned.

    before:  d = native_dropout(x, 0.1, True); y = d[0]; mask = d[1]
    after:   m = bernoulli(x, 0.9); y = mul(mul(x, m), 1.11...); mask = bool(m)

    On CPUs alone, where the fused kernel draws the same numbers from the same stream; on GPUs
    it has a stream of its own. ``everywhere``: on GPUs as well. A probability of 0 or 1 is left
    alone.
    """

    contract = Contract()

    everywhere: bool = False

    def run(self, step: StepGraph) -> int:
        fused = [n for n in step.graph.nodes if n.target is aten.native_dropout.default]
        matches = [node for node in fused if self._matches(node)]
        for node in matches:
            _expand(node)
        return len(matches)

    def _matches(self, node: fx.Node) -> bool:
        args: Any = node.args
        p, train = args[1], args[2] if len(args) > 2 else True
        placed = self.everywhere or target_for(type_of(args[0]).device).sequential_rng
        return placed and 0.0 < p < 1.0 and train is not False


def _expand(node: fx.Node) -> None:
    args: Any = node.args
    x, kept = args[0], 1.0 - args[1]
    build = ReplacementBuilder(node)
    draw = _draw(build, x, kept)
    scaled = build.call(aten.mul.Scalar, build.call(aten.mul.Tensor, x, draw), 1.0 / kept)
    mask = build.call(aten._to_copy.default, draw, dtype=torch.bool)
    for item in list(node.users):
        assert item.target is operator.getitem, item
        item.replace_all_uses_with((scaled, mask)[item.args[1]])  # type: ignore[index]
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _draw(build: ReplacementBuilder, x: fx.Node, kept: float) -> fx.Node:
    """The draw that the fused kernel makes: in the order of the mask's memory."""
    mask = value_of(build.root)[1]
    if mask.is_contiguous():
        return build.call(aten.bernoulli.p, x, kept)
    shape, strides = map(list, layout_of(mask))
    like = type_of(x)
    return build.call(BERNOULLI, shape, strides, like.dtype, like.device, kept)
