"""``treadle::ctc_loss``: the CTC loss of each sequence, as one operation with known sizes.

::

    losses = ctc_loss(log_probs, targets, input_lengths, target_lengths)       [N]

PyTorch's own operator also returns the table of its recursion, whose width is that of the longest
target: a value. Backward recomputes that table.

The table has T x N x ``2 * S + 1`` numbers for targets of length S, and backward holds one more
table and the losses. This is for CPUs, where ``tests/lower/test_workspace.py`` measures it. For
concatenated targets, whose maximal length depends on values, S is the total length: at most N times
too much.
"""

from math import prod

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import (
    CallContext,
    CustomOp,
    Gradient,
    Gradients,
    no_second_derivative,
)
from treadle.graph.custom_ops.recurrent import RECURSION

aten = torch.ops.aten


def _table(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)


def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    args = log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    losses, table = _table(*args)
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return aten._ctc_loss_backward.default(
        grad, log_probs, targets, *lengths, losses, table, blank, zero_infinity
    )


def _keep(
    ctx: CallContext, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int, bool], output: Tensor
) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = blank, zero_infinity


def _gradients(ctx: CallContext, grad: Tensor) -> Gradients:
    gradient = ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return gradient, None, None, None, None, None


def _table_bytes(log_probs: Tensor, targets: Tensor) -> int:
    times, batch, _ = log_probs.shape
    return log_probs.dtype.itemsize * times * batch * (2 * targets.shape[-1] + 1)


def _backward_bytes(grad: Tensor, log_probs: Tensor, targets: Tensor) -> int:
    losses = grad.dtype.itemsize * prod(grad.shape)
    return 2 * _table_bytes(log_probs, targets) + losses


OPERATORS = (
    CustomOp(
        "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
        "int blank, bool zero_infinity) -> Tensor",
        fake=lambda log_probs: log_probs.new_empty(log_probs.shape[1]),
        kernel=lambda *args: _table(*args)[0],
        gradient=Gradient(_keep, _gradients),
        holds=_table_bytes,
        library=RECURSION,
    ),
    CustomOp(
        "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
        "Tensor target_lengths, int blank, bool zero_infinity) -> Tensor",
        fake=lambda log_probs: log_probs.new_empty(log_probs.shape),
        kernel=_backward,
        gradient=no_second_derivative(
            "ctc_loss", "leave it out of the penalty: PyTorch has no second derivative of it either"
        ),
        holds=_backward_bytes,
        library=RECURSION,
    ),
)
ctc_loss, ctc_loss_backward = (operator.op for operator in OPERATORS)
