"""Attention within blocks: each block is an attention of its own.

::

    before:  y, l = attention(q, k, v, mask)                   [B, H, T, D], T = n * size
             mask[i, j] = 0 where i // size == j // size and j <= i, else -inf
    after:   y, l = attention(q', k', v', is_causal=True)      [B * n, H, size, D]
             x'[b * n + c, h, i] = x[b, h, c * size + i]

Gradients alike. Of ``n`` times fewer scores none is hidden but those that a causal mask hides.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from treadle.graph.core.operators import arguments
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.passes.attention.exchange import (
    OPERANDS,
    exchange,
    gradient_name,
    require_exchangeable,
)
from treadle.passes.attention.mask_patterns import Blocks
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class BlockedCall:
    """A call of attention and those of its gradients, in blocks of ``size`` positions; ``mask``:
    how they call theirs."""

    forward: fx.Node
    backward: tuple[fx.Node, ...]
    mask: str
    size: int
    causal: bool


def blocked(
    forward: fx.Node, backward: Sequence[fx.Node], mask: str, blocks: Blocks
) -> BlockedCall:
    """The call in blocks; ``NoMatch`` in words where these are none of their own."""
    args = arguments(forward)
    sizes = [size for name in OPERANDS for size in type_of(args[name]).shape]
    fixed = all(type(size) is int for size in sizes) and all(sizes)
    require(fixed, NoMatch, f"{forward} has dynamic sizes, or none")
    rows, within = type_of(args["query"]).shape[2], blocks.within
    words = f"the {rows} rows of {forward} are no whole number of blocks of {blocks.size}"
    require(rows % blocks.size == 0, NoMatch, words)
    flag = within.is_everything or within.is_causal
    require(flag, NoMatch, f"{forward} has {within} in each block: no flag says that")
    require(not args["dropout_p"], NoMatch, f"{forward} has dropout, computed from positions")
    require_exchangeable(forward, backward, (mask, "scale", "dropout_p"))
    return BlockedCall(forward, tuple(backward), mask, blocks.size, within.is_causal)


def replace(call: BlockedCall) -> None:
    """Let calls of blocks be read instead of the calls, which go."""
    args, make = arguments(call.forward), ReplacementBuilder(call.forward)
    operands = {name: _folded(make, args[name], call.size) for name in OPERANDS}
    flags = {call.mask: None, "is_causal": call.causal}
    blocked = make.again(call.forward, {**operands, **flags})
    items: dict[fx.Node, fx.Node] = {}
    for item in call.forward.users:
        items[item] = make.call(operator.getitem, blocked, item.args[1])
    result = next((new for new in items.values() if new.args[1] in (0,)), None)
    whole = [] if result is None else [_unfolded(make, result, call.size, call.forward)]
    for backward in call.backward:
        behind, theirs = ReplacementBuilder(backward), arguments(backward)
        name = gradient_name(backward)
        changes: dict[str, Any] = {**operands, **flags}
        changes[name] = _folded(behind, theirs[name], call.size)
        for key, value in theirs.items():
            if isinstance(value, fx.Node) and value in items:
                changes[key] = items[value]
            elif key in ("max_q", "max_k"):
                changes[key] = call.size
        gradients = behind.items(behind.again(backward, changes), 3)
        exchange(backward, [_unfolded(behind, one, call.size, backward) for one in gradients])
    exchange(call.forward, whole)


def _folded(make: ReplacementBuilder, value: fx.Node, size: int) -> fx.Node:
    """``[B, H, n * size, D]`` as ``[B * n, H, size, D]``: no copy where positions of all batches
    are evenly spaced."""
    batch, heads, rows, width = type_of(value).shape
    turned = make.call(aten.transpose.int, value, 1, 2)
    strides = type_of(turned).strides
    if batch > 1 and strides[0] != rows * strides[1]:
        turned = make.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    shape = [batch * (rows // size), size, heads, width]
    return make.call(aten.transpose.int, make.call(aten.view.default, turned, shape), 1, 2)


def _unfolded(make: ReplacementBuilder, value: fx.Node, size: int, call: fx.Node) -> fx.Node:
    """``[B * n, H, size, D]`` as ``[B, H, n * size, D]``; ``call``: of as many batches."""
    batch = type_of(arguments(call)["query"]).shape[0]
    many, heads, _, width = type_of(value).shape
    turned = make.call(aten.transpose.int, value, 1, 2)
    strides = type_of(turned).strides
    if many > 1 and strides[0] != size * strides[1]:
        turned = make.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    shape = [batch, many // batch * size, heads, width]
    return make.call(aten.transpose.int, make.call(aten.view.default, turned, shape), 1, 2)
