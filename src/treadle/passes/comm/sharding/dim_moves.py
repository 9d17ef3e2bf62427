"""The dims of a value, followed through operations that only move its elements.

::

    w = wait(all_gather(x, 2))    x: f32[2, 6, 8] on each rank        [ranks 2, a 2] [s 6] [k 8]
    p = split(w, 2)
    c = cat([p[0], p[1]], 1)                                          [a 2] [ranks 2, s 6] [k 8]
    v = view(c, [24, 8])                                              [a 2, ranks 2, s 6] [k 8]

Each dim is a list of factors, the slowest first, and a move reorders factors. A view may split a
factor into two, which then replace it everywhere.
"""

import torch
from torch import fx

from treadle.graph.core.dim_maps import EXPANDS, SPLITS, Dims, FactorTable
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import arguments, is_item
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.rules import NoMatch
from treadle.util.errors import require

aten = torch.ops.aten


def moved(moves: FactorTable, node: fx.Node, dims: Dims) -> Dims:
    """The dims of ``node``, whose operand has ``dims``; ``NoMatch`` if it does more than to put
    elements elsewhere, or to give them another dtype."""
    require(node.target not in EXPANDS, NoMatch, f"{node} is not a move of elements")
    return moves.through(node, dims)


def rejoined(moves: FactorTable, join: fx.Node, dims: Dims) -> Dims:
    """The dims of ``join``, which puts all pieces of a split beside each other along a dim."""
    split = split_behind(join)
    assert split is not None, join
    pieces = arguments(join)["tensors"]
    sizes = {type_of(piece).shape for piece in pieces}
    require(len(sizes) == 1, NoMatch, f"{split} makes parts of several sizes")
    args = arguments(split)
    along = args["dim"] % len(dims)
    left = list(moves.factors([dims[along]]))
    number = moves.taken(split, left, len(pieces))
    joined = list(dims)
    joined[along] = tuple(left)
    to = arguments(join)["dim"] % len(dims)
    joined[to] = (*number, *joined[to])
    return tuple(joined)


def split_behind(join: fx.Node) -> fx.Node | None:
    """What was split, if ``join`` is a cat of all its pieces in their order, and nobody else reads
    them; else none."""
    if join.target is not aten.cat.default:
        return None
    pieces = arguments(join)["tensors"]
    if not all(is_item(piece) and len(piece.users) == 1 for piece in pieces):
        return None
    sources = {piece.args[0] for piece in pieces}
    split = sources.pop()
    if sources or not isinstance(split, fx.Node) or split.target not in SPLITS:
        return None
    whole = [piece.args[1] for piece in pieces] == [*range(len(value_of(split)))]
    return split if whole and set(split.users) == set(pieces) else None
