"""Numbers that change, in a second process: what the first one captured serves it, with its own
numbers, and nothing is traced."""

import importlib.util
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import treadle
from contract.test_numbers_generator import KINDS, PLACES, USES, WHOLE, programs, together
from contract.test_numbers_of_sizes import STEPS, run

HEAD = """
import math
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from contract.test_numbers_generator import Scaled, averages, gradient, put_at

torch.manual_seed(0)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.param_groups[0]["v"] = 0.0
Made = torch.FloatTensor
HOLES = torch.tensor([math.nan, math.inf, -math.inf])
table = [0.5 * k for k in range(9)]
named = {k: k / 3 for k in range(9)}
array = np.linspace(0.0, 1.0, 5)
put = globals().update

"""


class Process:
    """A module of this text that is imported anew, as a process has it; ``compiled`` if its step
    is."""

    def __init__(self, path, cache=None):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.space = vars(module)
        self.step = self.space["step"]
        if cache is not None:
            owned = {"model": module.model, "optimizer": module.optimizer}
            options = treadle.Options(codegen=False, cache_dir=cache)
            self.step = treadle.compile(self.step, **owned, options=options)
        self.called = self.space | {"step": self.step}

    def call(self, text, value, x):
        *before, last = text.split("; ")
        given = {"V": value, "x": x}
        for each in before:
            exec(each, self.space, given)
        return eval(last, self.called | self.space | {"step": self.step} | given)


def alike(ours, theirs, text, values, size=4):
    """Whether each call, which is eager's, was served without a trace."""
    untraced = []
    for value in values:
        x = torch.randn(size, 3)
        found, expected = ours.call(text, value, x), theirs.call(text, value, x)
        torch.testing.assert_close(found, expected, equal_nan=False)
        pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
        assert all(type(a) is type(b) for a, b in pairs), (found, expected)
        untraced.append(ours.step.compiled.untraced)
    return untraced


@pytest.fixture
def processes(tmp_path):
    """Makes a compiled and an eager one of a text; each time the same module anew."""
    names = itertools.count()
    scaled = treadle.compile(lambda x, v: x * v, model=nn.Linear(2, 2))
    for v in (1.0, 2.0):  # what a first capture of numbers loads
        scaled(torch.ones(2), v)

    def make(text):
        path = tmp_path / "trained.py"
        path.write_text(HEAD + text)
        eager = tmp_path / f"eager_{next(names)}.py"
        eager.write_text(HEAD + text)
        return Process(path, tmp_path / "cache"), Process(eager)

    yield make
    for name in [name for name in sys.modules if name == "trained" or name.startswith("eager_")]:
        del sys.modules[name]


@pytest.mark.parametrize("names", programs(), ids=", ".join)
def test_numbers_of_a_second_process_are_its_own(names, processes):
    use = together(names)
    kinds = [kind for kind in KINDS if not use.whole or kind in WHOLE]
    offset = list(USES).index(names[0])
    for at in range(offset, offset + 3):
        place = list(PLACES)[at % len(PLACES)]
        kind = KINDS[kinds[at % len(kinds)]]
        text, call = PLACES[place]
        text = text.replace("BODY", use.body)
        alike(*processes(text), call, map(kind, range(4)))
        second = processes(text)
        untraced = alike(*second, call, map(kind, (2, 5, 1, 3)))
        reason = second[0].step.compiled.start.reason
        assert all(untraced) or use.ways > 1 or "array" in reason.lower(), (place, reason)


@pytest.mark.parametrize("function", STEPS, ids=lambda function: function.__name__)
def test_what_a_step_makes_of_numbers_is_that_of_its_process(function, tmp_path):
    """Sums, counts, growing lists, texts and factors, of values and of sizes."""

    def is_untraced(step):
        assert step.compiled.untraced, step.compiled.start

    run(function, (6, 5, 3), cache_dir=tmp_path)
    run(function, (4, 6, 3, 5), after=is_untraced, cache_dir=tmp_path)
