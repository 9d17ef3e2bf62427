"""oneDNN's LSTM: PyTorch's kernel in float32 or bfloat16 on CPUs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import implement
from treadle.util.errors import RuntimeFailure

aten = torch.ops.aten


def _onednn(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    reverse: bool,
    train: bool,
    workspace: int,
) -> list[Tensor]:
    y, _, cy, kept = onednn_forward(x, h, c, weights, reverse, train)
    if workspace and kept.numel() != workspace:
        raise RuntimeFailure(
            f"oneDNN keeps {kept.numel()} bytes for backward, but the step was compiled for "
            f"{workspace}",
            code="TR-403",
            remedy="compile the step again on this machine",
        )
    return [y, cy, *([kept] if workspace else [])]


def onednn_forward(
    x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, last output, last cell, and what backward needs: an opaque tensor."""
    settings = _onednn_settings(h, weights)
    operands = [tensor.detach() for tensor in (x.contiguous(), *_four(weights), h, c)]
    with torch.enable_grad():  # otherwise nothing is kept
        return aten.mkldnn_rnn_layer.default(*operands, reverse, [], *settings, train)


def _four(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The four weights of a layer. Without biases, weights that nobody reads take the places of the
    biases."""
    return weights if len(weights) == 4 else (*weights, *weights)


def _onednn_settings(
    h: Tensor, weights: Sequence[Tensor]
) -> tuple[int, int, int, bool, bool, bool]:
    """Mode (an LSTM), width, layers, biases, bidirectional, batch first."""
    return 2, h.shape[1], 1, len(weights) == 4, False, False


def _onednn_backward(
    dy: Tensor | None,
    dcy: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    y: Tensor,
    cy: Tensor,
    workspace: Tensor | None,
    reverse: bool,
    train: bool,
) -> list[Tensor]:
    if workspace is None:
        workspace = onednn_forward(x, h, c, weights, reverse, train)[3]
    mode, width, layers, biases, both, first = _onednn_settings(h, weights)
    hy = y[0] if reverse else y[-1]
    dx, w_ih, w_hh, b_ih, b_hh, dh, dc = aten.mkldnn_rnn_layer_backward.default(
        *(x.contiguous(), *_four(weights), h, c, y, hy, cy, dy, None, dcy),
        *(reverse, mode, width, layers, biases, train, both, [], first, workspace),
    )
    return [dx, dh, dc, w_ih, w_hh, *((b_ih, b_hh.clone()) if biases else ())]


implement("onednn_lstm", _onednn)
implement("onednn_lstm_backward", _onednn_backward)
