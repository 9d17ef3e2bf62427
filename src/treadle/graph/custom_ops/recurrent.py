"""Recurrent layers as operations of a graph: one call for all steps in time, forward and backward.

::

    y, [cy]  =  recurrent_layer(x, h, c, weights)            one layer, one direction
    dx, ...  =  recurrent_layer_backward(dy, dcy, ..., y)    computes the gates again

    y, cy, [workspace]    =  onednn_lstm(x, h, c, weights)   PyTorch's kernels for CPUs
    y, hy, [cy, reserve]  =  cudnn_rnn(x, h, c, weights)     and for GPUs: all layers in one call

Time comes first: ``x`` is [T, B, I], ``y`` [T, B, P]. ``weights`` of a layer are ``w_ih`` [G*H, I],
``w_hh`` [G*H, P], then ``b_ih`` and ``b_hh`` [G*H] if it has biases, then ``w_hr`` [P, H] if it
projects (otherwise P is H). What a vendor's kernel keeps for its backward is opaque; its bytes are
an argument, and with 0 there are none: backward runs the forward again. The kernels themselves are
in ``runtime/kernels/recurrent.py``, ``recurrent_onednn.py`` and ``recurrent_cudnn.py``.
"""

from collections.abc import Sequence
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

LSTM, GRU, TANH, RELU = "lstm", "gru", "rnn_tanh", "rnn_relu"
RECURSION = "a recursion: one call for all time steps"
"""Why it is a call of the library."""
LAST = no_second_derivative(
    "a recurrent layer",
    "use nn.LSTMCell, nn.GRUCell or nn.RNNCell in a loop over time for this layer, or leave it "
    "out of the penalty",
)

# What the results are, without running anything.


def results_of_layer(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    """Output and last cell, if there are cells, without running anything."""
    low = autocast or x.dtype
    shape = (x.shape[0], x.shape[1], weights[1].shape[1])
    if c is not None:
        high = torch.promote_types(low, c.dtype)
        projects = len(weights) % 2 == 1
        return [
            x.new_empty(shape, dtype=low if projects else high),
            c.new_empty(c.shape, dtype=high),
        ]
    high = torch.promote_types(low, h.dtype) if cell == GRU else low
    return [x.new_empty(shape, dtype=high)]


def gradients_like(
    x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor], needs_x: bool
) -> list[Tensor]:
    """The results of a backward: the gradient of ``x`` if it is wanted, then those of the rest."""
    return _like(x if needs_x else None, h, c, *weights)


