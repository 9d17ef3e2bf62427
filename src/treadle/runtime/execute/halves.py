"""Batch norms in half precision on CPUs, which are computed in float32 here.

PyTorch's kernels keep statistics in the dtype of the input or in float32, depending on the dtypes;
its type rules always say float32, and the backward kernel accepts only the forward kernel's dtype.
In float32 all agree, and nothing is rounded in between.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treadle.targets.registry import target_for

_HALVES = (torch.bfloat16, torch.float16)


def _forward(
    op: Callable[..., Any], args: tuple[Tensor, *tuple[object, ...]]
) -> tuple[object, ...]:
    out, *statistics = op(*map(_wide, args))
    return out.to(args[0].dtype), *statistics


def _backward(
    op: Callable[..., Any], args: tuple[Tensor, *tuple[object, ...]]
) -> tuple[object, ...]:
    gradient, *others = op(*map(_wide, args))
    return (None if gradient is None else gradient.to(args[0].dtype)), *others


_WIDENED = {
    "aten._native_batch_norm_legit_functional.default": _forward,
    "aten._native_batch_norm_legit.no_stats": _forward,
    "aten._native_batch_norm_legit_no_training.default": _forward,
    "aten.native_batch_norm.default": _forward,
    "aten.native_batch_norm_backward.default": _backward,
}


def widened(name: str, op: Callable[..., object]) -> Callable[..., object]:
    """``op``, or a function that calls it with float32 in place of 16-bit floats on CPUs."""
    wide = _WIDENED.get(name)
    if wide is None:
        return op

    def call(x: Tensor, *others: object) -> object:
        is_half = target_for(x.device).on_host and x.dtype in _HALVES
        return wide(op, (x, *others)) if is_half else op(x, *others)

    return call


def _wide(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value
