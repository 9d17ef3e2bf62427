"""Chains of views and copies, followed by the factors of their dims: where each element comes from.

::

    view(view(clone(transpose(x, 1, 2)), [8, 7, 4]), [2, 4, 7, 4])    is    transpose(x, 1, 2)

A layout is *plain* if elements are in the order of the first value: only dims changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import fx

from treadle.algebra.extents import same_sizes
from treadle.graph.core.dim_maps import CONVERSIONS, MOVES, Dims, FactorTable
from treadle.graph.core.operators import operand_of
from treadle.graph.core.types import is_tensor, type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True, eq=False)
class ElementOrder:
    """Which elements of a first value, of dims ``origin``, the last one of a chain has."""

    table: FactorTable
    origin: Dims
    dims: Dims

    @staticmethod
    def plain(shape: Sequence[int]) -> "ElementOrder":
        """The order of a value itself, before any move."""
        table = FactorTable()
        dims = table.dims_of(shape)
        return ElementOrder(table, dims, dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""
        return self.table.shape(self.dims)

    @property
    def is_plain(self) -> bool:
        """Whether the elements stand in the order of the first value."""
        return self.table.factors(self.origin) == self.table.factors(self.dims)

    def moved(self, node: fx.Node) -> "ElementOrder":
        """That of ``node``, a view or copy of what has this one; ``NoMatch`` if it has none."""
        return replace(self, dims=self.table.through(node, self.dims))

    def transposed(self) -> "ElementOrder":
        """With the last two of three dims exchanged."""
        one, two, three = self.dims
        return replace(self, dims=(one, three, two))


def is_move(node: object) -> bool:
    """Whether ``node`` is a view or a copy of its operand, of the same dtype."""
    return isinstance(node, fx.Node) and node.target in MOVES and is_tensor(node)


def is_cast(node: object) -> bool:
    """Whether ``node`` is its operand as another floating dtype, on the same device."""
    if not isinstance(node, fx.Node) or node.target not in CONVERSIONS:
        return False
    old, new = type_of(operand_of(node)), type_of(node)
    return all(tensor.dtype.is_floating_point for tensor in (old, new)) and old.device == new.device


@final
@dataclass(frozen=True, slots=True)
class Arrange:
    """Views that turn a value of three dims into one of four."""

    shape: tuple[int, ...]
    transposed: bool


def _source(value: fx.Node, arrange: Arrange) -> fx.Node | None:
    """The earliest value that equals ``value`` as ``arrange`` says, element for element, and has
    its last dim in order of memory; ``None`` if there is none."""
    shape, source, chain = arrange.shape, None, list[fx.Node]()
    at = value
    while True:
        kind = type_of(at)
        dense = kind.ndim > 0 and (kind.strides[-1] == 1 or kind.shape[-1] == 1)
        if kind.shape == shape and dense and _is_identity(chain, arrange):
            source = at
        if not is_move(at):
            return source
        chain.append(at)
        at = operand_of(at)


def arranged(make: ReplacementBuilder, value: fx.Node, arrange: Arrange) -> fx.Node:
    """``value``, of three dims, in the order of ``arrange``; if it copies a value, that value."""
    source = _source(value, arrange)
    if source is not None:
        return source
    turned = make.call(aten.transpose.int, value, 1, 2) if arrange.transposed else value
    return make.call(aten.view.default, make.dense(turned), list(arrange.shape))


def four_dims(make: ReplacementBuilder, mask: fx.Node) -> fx.Node:
    """A mask of scores with dims of size 1 before its own, or without some of them."""
    shape = list(type_of(mask).shape)
    if len(shape) > 4:
        return make.call(aten.view.default, make.dense(mask), shape[-4:])
    missing = 4 - len(shape)
    return make.call(aten.expand.default, mask, [1] * missing + shape) if missing else mask


def _is_identity(chain: Sequence[fx.Node], arrange: Arrange) -> bool:
    order = attempt(order_along, chain[::-1], arrange.shape)
    if isinstance(order, NoMatch):
        return False
    return (order.transposed() if arrange.transposed else order).is_plain


def order_along(chain: Sequence[fx.Node], shape: Sequence[int]) -> ElementOrder:
    """Which elements the last of ``chain``, views and copies one of another, has of a value of that
    shape; ``NoMatch`` if that is not known."""
    order = ElementOrder.plain(shape)
    for node in chain:
        order = order.moved(node)
    return order


def are_transposed(left: object, right: object) -> bool:
    """Whether one is the other with its last two of three dims exchanged."""
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return False
    if left is right:
        return type_of(left).shape[1:] == (1, 1)
    return _is_transpose(left, right) or _is_transpose(right, left)


def _is_transpose(turned: fx.Node, value: fx.Node) -> bool:
    at, chain = turned, list[fx.Node]()
    while at is not value and is_move(at):
        chain.append(at)
        at = operand_of(at)
    if at is not value or type_of(value).ndim != 3:
        return False
    order = attempt(order_along, chain[::-1], type_of(value).shape)
    if isinstance(order, NoMatch) or len(order.dims) != 3:
        return False
    return order.transposed().is_plain


def require_rows(layout: ElementOrder, rows: int, columns: int, node: fx.Node) -> None:
    """``NoMatch`` unless ``layout`` is one of matrices in their order: nothing in it moved."""
    kept = layout.is_plain and same_sizes(layout.shape[-2:], (rows, columns))
    require(kept, NoMatch, f"{node} takes queries and keys in another order")
