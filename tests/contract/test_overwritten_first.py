"""What a step overwrites before it reads it may be anything at a call, and is then what eager
leaves: modes of modules, attributes, gradients of models that the step does not train."""

import pytest
import torch
from torch import nn

from contract.contract_help import beside_eager


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 1))


def update(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def modes(model):
    return [each.training for each in model.modules()]


def trains():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        model.train()
        return update(model, optimizer, x)

    return step, model, optimizer


def trains_and_looks():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        model.train()
        loss = update(model, optimizer, x)
        model.eval()
        with torch.no_grad():
            return loss, model(x).mean()

    return step, model, optimizer


def reads_no_mode():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda x: update(model, optimizer, x), model, optimizer


AFTER = {trains: True, trains_and_looks: False}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("make", [trains, trains_and_looks, reads_no_mode])
def test_the_mode_at_a_call_may_be_any_where_the_step_sets_it_or_reads_none(make, first):
    seen = []

    def between(number, model):
        seen.append(modes(model))
        model.train(first == (number % 2 == 0))

    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=4, between=between)
    assert step.recompiles == []
    if make in AFTER:
        assert all(each == [AFTER[make]] * 5 for each in seen[2:])


def test_a_mode_that_the_step_reads_counts():
    def make():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x):
            before = model.training
            model.train()
            loss = update(model, optimizer, x)
            model.train(before)
            return loss

        return step, model, optimizer

    def between(number, model):
        model.train(number % 2 == 0)

    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=4, between=between)
    assert step.recompiles == []  # it is put back, and decides nothing else
    assert step.recaptures == ["the model: switched to eval()"]


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.seen = None
        self.often = 0

    def forward(self, x):
        return self.linear(x)


def test_attributes_that_the_step_sets_before_it_reads_them():
    def make():
        model = Remembers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x):
            model.seen, model.often = None, 0
            for half in x.chunk(2):
                if model.seen is None:
                    model.seen = half
                model.often += 1
            return update(model, optimizer, x + model.seen.sum()) * model.often

        return step, model, optimizer

    others = [None, "text", 3, torch.ones(2)]
    found = []

    def between(number, model):
        found.append((model.often, isinstance(model.seen, torch.Tensor)))
        model.seen, model.often = others[number], number

    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=4, between=between)
    assert step.recompiles == []
    assert found[2:] == [(2, True)] * 6


def test_gradients_that_the_step_does_not_touch():
    def make():
        making, judging = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizer = torch.optim.SGD(judging.parameters(), lr=0.01)

        def step(x):
            return update(judging, optimizer, making(x).detach())

        return step, [making, judging], optimizer

    def between(number, models):
        models[0].weight.grad = torch.full((3, 3), float(number)) if number % 2 else None

    step = beside_eager(make, lambda _: (torch.randn(4, 3),), steps=4, between=between)
    assert step.recompiles == []
