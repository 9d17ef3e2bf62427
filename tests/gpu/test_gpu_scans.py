"""On a real GPU: ``scan`` as one loop, and ``map`` as one batch."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan

import treadle
from contract.test_scans import Plain


class Own:
    scan, map = staticmethod(scan), staticmethod(map_over)


class Cell(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.into, self.over = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 0.9, width))


def recurrent(model, x, ways):
    def body(h, row):
        h = torch.tanh(model.over(h) + row) * model.scale
        return h, h.sin()

    rows = model.into(x)
    last, made = ways.scan(body, rows.mean(0), rows)
    return last.square().mean() + made.mean()


def mapped(model, x, ways):
    return ways.map(lambda row: torch.tanh(model.over(row)).sum(-1), x).square().mean()


def training(model, loss, ways):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x):
        value = loss(model, x, ways)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step, optimizer


@pytest.mark.parametrize("count", [257, 300])
@pytest.mark.parametrize("loss", [recurrent, mapped])
def test_slices_train_as_in_eager(loss, count, tmp_path):
    torch.manual_seed(0)
    model = Cell().cuda()
    exact = copy.deepcopy(model).double()
    (function, optimizer), (true, _) = training(model, loss, Own), training(exact, loss, Plain)
    options = treadle.Options(cache_dir=tmp_path)
    step = treadle.compile(function, model=model, optimizer=optimizer, options=options)
    for _ in range(5):
        x = torch.randn(count, 5, 32, device="cuda")
        torch.testing.assert_close(step(x).double(), true(x.double()), rtol=1e-3, atol=1e-4)
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)
