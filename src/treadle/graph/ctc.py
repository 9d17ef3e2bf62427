"""``treadle::ctc_loss``: the CTC loss of each sequence, as one operation with known sizes.

::

    losses = ctc_loss(log_probs, targets, input_lengths, target_lengths)       [N]

PyTorch's own also gives the table of its recursion, whose width is the longest target's: a value.
Backward computes that table again.
"""

from typing import NoReturn

import torch
from torch import Tensor

from treadle.compat.operators import OpOverload
from treadle.graph.autograd_context import CallContext, Gradients, Registered
from treadle.util.errors import CaptureError

aten = torch.ops.aten
_library = torch.library.Library("treadle", "FRAGMENT")
_library.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> Tensor"
)
_library.define(
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
    "Tensor target_lengths, int blank, bool zero_infinity) -> Tensor"
)
ctc_loss: OpOverload = torch.ops.treadle.ctc_loss.default
ctc_loss_backward: OpOverload = torch.ops.treadle.ctc_loss_backward.default
OPERATIONS = (ctc_loss, ctc_loss_backward)


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


def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return _table(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]


def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    given = log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    losses, table = _table(*given)
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return aten._ctc_loss_backward.default(
        grad, log_probs, targets, *lengths, losses, table, blank, zero_infinity
    )


_library.impl("ctc_loss", _losses, "CompositeExplicitAutograd")
_library.impl("ctc_loss_backward", _backward, "CompositeExplicitAutograd")


def _one_each(log_probs: Tensor, *_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _like(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(
    ctx: CallContext, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int, bool], output: Tensor
) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = blank, zero_infinity


def _gradients(ctx: CallContext, grad: Tensor) -> Gradients:
    found = ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return found, None, None, None, None, None


def _keep_nothing(ctx: object, inputs: tuple[object, ...], output: object) -> None:
    """There is no second derivative."""


def _no_second_derivative(ctx: object, *_: object) -> NoReturn:
    raise CaptureError(
        "the gradient of ctc_loss is differentiated again",
        code="TR-140",
        remedy="leave it out of the penalty: PyTorch has no second derivative of it either",
    )


def _register() -> None:
    rows: tuple[Registered, ...] = (
        (ctc_loss, _one_each, _keep, _gradients),
        (ctc_loss_backward, _like, _keep_nothing, _no_second_derivative),
    )
    for op, fake, keep, gradients in rows:
        name = op.name().partition(".")[0]
        torch.library.register_fake(name, fake, lib=_library)
        torch.library.register_autograd(name, gradients, setup_context=keep, lib=_library)


_register()

__all__ = ["OPERATIONS", "ctc_loss", "ctc_loss_backward"]
