"""``torch.lstm`` and its kin while a step is traced: one operation per layer, not one per time
step.

before:  addmm, sigmoid, tanh, mul, ...     T times, and again in backward
after:   y, cy = recurrent_layer(x, h, c, weights)

What eager would call is what runs: oneDNN's LSTM on CPUs, cuDNN on GPUs, PyTorch's own layers
otherwise. Between layers is ordinary dropout; cuDNN's own, whose masks come from a generator that
nobody else sees, is not used.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.capture.explain_errors import here
from treadle.capture.integrations.ctc import FUNCTIONS, losses
from treadle.capture.integrations.packed import PackedRows
from treadle.compat.switches import onednn_takes
from treadle.compat.tracing import outside_modes
from treadle.graph.custom_ops.packed import packed_layer
from treadle.graph.custom_ops.recurrent import (
    GRU,
    LSTM,
    RELU,
    TANH,
    cudnn_rnn,
    onednn_lstm,
    recurrent_layer,
)
from treadle.runtime.kernels.recurrent_cudnn import cudnn_reserve
from treadle.runtime.kernels.recurrent_onednn import onednn_forward
from treadle.targets.registry import target_for
from treadle.util.errors import CaptureError

_CELLS: dict[object, str] = {
    torch.lstm: LSTM,
    torch.gru: GRU,
    torch.rnn_tanh: TANH,
    torch.rnn_relu: RELU,
}
_CUDNN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@final
@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers of one kind: the arguments of ``torch.lstm``, time first."""

    cell: str
    x: Tensor
    h: Tensor  # [layers * directions, B, P]
    c: Tensor | None
    weights: tuple[tuple[Tensor, ...], ...]  # by layer, then direction
    dropout: float
    train: bool
    bidirectional: bool
    autocast: torch.dtype | None

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def layers(self) -> int:
        return len(self.weights) // self.directions

    @property
    def projects(self) -> bool:
        return len(self.weights[0]) % 2 == 1

    @property
    def tensors(self) -> list[Tensor]:
        state = [self.h] if self.c is None else [self.h, self.c]
        return [self.x, *state, *(weight for layer in self.weights for weight in layer)]

    def cast(self) -> "_Stack":
        """All tensors in autocast's dtype, as autocast does for oneDNN's and cuDNN's layers."""
        low = self.autocast
        if low is None:
            return self
        weights = tuple(tuple(weight.to(low) for weight in layer) for layer in self.weights)
        c = None if self.c is None else self.c.to(low)
        x, h = self.x.to(low), self.h.to(low)
        rest = self.dropout, self.train, self.bidirectional, None
        return _Stack(self.cell, x, h, c, weights, *rest)


