"""Modules whose tensors are no parameters: they may be other objects at every call, and what stands
beside them may not."""

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import treadle
from contract.contract_help import training
from treadle.capture.python_state.reads import object_match, read_tensors
from treadle.capture.python_state.reads.reads_guard import ReadsGuard

OPTIONS = treadle.Options(codegen=False)


class Held:
    def __init__(self) -> None:
        self.shift = torch.randn(4)
        self.scale = 2.0


class Tables(nn.Module):
    """Buffers, tensors in a list and in an object, and numbers beside each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("other", torch.randn(4))
        self.gain = 1.5
        self.several = [torch.randn(4), torch.randn(4), 3.0]
        self.held = Held()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.table + self.other * self.gain
        y = y + self.several[0] * self.several[2] - self.several[1]
        return y * self.held.scale + self.held.shift.to(y.dtype)


class Buffers(nn.Module):
    """Nothing but parameters, buffers and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("other", torch.randn(4))
        self.gain = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.norm((self.layer(x) * self.table).float()) + self.other * self.gain


CHANGES: dict[str, Callable[[Tables], object]] = {
    "nothing": lambda m: None,
    "nothing again": lambda m: None,
    "another buffer": lambda m: setattr(m, "table", torch.randn(4)),
    "another entry": lambda m: m._buffers.__setitem__("other", torch.randn(4)),
    "written to": lambda m: m.table.add_(1),
    "another dtype": lambda m: setattr(m, "other", torch.randn(4).double()),
    "another dtype of its data": lambda m: setattr(m.table, "data", torch.randn(4).double()),
    "back to one dtype": lambda m: m.float(),
    "another shape": lambda m: setattr(m, "table", torch.randn(1)),
    "two are one": lambda m: setattr(m, "table", m.other),
    "one more": lambda m: m.register_buffer(f"more{len(m._buffers)}", torch.zeros(1)),
    "buffers in another dict": lambda m: setattr(m, "_buffers", dict(m._buffers)),
    "a number": lambda m: setattr(m, "gain", random.choice([1.5, 2.5])),
    "a number of another kind": lambda m: setattr(m, "gain", random.choice([1, 1.0])),
    "in a list": lambda m: m.several.__setitem__(0, torch.randn(4)),
    "turned in a list": lambda m: m.several.__setitem__(slice(2), m.several[1::-1]),
    "a number in a list": lambda m: m.several.__setitem__(2, random.choice([3.0, 4.0])),
    "another list": lambda m: setattr(m, "several", list(m.several)),
    "in an object": lambda m: setattr(m.held, "shift", torch.randn(4)),
    "a number in an object": lambda m: setattr(m.held, "scale", random.choice([2.0, 0.5])),
    "another object": lambda m: setattr(m, "held", Held()),
}
OF_TABLES = ("list", "object")
OF_BUFFERS = {
    **{name: change for name, change in CHANGES.items() if name.split()[-1] not in OF_TABLES},
    "the norm's in place": lambda m: m.norm.running_mean.mul_(0.5),
    "the norm's": lambda m: setattr(m.norm, "running_var", torch.rand(4) + 1),
    "the norm's are one": lambda m: setattr(m.norm, "running_mean", m.norm.running_var),
    "a hook": lambda m: m.norm.register_forward_hook(lambda *_: None),
}


def made(kind: type[nn.Module] = Tables, **chosen: Any) -> tuple[Any, treadle.Step]:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = training(lambda x: model(x).square().sum(), optimizer)
    options = dataclasses.replace(OPTIONS, **chosen)
    return model, treadle.compile(step, model=model, optimizer=optimizer, options=options)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kind", "changes"), [(Tables, CHANGES), (Buffers, OF_BUFFERS)])
@pytest.mark.filterwarnings("ignore:.*compiled again")
def test_any_change_between_calls_counts(kind, changes, seed):
    random.seed(seed)
    torch.manual_seed(seed)
    model, step = made(kind)
    for number in range(24):
        name = random.choice(list(changes)) if number > 1 else "nothing"
        changes[name](model)
        x = torch.randn(3, 4)
        right = copy.deepcopy(model)(x).square().sum()
        torch.testing.assert_close(step(x), right, msg=f"call {number}, after {name}")


@pytest.mark.parametrize("name", ["nothing", "another buffer", "written to", "in a list"])
def test_where_only_such_tensors_change_one_look_at_everything_is_enough(name):
    torch.manual_seed(0)
    model, step = made()
    for _ in range(3):
        step(torch.randn(3, 4))
    with mock.patch.object(ReadsGuard, "hold", autospec=True, side_effect=ReadsGuard.hold) as asked:
        for _ in range(4):
            CHANGES[name](model)
            x = torch.randn(3, 4)
            torch.testing.assert_close(step(x), model(x).square().sum())
    assert asked.call_count == (4 if name == "another buffer" else 0)
    assert not step.recompiles


def test_buffers_that_the_models_watch_sees_are_asked_nothing(tmp_path):
    model, step = made(Buffers, cache_dir=tmp_path)
    for _ in range(3):
        step(torch.randn(3, 4))
    with (
        mock.patch.object(read_tensors, "tensor_fact", side_effect=AssertionError),
        mock.patch.object(object_match, "tensor_fact", side_effect=AssertionError),
    ):
        for _ in range(3):
            model.other.add_(1)
            step(torch.randn(3, 4))
