"""Random zeros and ones in a graph, in both variants."""

from dataclasses import dataclass

import torch
from torch import fx

from treadle.compat.operators.rng_operators import BERNOULLI, DRAWS
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import arguments

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ZeroOneDraw:
    """``m[i] = 1`` with probability ``p``, else ``0``; in memory as ``stride`` says, in the order
    of memory. ``generator``: the user's own, if not the device's."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    p: float
    generator: object


_ZERO_OR_ONE = frozenset({
    aten.bernoulli.p, aten.bernoulli.default, aten.bernoulli.Tensor, BERNOULLI,
    DRAWS[aten.bernoulli_.Tensor],
})  # fmt: skip


def is_zero_or_one(node: fx.Node) -> bool:
    """Whether ``node`` draws zeros and ones, with a probability that is known or in a tensor."""
    return node.op == "call_function" and node.target in _ZERO_OR_ONE


def zero_one_draw(node: fx.Node) -> ZeroOneDraw | None:
    """What ``node`` draws, if it draws zeros and ones and looks at no tensor's elements."""
    if node.target is not BERNOULLI and node.target is not aten.bernoulli.p:
        return None
    args = arguments(node)
    return ZeroOneDraw(*layout_of(value_of(node)), args["p"], args["generator"])
