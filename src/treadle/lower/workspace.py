"""Bytes that library calls allocate beside their results, where they are known and not measured.

Attention's backward sums dq in float32 over its blocks, and keeps one number for each row:
measured on an H200 with PyTorch 2.11 for cuDNN, 48.75 MiB for 16 x 12 heads x 1024 x 64, which
is ``4 * (B * H * S * D + B * H * S)``. The gradient of an embedding sorts its indices: keys,
values and their sorted copies, in int64. The CTC loss keeps the table of its recursion, T x N x
``2 * S + 1`` for targets of length S, and backward one more and the losses: so on CPUs, where
``tests/lower/test_workspace.py`` measures it. Of joined targets, whose longest only values tell, S
is the length of all together: at most N times too much. A loop of ``torch.while_loop`` whose rounds
are PyTorch's kernels holds what one round does; its backward also what each round began with, of
which one is counted. Of loops that are compiled ``compiler/loops.py`` knows more.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from treadle.algebra.extents import largest
from treadle.compat.operators import OpOverload
from treadle.graph.ctc import ctc_loss, ctc_loss_backward
from treadle.graph.while_loops import bytes_of_round, while_loop, while_loop_backward
from treadle.targets.record import DeviceTarget

aten = torch.ops.aten


def workspace_of(op: OpOverload, args: Sequence[object], target: DeviceTarget) -> int:
    """Bytes that ``op`` holds while it runs, at the largest of sizes that vary; 0 where nothing is
    known."""
    formula = _ANYWHERE.get(op) or (_CUDNN.get(op) if "cudnn" in target.libraries else None)
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
    each = query.dtype.itemsize * prod(key.shape) // key.shape[heads] * query.shape[heads]
    return found + 2 * each


def _flash_tokens_first(args: Sequence[Any]) -> int:
    return _flash(args, tokens=-3)


def _embedding(args: Sequence[Any]) -> int:
    return 8 * 8 * prod(args[1].shape)


def _ctc(args: Sequence[Any]) -> int:
    log_probs, targets = args[:2]
    times, batch, _ = log_probs.shape
    return log_probs.dtype.itemsize * times * batch * (2 * targets.shape[-1] + 1)


def _ctc_backward(args: Sequence[Any]) -> int:
    losses, *given = args
    return 2 * _ctc(given) + losses.dtype.itemsize * prod(losses.shape)


def _loop(args: Sequence[Any]) -> int:
    *_, condition, body, _ = args
    return max(bytes_of_round(condition), bytes_of_round(body))


def _loop_backward(args: Sequence[Any]) -> int:
    """Of a single round: how many there are is not known."""
    _, carried, others, flags, _, body, backward = args
    begins = sum(each.dtype.itemsize * prod(each.shape) for each in carried)
    sums = sum(
        each.dtype.itemsize * prod(each.shape)
        for each in itertools.compress(others, flags[len(carried) :])
    )
    return begins + sums + max(bytes_of_round(body), bytes_of_round(backward))


_ANYWHERE: Mapping[OpOverload, Callable[[Sequence[Any]], int]] = {
    ctc_loss: _ctc,
    ctc_loss_backward: _ctc_backward,
    while_loop: _loop,
    while_loop_backward: _loop_backward,
}

_CUDNN: Mapping[OpOverload, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_cudnn_attention_backward.default: _attention,
    aten._scaled_dot_product_flash_attention_backward.default: _flash,
    aten._flash_attention_backward.default: _flash_tokens_first,
    aten._scaled_dot_product_efficient_attention_backward.default: _attention,
    aten.embedding_dense_backward.default: _embedding,
}
