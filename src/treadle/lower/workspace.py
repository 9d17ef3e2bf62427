"""Bytes that library calls allocate beside their results, where they are known and not measured.

Attention's backward sums dq in float32 over its blocks, and keeps one number for each row:
measured on an H200 with PyTorch 2.11 for cuDNN, 48.75 MiB for 16 x 12 heads x 1024 x 64, which
is ``4 * (B * H * S * D + B * H * S)``. The gradient of an embedding sorts its indices: keys,
values and their sorted copies, in int64. The CTC loss, on any device, keeps the table of its
recursion, whose width is at most twice that of the targets and one, and backward one more.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from treadle.graph.ctc import ctc_loss, ctc_loss_backward

aten = torch.ops.aten


def workspace_of(op: OpOverload, args: Sequence[Any], device: str) -> int:
    """Bytes that ``op`` holds while it runs; 0 where nothing is known."""
    formula = _ANYWHERE.get(op) or (_CUDA.get(op) if device.startswith("cuda") else None)
    return formula(args) if formula is not None else 0


def _attention(args: Sequence[Any]) -> int:
    query = args[1].shape  # after the gradient of the result
    return 4 * (prod(query) + prod(query[:-1]))


def _embedding(args: Sequence[Any]) -> int:
    return 8 * 8 * prod(args[1].shape)


def _ctc(args: Sequence[Any]) -> int:
    return _ctc_table(*args[:2])


def _ctc_backward(args: Sequence[Any]) -> int:
    return 2 * _ctc_table(*args[1:3])


def _ctc_table(log_probs: Any, targets: Any) -> int:
    """Joined targets may all be of one sequence."""
    times, batch, _ = log_probs.shape
    return log_probs.dtype.itemsize * batch * (1 + times * (2 * targets.shape[-1] + 1))


_ANYWHERE: Mapping[OpOverload, Callable[[Sequence[Any]], int]] = {
    ctc_loss: _ctc,
    ctc_loss_backward: _ctc_backward,
}

_CUDA: Mapping[OpOverload, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_cudnn_attention_backward.default: _attention,
    aten._scaled_dot_product_flash_attention_backward.default: _attention,
    aten._scaled_dot_product_efficient_attention_backward.default: _attention,
    aten.embedding_dense_backward.default: _embedding,
}
