"""cuDNN's recurrent layers: all layers in one call, with their weights in one buffer, as nn.LSTM
keeps them."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import implement
from treadle.util.errors import RuntimeFailure
from treadle.util.memory import memory_start

aten = torch.ops.aten


_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def _cudnn(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    layers: int,
    bidirectional: bool,
    cell: str,
    train: bool,
    reserve: int,
) -> list[Tensor]:
    y, hy, cy, kept = _cudnn_forward(x, h, c, weights, layers, bidirectional, cell, train)
    outputs = [y, hy, *([] if c is None else [cy])]
    return [*outputs, _of_size(kept, reserve)] if reserve else outputs


def _cudnn_forward(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    layers: int,
    bidirectional: bool,
    cell: str,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, last outputs, last cells, and what backward needs: an opaque tensor."""
    call = _CudnnCall(x, h, weights, layers, bidirectional, cell)
    weights_, buffer = call.one_buffer()
    outputs = aten._cudnn_rnn.default(
        *(x.contiguous(), weights_, call.per_layer, buffer, h.contiguous()),
        *(None if c is None else c.contiguous(), *call.settings(train), [], None),
    )
    return outputs[:4]


def _cudnn_backward(
    dy: Tensor | None,
    dhy: Tensor | None,
    dcy: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    y: Tensor,
    reserve: Tensor | None,
    layers: int,
    bidirectional: bool,
    cell: str,
    needs_x: bool,
    last: bool,
) -> list[Tensor]:
    """``last``: nobody reads ``reserve`` after this, which cuDNN overwrites."""
    if reserve is None:
        reserve = _cudnn_forward(x, h, c, weights, layers, bidirectional, cell, True)[3]
    elif not last:
        reserve = reserve.clone()
    call = _CudnnCall(x, h, weights, layers, bidirectional, cell)
    weights_, buffer = call.one_buffer()
    grads = [None if tensor is None else tensor.contiguous() for tensor in (dy, dhy, dcy)]
    dx, dh, dc, d_weights = aten._cudnn_rnn_backward.default(
        *(x.contiguous(), weights_, call.per_layer, buffer, h.contiguous()),
        *(None if c is None else c.contiguous(), y, *grads, *call.settings(True), [], None),
        *(reserve, [True, True, c is not None, True]),
    )
    state = [dh] if c is None else [dh, dc]
    return [*([dx] if needs_x else []), *state, *(gradient.clone() for gradient in d_weights)]


class _CudnnCall:
    """The arguments of a cuDNN call apart from its tensors."""

    def __init__(
        self,
        x: Tensor,
        h: Tensor,
        weights: Sequence[Tensor],
        layers: int,
        bidirectional: bool,
        cell: str,
    ) -> None:
        self.weights = list(weights)
        self.per_layer = len(weights) // (layers * (2 if bidirectional else 1))
        self.mode, self.layers, self.bidirectional = _MODES[cell], layers, bidirectional
        self.width = x.shape[2]
        projects = self.per_layer % 2 == 1
        self.hidden = weights[self.per_layer - 1].shape[1] if projects else h.shape[2]
        self.project = h.shape[2] if projects else 0

    def settings(self, train: bool) -> tuple[int, int, int, int, bool, float, bool, bool]:
        """Mode, sizes, layers, batch first, dropout, train, bidirectional."""
        sizes = self.hidden, self.project, self.layers
        return self.mode, *sizes, False, 0.0, train, self.bidirectional

    def one_buffer(self) -> tuple[list[Tensor], Tensor]:
        """The weights and the buffer that they are views of: the module's own, or a copy."""
        first = self.weights[0]
        starts, size = self._layout()
        begin = first.storage_offset() - starts[0]
        storage = first.untyped_storage()
        same = all(
            memory_start(weight) == storage.data_ptr()
            and weight.storage_offset() - begin == start
            and weight.is_contiguous()
            for weight, start in zip(self.weights, starts, strict=True)
        )
        if same and begin >= 0 and storage.nbytes() >= (begin + size) * first.element_size():
            return self.weights, first.as_strided((size,), (1,), begin)
        copies = [weight.detach().view_as(weight).contiguous() for weight in self.weights]
        return copies, self._flattened(copies)

    def _layout(self) -> tuple[tuple[int, ...], int]:
        """Where each weight begins in the buffer, and its size, in elements."""
        first = self.weights[0]
        key = tuple(tuple(weight.shape) for weight in self.weights), self.mode, self.layers
        key = *key, self.bidirectional, self.project, first.dtype, first.device
        if key not in _layouts:
            like = [torch.empty_like(weight, memory_format=_DENSE) for weight in self.weights]
            buffer = self._flattened(like)
            _layouts[key] = tuple(int(view.storage_offset()) for view in like), buffer.numel()
        return _layouts[key]

    def _flattened(self, weights: list[Tensor]) -> Tensor:
        """A new buffer; ``weights`` become views of it."""
        sizes = self.hidden, self.project, self.layers
        return aten._cudnn_rnn_flatten_weight.default(
            weights, self.per_layer, self.width, self.mode, *sizes, False, self.bidirectional
        )


_DENSE = torch.contiguous_format

_layouts: dict[tuple[object, ...], tuple[tuple[int, ...], int]] = {}


def _of_size(kept: Tensor, size: int) -> Tensor:
    """``kept``, padded to ``size`` bytes, which the plan assumes."""
    if kept.numel() == size:
        return kept
    if kept.numel() > size:
        raise RuntimeFailure(
            f"cuDNN keeps {kept.numel()} bytes for backward, but the step was compiled for {size}",
            code="TR-403",
            remedy="compile the step again on this machine",
        )
    longer = kept.new_empty(size)
    longer[: kept.numel()] = kept
    return longer


@functools.cache
def cudnn_reserve(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    layers: int,
    bidirectional: bool,
    cell: str,
) -> int:
    """Bytes that cuDNN keeps for the backward of layers whose x, h and weights have these shapes:
    only the library knows, so it runs once; without the library, an estimate."""
    time, rows = shapes[0][:2]
    if not torch.cuda.is_available():
        outputs = sum(shape[0] for shape in shapes[2:] if len(shape) == 2)
        return dtype.itemsize * time * rows * outputs
    with torch.no_grad():
        x, h, *weights = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        projects = len(weights) // (layers * (2 if bidirectional else 1)) % 2 == 1
        hidden = weights[1].shape[0] // 4 if projects else h.shape[2]
        c = h.new_zeros(*h.shape[:2], hidden) if cell == "lstm" else None
        return _cudnn_forward(x, h, c, weights, layers, bidirectional, cell, True)[3].numel()


implement("cudnn_rnn", _cudnn)
implement("cudnn_rnn_backward", _cudnn_backward)
