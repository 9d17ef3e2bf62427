"""Packed sequences as operations of a graph: padded rows beside their lengths.

::

    y, hy, [cy]  =  packed_layer(x, lengths, h, c, weights)     y is zero beyond each length
    z            =  unpacked(y, lengths, value)                 z[t, b] = y[t, b] if t < lengths[b]

``x`` is [T, B, I], ``lengths`` [B] in descending order. How many rows a packed sequence has depends
on values, so none is ever made: PyTorch packs inside the call. The kernels are in
``runtime/packed.py``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.compat.operators import OpOverload
from treadle.graph.autograd_context import CallContext, Formula, Gradients, Registered, count_flops
from treadle.graph.recurrent import Shape, flops_of_layer, no_second_derivative, results_of_layer

_library = torch.library.Library("treadle", "FRAGMENT")
_library.define(
    "packed_layer(Tensor x, Tensor lengths, Tensor h, Tensor? c, Tensor[] weights, str cell, "
    "bool reverse, ScalarType? autocast) -> Tensor[]"
)
_library.define(
    "packed_layer_backward(Tensor? dy, Tensor? dhy, Tensor? dcy, Tensor x, Tensor lengths, "
    "Tensor h, Tensor? c, Tensor[] weights, Tensor y, str cell, bool reverse, "
    "ScalarType? autocast, bool needs_x) -> Tensor[]"
)
_library.define("unpacked(Tensor y, Tensor lengths, float value, str fits) -> Tensor")
_treadle = torch.ops.treadle
packed_layer = _treadle.packed_layer.default
packed_layer_backward = _treadle.packed_layer_backward.default
unpacked = _treadle.unpacked.default
OPERATIONS = (packed_layer, packed_layer_backward, unpacked)
EQUAL, AT_MOST, ANY = "equal", "at most", "any"
"""What the longest length is to the time of ``y``: what ``unpacked`` refuses otherwise."""


def _layer(
    x: Tensor,
    lengths: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    reverse: bool,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    y, *rest = results_of_layer(x, h, c, weights, cell, reverse, autocast)
    return [y, y.new_empty(h.shape), *rest]


def _layer_backward(
    dy: Tensor | None,
    dhy: Tensor | None,
    dcy: Tensor | None,
    x: Tensor,
    lengths: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    y: Tensor,
    cell: str,
    reverse: bool,
    autocast: torch.dtype | None,
    needs_x: bool,
) -> list[Tensor]:
    like = [x if needs_x else None, h, c, *weights]
    return [each.new_empty(each.shape) for each in like if each is not None]


def _unpacked(y: Tensor, lengths: Tensor, value: float, fits: str) -> Tensor:
    return y.new_empty(y.shape)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor], *tuple[object, ...]]
"""``x, lengths, h, c, weights`` and what is no tensor."""


def _keep(ctx: CallContext, inputs: Inputs, output: Sequence[Tensor]) -> None:
    x, lengths, h, c, weights, *ctx.rest = inputs
    ctx.save_for_backward(x, lengths, h, c, output[0], *weights)
    ctx.set_materialize_grads(False)


def _gradients(ctx: CallContext, grads: Sequence[Tensor | None]) -> Gradients:
    x, lengths, h, c, y, *weights = ctx.saved_tensors
    dy, dhy, dcy = (*grads, None)[:3]
    needs_x = ctx.needs_input_grad[0]
    found = packed_layer_backward(dy, dhy, dcy, x, lengths, h, c, weights, y, *ctx.rest, needs_x)
    dx = found.pop(0) if needs_x else None
    dh = found.pop(0)
    dc = None if c is None else found.pop(0)
    return (dx, None, dh, dc, found, *(None,) * len(ctx.rest))


def _keep_lengths(
    ctx: CallContext, inputs: tuple[Tensor, Tensor, *tuple[object, ...]], output: Tensor
) -> None:
    ctx.save_for_backward(inputs[1])


def _unpacked_gradient(ctx: CallContext, grad: Tensor) -> Gradients:
    (lengths,) = ctx.saved_tensors
    return unpacked(grad, lengths, 0.0, ANY), None, None, None


def _nothing(ctx: object, inputs: tuple[object, ...], output: object) -> None:
    """Nothing is kept: there is no second derivative."""


def _layer_flops(
    x: Shape,
    lengths: object,
    h: object,
    c: object,
    weights: Sequence[Shape],
    *_: object,
    **__: object,
) -> int:
    return flops_of_layer(x, weights)


def _backward_flops(
    dy: object,
    dhy: object,
    dcy: object,
    x: Shape,
    lengths: object,
    h: object,
    c: object,
    weights: Sequence[Shape],
    *_: object,
    **__: object,
) -> int:
    return 3 * flops_of_layer(x, weights)


def _register() -> None:
    rows: tuple[Registered, ...] = (
        (packed_layer, _layer, _keep, _gradients),
        (packed_layer_backward, _layer_backward, _nothing, no_second_derivative),
        (unpacked, _unpacked, _keep_lengths, _unpacked_gradient),
    )
    for op, fake, keep, gradients in rows:
        name = op.name().partition(".")[0]
        torch.library.register_fake(name, fake, lib=_library)
        torch.library.register_autograd(name, gradients, setup_context=keep, lib=_library)
    formulas: tuple[tuple[OpOverload, Formula], ...] = (
        (packed_layer, _layer_flops),
        (packed_layer_backward, _backward_flops),
    )
    for op, formula in formulas:
        count_flops(op, formula)


_register()

__all__ = [
    "ANY",
    "AT_MOST",
    "EQUAL",
    "OPERATIONS",
    "packed_layer",
    "packed_layer_backward",
    "unpacked",
]
