"""Tensors that a step makes of numbers are numbers of its graph."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from treadle.capture.step import capture
from treadle.graph.text.printing import show

SCALE = torch.tensor(2.0)


def graph_of(step, *args, model=None):
    models = {"": model or nn.Linear(3, 3)}
    return show(capture(step, models=models, optimizers={}, args=args, kwargs={}).step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_a_literal_is_a_number(dtype):
    text = graph_of(lambda x: torch.where(x > 0, torch.tensor(1, dtype=dtype), x), torch.ones(3))
    assert "constant" not in text
    assert "full([], " in text


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3.0000000000000004, float("inf")])
def test_every_digit_is_kept(value):
    model = nn.Linear(3, 3).double()
    step = treadle.compile(
        lambda x: torch.tensor(value, dtype=torch.float64).expand(3) + x * 0, model=model
    )
    for _ in range(2):
        found = step(torch.zeros(3, dtype=torch.float64) * -1)
        wanted = torch.tensor(value, dtype=torch.float64).expand(3) + torch.zeros(3) * -0.0
        assert torch.equal(found, wanted)
        assert torch.equal(found.signbit(), wanted.signbit())


def test_a_literal_of_one_element_with_dims():
    text = graph_of(lambda x: x * torch.tensor([[2.5]]), torch.ones(3))
    assert "full([1, 1], 2.5" in text


def test_several_elements_stay_a_tensor():
    assert "constant 0" in graph_of(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))


def test_a_tensor_from_outside_is_read_at_every_call():
    step = treadle.compile(lambda x: x * SCALE, model=nn.Linear(3, 3))
    x = torch.ones(3)
    assert torch.equal(step(x), 2 * x)
    try:
        SCALE.fill_(5.0)
        assert torch.equal(step(x), 5 * x)
    finally:
        SCALE.fill_(2.0)


def test_memory_of_an_array_is_read_at_every_call():
    array = np.array([2.0], dtype=np.float32)
    step = treadle.compile(lambda x: x * torch.from_numpy(array), model=nn.Linear(3, 3))
    x = torch.ones(3)
    for value in (2.0, 7.0):
        array[0] = value
        assert torch.equal(step(x), value * x)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.factor = nn.Linear(3, 3), 0.5

    def forward(self, x):
        total = torch.tensor(0.0)
        total += self.inner(x).mean()
        return total * torch.tensor(self.factor)


def test_a_literal_that_is_written_and_one_of_an_attribute():
    model = Scaled()
    twin = copy.deepcopy(model)
    step = treadle.compile(lambda x: model(x), model=model)
    for factor in (0.5, 0.5, -2.0, 0.5):
        model.factor = twin.factor = factor
        x = torch.randn(2, 3)
        torch.testing.assert_close(step(x), twin(x))


def test_a_literal_that_the_caller_gets_is_its_own():
    step = treadle.compile(lambda x: (x + 1, torch.tensor(3.0)), model=nn.Linear(3, 3))
    _, first = step(torch.ones(3))
    first.add_(1)
    _, second = step(torch.ones(3))
    assert (first.item(), second.item()) == (4.0, 3.0)
