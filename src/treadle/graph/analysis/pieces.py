"""Pieces of a value along one dim: slices, the results of a split, the operands of a cat.

::

    s = slice(x, 1, 2, 5)                    Piece(x, dim=1, start=2, stop=5)
    p = split(x, [2, 3], 1); q = p[1]        Piece(x, dim=1, start=2, stop=5)
    c = cat([a, b], 1)                       a: Piece(c, 1, 0, 2),  b: Piece(c, 1, 2, 5)

One index of a dim is a piece without the dim: ``select``, and the results of ``unbind``.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treadle.algebra.extents import ceil_div, is_negative, is_zero, same
from treadle.graph.core.dim_maps import SPLITS
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import TensorType, is_tensor, type_of
from treadle.util.errors import VerifyError, require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Piece:
    """``source[start:stop]`` along ``dim``."""

    source: fx.Node
    dim: int
    start: int
    stop: int

    def continues(self, other: "Piece") -> bool:
        """Whether it begins where ``other`` ends."""
        along = self.source is other.source and self.dim == other.dim
        return along and same(self.start, other.stop)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        extent = type_of(self.source).shape[self.dim]
        return same(self.start, 0) and same(self.stop, extent)


@dataclass(frozen=True, slots=True)
class Selected:
    """``source[..., index, ...]``, without the dim ``dim``."""

    source: fx.Node
    dim: int
    index: int


def piece_of(node: fx.Node) -> Piece | None:
    """What part of which value ``node`` is; ``None`` if it is not a piece."""
    if node.target is aten.slice.Tensor:
        return _sliced(node)
    if node.target is not operator.getitem:
        return None
    maker, at = node.args
    if not isinstance(maker, fx.Node) or maker.target not in SPLITS or not isinstance(at, int):
        return None
    args = arguments(maker)
    source = args["self"]
    extents = split_extents(maker)
    dim, at = args["dim"] % type_of(source).ndim, at % len(extents)
    start = sum(extents[:at])
    return Piece(source, dim, start, start + extents[at])


def split_extents(split: fx.Node) -> list[int]:
    """How long each result of a split is along its dim."""
    args = arguments(split)
    source = type_of(args["self"])
    dim = args["dim"] % source.ndim
    sizes: Any = args.get("split_sizes", args.get("split_size"))
    if isinstance(sizes, list | tuple):
        return list(sizes)
    count = len(value_of(split))
    if "chunks" in args:
        sizes = ceil_div(source.shape[dim], args["chunks"])
    return [*[sizes] * (count - 1), source.shape[dim] - sizes * (count - 1)]


def _sliced(node: fx.Node) -> Piece | None:
    args = arguments(node)
    source = args["self"]
    if not is_tensor(source) or args["step"] != 1:
        return None
    dim = args["dim"] % type_of(source).ndim
    extent, length = type_of(source).shape[dim], type_of(node).shape[dim]
    try:
        start = first_of(args["start"], extent)
    except VerifyError:  # it depends on sizes
        return None
    return Piece(source, dim, start, start + length)


def first_of(start: int | None, extent: int) -> int:
    """Where a slice begins in a dim of ``extent``; ``VerifyError`` where that depends on sizes."""
    start = 0 if start is None else start
    if is_negative(start):
        start = start + extent
        start = 0 if is_negative(start) else start
    return extent if is_negative(extent - start) else start  # past the end: nothing


def selected_of(node: fx.Node) -> Selected | None:
    """Which index of which value ``node`` is; ``None`` if it is none."""
    args: dict[str, Any] = arguments(node) if node.target is aten.select.int else {}
    if node.target is operator.getitem:
        maker, at = node.args
        if not isinstance(maker, fx.Node) or maker.target is not aten.unbind.int:
            return None
        args = {**arguments(maker), "index": at}
    if not args or not is_tensor(args["self"]):
        return None
    source = type_of(args["self"])
    dim, index = args["dim"] % source.ndim, args["index"]
    try:
        index = index + source.shape[dim] if is_negative(index) else index
    except VerifyError:
        return None
    return Selected(args["self"], dim, index)


@dataclass(frozen=True, slots=True)
class Joined:
    """A cat: which values, along which dim, and where each of them begins."""

    node: fx.Node
    operands: tuple[fx.Node, ...]
    dim: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each operand begins, and where the last one ends."""
        places = [0]
        for operand in self.operands:
            places.append(places[-1] + type_of(operand).shape[self.dim])
        return tuple(places)


def joined_of(node: fx.Node) -> Joined | None:
    """The cat that ``node`` is; ``None`` if it is none, if it converts an operand, or if it
    skips one, as it does with the empty vectors of old."""
    if node.target is not aten.cat.default:
        return None
    args, result = arguments(node), type_of(node)
    operands = tuple(args["tensors"])
    if not all(_is_joined(type_of(operand), result) for operand in operands):
        return None
    return Joined(node, operands, args["dim"] % result.ndim)


def _is_joined(operand: TensorType, result: TensorType) -> bool:
    return operand.dtype is result.dtype and operand.ndim == result.ndim


def is_empty(node: fx.Node, dim: int) -> bool:
    """Whether it has no elements along ``dim``, whatever the sizes."""
    return is_zero(type_of(node).shape[dim])


def joined_source(tensors: Sequence[fx.Node], dim: int) -> fx.Node:
    """The value that a cat of pieces is all of; ``NoMatch`` if there is none."""
    pieces = [piece_of(tensor) for tensor in tensors]
    first, last = pieces[0], pieces[-1]
    require(first is not None, NoMatch, f"{tensors[0]} is not a slice")
    assert first is not None
    require(
        dim % type_of(first.source).ndim == first.dim,
        NoMatch,
        f"{first.source} is split along another dim",
    )
    for before, after in itertools.pairwise(pieces):
        follows = before is not None and after is not None and after.continues(before)
        require(follows, NoMatch, "its operands do not follow each other")
    assert last is not None
    whole = Piece(first.source, first.dim, first.start, last.stop)
    require(whole.is_whole, NoMatch, f"a part of {first.source} is missing")
    return first.source


def stacked_source(tensors: Sequence[fx.Node], dim: int) -> fx.Node:
    """The value that a stack of what was selected is all of; ``NoMatch`` if there is none."""
    chosen = [selected_of(tensor) for tensor in tensors]
    first = chosen[0]
    require(first is not None, NoMatch, f"{tensors[0]} is not selected from anything")
    assert first is not None
    source = type_of(first.source)
    require(dim % source.ndim == first.dim, NoMatch, f"{first.source} is split along another dim")
    expected = [Selected(first.source, first.dim, at) for at in range(len(tensors))]
    require(chosen == expected, NoMatch, "its operands do not follow each other")
    extent = source.shape[first.dim]
    require(same(extent, len(tensors)), NoMatch, f"a part of {first.source} is missing")
    return first.source
