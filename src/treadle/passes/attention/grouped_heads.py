"""Grouped-query attention: shared heads of keys and values, passed to attention without repeating
them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import fx

from treadle.algebra.extents import same, same_sizes, surely_less
from treadle.graph.core.dim_maps import CONVERSIONS, RESHAPES, SWAPS, permutation
from treadle.graph.core.operators import arguments, is_item, operand_of, set_argument
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.node_rewrite import NodeRewrite
from treadle.graph.rewrite.passes import Contract
from treadle.graph.rewrite.rules import any_of, anything, bindings_of, named, through
from treadle.passes.attention.exchange import gradients_of
from treadle.passes.attention.moves import is_cast
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

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
    of the heads. ``cast``: of all heads afterwards, as autocast does."""

    value: fx.Node
    single: fx.Node
    shape: tuple[int, ...]
    axis: int
    cast: fx.Node | None

    @property
    def swapped(self) -> bool:
        """Whether tokens come before heads in ``single``."""
        return self.axis == 3


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

    contract: ClassVar[Contract] = Contract()

    def find(self, node: fx.Node) -> _Grouped:
        require(node.target in KERNELS, NoMatch, f"{node} calls no kernel that shares heads")
        args = arguments(node)
        drawn = f"{node} has dropout, and might draw other numbers for shared heads"
        require(not args["dropout_p"], NoMatch, drawn)
        operands = {name: _repeated(args[name]) for name in _OPERANDS}
        counts = [operand.shape[operand.axis] for operand in operands.values()]
        require(same(*counts), NoMatch, f"keys and values of {node} are repeated in different ways")
        backward = gradients_of(node, (KERNELS[node.target],))
        calls = (node, *backward)
        for name, operand in operands.items():
            alone = set(operand.value.users) <= set(calls)
            require(alone, NoMatch, f"{operand.value} is read by others as well")
            taken = all(arguments(call)[name] is operand.value for call in calls)
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
        for name, operand in found.operands.items():
            make = ReplacementBuilder(found.calls[0], operand.value)
            operands = [make.call(aten.squeeze.dim, operand.single, operand.axis)]
            if operand.swapped:
                operands.append(make.call(aten.transpose.int, operands[-1], 1, 2))
            if operand.cast is not None:
                operands.append(make.again(operand.cast, {"self": operands[-1]}))
            for call in found.calls:
                set_argument(call, name, operands[-1])
            changed += operands
        for call in found.calls:
            changed += [call, *(user for user in call.users if is_item(user))]
        for summed in found.sums:
            changed += _unsummed(summed)
        return changed


def _items(call: fx.Node, at: int) -> list[fx.Node]:
    return [user for user in call.users if is_item(user) and user.args[1] == at]


def _heads_repeated(
    single: object, wide: object, joined: object, swaps: object, casts: object
) -> object:
    """Each head of ``single`` several times, then tokens and heads exchanged, then converted."""
    copied = through((aten.clone.default,), named(wide, aten.expand.default(single, ...)))
    heads = named(joined, any_of(*RESHAPES)(copied, ...))
    return through(CONVERSIONS, through(SWAPS, heads, swaps), casts)


def _repeated(value: fx.Node) -> _Repeated:
    """How ``value``, ``[B, H, T, D]``, repeats heads; ``NoMatch`` if it does not."""
    other = NoMatch(f"{value} is not made by repeating each head")
    bindings = attempt(bindings_of, _heads_repeated, value)
    if isinstance(bindings, NoMatch):
        raise other
    require(_is_swap(bindings["swaps"]) and _is_cast(bindings["casts"]), other)
    axis = 3 if bindings["swaps"] else 2
    single, shape = bindings["single"], type_of(bindings["wide"]).shape
    before = type_of(single).shape
    require(len(shape) == len(before) == 5, other)
    alone = same(before[axis], 1) and surely_less(1, shape[axis])
    require(alone, other)
    others = (*shape[:axis], *shape[axis + 1 :])
    require(same_sizes(others, (*before[:axis], *before[axis + 1 :])), other)
    joined = (*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])
    require(same_sizes(joined, type_of(bindings["joined"]).shape), other)
    return _Repeated(value, single, shape, axis, next(iter(bindings["casts"]), None))


def _is_swap(swaps: Sequence[fx.Node]) -> bool:
    """Whether tokens and heads change places, or nothing does."""
    return not swaps or (len(swaps) == 1 and permutation(swaps[0]) == [0, 2, 1, 3])


def _is_cast(casts: Sequence[fx.Node]) -> bool:
    """Whether it is one conversion between floating dtypes, or none."""
    return not casts or (len(casts) == 1 and is_cast(casts[0]))


def _heads_summed(
    item: object, wide: object, swaps: object, casts: object, dims: object, dtype: object
) -> object:
    """The sum of ``item`` over some of the dims in which it is seen."""
    turned = through(SWAPS, through(CONVERSIONS, item, casts), swaps)
    seen = named(wide, any_of(*RESHAPES)(through((aten.clone.default,), turned), ...))
    return aten.sum.dim_IntList(seen, dims, anything, dtype=dtype)


def _sum_of(item: fx.Node, of: _Repeated) -> _Sum:
    """The sum of the gradient ``item`` over the queries that share a head, its one reader."""
    other = NoMatch(f"{item} is not summed over what shares a head")
    total = item
    while total.target is not aten.sum.dim_IntList:
        total = _reader(total)
    bindings = attempt(bindings_of, _heads_summed, total)
    if isinstance(bindings, NoMatch):
        raise other
    wide = type_of(bindings["wide"])
    require(_is_swap(bindings["swaps"]) and _is_cast(bindings["casts"]), other)
    require(bool(bindings["swaps"]) == of.swapped and same_sizes(wide.shape, of.shape), other)
    require([dim % 5 for dim in bindings["dims"]] == [of.axis], other)
    require(bindings["dtype"] in (None, wide.dtype), other)
    return _Sum(item, total, next(iter(bindings["casts"]), None), of)


def _reader(node: fx.Node) -> fx.Node:
    """The one node that reads ``node``."""
    readers = list(node.users)
    alone = len(readers) == 1 and readers[0].op == "call_function"
    require(alone, NoMatch, f"{node} has no one reader")
    return readers[0]


def _unsummed(summed: _Sum) -> list[fx.Node]:
    """The gradient itself in the place of its sum; the nodes that are new."""
    make, nodes = ReplacementBuilder(summed.total), [summed.item]
    if summed.cast is not None:
        nodes.append(make.again(summed.cast, {"self": nodes[-1]}))
    if summed.of.swapped:
        nodes.append(make.call(aten.transpose.int, nodes[-1], 1, 2))
    if arguments(summed.total)["keepdim"]:
        nodes.append(make.call(aten.unsqueeze.default, nodes[-1], summed.of.axis))
    summed.total.replace_all_uses_with(nodes[-1])
    path = summed.total
    while path is not summed.item:  # nobody reads it now, and its shape is that of repeated heads
        before = operand_of(path)
        path.graph.erase_node(path)
        path = before
    return nodes[1:]
