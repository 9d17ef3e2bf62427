"""Functions that take no number but a real one, of numbers that change from call to call: beside
eager, and compiled again at most once."""

import builtins
import functools
import math
from math import atan2, cos
from math import sqrt as root

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from contract.linear_step import in_fours, pair


def as_float(n):
    return float(n) * 0.5


def as_int(n):
    return int(n) + 1


def outer(n):
    return as_float(n) + as_int(n) * 2


def around(convert):
    def inner(n):
        return convert(n) * 3

    return inner


def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args) + 1

    return call


@decorated
def behind(n):
    def inner():
        return float(n) * cos(n)

    return inner()


class Schedule:
    scale = 2

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, n):
        return 0.5 * (1 + cos(math.pi * float(n) / self.steps)) * self.scale

    @staticmethod
    def fixed(n):
        return int(n) / 3

    @property
    def length(self):
        return float(self.steps)


class Gate(nn.Module):
    def forward(self, h, n):
        return h * float(n) + int(n)


schedule, gate = Schedule(20), Gate()
CASES = {
    "a function": lambda h, n: h * as_float(n),
    "a whole number": lambda h, n: h * as_int(n),
    "a function of functions": lambda h, n: h * outer(n),
    "a module": lambda h, n: gate(h, n),
    "an object": lambda h, n: h * schedule(n),
    "a static method": lambda h, n: h * schedule.fixed(n),
    "a decorator": lambda h, n: h * behind(n),
    "a closure": lambda h, n: h * around(float)(n),
    "a closure of math": lambda h, n: h * around(cos)(n),
    "imported": lambda h, n: h * cos(n),
    "by another name": lambda h, n: h * root(n),
    "two numbers": lambda h, n: h * atan2(n, 2),
    "map": lambda h, n: h * sum(map(float, (n, 2))),
    "a list": lambda h, n: h * sum([float(each) for each in (n, n + 1)]),
    "of the module": lambda h, n: h * math.cos(n) * math.log1p(n),
    "a check": lambda h, n: h * float(n) if isinstance(float(n), float) else h,
}
VALUES = {
    "whole": list(range(1, 6)),
    "floats": [0.7, 1.9, 3.2, 4.4, 5.1],
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("names", in_fours(CASES), ids=", ".join)
def test_real_numbers_that_change_are_inputs(names, values):
    ours, eager = pair(*(CASES[name] for name in names))
    for n in VALUES[values]:
        x = torch.randn(4, 3)
        torch.testing.assert_close(ours(x, n), eager(x, n))
    assert len(ours.recompiles) <= 1, ours.recompiles


def shadowed(n):
    def float(value):
        return f"{value:.1f}"

    return len(float(n))


def cos_of(n, cos=math.sin):
    return cos(n)


@pytest.mark.parametrize("body", [lambda h, n: h * shadowed(n), lambda h, n: h * cos_of(n)])
def test_functions_of_those_names_are_the_users(body):
    ours, eager = pair(body)
    for n in (1.0, 12.0, 123.0):
        x = torch.randn(4, 3)
        torch.testing.assert_close(ours(x, n), eager(x, n))


def test_a_number_of_a_tensor_in_a_function_that_is_imported():
    def step(model, x):
        return cos(model(x).sum().item())

    model = nn.Linear(3, 2)
    ours = treadle.compile(functools.partial(step, model), model=model)
    for _ in range(3):
        x = torch.randn(4, 3)
        assert ours(x) == pytest.approx(step(model, x), rel=1e-5, abs=1e-5)


def test_functions_are_as_they_were():
    codes = [each.__code__ for each in (as_float, as_int, Gate.forward)]
    ours, _ = pair(lambda h, n: gate(h, n) * outer(n))
    for n in (1, 2, 3):
        ours(torch.randn(4, 3), n)
    assert [each.__code__ for each in (as_float, as_int, Gate.forward)] == codes
    assert not any(" " in name for name in vars(builtins))


def test_numbers_of_numpy():
    ours, eager = pair(lambda h, n: h * outer(n) * cos(n))
    for n in (0.7, 1.9, 3.2, 4.4):
        x = torch.randn(4, 3)
        torch.testing.assert_close(ours(x, np.float32(n)), eager(x, np.float32(n)))
    assert len(ours.recompiles) <= 1, ours.recompiles
