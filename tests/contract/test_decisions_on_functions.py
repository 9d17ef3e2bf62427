"""Decisions on what Python makes of numbers of tensors: quotients, powers, logarithms, rounding."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import treadle

DECISIONS = {
    "a quotient": lambda a, b: a / 1.7 > 0.6,
    "of two": lambda a, b: a / b > 1.0,
    "an inverse": lambda a, b: 1 / a > 1.0,
    "a ratio": lambda a, b: abs(a - b) / max(a, b) < 0.3,
    "whole quotients": lambda a, b: a // b > 0 or a % b > 0.5,
    "a square": lambda a, b: a**2 > 1.0,
    "a root": lambda a, b: a**0.5 > 1.0 and math.sqrt(b) < 1.0,
    "a power": lambda a, b: 2**a > 2,
    "perplexity": lambda a, b: math.exp(min(a, 20)) > 3,
    "a logarithm": lambda a, b: -math.log(a) > 0,
    "rounded": lambda a, b: round(a, 2) > 1,
    "to a whole": lambda a, b: round(a) + int(b * 3) + math.floor(a) > 3,
    "not a number": lambda a, b: not np.isnan(a) and math.isfinite(b),
    "a base": lambda a, b: math.log(a, 2) > -0.5 and math.hypot(a, b, 1.0) < 3,
    "near": lambda a, b: math.isclose(a, b, rel_tol=0.4) or math.isclose(a, 1.0, abs_tol=0.2),
    "a whole number": lambda a, b: (a * 2).is_integer() or float(round(b)).is_integer(),
    "numpy's": lambda a, b: np.sqrt(a) > 1 or np.exp(b) > np.maximum(a, 1.5),
}


class World:
    """A model, and what steps note of it."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.hits, self.average, self.count, self.best = 0, 0.0, 0, 0.0
        self.losses, self.stopped = [], False

    def train(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def seen(self):
        kept = self.hits, self.average, self.count, self.best, self.stopped, list(self.losses)
        return [*kept, *(each.detach().clone() for each in self.model.parameters())]


def calls(step, compiled, number=8):
    world = World()

    def run(x, y):
        return step(world, x, y)

    called = run
    if compiled:
        options = treadle.Options(codegen=False)
        called = treadle.compile(run, model=world.model, optimizer=world.optimizer, options=options)
    found = []
    for at in range(number):
        torch.manual_seed(at)
        batch = torch.randn(5, 4), torch.randn(5, 1)
        try:
            result = called(*batch)
        except (ArithmeticError, ValueError) as error:
            result = type(error).__name__, str(error)
        found.append((result, world.seen()))
    return found, getattr(called, "recompiles", [])


def beside(step, most, number=8):
    (found, recompiles), (want, _) = calls(step, True, number), calls(step, False, number)
    for (ours, mine), (theirs, others) in zip(found, want, strict=True):
        assert isinstance(ours, tuple) == isinstance(theirs, tuple)
        if isinstance(ours, tuple):
            assert ours == theirs
        else:
            torch.testing.assert_close((ours, mine), (theirs, others))
    assert len(recompiles) <= most, recompiles
    return want


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision(name):
    def step(world, x, y):
        loss = world.train(x, y)
        if DECISIONS[name](loss.item(), y.square().mean().item()):
            world.hits += 1
            loss = loss * 2
        return loss

    want = beside(step, 3)
    assert 0 <= want[-1][1][0] <= 8


def test_a_finder_of_learning_rates():
    def step(world, x, y):
        loss, beta = world.train(x, y), 0.9
        world.count += 1
        world.average = beta * world.average + (1 - beta) * loss.item()
        smoothed = world.average / (1 - beta**world.count)
        if world.count > 1 and smoothed > 1.1 * world.best:
            world.stopped = True
        if smoothed < world.best or world.count == 1:
            world.best = smoothed
        world.losses.append(smoothed)
        return loss

    beside(step, 3, number=12)


def test_a_meter():
    def step(world, x, y):
        loss = world.train(x, y)
        world.average += loss.item() * x.shape[0]
        world.count += x.shape[0]
        if world.average / world.count < 1.2:
            world.hits += 1
        return loss

    beside(step, 2)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda x: 1 / (x[0, 0] > 0).sum().item() > 0.5, "ZeroDivisionError"),
        (lambda x: 7 // (x[0, 0] > 0).sum().item() > 3, "ZeroDivisionError"),
        (lambda x: math.log(x[0, 0].item()) > 0, "ValueError"),
        (lambda x: math.sqrt(x[0, 0].item()) > 1, "ValueError"),
        (lambda x: int(1 / (x[0, 0] > 0).double()) > 0, "OverflowError"),
        (lambda x: math.exp(x[0, 0].item() * 1e5) > 1, "OverflowError"),
    ],
)
def test_what_python_raises_is_raised(read, error):
    """Before the update, and as in eager after the calls before."""

    def step(world, x, y):
        if read(x):
            world.hits += 1
        return world.train(x, y)

    want = beside(step, 2)
    assert error in {result[0] for result, _ in want if isinstance(result, tuple)}
    assert any(not isinstance(result, tuple) for result, _ in want)
