"""Recurrent layers as operations: PyTorch's numbers forward, and its gradients."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from treadle.graph.custom_ops.recurrent import onednn_lstm, recurrent_layer
from treadle.runtime.kernels.recurrent_onednn import onednn_forward
from treadle.util.errors import CaptureError

LAYERS = {
    "lstm": (nn.LSTM, {}),
    "lstm without biases": (nn.LSTM, {"bias": False}),
    "lstm, projected": (nn.LSTM, {"proj_size": 3}),
    "lstm, projected, without biases": (nn.LSTM, {"proj_size": 3, "bias": False}),
    "gru": (nn.GRU, {}),
    "gru without biases": (nn.GRU, {"bias": False}),
    "rnn_tanh": (nn.RNN, {}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
}


def sample(name, dtype, time, rows):
    kind, settings = LAYERS[name]
    layer = kind(5, 7, **settings).to(dtype)
    x, h = torch.randn(time, rows, 5, dtype=dtype), torch.randn(rows, settings.get("proj_size", 7))
    c = torch.randn(rows, 7, dtype=dtype) if kind is nn.LSTM else None
    state = [each.to(dtype).requires_grad_() for each in (h, c) if each is not None]
    return layer, x.requires_grad_(), state


def gradients(results, inputs, factors):
    loss = sum((each * factor).sum() for each, factor in zip(results, factors, strict=True))
    return torch.autograd.grad(loss, inputs)


def eager(layer, x, state, reverse):
    whole = tuple(each[None] for each in state)
    y, last = layer(x.flip(0) if reverse else x, whole if len(state) == 2 else whole[0])
    return [y.flip(0) if reverse else y, *([last[1][0]] if len(state) == 2 else [])]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("time", "rows"), [(1, 1), (6, 3), (13, 2), (2, 0)])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_layer_equals_eager(name, time, rows, reverse):
    layer, x, state = sample(name, torch.float64, time, rows)
    h, c = state if len(state) == 2 else (*state, None)
    weights = list(layer._flat_weights)
    want = eager(layer, x, state, reverse)
    cell = name.partition(",")[0].partition(" ")[0]
    got = recurrent_layer(x, h, c, weights, cell, reverse, None)
    factors = [torch.randn_like(each) for each in want]
    inputs = [x, *state, *weights]
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)
        assert mine.is_contiguous()
    pairs = zip(gradients(got, inputs, factors), gradients(want, inputs, factors), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["lstm", "lstm without biases"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_onednn_s_lstm_is_eager_s(name, keeps, reverse):
    layer, x, (h, c) = sample(name, torch.float32, 6, 3)
    weights = list(layer._flat_weights)
    kept = onednn_forward(x, h, c, weights, reverse, True)[3].numel() if keeps else 0
    got = onednn_lstm(x, h, c, weights, reverse, True, kept)[:2]
    want = eager(layer, x, [h, c], reverse)
    factors = [torch.randn_like(each) for each in want]
    inputs = [x, h, c, *weights]
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)
    pairs = zip(gradients(got, inputs, factors), gradients(want, inputs, factors), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_types_are_known_without_running(name, autocast):
    layer, x, state = sample(name, torch.float32, 4, 2)
    weights = list(layer._flat_weights)
    cell = name.partition(",")[0].partition(" ")[0]
    h, c = state if len(state) == 2 else (*state, None)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):  # which has its own types
        real = recurrent_layer(x, h, c, weights, cell, False, autocast)
        with FakeTensorMode() as mode:
            to_fake = mode.from_tensor
            fake_c = None if c is None else to_fake(c)
            fakes = [to_fake(each) for each in weights]
            known = recurrent_layer(to_fake(x), to_fake(h), fake_c, fakes, cell, False, autocast)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            want = eager(layer, x, state, False)
    for mine, fake, other in zip(real, known, want, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (fake.dtype, fake.shape, fake.stride())
        assert torch.equal(mine, other)


def test_a_second_derivative_is_refused():
    layer, x, (h,) = sample("gru", torch.float64, 3, 2)
    (y,) = recurrent_layer(x, h, None, list(layer._flat_weights), "gru", False, None)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(CaptureError, match="TR-140"):
        gradient.square().sum().backward()
