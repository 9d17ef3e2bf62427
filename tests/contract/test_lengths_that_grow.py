"""Lengths of containers that a step changes, beside eager: numbers of the call, and compiled again
only for decisions that come out otherwise."""

import collections
import copy

import pytest
import torch
from torch import nn

import treadle


def in_a_dict(model, logs):
    def step(x):
        loss = model(x).square().mean()
        logs["train"].append(loss.item())
        logs["n"].append(len(logs["train"]))
        logs["before"].append(len(logs["n"]) - 1)
        return loss.detach()

    return step


def in_a_method(model, logs):
    class Meter:
        def __init__(self):
            self.values, self.counts = logs["train"], logs["n"]

        def update(self, value):
            self.values.append(value)
            self.counts.append(len(self.values))

        @property
        def count(self):
            return float(len(self.values))

    meter = Meter()

    def step(x):
        meter.update(model(x).square().mean().item())
        return x.sum() / meter.count

    return step


def scaled(model, logs):
    def step(x):
        logs["train"].extend([1, 2])
        return model(x).detach() * 0.9 ** len(logs["train"]) + len(logs["n"])

    return step


def bounded(model, logs):
    recent = logs["recent"]

    def step(x):
        recent.append(model(x).sum().item())
        recent.appendleft(0.0)
        logs["n"].append(len(recent))
        return x.sum() / len(recent)

    return step


def printed(model, logs):
    def step(x):
        logs["train"].append(model(x).sum().item())
        logs["lines"].append(f"step {len(logs['train'])} of {len(logs['lines']) + 1:d}")
        return x.sum()

    return step


STEPS = [in_a_dict, in_a_method, scaled, bounded, printed]


def beside_eager(make, calls=6):
    """What the step that ``make`` makes was compiled or captured again for."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    logs: dict[str, object] = {name: [] for name in ("train", "n", "before", "lines")}
    logs["recent"] = collections.deque(maxlen=5)
    both = [copy.deepcopy(logs) for _ in range(2)]
    eager, function = map(make, models, both)
    step = treadle.compile(function, model=models[1])
    for _ in range(calls):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step(x), eager(x))
    for name, expected in both[0].items():
        if expected and type(expected[0]) is str:
            assert both[1][name] == expected
        else:
            assert list(both[1][name]) == pytest.approx(list(expected), rel=1e-4, abs=1e-5)
    return [*step.recompiles, *step.recaptures]


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_a_length_is_a_number_of_the_call(make):
    assert beside_eager(make) == []


def warms_up(model, logs):
    def step(x):
        logs["train"].append(x.sum().item())
        if len(logs["train"]) < 3:
            return x.sum()
        return model(x).detach()

    return step


def begins(model, logs):
    def step(x):
        y = model(x).sum().detach()
        if not logs["train"]:
            y = y * 2
        logs["train"].append(y.item())
        return y

    return step


@pytest.mark.parametrize(("make", "outcome"), [(warms_up, True), (begins, False)])
def test_a_branch_on_a_length_compiles_once_for_each_outcome(make, outcome):
    (found,) = beside_eager(make)
    words = f"a branch on len(logs['train']) was {outcome} and is {not outcome}: "
    assert found.startswith(words)


def counted_off(model, logs):
    def step(x):
        logs["train"].append(x.sum().item())
        return sum(x[:, i % 3].sum() for i in range(len(logs["train"])))

    return step


def test_a_length_that_the_graph_needs_compiles_again():
    found = beside_eager(counted_off, calls=4)
    assert [each.partition(":")[0] for each in found] == ["len(logs['train'])"] * 3


def worse(model, logs):
    def step(x):
        logs["train"].append(model(x).square().mean().item())
        if len(logs["train"]) > 1 and logs["train"][-1] > logs["train"][-2]:
            logs["n"].append(len(logs["train"]))
        return x.sum()

    return step


def smoothed(model, logs):
    def step(x):
        before = logs["train"][-1] if logs["train"] else 0.0
        logs["train"].append(0.9 * before + 0.1 * model(x).sum().item())
        logs["n"].append(logs["train"][0])
        return model(x).detach() * 0.5 + before

    return step


def of_deque(model, logs):
    recent = logs["recent"]

    def step(x):
        recent.append(model(x).sum().item())
        if len(recent) > 2:
            logs["n"].append(recent[-1] - recent[-3])
        return x.sum()

    return step


def indexed(model, logs):
    def step(x):
        at = logs["n"][-1] if logs["n"] else 0
        logs["n"].append((at + 1) % 3)
        return model(x)[:, at].detach()

    return step


@pytest.mark.parametrize(("make", "most"), [(worse, 3), (smoothed, 1), (of_deque, 1), (indexed, 3)])
def test_entries_that_were_there_are_numbers_of_the_call(make, most):
    assert len(beside_eager(make, calls=8)) <= most


def test_an_entry_of_another_type_is_another_variant():
    model, history = nn.Linear(3, 3), [2]

    def step(x):
        history.append(history[-1] * 1.5)
        return model(x).detach() * history[-2]

    compiled = treadle.compile(step, model=model)
    for call in range(4):
        x = torch.randn(4, 3)
        torch.testing.assert_close(compiled(x), model(x).detach() * (2 * 1.5**call))
    history.append("a")
    with pytest.raises(TypeError):
        compiled(x)
    del history[:]
    with pytest.raises(IndexError):
        compiled(x)
    assert history == []