@final
@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """``onednn``: whether PyTorch may use it outside the trace; ``packed``: packed rows."""

    onednn: bool
    packed: PackedRows = field(default_factory=PackedRows)

    def instead_of(
        self,
        function: Callable[..., object],
        leaves: list[object],
        kwargs: Mapping[str, object] | None,
    ) -> Callable[..., object]:
        """What to call in place of a recurrent layer of PyTorch's, its CTC loss, or what packs
        sequences; any other function as it is. ``leaves``: tensors and values of its arguments."""
        if function in FUNCTIONS:
            return losses
        cell = _CELLS.get(function) if not kwargs else None
        if cell is None:
            return self.packed.instead_of(function, leaves, kwargs)
        return functools.partial(self._call, function, cell)

    def _call(self, function: Callable[..., object], cell: str, *args: Any) -> object:
        if self.packed.rows_of(args[0]) is not None:
            return self._call_packed(cell, *args)
        packed = isinstance(args[1], Tensor) and (cell == LSTM or isinstance(args[2], Tensor))
        if packed or len(args) != 9 or _is_empty(args[0], args[8]):
            return function(*args)
        x, state, weights, _, layers, dropout, train, bidirectional, first = args
        h, c = state if cell == LSTM else (state, None)
        per_layer = len(weights) // (layers * (2 if bidirectional else 1))
        rows = tuple(
            tuple(weights[at : at + per_layer]) for at in range(0, len(weights), per_layer)
        )
        x = x.transpose(0, 1) if first else x
        stack = _Stack(cell, x, h, c, rows, dropout, train, bidirectional, _autocast(x))
        y, hy, cy = self._run(stack)
        y = y.transpose(0, 1) if first else y
        return (y, hy) if cy is None else (y, hy, cy)

    def _call_packed(
        self, cell: str, data: Tensor, _: Tensor, state: Any, *settings: Any
    ) -> tuple[Tensor, ...]:
        """Layers over packed rows: one call for each layer and direction, as for padded rows."""
        rows = self.packed.rows_of(data)
        assert rows is not None
        weights, _, layers, dropout, train, bidirectional = settings
        if dropout and train and layers > 1:
            raise _drops_packed(cell)
        h, c = state if cell == LSTM else (state, None)
        per_layer = len(weights) // (layers * (2 if bidirectional else 1))
        x, outputs, cells = rows.padded, list[Tensor](), list[Tensor]()
        for at in range(0, h.shape[0], 2 if bidirectional else 1):
            tensors: list[Tensor] = []
            for reverse in (False, True)[: 2 if bidirectional else 1]:
                index = at + reverse
                own = list(weights[index * per_layer : (index + 1) * per_layer])
                start = h[index], None if c is None else c[index]
                y, *last = packed_layer(x, rows.lengths, *start, own, cell, reverse, _autocast(x))
                tensors.append(y)
                outputs.append(last[0])
                cells += last[1:]
            x = tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)
        y = self.packed.handle_of(x, rows.lengths)
        hy = torch.stack(outputs)
        return (y, hy, torch.stack(cells)) if cells else (y, hy)

    def _run(self, stack: _Stack) -> tuple[Tensor, Tensor, Tensor | None]:
        cudnn, onednn = _has_cudnn(stack), self._has_onednn(stack)
        if cudnn or onednn:
            stack = stack.cast()
        drops = stack.layers > 1 and stack.train and stack.dropout > 0
        if cudnn and not drops:
            return _cudnn(stack.x, stack, range(stack.layers))
        x, outputs, cells = stack.x, list[Tensor](), list[Tensor]()
        for layer in range(stack.layers):
            if cudnn:
                x, hy, cy = _cudnn(x, stack, range(layer, layer + 1))
                outputs += hy.unbind(0)
                cells += [] if cy is None else cy.unbind(0)
            else:
                x = _layer(x, stack, layer, onednn, outputs, cells)
            if drops and layer < stack.layers - 1:
                x = F.dropout(x, stack.dropout)
        return x, torch.stack(outputs), torch.stack(cells) if cells else None

    def _has_onednn(self, stack: _Stack) -> bool:
        """Whether eager would call oneDNN's LSTM. (It is off while a step is traced.)"""
        on = self.onednn and stack.cell == LSTM and not stack.projects
        ours = all("onednn" in target_for(tensor.device).libraries for tensor in stack.tensors)
        return on and ours and not _has_zero(stack.x.shape) and onednn_takes(stack.x.dtype)


def _layer(
    x: Tensor,
    stack: _Stack,
    layer: int,
    onednn: bool,
    outputs: list[Tensor],
    cells: list[Tensor],
) -> Tensor:
    """Both directions of one layer, or its only direction."""
    tensors: list[Tensor] = []
    for direction in range(stack.directions):
        at = layer * stack.directions + direction
        c = None if stack.c is None else stack.c[at]
        if c is not None and onednn and _is_differentiated(stack):
            y, *cy = _onednn(x, stack, at, c, direction > 0)
        else:
            operands = x, stack.h[at], c, list(stack.weights[at])
            y, *cy = recurrent_layer(*operands, stack.cell, direction > 0, stack.autocast)
        tensors.append(y)
        outputs.append(y[0] if direction else y[-1])
        cells += cy
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def _onednn(x: Tensor, stack: _Stack, at: int, c: Tensor, reverse: bool) -> Sequence[Tensor]:
    """One layer in one direction. It keeps nothing for the backward if sizes are not known yet."""
    h, weights, kept = stack.h[at], list(stack.weights[at]), 0
    sizes = *x.shape, h.shape[1]
    if _are_known(sizes):
        kind = x.dtype, len(weights), reverse, stack.train, torch.get_num_threads()
        kept = _onednn_workspace(sizes, *kind)
    return onednn_lstm(x, h, c, weights, reverse, stack.train, kept)[:2]


