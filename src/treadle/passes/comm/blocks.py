"""Operations around a collective that only rearrange elements: views, slices, and copies of them.

::

    s = mul(g, 0.5)
    r = all_gather(s, 2, "0"); w = wait(r)
    p = split(w, 4); a = p[0]; b = p[1]; t = cat([a, b], 1)     rearranges
    y = mm(x, t)                                                computes
"""

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from treadle.graph.analysis.alias import storages
from treadle.graph.core.dim_maps import JOINS, MOVES
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import effects_of, operand_of
from treadle.graph.core.types import type_of
from treadle.graph.core.values import emit_ahead
from treadle.util.reach import reached

aten = torch.ops.aten


def rearranges(node: fx.Node) -> bool:
    """Whether the node gives the elements of its operands and nothing else: views of them, or
    copies."""
    return is_view(node) or node.target in MOVES or node.target in JOINS


def is_view(node: fx.Node) -> bool:
    """Whether the node shows elements of its one operand, in the operand's memory. A node that
    gives several views counts as well, and so does an item of it."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or effects_of(node):
        return False
    return bool(storages(value_of(node)) & storages(value_of(operand_of(node))))


def views_towards(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The views that ``nodes`` are, and those that they are views of."""
    views = filter(is_view, nodes)
    return {*reached(views, lambda view: filter(is_view, view.all_input_nodes))}


def reshaped_ahead(place: fx.Node, root: fx.Node, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """``node`` in another shape, if it is another, ahead of ``place``: a copy if it cannot be a
    view. It belongs where ``root`` does."""
    kind = type_of(node)
    if kind.shape == tuple(shape):
        return node
    target = aten.view.default if kind.is_contiguous else aten.reshape.default
    return emit_ahead(place, root, target, node, list(shape))
