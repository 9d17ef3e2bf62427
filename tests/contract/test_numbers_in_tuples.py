"""Numbers in tuples that a step replaces, or the code around it: inputs from the second compile on,
as those of lists and attributes, and never stale where tuples are shared."""

import collections
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import treadle

Mean = collections.namedtuple("Mean", "value count")


def averaged(held, y):
    total, count = held.pair
    held.pair = (total + y.mean().item(), count + 1)
    return y * (1.0 + count)


def named(held, y):
    mean = held.mean
    held.mean = Mean(0.9 * mean.value + y.detach().mean(0), mean.count + 1)
    return y - held.mean.value * mean.count


def accounted(held, y):
    """As accountants of private training: the last entry is replaced."""
    noise, rate, steps = held.history.pop()
    held.history.append((noise, rate, steps + 1))
    return y * noise


def nested(held, y):
    first, (scale, count) = held.deep["of"]
    held.deep["of"] = (first, (scale * 0.5, count + 1))
    return y * scale + first


def made():
    history, deep = [(0.5, 0.1, 0)], {"of": (1, (8.0, 0))}
    return SimpleNamespace(pair=(0.0, 0), mean=Mean(torch.zeros(3), 0), history=history, deep=deep)


def told(held):
    return held.pair, held.mean, held.history, held.deep


@pytest.mark.parametrize("change", [averaged, named, accounted, nested])
def test_tuples_that_a_step_replaces(change):
    torch.manual_seed(0)
    model, ours, theirs = nn.Linear(4, 3), made(), made()
    step = treadle.compile(lambda x: change(ours, model(x)), model=model)
    for _ in range(5):
        x = torch.randn(2, 4)
        torch.testing.assert_close(step(x), change(theirs, model(x)))
        torch.testing.assert_close(told(ours), told(theirs))
        assert type(ours.mean) is Mean
    assert len(step.recompiles) + len(step.recaptures) <= 2, (step.recompiles, step.recaptures)


def test_a_tuple_in_two_places_is_set_in_one():
    shared = (2.0, 3.0)
    one, other = SimpleNamespace(range=shared), SimpleNamespace(range=shared)
    model = nn.Linear(2, 2)

    def step(x):
        return model(x) * one.range[0] + other.range[0] * one.range[1]

    compiled = treadle.compile(step, model=model)
    x = torch.randn(3, 2)
    changes = [shared, (2.5, 3.0), (2.5, 3.5), (7.0, 1.0)]
    for value in changes:
        one.range = value
        torch.testing.assert_close(compiled(x), step(x))
    for value in changes:
        other.range = value
        torch.testing.assert_close(compiled(x), step(x))
    one.range = other.range = (5.0, 6.0)
    torch.testing.assert_close(compiled(x), step(x))
    assert shared == (2.0, 3.0)
    assert one.range == other.range == (5.0, 6.0)


def test_tuples_of_another_length_or_kind_are_noticed():
    held = SimpleNamespace(range=(1.0, 2.0))
    model = nn.Linear(2, 2)

    def step(x):
        return model(x) * sum(held.range)

    compiled = treadle.compile(step, model=model)
    x = torch.randn(3, 2)
    for value in ((1.0, 2.0), (1.5, 2.0), (1.0, 2.0, 3.0), (1, 2), Mean(2.0, 3.0), (4.0, 2.0)):
        held.range = value
        torch.testing.assert_close(compiled(x), step(x))
        assert held.range == value
