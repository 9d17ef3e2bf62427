"""Bytes that library calls allocate apart from their results, where these are known instead of
measured.

Attention's backward sums dq in float32 over its blocks, and keeps one number for each row: measured
on an H200 with PyTorch 2.11 for cuDNN, 48.75 MiB for 16 x 12 heads x 1024 x 64, which is
``4 * (B * H * S * D + B * H * S)``. The gradient of an embedding sorts its indices: keys, values
and their sorted copies, in int64. treadle's own operators have them in their records; for compiled
loops, ``compiler/loops.py`` knows more.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from treadle.algebra.extents import largest
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.custom_ops.table import CUSTOM_OPS
from treadle.targets.record import DeviceTarget

aten = torch.ops.aten


def workspace_of(op: OpOverload, args: Sequence[object], target: DeviceTarget) -> int:
    """Bytes that ``op`` holds while it runs, at the largest of sizes that vary; 0 where nothing is
    known."""
    formula = _OURS.get(op) or (_CUDNN.get(op) if "cudnn" in target.libraries else None)
    return largest(formula(args)) if formula is not None else 0


def _attention(args: Sequence[Any]) -> int:
    query = args[1].shape  # after the gradient of the result
    return 4 * (prod(query) + prod(query[:-1]))


def _flash(args: Sequence[Any], tokens: int = -2) -> int:
    """``tokens``: the dim of the positions, before or behind that of the heads."""
    query, key = args[1], args[2]
    heads = -5 - tokens
    rows, width = -(-query.shape[tokens] // 128) * 128, -(-query.shape[-1] // 32) * 32
    found = 4 * query.shape[0] * query.shape[heads] * rows * (width + 1)
    if query.shape[heads] == key.shape[heads]:
        return found
    expanded = query.dtype.itemsize * prod(key.shape) // key.shape[heads] * query.shape[heads]
    return found + 2 * expanded


def _flash_tokens_first(args: Sequence[object]) -> int:
    return _flash(args, tokens=-3)


def _embedding(args: Sequence[Any]) -> int:
    return 8 * 8 * prod(args[1].shape)


_OURS: Mapping[OpOverload, Callable[[Sequence[object]], int]] = {
    custom_op.op: custom_op.bytes_held for custom_op in CUSTOM_OPS if custom_op.holds is not None
}

_CUDNN: Mapping[OpOverload, Callable[[Sequence[object]], int]] = {
    aten._scaled_dot_product_cudnn_attention_backward.default: _attention,
    aten._scaled_dot_product_flash_attention_backward.default: _flash,
    aten._flash_attention_backward.default: _flash_tokens_first,
    aten._scaled_dot_product_efficient_attention_backward.default: _attention,
    aten.embedding_dense_backward.default: _embedding,
}
