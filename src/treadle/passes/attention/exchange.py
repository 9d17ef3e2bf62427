"""Replacing one attention kernel by another: the conditions, and the mapping of results."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from treadle.graph.core.operators import arguments, is_item
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

OPERANDS = ("query", "key", "value")


def gradients_of(forward: fx.Node, targets: Iterable[object]) -> tuple[fx.Node, ...]:
    """The calls of ``targets`` that read a result of ``forward``, in the order of its results."""
    known = frozenset(targets)
    readers = [user for item in forward.users if is_item(item) for user in item.users]
    return tuple(reader for reader in dict.fromkeys(readers) if reader.target in known)


def gradient_name(backward: fx.Node) -> str:
    """What a kernel calls the gradient of its result."""
    return next(name for name in ("grad_out", "grad_out_") if name in arguments(backward))


def require_exchangeable(
    forward: fx.Node, backward: Sequence[fx.Node], alike: Sequence[str]
) -> None:
    """``NoMatch`` in words unless of ``forward`` the result may be read by anything, and all else
    by ``backward`` alone, which are its gradients, with equal arguments of the names ``alike``."""
    readers = set(backward)
    for item in forward.users:
        known = is_item(item) and (item.args[1] in (0,) or set(item.users) <= readers)
        require(known, NoMatch, f"{item} of {forward} is read by others")
    args = arguments(forward)
    for node in backward:
        theirs = arguments(node)
        fits = all(theirs[name] is args[name] for name in OPERANDS)
        fits = fits and all(theirs[name] == args[name] for name in alike)
        result = theirs["out"]
        fits = fits and is_item(result) and result.args == (forward, 0)
        require(bool(fits), NoMatch, f"{node} is not the gradient of {forward}")
        three = all(is_item(item) and item.args[1] in (0, 1, 2) for item in node.users)
        require(three, NoMatch, f"{node} gives more than three gradients")


def require_masks_after_scaling(call: fx.Node) -> None:
    """``NoMatch`` in words unless the scale of ``call`` is a positive number of f32. A kernel that
    hides keys by itself may fill scores with -inf before it scales them: zero times that is NaN,
    and a negative number of times it is inf. A mask that is added is added after."""
    scale, f32 = arguments(call)["scale"], torch.finfo(torch.float32)
    known = scale is None or f32.tiny <= scale <= f32.max
    require(known, NoMatch, f"{call} scales by {scale}: the kernel may scale what it hides")


def exchange(call: fx.Node, results: Sequence[fx.Node]) -> None:
    """Let ``results`` be read instead of those of ``call``, which goes with all of them."""
    for item in list(call.users):
        at: Any = item.args[1]
        if item.users:
            item.replace_all_uses_with(_as_laid_out(ReplacementBuilder(item), results[at], item))
        item.graph.erase_node(item)
    call.graph.erase_node(call)


def _as_laid_out(make: ReplacementBuilder, new: fx.Node, old: fx.Node) -> fx.Node:
    """``new`` with the strides of ``old``, which views of it were captured for."""
    strides, sizes = type_of(old).strides, type_of(old).shape
    pairs = zip(sizes, type_of(new).strides, strides, strict=True)
    if all(size == 1 or mine == theirs for size, mine, theirs in pairs):
        return new
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    dense = make.dense(make.call(aten.permute.default, new, order))
    return make.call(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])
