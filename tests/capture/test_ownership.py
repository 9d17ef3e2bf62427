"""Packages whose names begin like those of PyTorch or treadle are code of the user's."""

import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from treadle.capture.explain_errors import is_between
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.ownership import is_machinery_class
from treadle.util.package import PACKAGE

TORCH = Path(torch.__file__).parent
OURS = Path(treadle.__file__).parent
COUNTER = """
class Counter:
    def __init__(self):
        self.calls = 0

    def updates(self):
        self.calls += 1
        return self.calls % 3 == 0
"""


def counter(name, folder):
    """A ``Counter`` of the module ``name`` in ``folder``."""
    module = ModuleType(name)
    module.__file__ = os.path.join(folder, f"{name}.py")
    exec(compile(COUNTER, module.__file__, "exec"), vars(module))
    return module


def train(counts, compiled):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        if counts.updates():
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    made = treadle.compile(step, model=model, optimizer=optimizer) if compiled else step
    return [made(torch.ones(2, 3)).item() for _ in range(8)], counts.calls


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("treadle_extras", f"{OURS}_extras"),
        ("treadle.integrations.counting", OURS / "integrations"),
        ("gpt_counts", OURS / "examples"),
        ("torchcounts", f"{TORCH}counts"),
        ("torch_counts", f"{TORCH}_counts"),
        ("sympy_counts", TORCH.parent / "sympy_counts"),
        ("numpy_counts", f"{Path(np.__file__).parent}_counts"),
    ],
)
def test_a_counter_of_another_package_counts(name, folder, monkeypatch):
    module = counter(name, folder)
    monkeypatch.setitem(sys.modules, name, module)
    theirs, ours = train(module.Counter(), False), train(module.Counter(), True)
    assert ours[1] == theirs[1] == 8
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)


def test_whose_code_a_file_is():
    assert code_owner(f"{PACKAGE}/session/serve.py") is CodeOwner.OURS
    assert code_owner(f"{PACKAGE}_extras/loop.py") >= CodeOwner.INSTALLED
    assert code_owner(f"{TORCH}/nn/functional.py") is CodeOwner.TORCH
    assert code_owner(f"{TORCH}metrics/metric.py") is CodeOwner.INSTALLED
    assert code_owner(str(Path(np.__file__))) is CodeOwner.STDLIB


def test_lines_of_other_packages_may_be_named():
    assert is_between(f"{TORCH}/nn/functional.py")
    assert not is_between(f"{TORCH}vision/ops.py")
    assert not is_between(f"{PACKAGE}_extras/loop.py")


@pytest.mark.parametrize("name", ["treadle_target_train", "treadler", "sympyx.core"])
def test_classes_of_other_packages_are_no_machinery(name):
    assert not is_machinery_class(type("Counter", (), {"__module__": name}))


@pytest.mark.parametrize("name", ["treadle.api", "sympy", "sympy.core", "torch.fx", "torch._ops"])
def test_classes_of_the_trace_are_machinery(name):
    assert is_machinery_class(type("Counter", (), {"__module__": name}))
