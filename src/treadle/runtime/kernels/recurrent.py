"""Kernels of recurrent layers: PyTorch's own where there are some, and a backward through time.

::

    forward    PyTorch's layer, as eager calls it
    backward   gates of all steps at once, since y is known:  a = x w_ih^T + y[t-1] w_hh^T
               then back in time:  d[t] = (dy[t] + carry) * factors[t];  carry = d[t] w_hh + ...
               then one product for each weight, over all steps

What they are to a graph stands in ``graph/custom_ops/recurrent.py``.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from treadle.compat.operators.custom_op import implement
from treadle.util.errors import RuntimeFailure
from treadle.util.memory import memory_start

aten = torch.ops.aten

LAYERS: dict[str, Callable[..., Any]] = {
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


def _forward(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    reverse: bool,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    casts = nullcontext() if autocast is None else torch.autocast(x.device.type, autocast)
    steps = x.flip(0) if reverse else x
    settings = len(weights) >= 4, 1, 0.0, False, False, False
    with torch.no_grad(), casts:
        if c is None:
            y = LAYERS[cell](steps, h[None], list(weights), *settings)[0]
            return [_in_order(y, reverse)]
        y, _, cy = torch.lstm(steps, (h[None], c[None]), list(weights), *settings)
    return [_in_order(y, reverse), cy[0]]


def _in_order(y: Tensor, reverse: bool) -> Tensor:
    return y.flip(0) if reverse else y.contiguous()


def _backward(
    dy: Tensor | None,
    dcy: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    y: Tensor,
    cell: str,
    reverse: bool,
    autocast: torch.dtype | None,
    needs_x: bool,
) -> list[Tensor]:
    """Gradients of ``x`` if asked for, ``h``, ``c`` if there is one, and the weights."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        tensors = x, y, torch.zeros_like(y) if dy is None else dy
        x_, y_, dy_ = (_in_time(tensor.to(exact), reverse) for tensor in tensors)
        dx, *gradients_ = gradients(dy_, dcy, x_, y_, h, c, weights, cell)
        return [_in_time(dx, reverse).to(x.dtype), *gradients_] if needs_x else gradients_