def _drops_packed(cell: str) -> CaptureError:
    return CaptureError(
        f"packed rows go through dropout between layers ({cell}): how many numbers eager draws "
        "depends on the lengths, which are unknown during capture",
        code="TR-141",
        where=here(),
        remedy="use separate layers, with nn.Dropout on the unpacked batch between them",
    )


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _is_differentiated(stack: _Stack) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in stack.tensors)


def _is_empty(x: Tensor, batch_first: bool) -> bool:
    """Whether there are no time steps, which PyTorch refuses with its own error."""
    return _has_zero(x.shape[1:2] if batch_first else x.shape[:1])


def _has_zero(sizes: Sequence[object]) -> bool:
    """Whether a size is known to be zero; sizes that a call decides are not."""
    return any(type(size) is int and size == 0 for size in sizes)


def _are_known(sizes: Sequence[object]) -> bool:
    return all(type(size) is int for size in sizes)


@functools.cache
def _onednn_workspace(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    weights: int,
    reverse: bool,
    train: bool,
    threads: int,
) -> int:
    """Bytes that oneDNN keeps for the backward of a layer of these sizes (T, B, I, H): only the
    kernel knows, so it runs once."""
    time, rows, width, hidden = sizes
    shapes = (time, rows, width), (rows, hidden), (rows, hidden)
    rest = (4 * hidden, width), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)
    with outside_modes():
        x, h, c, *weights_ = (
            torch.zeros(shape, dtype=dtype) for shape in (*shapes, *rest[:weights])
        )
        return onednn_forward(x, h, c, weights_, reverse, train)[3].numel()


def _has_cudnn(stack: _Stack) -> bool:
    on = torch.backends.cudnn.enabled and not _has_zero(stack.x.shape)
    there = "cudnn" in target_for(stack.x.device).libraries
    return on and there and (stack.autocast or stack.x.dtype) in _CUDNN


def _cudnn(x: Tensor, stack: _Stack, layers: range) -> tuple[Tensor, Tensor, Tensor | None]:
    """``layers`` of the stack in one call."""
    both = stack.directions
    part = slice(layers.start * both, layers.stop * both)
    h, c = stack.h[part], None if stack.c is None else stack.c[part]
    weights = [weight for layer in stack.weights[part] for weight in layer]
    train, reserve = _is_differentiated(stack), 0
    if train and _are_known((*x.shape, *h.shape)):
        shapes = tuple(tuple(tensor.shape) for tensor in (x, h, *weights))
        kind = x.dtype, x.device, len(layers), stack.bidirectional, stack.cell
        with outside_modes():
            reserve = cudnn_reserve(shapes, *kind)
    settings = len(layers), stack.bidirectional, stack.cell, train, reserve
    y, hy, *rest = cudnn_rnn(x, h, c, weights, *settings)
    return y, hy, rest[0] if c is not None else None


@contextmanager
def weights_in_place() -> Iterator[None]:
    """Inside, ``flatten_parameters`` does nothing. ``nn.LSTM`` calls it when its weights are other
    tensors than before, as they are while a step is traced; on a GPU it reads their memory."""
    original = nn.RNNBase.flatten_parameters
    nn.RNNBase.flatten_parameters = _nothing
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = original


def _nothing(self: nn.RNNBase) -> None:
    pass