def _like(*values: Tensor | None, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [value.new_empty(value.shape, dtype=dtype) for value in values if value is not None]


def _onednn(x: Tensor, h: Tensor, c: Tensor, workspace: int) -> list[Tensor]:
    y = x.new_empty((x.shape[0], x.shape[1], h.shape[1]))
    return [y, c.new_empty(c.shape), *_kept_bytes(x, workspace)]


def _onednn_backward(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return _like(x, h, c, *weights, dtype=torch.float32)


def _cudnn(
    x: Tensor, h: Tensor, c: Tensor | None, bidirectional: bool, reserve: int
) -> list[Tensor]:
    width = h.shape[2] * (2 if bidirectional else 1)
    y = x.new_empty((x.shape[0], x.shape[1], width))
    return [y, *_like(h, c), *_kept_bytes(x, reserve)]


def _kept_bytes(x: Tensor, count: int) -> list[Tensor]:
    return [x.new_empty((count,), dtype=torch.uint8)] if count else []


# Gradients. A context keeps the tensors of a call, which may be views that share storage.


Inputs = tuple[Tensor, Tensor, Tensor | None, list[Tensor], *tuple[object, ...]]
"""``x, h, c, weights`` and what is not a tensor."""


def _keep(ctx: CallContext, inputs: Inputs, output: Sequence[Tensor]) -> None:
    x, h, c, weights, *rest = inputs
    ctx.save_for_backward(x, h, c, *weights, *output)
    ctx.rest = (len(weights), *rest)
    ctx.set_materialize_grads(False)


Kept = tuple[Tensor, Tensor, Tensor | None, list[Tensor], list[Tensor], list[object]]


def _kept(ctx: CallContext) -> Kept:
    """Inputs, outputs, and what was no tensor."""
    x, h, c, *others = ctx.saved_tensors
    count, *rest = ctx.rest
    assert isinstance(count, int)
    return x, h, c, others[:count], others[count:], rest


def _padded(c: Tensor | None, dx: Tensor | None, tensors: Sequence[Tensor], rest: int) -> Gradients:
    """Gradients in the order of the arguments."""
    dh, *left = tensors
    dc = left.pop(0) if c is not None else None
    return (dx, dh, dc, left, *(None,) * rest)


def _layer_gradients(ctx: CallContext, grads: Sequence[Tensor | None]) -> Gradients:
    x, h, c, weights, outputs, rest = _kept(ctx)
    dy, dcy = (*grads, None)[:2]
    needs_x = ctx.needs_input_grad[0]
    gradients = recurrent_layer_backward(dy, dcy, x, h, c, weights, outputs[0], *rest, needs_x)
    dx = gradients[0] if needs_x else None
    return _padded(c, dx, gradients[1:] if needs_x else gradients, len(rest))


def _onednn_gradients(ctx: CallContext, grads: Sequence[Tensor | None]) -> Gradients:
    x, h, c, weights, (y, cy, *kept), rest = _kept(ctx)
    reverse, train, _ = rest
    workspace = kept[0] if kept else None
    dx, *gradients = onednn_lstm_backward(
        grads[0], grads[1], x, h, c, weights, y, cy, workspace, reverse, train
    )
    assert c is not None
    gradients = [
        gradient.to(like.dtype) for gradient, like in zip(gradients, (h, c, *weights), strict=True)
    ]
    return _padded(c, dx.to(x.dtype), gradients, len(rest))


def _cudnn_gradients(ctx: CallContext, grads: Sequence[Tensor | None]) -> Gradients:
    x, h, c, weights, outputs, rest = _kept(ctx)
    layers, bidirectional, cell, _, reserve = rest
    dcy = grads[2] if c is not None else None
    needs_x = ctx.needs_input_grad[0]
    gradients = cudnn_rnn_backward(
        *(grads[0], grads[1], dcy, x, h, c, weights, outputs[0]),
        *(outputs[-1] if reserve else None, layers, bidirectional, cell, needs_x, False),
    )
    dx = gradients[0] if needs_x else None
    return _padded(c, dx, gradients[1:] if needs_x else gradients, len(rest))


# Floating-point operations: two for each weight of a product and each row, thrice in a training
# step; a backward that computes gates again does the forward's as well.

Shape = Sequence[int]


def flops_of_layer(x: Shape, weights: Sequence[Shape]) -> int:
    """Of its products, forward, from the shapes."""
    return 2 * x[0] * x[1] * sum(prod(weight) for weight in weights if len(weight) == 2)


def flops_of_backward(x: Shape, weights: Sequence[Shape]) -> int:
    """The operations of a backward pass whose forward pass kept all that it needs."""
    return 2 * flops_of_layer(x, weights)


def flops_with_gates(x: Shape, weights: Sequence[Shape]) -> int:
    """Of a backward that computes the gates again."""
    return 3 * flops_of_layer(x, weights)


OPERATORS = (
    CustomOp(
        "recurrent_layer(Tensor x, Tensor h, Tensor? c, Tensor[] weights, str cell, bool reverse, "
        "ScalarType? autocast) -> Tensor[]",
        fake=results_of_layer,
        gradient=Gradient(_keep, _layer_gradients),
        flops=flops_of_layer,
        library=RECURSION,
    ),
    CustomOp(
        "recurrent_layer_backward(Tensor? dy, Tensor? dcy, Tensor x, Tensor h, Tensor? c, "
        "Tensor[] weights, Tensor y, str cell, bool reverse, ScalarType? autocast, bool needs_x) "
        "-> Tensor[]",
        fake=gradients_like,
        gradient=LAST,
        flops=flops_with_gates,
        library=RECURSION,
    ),
    CustomOp(
        "onednn_lstm(Tensor x, Tensor h, Tensor c, Tensor[] weights, bool reverse, bool train, "
        "int workspace) -> Tensor[]",
        fake=_onednn,
        gradient=Gradient(_keep, _onednn_gradients),
        flops=flops_of_layer,
        library=RECURSION,
    ),
    CustomOp(
        "onednn_lstm_backward(Tensor? dy, Tensor? dcy, Tensor x, Tensor h, Tensor c, "
        "Tensor[] weights, Tensor y, Tensor cy, Tensor? workspace, bool reverse, bool train) "
        "-> Tensor[]",
        fake=_onednn_backward,
        gradient=LAST,
        flops=flops_of_backward,
        library=RECURSION,
    ),
    CustomOp(
        "cudnn_rnn(Tensor x, Tensor h, Tensor? c, Tensor[] weights, int layers, "
        "bool bidirectional, str cell, bool train, int reserve) -> Tensor[]",
        fake=_cudnn,
        gradient=Gradient(_keep, _cudnn_gradients),
        flops=flops_of_layer,
        library=RECURSION,
    ),
    CustomOp(
        "cudnn_rnn_backward(Tensor? dy, Tensor? dhy, Tensor? dcy, Tensor x, Tensor h, Tensor? c, "
        "Tensor[] weights, Tensor y, Tensor? reserve, int layers, bool bidirectional, str cell, "
        "bool needs_x, bool last) -> Tensor[]",
        fake=gradients_like,
        gradient=LAST,
        flops=flops_of_backward,
        library=RECURSION,
    ),
)
(
    recurrent_layer,
    recurrent_layer_backward,
    onednn_lstm,
    onednn_lstm_backward,
    cudnn_rnn,
    cudnn_rnn_backward,
) = (operator.op for operator in OPERATORS)
