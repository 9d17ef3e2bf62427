"""Updates of parameters of one type are traced once: the graph is that of tracing each."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import treadle
from treadle.capture.optimizers import updates
from treadle.capture.optimizers.updates import UpdatesOfGroup
from treadle.capture.step import capture
from treadle.capture.tracing_again import TracedPiece
from treadle.graph.text.printing import show

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizers"))
from test_optimizers import CASES

MUON = {"Muon": (torch.optim.Muon, {"lr": 0.02})}


class Layers(nn.Module):
    """Three of each type, and some of their own."""

    def __init__(self, *, bias=True, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=bias, dtype=dtype) for _ in range(3))
        self.turned = nn.Parameter(torch.randn(5, 5, dtype=dtype).t())  # of other strides
        self.alone = bias
        if self.alone:
            self.one = nn.Parameter(torch.randn((), dtype=dtype))
            self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x @ self.turned
        return x * self.one + self.empty.sum() if self.alone else x


def captured(kind, options, model, *, groups=False, steps=1):
    """The step's graph as text."""
    parameters = list(model.parameters())
    given = parameters
    if groups:
        given = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 1e-3}]
    optimizer = kind(given, **options)

    def step(x):
        for _ in range(steps):
            loss = model(x).square().mean().abs()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    dtype = parameters[0].dtype
    found = capture(
        step,
        models={"": model},
        optimizers={"": optimizer},
        args=(torch.randn(4, 5, dtype=dtype),),
        kwargs={},
    )
    return show(found.step, exact=True)


@pytest.fixture
def again(monkeypatch):
    """How often an update was taken from another."""
    counted = []
    original = TracedPiece.again
    monkeypatch.setattr(
        TracedPiece, "again", lambda *given: (counted.append(1), original(*given))[1]
    )
    return counted


def each_by_itself(monkeypatch):
    monkeypatch.setattr(UpdatesOfGroup, "run", lambda self, tensors, states, update: update())


@pytest.mark.parametrize("name", [*CASES, *MUON])
def test_the_graph_is_that_of_tracing_each(name, again, monkeypatch):
    kind, options = {**CASES, **MUON}[name]
    model = Layers(bias=name not in MUON)
    shared = captured(kind, options, model)
    assert len(again) == 2 * len(model.layers[:2]) if name not in MUON else len(again) == 2
    each_by_itself(monkeypatch)
    assert shared == captured(kind, options, model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype, again, monkeypatch):
    model = Layers(dtype=dtype)
    shared = captured(torch.optim.AdamW, {"weight_decay": 0.1}, model)
    assert len(again) == 4
    each_by_itself(monkeypatch)
    assert shared == captured(torch.optim.AdamW, {"weight_decay": 0.1}, model)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Adafactor"])
def test_groups_and_several_steps_in_a_call(name, again, monkeypatch):
    kind, options = CASES[name]
    model = Layers()
    shared = captured(kind, options, model, groups=True, steps=3)
    assert len(again) == 3 * 4
    each_by_itself(monkeypatch)
    assert shared == captured(kind, options, model, groups=True, steps=3)


def test_parameters_that_are_parts_of_one_memory(again, monkeypatch):
    model = Layers()
    memory = torch.randn(3, 5, 5)
    for layer, part in zip(model.layers, memory.unbind(), strict=True):
        layer.weight = nn.Parameter(part)
    shared = captured(torch.optim.SGD, {"lr": 0.1}, model)
    assert len(again) == 2  # biases: the weights have other places in their memory
    each_by_itself(monkeypatch)
    assert shared == captured(torch.optim.SGD, {"lr": 0.1}, model)


def test_a_second_backward_through_what_was_updated_is_an_error_as_in_eager(tmp_path):
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()
        return loss.detach()

    x = torch.randn(4, 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(x)
    options = treadle.Options(cache_dir=tmp_path)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(x)


def test_a_user_s_update_is_run_for_each(again):
    class Halved(torch.optim.SGD):
        pass

    class Update(treadle.OptimizerUpdate):
        def __init__(self):
            self.seen = []

        def structure(self, group):
            return ()

        def states(self, parameter, group):
            return {}

        def scalars(self, group):
            return {"lr": float(group["lr"])}

        def prepare(self, scalars, group):
            return {"lr": scalars["lr"]}

        def update(self, parameter, grad, state, shared, group):
            self.seen.append(tuple(parameter.shape))
            parameter.copy_(parameter - grad * shared["lr"] / len(self.seen))

    update = Update()
    treadle.register_optimizer(Halved, update)
    captured(Halved, {"lr": 0.1}, Layers())
    assert len(update.seen) == 9
    assert not again


def test_what_has_to_be_traced_each_time(again, monkeypatch):
    monkeypatch.setattr(updates, "_types", lambda tensors: None)
    captured(torch.optim.AdamW, {}, Layers())
    assert not again
