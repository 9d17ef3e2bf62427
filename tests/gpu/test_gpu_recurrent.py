"""Recurrent layers on a GPU: cuDNN's calls, beside eager."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.runtime.store.artifact import CallStep

LAYERS = {
    "lstm": lambda: nn.LSTM(6, 8),
    "lstm, two layers, both ways": lambda: nn.LSTM(6, 8, num_layers=2, bidirectional=True),
    "lstm, projected": lambda: nn.LSTM(6, 8, proj_size=4),
    "lstm without biases": lambda: nn.LSTM(6, 8, bias=False),
    "gru": lambda: nn.GRU(6, 8, batch_first=True),
    "rnn": lambda: nn.RNN(6, 8, nonlinearity="relu"),
}


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.body, self.head = layer, nn.LazyLinear(3)

    def forward(self, x, state):
        y, state = self.body(x, state)
        return self.head(y), state


def made(model, low):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, target, state):
        with torch.autocast("cuda", torch.bfloat16) if low else nullcontext():
            y, after = model(x, state)
        loss = F.mse_loss(y.float(), target)
        tensors = after if isinstance(after, tuple) else (after,)
        loss = loss + sum(each.float().square().mean() for each in tensors)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = tuple(each.detach() for each in tensors)
        return loss.detach(), found if isinstance(after, tuple) else found[0]

    return step, optimizer


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("low", [False, True])
def test_recurrent_steps_equal_eager(name, low):
    torch.manual_seed(0)
    model = Model(LAYERS[name]()).cuda()
    x = torch.randn(5, 4, 6, device="cuda")
    target = torch.randn(5, 4, 3, device="cuda")
    model(x, None)
    twin = copy.deepcopy(model)
    function, optimizer = made(model, low)
    step = treadle.compile(function, model=model, optimizer=optimizer)
    eager, _ = made(twin, low)
    mine = others = None
    bounds = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 1e-3, "atol": 1e-4}
    for _ in range(3):
        loss, mine = step(x, target, mine)
        expected, others = eager(x, target, others)
        torch.testing.assert_close(loss, expected, **bounds)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, **bounds)
    calls = [each.op for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    assert sum("cudnn_rnn" in each for each in calls) == 2
    assert not step.compiled.artifact.fallbacks


@pytest.mark.gpu
def test_dropout_between_layers_is_pytorch_s():
    """Not cuDNN's own, whose generator nobody can keep: the seed decides, and a run repeats."""
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model(nn.GRU(6, 8, num_layers=3, dropout=0.5)).cuda()
        x = torch.randn(5, 4, 6, device="cuda")
        model(x, None)
        function, optimizer = made(model, False)
        step = treadle.compile(function, model=model, optimizer=optimizer)
        torch.manual_seed(1)
        target = torch.zeros(5, 4, 3, device="cuda")
        losses.append([step(x, target, None)[0].item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
