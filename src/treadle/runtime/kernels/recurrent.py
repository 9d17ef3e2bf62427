"""Kernels of recurrent layers: PyTorch's own where there are some, and a backward through time
where they have none.

::

    forward    PyTorch's layer, as eager calls it
    backward   gates of all steps at once, since y is known:  a = x w_ih^T + y[t-1] w_hh^T
               then back in time:  d[t] = (dy[t] + carry) * factors[t];  carry = d[t] w_hh + ...
               then one product for each weight, over all steps

What they are to a graph stands in ``graph/custom_ops/recurrent.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from treadle.compat.operators.custom_op import implement

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
    """The gradients of ``x`` if asked for, of ``h``, of ``c`` if there is one, and of the
    weights."""
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
    """``value`` at time steps inside a sequence, zero elsewhere."""
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
    """The parts of the tensors at each time step, the last first."""
    return reversed(list(zip(*(tensor.unbind(0) for tensor in values), strict=True)))


implement("recurrent_layer", _forward)
implement("recurrent_layer_backward", _backward)
