"""Where the dims of a value go, through operations that only put its elements elsewhere.

::

    w = wait(all_gather(x, 2))    x: f32[2, 6, 8] on each rank        [ranks 2, a 2] [s 6] [k 8]
    p = split(w, 2)
    c = cat([p[0], p[1]], 1)                                          [a 2] [ranks 2, s 6] [k 8]
    v = view(c, [24, 8])                                              [a 2, ranks 2, s 6] [k 8]

Each dim is a list of factors, the slowest first, and a move puts factors elsewhere. A view may find
that one consists of two: both stand for it from then on, wherever it stood.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeAlias, final

import torch
from torch import fx

from treadle.graph.node_info import value_of
from treadle.graph.operators import arguments, is_item
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import type_of
from treadle.util.errors import require

aten = torch.ops.aten

Factors: TypeAlias = tuple[int, ...]
"""Numbers of factors, the slowest first."""
Dims: TypeAlias = tuple[Factors, ...]
"""The factors of each dim."""

_RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip
_COPIES = frozenset({aten.clone.default, aten.contiguous.default})
CASTS = frozenset({aten._to_copy.default, aten.view.dtype})
"""Each element as another dtype: the same for a part of the elements."""
_SPLITS = frozenset({aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default})


@final
class DimMoves:
    """The factors of some value's dims. One of a single index is none."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def dims_of(self, shape: Sequence[int]) -> Dims:
        """New factors, one for each dim."""
        return tuple(self._new(size) for size in shape)

    def factors(self, dims: Iterable[Factors]) -> Factors:
        """Those of all the dims, one behind the other."""
        return tuple(known for dim in dims for each in dim for known in self._known(each))

    def sizes(self, factors: Iterable[int]) -> list[int]:
        """How many indices each has."""
        return [self._sizes[each] for each in factors]

    def grouped(self, node: fx.Node, dims: Iterable[Factors], shape: Sequence[int]) -> Dims:
        """The factors of all ``dims`` in their order, as dims of other sizes."""
        left = list(self.factors(dims))
        found = tuple(self.taken(node, left, size) for size in shape)
        require(not left, NoMatch, f"{node} has another size than what it shows")
        return found

    def taken(self, node: fx.Node, factors: list[int], size: int) -> Factors:
        """The first of ``factors``, which go: those that have ``size`` indices together."""
        found: list[int] = []
        while size > 1:
            require(bool(factors), NoMatch, f"{node} has another size than what it shows")
            first = factors.pop(0)
            if self._sizes[first] > size:
                require(self._sizes[first] % size == 0, NoMatch, _mixes(node))
                first, rest = self._divide(first, size)
                factors.insert(0, rest)
            require(size % self._sizes[first] == 0, NoMatch, _mixes(node))
            found.append(first)
            size //= self._sizes[first]
        return tuple(found)

    def _new(self, size: int) -> Factors:
        if size == 1:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def _known(self, factor: int) -> Factors:
        if factor not in self._parts:
            return (factor,)
        return tuple(known for each in self._parts[factor] for known in self._known(each))

    def _divide(self, factor: int, size: int) -> tuple[int, int]:
        (slow,), (fast,) = self._new(size), self._new(self._sizes[factor] // size)
        self._parts[factor] = slow, fast
        return slow, fast


def _mixes(node: fx.Node) -> str:
    return f"{node} puts parts of several dims together"


def moved(moves: DimMoves, node: fx.Node, dims: Dims) -> Dims:
    """The dims of ``node``, whose operand has ``dims``; ``NoMatch`` if it does more than to put
    elements elsewhere, or to give them another dtype."""
    given = arguments(node)
    if node.target in _RESHAPES:
        return moves.grouped(node, dims, type_of(node).shape)
    if node.target in _COPIES or node.target in CASTS:
        same = type_of(node).shape == type_of(given["self"]).shape
        require(same, NoMatch, f"{node} shows its bytes as elements of another size")
        return dims
    match node.target:
        case aten.permute.default:
            order = [int(each) for each in given["dims"]]
        case aten.transpose.int:
            order = _swapped(len(dims), int(given["dim0"]), int(given["dim1"]))
        case aten.t.default:
            order = [*reversed(range(len(dims)))]
        case _:
            raise NoMatch(f"{node} is no move of elements")
    return tuple(dims[each] for each in order)


def _swapped(count: int, one: int, other: int) -> list[int]:
    order = [*range(count)]
    order[one], order[other] = order[other], order[one]
    return order


def rejoined(moves: DimMoves, join: fx.Node, dims: Dims) -> Dims:
    """The dims of ``join``, which puts all pieces of a split beside each other along a dim."""
    split = split_behind(join)
    assert split is not None, join
    pieces = arguments(join)["tensors"]
    sizes = {type_of(each).shape for each in pieces}
    require(len(sizes) == 1, NoMatch, f"{split} cuts pieces of several sizes")
    given = arguments(split)
    along = given["dim"] % len(dims)
    left = list(moves.factors([dims[along]]))
    number = moves.taken(split, left, len(pieces))
    found = list(dims)
    found[along] = tuple(left)
    to = arguments(join)["dim"] % len(dims)
    found[to] = (*number, *found[to])
    return tuple(found)


def split_behind(join: fx.Node) -> fx.Node | None:
    """What was split, if ``join`` is a cat of all its pieces in their order, and nobody else reads
    them; else none."""
    if join.target is not aten.cat.default:
        return None
    pieces = arguments(join)["tensors"]
    if not all(is_item(each) and len(each.users) == 1 for each in pieces):
        return None
    sources = {each.args[0] for each in pieces}
    split = sources.pop()
    if sources or not isinstance(split, fx.Node) or split.target not in _SPLITS:
        return None
    whole = [each.args[1] for each in pieces] == [*range(len(value_of(split)))]
    return split if whole and set(split.users) == set(pieces) else None


def product_of_sizes(moves: DimMoves, factors: Iterable[int]) -> int:
    """How many indices they have together."""
    return prod(moves.sizes(factors))


__all__ = [
    "CASTS",
    "DimMoves",
    "Dims",
    "Factors",
    "moved",
    "product_of_sizes",
    "rejoined",
    "split_behind",
]
