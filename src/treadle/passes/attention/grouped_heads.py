"""Heads of keys and values that several queries share, handed to attention as they are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.algebra.extents import same, same_sizes, surely_less
from treadle.graph.core.dim_maps import RESHAPES, SWAPS, permutation
from treadle.graph.core.operators import arguments, is_item, set_argument
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.node_rewrite import NodeRewrite
from treadle.passes.attention.exchange import gradients_of
from treadle.passes.attention.moves import is_cast, operand_of
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

KERNELS: Mapping[object, object] = {
    aten._scaled_dot_product_cudnn_attention.default: (
        aten._scaled_dot_product_cudnn_attention_backward.default
    ),
    aten._scaled_dot_product_flash_attention.default: (
        aten._scaled_dot_product_flash_attention_backward.default
    ),
}
"""Kernels that take fewer heads of keys and values than of queries, with those of the gradients."""
_OPERANDS = ("key", "value")
_GRADIENTS = {"key": 1, "value": 2}  # where they stand among the results


@final
@dataclass(frozen=True, slots=True)
class _Repeated:
    """``value[b, h] = single[b, h // n]``; ``single`` has a dim of size 1 at ``axis``, behind that
    of the heads, and ``swapped`` says that tokens come before heads there. ``cast``: of all heads
    afterwards, as autocast does."""

    value: fx.Node
    single: fx.Node
    shape: tuple[int, ...]
    axis: int
    swapped: bool
    cast: fx.Node | None


@final
@dataclass(frozen=True, slots=True)
class _Grouped:
    """A call of attention with what it reads, and its gradients with the sums that read them."""

    calls: tuple[fx.Node, ...]
    operands: Mapping[str, _Repeated]
    sums: tuple["_Sum", ...]


@final
@dataclass(frozen=True, slots=True)
class _Sum:
    """``total`` of the gradient ``item`` over the queries that share a head; ``cast`` before it."""

    item: fx.Node
    total: fx.Node
    cast: fx.Node | None
    of: _Repeated


@dataclass(frozen=True)
class GroupHeads(NodeRewrite[_Grouped]):
    """Never repeat heads that several queries share, nor keep the copies for the backward pass.

    before:  r = view(clone(expand(unsqueeze(k, 2), [b, g, n, t, d])), [b, g * n, t, d])
             y = attention(q, r, v);   s = attention_backward(...)[1]
             e = sum(view(s, [b, g, n, t, d]), [2])
    after:   y = attention(q, k, v);   e = attention_backward(...)[1]

    Keys and values alike, of PyTorch's kernels for GPUs that take this. Their gradients are summed
    over the queries that share a head before they are rounded; eager rounds each, and the sum.
    """

    def find(self, node: fx.Node) -> _Grouped:
        require(node.target in KERNELS, NoMatch, f"{node} is no call of a kernel that shares heads")
        given = arguments(node)
        drawn = f"{node} drops out: that it draws the same for shared heads is not known"
        require(not given["dropout_p"], NoMatch, drawn)
        operands = {name: _repeated(given[name]) for name in _OPERANDS}
        counts = [each.shape[each.axis] for each in operands.values()]
        require(same(*counts), NoMatch, f"keys and values of {node} are repeated unlike")
        backward = gradients_of(node, (KERNELS[node.target],))
        calls = (node, *backward)
        for name, each in operands.items():
            alone = set(each.value.users) <= set(calls)
            require(alone, NoMatch, f"{each.value} is read by others as well")
            taken = all(arguments(call)[name] is each.value for call in calls)
            require(taken, NoMatch, f"{node} and its gradient read other {name}s")
        sums = tuple(
            _sum_of(item, operands[name])
            for call in backward
            for name in _OPERANDS
            for item in _items(call, _GRADIENTS[name])
        )
        return _Grouped(calls, operands, sums)

    def replace(self, found: _Grouped) -> Iterable[fx.Node]:
        """Rewrite; the nodes that are new or have another shape, in their order."""
        changed: list[fx.Node] = []
        for name, each in found.operands.items():
            make = ReplacementBuilder(found.calls[0], each.value)
            made = [make.call(aten.squeeze.dim, each.single, each.axis)]
            if each.swapped:
                made.append(make.call(aten.transpose.int, made[-1], 1, 2))
            if each.cast is not None:
                made.append(make.again(each.cast, {"self": made[-1]}))
            for call in found.calls:
                set_argument(call, name, made[-1])
            changed += made
        for call in found.calls:
            changed += [call, *(each for each in call.users if is_item(each))]
        for each in found.sums:
            changed += _unsummed(each)
        return changed


def _items(call: fx.Node, at: int) -> list[fx.Node]:
    return [each for each in call.users if is_item(each) and each.args[1] == at]


def _repeated(value: object) -> _Repeated:
    """How ``value``, ``[B, H, T, D]``, repeats heads; ``NoMatch`` if it does not."""
    assert isinstance(value, fx.Node), value
    cast = value if is_cast(value) else None
    inner = value if cast is None else operand_of(cast)
    swapped = _is_swap(inner)
    if swapped:
        inner = arguments(inner)["self"]
    other = f"{value} is not made by repeating each head"
    require(inner.target in RESHAPES, NoMatch, other)
    wide = arguments(inner)["self"]
    if wide.target is aten.clone.default:
        wide = arguments(wide)["self"]
    require(wide.target is aten.expand.default, NoMatch, other)
    single = arguments(wide)["self"]
    axis = 3 if swapped else 2
    shape, before = type_of(wide).shape, type_of(single).shape
    require(len(shape) == len(before) == 5, NoMatch, other)
    alone = same(before[axis], 1) and surely_less(1, shape[axis])
    require(alone, NoMatch, other)
    others = (*shape[:axis], *shape[axis + 1 :])
    require(same_sizes(others, (*before[:axis], *before[axis + 1 :])), NoMatch, other)
    joined = (*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])
    require(same_sizes(joined, type_of(inner).shape), NoMatch, other)
    return _Repeated(value, single, tuple(shape), axis, swapped, cast)


def _is_swap(node: fx.Node) -> bool:
    """Whether tokens and heads change places."""
    return node.target in SWAPS and permutation(node) == [0, 2, 1, 3]


def _sum_of(item: fx.Node, of: _Repeated) -> _Sum:
    """The sum of the gradient ``item`` over the queries that share a head, its one reader."""
    message = f"{item} is not summed over what shares a head"
    node, cast = _reader(item), None
    if is_cast(node):
        node, cast = _reader(node), node
    if of.swapped:
        require(_is_swap(node), NoMatch, message)
        node = _reader(node)
    if node.target is aten.clone.default:
        node = _reader(node)
    fits = node.target in RESHAPES and same_sizes(type_of(node).shape, of.shape)
    require(fits, NoMatch, message)
    before, node = node, _reader(node)
    given = arguments(node) if node.target is aten.sum.dim_IntList else {}
    summed = bool(given) and [dim % 5 for dim in given["dim"]] == [of.axis]
    require(summed and given["dtype"] in (None, type_of(before).dtype), NoMatch, message)
    return _Sum(item, node, cast, of)


def _reader(node: fx.Node) -> fx.Node:
    """The one node that reads ``node``."""
    readers = list(node.users)
    alone = len(readers) == 1 and readers[0].op == "call_function"
    require(alone, NoMatch, f"{node} has no one reader")
    return readers[0]


def _unsummed(found: _Sum) -> list[fx.Node]:
    """The gradient itself in the place of its sum; the nodes that are new."""
    make, made = ReplacementBuilder(found.total), [found.item]
    if found.cast is not None:
        made.append(make.again(found.cast, {"self": made[-1]}))
    if found.of.swapped:
        made.append(make.call(aten.transpose.int, made[-1], 1, 2))
    if arguments(found.total)["keepdim"]:
        made.append(make.call(aten.unsqueeze.default, made[-1], found.of.axis))
    found.total.replace_all_uses_with(made[-1])
    path = found.total
    while path is not found.item:  # nobody reads it now, and its shape is that of repeated heads
        before = operand_of(path)
        path.graph.erase_node(path)
        path = before
    return made[1:]


__all__ = ["KERNELS", "GroupHeads"]