def gradients(
    dy: Tensor,
    dcy: Tensor | None,
    x: Tensor,
    y: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    inside: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of ``x``, ``h``, ``c`` if there is one, and the weights, back in time. ``x``, ``y``
    and ``dy`` are in the dtype to compute in. ``inside`` [T, B, 1]: steps that there are; where
    there are none, ``x``, ``y`` and ``dy`` are zero."""
    wide = [weight.to(x.dtype) for weight in weights]
    before = torch.cat((h.to(x.dtype)[None], y[:-1]))
    project: list[Tensor] = []
    if c is None:
        through = _through_gru if cell == "gru" else _through_plain
        da, dz, dh = through(dy, x, before, y, wide, cell, inside)
        results = [dh]
    else:
        start = c.to(x.dtype)
        last = torch.zeros_like(start) if dcy is None else dcy.to(x.dtype)
        da, dh, dc, project = _through_lstm(dy, last, x, before, start, wide, inside)
        dz, results = da, [dh, dc]
    rows, inner = da.flatten(0, 1), dz.flatten(0, 1)
    results += [rows.t() @ x.flatten(0, 1), inner.t() @ before.flatten(0, 1)]
    if len(weights) >= 4:
        results += [rows.sum(0), inner.sum(0)]
    results += project
    like = [h, *([] if c is None else [c]), *weights]
    results = [result.to(a.dtype) for result, a in zip(results, like, strict=True)]
    return [(rows @ wide[0]).view(x.shape), *results]


def _only(inside: Tensor | None, value: Tensor, outside: float = 0.0) -> Tensor:
    """``value`` at steps that there are."""
    return value if inside is None else value.masked_fill(~inside, outside)


def _in_time(x: Tensor, reverse: bool) -> Tensor:
    return x.flip(0) if reverse else x


def _biases(weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    return (weights[2], weights[3]) if len(weights) >= 4 else (None, None)


def _through_plain(
    dy: Tensor,
    x: Tensor,
    before: Tensor,
    y: Tensor,
    weights: Sequence[Tensor],
    cell: str,
    inside: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = f(a)``:  ``da[t] = (dy[t] + da[t+1] w_hh) * f'``, with ``f'`` known from ``y``."""
    slope = _only(inside, 1 - y * y if cell == "rnn_tanh" else (y > 0).to(y.dtype))
    da = torch.empty_like(y)
    carry = torch.zeros_like(y[0])
    for d, f, out in _backwards(dy, slope, da):
        torch.mul(carry.add_(d), f, out=out)
        torch.mm(out, weights[1], out=carry)
    return da, da, carry


def _through_gru(
    dy: Tensor,
    x: Tensor,
    before: Tensor,
    y: Tensor,
    weights: Sequence[Tensor],
    cell: str,
    inside: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = (1 - z) n + z h``, ``n = tanh(a_n + r (w_hn h + b_hn))``; rows of the weights are r, z
    and n. ``factors``: the derivatives of y by the inner parts of r, z and n, and by a_n."""
    b_ih, b_hh = _biases(weights)
    a_r, a_z, a_n = F.linear(x, weights[0], b_ih).chunk(3, -1)
    h_r, h_z, h_n = F.linear(before, weights[1], b_hh).chunk(3, -1)
    r, z = torch.sigmoid(a_r + h_r), torch.sigmoid(a_z + h_z)
    n = torch.tanh(a_n + r * h_n)
    by_n = (1 - z) * (1 - n * n)
    parts = by_n * h_n * r * (1 - r), (before - n) * z * (1 - z), by_n * r, by_n
    factors = torch.stack([_only(inside, part) for part in parts], 2)
    d = torch.empty_like(factors)
    flat = d.flatten(2)
    width = y.shape[-1]
    carry = torch.zeros_like(y[0])
    last = torch.empty_like(carry)
    for g, f, out, inner, keep in _backwards(dy, factors, d, flat[..., : 3 * width], z):
        carry.add_(g)
        torch.mul(carry[:, None], f, out=out)
        torch.mul(carry, keep, out=last)
        torch.addmm(last, inner, weights[1], out=carry)
    outer = torch.cat((flat[..., : 2 * width], flat[..., 3 * width :]), -1)
    return outer, flat[..., : 3 * width], carry


def _through_lstm(
    dy: Tensor,
    dcy: Tensor,
    x: Tensor,
    before: Tensor,
    start: Tensor,
    weights: Sequence[Tensor],
    inside: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """``c[t] = f c[t-1] + i g``, ``y = o tanh(c)`` or that times ``w_hr``; rows are i, f, g, o."""
    b_ih, b_hh = _biases(weights)
    a = F.linear(x, weights[0], b_ih).add_(F.linear(before, weights[1], b_hh))
    i, f, g, o = a.chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    gained = i * g
    cells = start.new_empty((len(x) + 1, *start.shape))
    cells[0] = start
    steps = cells.unbind(0)
    for now, then, keep, add in zip(steps, steps[1:], f.unbind(0), gained.unbind(0), strict=False):
        torch.addcmul(add, keep, now, out=then)
    tanh = torch.tanh(cells[1:])
    by_gates = gained * (1 - i), f * (1 - f) * cells[:-1], (1 - g * g) * i
    factors = torch.stack([_only(inside, gate) for gate in by_gates], 2)
    to_o, to_c = _only(inside, o * (1 - o) * tanh), _only(inside, o * (1 - tanh * tanh))
    f = _only(inside, f, 1.0)  # what is known of the last cell waits until there is a step
    da, project, width = torch.empty_like(a), weights[4:5] or weights[2:3], start.shape[1]
    if len(weights) % 2 == 0:
        project = []
    inner, outer = da[..., : 3 * width].unflatten(-1, (3, width)), da[..., 3 * width :]
    dh, dc = torch.zeros_like(before[0]), dcy.clone()[:, None]
    totals: list[Tensor] = []
    parts = (dy, factors, to_o, to_c[:, :, None], f[:, :, None], inner, outer, da)
    for d, by, by_o, by_c, keep, out, out_o, whole in _backwards(*parts):
        dh.add_(d)
        if project:
            totals.append(dh.clone())
        top = dh @ project[0] if project else dh
        dc.addcmul_(top[:, None], by_c)
        torch.mul(dc, by, out=out)
        torch.mul(top, by_o, out=out_o)
        dc.mul_(keep)
        torch.mm(whole, weights[1], out=dh)
    tensors: list[Tensor] = []
    if project:
        tensors = [torch.cat(totals[::-1]).t() @ (o * tanh).flatten(0, 1)]
    return da, dh, dc[:, 0], tensors


def _backwards(*values: Tensor) -> Iterator[tuple[Any, ...]]:
    """Their parts at each time, last first."""
    return reversed(list(zip(*(tensor.unbind(0) for tensor in values), strict=True)))


# oneDNN: PyTorch's kernel for an LSTM in float32 or bfloat16 on CPUs.


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
    """Without biases their places are taken by weights, which are not read."""
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


# cuDNN: all layers in one call; its weights are one buffer, as nn.LSTM keeps them.

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
    """What cuDNN is told of a call beside its tensors."""

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
        """A buffer of which ``weights`` are views from now on."""
        sizes = self.hidden, self.project, self.layers
        return aten._cudnn_rnn_flatten_weight.default(
            weights, self.per_layer, self.width, self.mode, *sizes, False, self.bidirectional
        )


_DENSE = torch.contiguous_format
_layouts: dict[tuple[object, ...], tuple[tuple[int, ...], int]] = {}


def _of_size(kept: Tensor, size: int) -> Tensor:
    """``kept`` with bytes at its end up to ``size``, which the plan counts on."""
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
    nothing but the library says, so it runs once; where there is none, about as many."""
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


for _name, _kernel in (
    ("recurrent_layer", _forward),
    ("recurrent_layer_backward", _backward),
    ("onednn_lstm", _onednn),
    ("onednn_lstm_backward", _onednn_backward),
    ("cudnn_rnn", _cudnn),
    ("cudnn_rnn_backward", _cudnn_backward),
):
    implement(_name, _kernel)
