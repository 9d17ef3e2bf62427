"""Chains of views and copies, followed by their strides: where each element comes from, exactly.

::

    view(view(clone(transpose(x, 1, 2)), [8, 7, 4]), [2, 4, 7, 4])    is    transpose(x, 1, 2)

A *layout* is a tensor without memory whose strides say which element of the first value each
element of the last one is. It is *plain* if dims alone changed: elements stand in order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from treadle.graph.operators import arguments
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import is_tensor, type_of
from treadle.util.errors import require

aten = torch.ops.aten

_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_VIEWS = frozenset(
    {
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
    }
)
_COPIES = frozenset({aten.clone.default, aten.detach.default, aten.alias.default})
_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def is_move(node: object) -> bool:
    """Whether ``node`` is a view or a copy of its operand, of the same dtype."""
    known = isinstance(node, fx.Node) and node.target in _RESHAPES | _VIEWS | _COPIES
    return known and is_tensor(node)


def is_cast(node: object) -> bool:
    """Whether ``node`` is its operand as another floating dtype, on the same device."""
    if not isinstance(node, fx.Node) or node.target not in _CASTS:
        return False
    old, new = type_of(operand_of(node)), type_of(node)
    return all(each.dtype.is_floating_point for each in (old, new)) and old.device == new.device


def operand_of(node: fx.Node) -> fx.Node:
    """The value that a view or a copy is of."""
    (operand,) = node.all_input_nodes
    return operand


def plain(shape: Sequence[int]) -> Tensor:
    """The layout of a value that is its own beginning."""
    return torch.empty(tuple(shape), device="meta")


def is_plain(layout: Tensor) -> bool:
    """Whether the elements stand in the order of the first value."""
    return layout.is_contiguous()


def moved(node: fx.Node, layout: Tensor) -> Tensor:
    """The layout of ``node``, a view or copy of what has ``layout``; ``NoMatch`` if it has none."""
    if node.target in _COPIES:
        return layout
    if node.target not in _RESHAPES:
        assert callable(node.target), node
        return node.target(layout, *node.args[1:], **node.kwargs)
    try:
        return layout.view(arguments(node)["size"])
    except RuntimeError:
        raise NoMatch(f"{node} joins dims that are not next to each other") from None


def source(value: fx.Node, arrange: "Arrange") -> fx.Node | None:
    """The earliest value that equals ``value`` as ``arrange`` says, element for element, and has
    its last dim in order of memory; ``None`` if there is none."""
    shape, found, chain = arrange.shape, None, list[fx.Node]()
    at = value
    while True:
        kind = type_of(at)
        dense = kind.ndim > 0 and (kind.strides[-1] == 1 or kind.shape[-1] == 1)
        if kind.shape == shape and dense and _is_identity(chain, arrange):
            found = at
        if not is_move(at):
            return found
        chain.append(at)
        at = operand_of(at)


class Arrange:
    """Views that turn a value into one of four dims: as a layout, and as nodes."""

    def __init__(self, shape: Sequence[int], *, transposed: bool) -> None:
        self.shape = tuple(shape)
        self.transposed = transposed

    def layout(self, layout: Tensor) -> Tensor:
        """Of a layout with three dims."""
        turned = layout.transpose(1, 2) if self.transposed else layout
        return turned.view(self.shape)


def _is_identity(chain: Sequence[fx.Node], arrange: Arrange) -> bool:
    layout = plain(arrange.shape)
    try:
        for node in reversed(chain):
            layout = moved(node, layout)
        return is_plain(arrange.layout(layout))
    except (NoMatch, RuntimeError):
        return False


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
    layout = plain(type_of(value).shape)
    try:
        for node in reversed(chain):
            layout = moved(node, layout)
    except (NoMatch, RuntimeError):
        return False
    return layout.ndim == 3 and is_plain(layout.transpose(1, 2))


def require_rows(layout: Tensor, rows: int, columns: int, node: fx.Node) -> None:
    """``NoMatch`` unless ``layout`` is one of matrices in their order: nothing in it moved."""
    kept = is_plain(layout) and tuple(layout.shape[-2:]) == (rows, columns)
    require(kept, NoMatch, f"{node} takes queries and keys in another order")
