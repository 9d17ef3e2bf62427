"""Attention within a window, by the PyTorch kernel that skips the keys outside the window.

::

    before:  y, l, ... = cudnn_attention(q, k, v, mask)                      [B, H, T, D]
             dq, dk, dv = cudnn_attention_backward(dy, q, k, v, y, l, ..., mask)
    after:   t = flash_attention(q^T, k^T, v^T, window_size_left=63, window_size_right=0)
             y = t[0]^T; dq, dk, dv = flash_attention_backward(dy^T, ...)^T   [B, T, H, D]

The kernel is FlashAttention-2's (Dao, 2023), which never loads blocks of keys outside the window of
a block of queries.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from treadle.graph.core.arguments import Argument
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.passes.attention.exchange import (
    OPERANDS,
    exchange,
    gradient_name,
    require_exchangeable,
)
from treadle.passes.attention.mask_patterns import Window
from treadle.targets.registry import target_for
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MOST_WIDE = 256


@final
@dataclass(frozen=True, slots=True)
class WindowedCall:
    """A call of attention and those of its gradients, all with the same window."""

    forward: fx.Node
    backward: tuple[fx.Node, ...]
    left: int
    right: int

    @property
    def options(self) -> dict[str, Argument]:
        """Keyword arguments of the kernels, forward and backward."""
        sides = {"window_size_left": self.left, "window_size_right": self.right}
        return {"scale": arguments(self.forward)["scale"], **sides}


def windowed(forward: fx.Node, backward: Sequence[fx.Node], window: Window) -> WindowedCall:
    """The call of the kernel with windows for ``forward``; ``NoMatch`` in words if it takes
    none of these operands, or if something of the call is read that it does not have."""
    args = arguments(forward)
    left, right = _side(forward, window.behind), _side(forward, window.ahead)
    _check_operands(forward, args)
    require_exchangeable(forward, backward, ("attn_bias", "scale"))
    return WindowedCall(forward, tuple(backward), left, right)


def replace(call: WindowedCall) -> None:
    """Replace the calls by those of the kernel with windows."""
    args = arguments(call.forward)
    make = ReplacementBuilder(call.forward)
    operands = [_tokens_first(make, args[name]) for name in OPERANDS]
    rows = type_of(operands[0]).shape[1]
    sizes = (None, None, rows, rows, 0.0, False)
    windowed_call = make.call(
        aten._flash_attention_forward.default, *operands, *sizes, False, **call.options
    )
    result, *saved = (make.call(operator.getitem, windowed_call, at) for at in range(4))
    turned = _tokens_first(make, result)
    for backward in call.backward:
        behind = ReplacementBuilder(backward)
        d_result = _tokens_first(behind, arguments(backward)[gradient_name(backward)])
        beside = (*operands, result, saved[0], *sizes, *saved[1:])
        target = aten._flash_attention_backward.default
        gradients = behind.items(behind.call(target, d_result, *beside, **call.options), 3)
        exchange(backward, [_tokens_first(behind, one) for one in gradients])
    exchange(call.forward, [turned])


def _side(forward: fx.Node, bound: int | None) -> int:
    """A bound of the window as the kernel has it: -1 for none."""
    if bound is None:
        return -1
    require(type(bound) is int, NoMatch, f"the window of {forward} has a dynamic width")
    require(bound >= 0, NoMatch, f"the window of {forward} leaves out a query's own position")
    return bound


def _check_operands(forward: fx.Node, args: Mapping[str, Any]) -> None:
    query, key, value = (type_of(args[name]) for name in OPERANDS)
    sizes = [*query.shape, *key.shape, *value.shape]
    fixed = all(type(size) is int for size in sizes) and all(sizes)
    require(fixed, NoMatch, f"{forward} has dynamic sizes, or none")
    half = query.dtype in _HALF
    require(half, NoMatch, f"{forward} is of {query.dtype}: windows are for 16 bits")
    width = query.shape[3]
    fits = width % 8 == 0 and width <= _MOST_WIDE and value.shape[3] == width
    words = f"heads of {forward} are {width} wide: windows are for multiples of 8 up to 256"
    require(fits, NoMatch, words)
    shared = query.shape[1] % key.shape[1] == 0 and key.shape == value.shape
    require(shared, NoMatch, f"keys and values of {forward} differ in their heads")
    capability = target_for(query.device).driver.capability(query.device)
    old = f"the kernel with windows is not for devices of compute capability {capability}"
    require(capability is None or capability >= (8, 0), NoMatch, old)


def _tokens_first(make: ReplacementBuilder, value: fx.Node) -> fx.Node:
    """``[B, H, T, D]`` as ``[B, T, H, D]``, and back."""
    return make.call(aten.transpose.int, value, 1, 2)
