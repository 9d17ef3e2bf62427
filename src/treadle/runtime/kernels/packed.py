"""Kernels of packed sequences: PyTorch packs, runs the layer and pads again."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from treadle.compat.operators.custom_op import implement
from treadle.runtime.kernels.recurrent import LAYERS, gradients
from treadle.util.errors import RuntimeFailure


def _forward(
    x: Tensor,
    lengths: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    reverse: bool,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    casts = nullcontext() if autocast is None else torch.autocast(x.device.type, autocast)
    settings = list(weights), len(weights) >= 4, 1, 0.0, False, False
    with torch.no_grad(), casts:
        rows = pack_padded_sequence(_in_time(x, lengths, reverse), lengths.cpu())
        if c is None:
            y, hy = LAYERS[cell](rows.data, rows.batch_sizes, h[None], *settings)
            last = [hy[0]]
        else:
            state = (h[None], c[None])
            y, hy, cy = torch.lstm(rows.data, rows.batch_sizes, state, *settings)
            last = [hy[0], cy[0]]
        whole = pad_packed_sequence(PackedSequence(y, rows.batch_sizes), total_length=len(x))[0]
    return [_in_time(whole, lengths, reverse).contiguous(), *last]


def _backward(
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
    """Gradients of packed sequences. Values after a sequence's end enter no sum, whatever they
    are."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    lengths = lengths.to(x.device)
    inside = _inside(x, lengths)[..., None]
    with torch.no_grad():
        tensors = x, y, torch.zeros_like(y) if dy is None else dy
        x_, y_, dy_ = (
            _in_time(tensor.to(exact), lengths, reverse).masked_fill(~inside, 0.0)
            for tensor in tensors
        )
        if dhy is not None:
            columns = torch.arange(x.shape[1], device=x.device)
            dy_[lengths - 1, columns] += dhy.to(exact)
        dx, *gradients_ = gradients(dy_, dcy, x_, y_, h, c, weights, cell, inside)
        if not needs_x:
            return gradients_
        return [_in_time(dx, lengths, reverse).to(x.dtype), *gradients_]


def _inside(x: Tensor, lengths: Tensor) -> Tensor:
    """A mask [T, B]: whether a time step belongs to its sequence."""
    return torch.arange(len(x), device=x.device)[:, None] < lengths.to(x.device)


def _in_time(x: Tensor, lengths: Tensor, reverse: bool) -> Tensor:
    """The values in time order; with each sequence reversed, if asked for."""
    if not reverse:
        return x
    time = torch.arange(len(x), device=x.device)[:, None]
    turned = torch.where(_inside(x, lengths), lengths.to(x.device) - 1 - time, time)
    return x.gather(0, turned[..., None].expand(x.shape))


def _unpacked(y: Tensor, lengths: Tensor, value: float, fits: str) -> Tensor:
    longest = int(lengths.max())
    if (fits == "equal" and longest != len(y)) or (fits == "at most" and longest > len(y)):
        raise RuntimeFailure(
            f"the longest packed sequence has {longest} steps, but the batch has {len(y)}",
            code="TR-403",
            remedy=f"pass total_length={len(y)} to pad_packed_sequence, or truncate the batch",
        )
    return y.masked_fill(~_inside(y, lengths)[..., None], value)


_KERNELS: Mapping[str, Callable[..., object]] = {
    "packed_layer": _forward,
    "packed_layer_backward": _backward,
    "unpacked": _unpacked,
}
for _name, _kernel in _KERNELS.items():
    implement(_name, _kernel)

LENGTHS = {
    f"treadle.{name}.default": [*inspect.signature(kernel).parameters].index("lengths")
    for name, kernel in _KERNELS.items()
}
"""The position of the lengths in each operation's arguments: right after a tensor whose number of
time steps none may exceed."""
