"""On a real GPU: loops whose functions are programs of generated Triton and library calls."""

import copy

import pytest
import torch
from torch import nn, while_loop

import treadle
from treadle.runtime.store.artifact import CallStep, Launch


def plain_while(condition, body, carried):
    while bool(condition(*carried)):
        carried = body(*carried)
    return carried


class Cell(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(h)))


def settled(model, x, rounds, loop):
    def body(i, h, mean):
        return i + 1, torch.tanh(model(h)) + 0.1 * x, 0.9 * mean + h.mean(0)

    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    start = zero, x * 1.0, torch.zeros(x.shape[-1], device=x.device, dtype=x.dtype)
    _, h, mean = loop(lambda i, h, mean: i < rounds, body, start)
    return h.square().mean() + mean.sum() * 0.01


def training(model, loop):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x, rounds):
        loss = settled(model, x, rounds, loop)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


@pytest.mark.parametrize("rows", [5, 257])
def test_a_loop_trains_as_in_eager(rows, tmp_path):
    torch.manual_seed(0)
    model = Cell().cuda()
    exact = copy.deepcopy(model).double()
    (function, optimizer), (true, _) = training(model, while_loop), training(exact, plain_while)
    options = treadle.Options(cache_dir=tmp_path)
    step = treadle.compile(function, model=model, optimizer=optimizer, options=options)
    for count in (4, 1, 7):
        x = torch.randn(rows, 64, device="cuda")
        rounds = torch.tensor(count, device="cuda")
        found, best = step(x, rounds), true(x.double(), rounds)
        torch.testing.assert_close(found.double(), best, rtol=1e-4, atol=1e-5)
    for mine, best in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), best, rtol=1e-4, atol=1e-5)
    artifact = step.compiled.artifact
    loops = [each for each in artifact.steps if isinstance(each, CallStep) and each.bodies]
    assert len(loops) == 2
    bodies = [artifact.bodies[name] for name in loops[1].bodies]
    assert all(any(isinstance(each, Launch) for each in body.steps) for body in bodies)
    assert not any(body.fallbacks for body in bodies)
