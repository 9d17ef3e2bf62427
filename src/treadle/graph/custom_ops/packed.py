"""Packed sequences as operations of a graph: padded rows with their lengths.

::

    y, hy, [cy]  =  packed_layer(x, lengths, h, c, weights)     y is zero beyond each length
    z            =  unpacked(y, lengths, value)                 z[t, b] = y[t, b] if t < lengths[b]

``x`` is [T, B, I], ``lengths`` [B] in descending order. How many rows a packed sequence has depends
on values, so none is ever made: PyTorch packs inside the call. The kernels are in
``runtime/kernels/packed.py``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CallContext, CustomOp, Gradient, Gradients
from treadle.graph.custom_ops.recurrent import (
    LAST,
    RECURSION,
    flops_of_layer,
    flops_with_gates,
    gradients_like,
    results_of_layer,
)

EQUAL, AT_MOST, ANY = "equal", "at most", "any"
"""What the longest length is to the time of ``y``: what ``unpacked`` refuses otherwise."""


def _layer(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    y, *rest = results_of_layer(x, h, c, weights, cell, autocast)
    return [y, y.new_empty(h.shape), *rest]


def _unpacked(y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor], *tuple[object, ...]]
"""``x, lengths, h, c, weights`` and what is not a tensor."""


def _keep(ctx: CallContext, inputs: Inputs, output: Sequence[Tensor]) -> None:
    x, lengths, h, c, weights, *ctx.rest = inputs
    ctx.save_for_backward(x, lengths, h, c, output[0], *weights)
    ctx.set_materialize_grads(False)


def _gradients(ctx: CallContext, grads: Sequence[Tensor | None]) -> Gradients:
    x, lengths, h, c, y, *weights = ctx.saved_tensors
    dy, dhy, dcy = (*grads, None)[:3]
    needs_x = ctx.needs_input_grad[0]
    gradients = packed_layer_backward(
        dy, dhy, dcy, x, lengths, h, c, weights, y, *ctx.rest, needs_x
    )
    dx = gradients.pop(0) if needs_x else None
    dh = gradients.pop(0)
    dc = None if c is None else gradients.pop(0)
    return (dx, None, dh, dc, gradients, *(None,) * len(ctx.rest))


def _keep_lengths(
    ctx: CallContext, inputs: tuple[Tensor, Tensor, *tuple[object, ...]], output: Tensor
) -> None:
    ctx.save_for_backward(inputs[1])


def _unpacked_gradient(ctx: CallContext, grad: Tensor) -> Gradients:
    (lengths,) = ctx.saved_tensors
    return unpacked(grad, lengths, 0.0, ANY), None, None, None


OPERATORS = (
    CustomOp(
        "packed_layer(Tensor x, Tensor lengths, Tensor h, Tensor? c, Tensor[] weights, str cell, "
        "bool reverse, ScalarType? autocast) -> Tensor[]",
        fake=_layer,
        gradient=Gradient(_keep, _gradients),
        flops=flops_of_layer,
        library=RECURSION,
    ),
    CustomOp(
        "packed_layer_backward(Tensor? dy, Tensor? dhy, Tensor? dcy, Tensor x, Tensor lengths, "
        "Tensor h, Tensor? c, Tensor[] weights, Tensor y, str cell, bool reverse, "
        "ScalarType? autocast, bool needs_x) -> Tensor[]",
        fake=gradients_like,
        gradient=LAST,
        flops=flops_with_gates,
        library=RECURSION,
    ),
    CustomOp(
        "unpacked(Tensor y, Tensor lengths, float value, str fits) -> Tensor",
        fake=_unpacked,
        gradient=Gradient(_keep_lengths, _unpacked_gradient),
        library=RECURSION,
    ),
)
packed_layer, packed_layer_backward, unpacked = (operator.op for operator in OPERATORS)
