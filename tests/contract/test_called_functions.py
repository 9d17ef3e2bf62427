"""Numbers that change, given to functions of real numbers wherever those are kept, through wrappers
of the step: run-time numbers, as in a direct call."""

import functools
import math

import pytest
import torch
from torch import nn

import treadle
from treadle import Options


class Held(nn.Module):
    """A model that keeps functions of numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.act = math.exp
        self.acts = {"cos": math.cos, "all": [math.sin, math.tanh]}

    def forward(self, x):
        return self.layer(x)


def wrapped(f):
    @functools.wraps(f)
    def call(*args, **kwargs):
        return f(*args, **kwargs)

    return call


class Called:
    def __init__(self, f):
        self.f = f

    def __call__(self, *args, **kwargs):
        return self.f(*args, **kwargs)


class Trainer:
    def __init__(self, model):
        self.model, self.act = model, math.sqrt

    def step(self, x, n):
        act = self.act
        return self.model(x) * act(n) * self.act(n) * float(n)


def direct(model, x, n):
    return model(x) * math.cos(n) * float(n)


@wrapped
def helper(n):
    return math.sin(n) + float(n)


def by_default(n, f=math.cos, *, g=float):
    return f(n) + g(n)


def in_variables(n):
    f, g = math.cos, float
    return 2.0 * f(n) + g(n)


def beside_a_cell(n):
    y = n

    def inner():
        return y

    def converted(v):
        return float(v)

    return max(y, converted(y)) + inner()


STEPS = {
    "a wrapper": lambda m: lambda *args, **kwargs: direct(m, *args, **kwargs),
    "decorated": lambda m: wrapped(lambda x, n: direct(m, x, n)),
    "decorated twice": lambda m: wrapped(wrapped(functools.partial(direct, m))),
    "partial": lambda m: functools.partial(wrapped(direct), m),
    "an object": lambda m: Called(lambda x, n: direct(m, x, n)),
    "a method": lambda m: Trainer(m).step,
    "a decorated method": lambda m: wrapped(Trainer(m).step),
    "a decorated helper": lambda m: lambda x, n: m(x) * helper(n),
    "an attribute": lambda m: lambda x, n: m(x) * m.act(n),
    "an entry": lambda m: lambda x, n: m(x) * m.acts["cos"](n),
    "entries": lambda m: lambda x, n: m(x) * sum(f(n) for f in m.acts["all"]),
    "a default": lambda m: lambda x, n: m(x) * by_default(n),
    "a variable": lambda m: lambda x, n: m(x) * in_variables(n),
    "an argument": lambda m: lambda x, n: (lambda f: m(x) * f(n))(math.exp),
    "a variable beside": lambda m: lambda x, n: m(x) * beside_a_cell(n),
    "lists": lambda m: (
        lambda x, n: m(x) * math.fsum([n, 1.0]) * math.prod([n, 2, n]) + math.dist([n], [0])
    ),
    "named": lambda m: lambda x, n: m(x) * (2 if math.isclose(n, 9.0, rel_tol=0.1) else 3),
    "mapped": lambda m: lambda x, n: m(x) * sum(map(float, [n, 2 * n])),
    "reduced": lambda m: lambda x, n: m(x) * functools.reduce(math.hypot, [n, 2 * n, 3]),
}


@pytest.mark.parametrize("name", STEPS)
def test_functions_of_numbers_wherever_they_are(name):
    model = Held()
    step = STEPS[name](model)
    ours = treadle.compile(step, model=model, options=Options(codegen=False))
    for n in (0.3, 1.2, 0.7, 0.9):
        x = torch.randn(4, 3)
        torch.testing.assert_close(ours(x, n), step(x, n))
        assert model.act is math.exp
        assert model.acts == {"cos": math.cos, "all": [math.sin, math.tanh]}
    decides = name == "named"  # what every call decides alike
    assert len(ours.recompiles) + len(ours.recaptures) == (0 if decides else 1)


def test_what_a_method_reads_that_the_library_calls_counts():
    """Also where the method is that of a text, as a notebook's are: it is no code of the
    library's."""
    text = (
        "import collections\nscale = 2.0\nclass Table(collections.UserDict):\n"
        "    def __missing__(self, key):\n        return scale\n"
    )
    space = {"__name__": "cells"}
    exec(compile(text, "<cell 1>", "exec"), space)
    layer, table = nn.Linear(2, 2), space["Table"]()

    def step(x):
        return layer(x) * table["factor"]

    compiled = treadle.compile(step, model=layer)
    for scale in (2.0, 3.0, 3.0, 5.0):
        space["scale"] = scale
        x = torch.randn(3, 2)
        torch.testing.assert_close(compiled(x), step(x))


def mapped(n, call):
    return call(n)


@pytest.mark.parametrize("others", [{"dtype": torch.float32}, {}], ids=["named", "none"])
def test_what_a_method_is_asked_of_is_no_function(others):
    """Beside a call of a number's function by a name: ``x.to(**others)``, ``calls[0](n)``,
    ``holder.f(*several)``."""
    model = nn.Linear(3, 2)

    def step(x, n):
        call, calls, several, holder = float, [math.cos], (n,), Called(math.sin)
        x = x.to(**others)
        out = model(x.view(*x.shape))
        return out * call(n) * calls[0](n) * holder.f(*several) * mapped(n, call=call)

    compiled = treadle.compile(step, model=model)
    x = torch.randn(4, 3)
    for n in (0.5, 0.75, 1.25):
        torch.testing.assert_close(compiled(x, n), step(x, n))
