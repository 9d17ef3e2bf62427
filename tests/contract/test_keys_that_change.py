"""Texts and numbers of a call as keys: of counters, of dicts of other classes, of new dicts."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

import treadle


class Table(dict):
    """A dict of a class of its own."""


class World:
    """What steps count in."""

    def __init__(self):
        self.counter, self.table, self.dict, self.new, self.errors = Counter(), Table(), {}, None, 0


def counts(world, x, name):
    world.counter[name] += 1
    return x.sum()


def counts_pairs(world, x, name):
    world.counter[name, 1] += 1
    world.dict[name, 2] = x.mean().item()
    return x.sum()


def updates(world, x, name):
    world.counter.update([name, "always"])
    return x.sum()


def in_a_table(world, x, name):
    world.table[name] = x.mean().item()
    return x.sum()


def makes_dicts(world, x, name):
    world.new = {name: 1, "more": {(name, 2): x * 2}, "set": {name}}
    return {name: x.sum(), "names": [{name: name}]}


def keys_in(value):
    if isinstance(value, dict):
        return [(type(key), key, keys_in(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set):
        return [keys_in(each) for each in value]
    return value if isinstance(value, torch.Tensor) else (type(value), value)


def calls(step, names, compiled):
    world, model = World(), nn.Linear(2, 2)

    def run(x, name):
        return step(world, x, name)

    if compiled:
        run = treadle.compile(run, model=model, options=treadle.Options(codegen=False))
    found = []
    for at, name in enumerate(names):
        torch.manual_seed(at)
        result = run(torch.randn(3), name)
        kept = world.counter, world.table, world.dict, world.new
        found.append(keys_in([result, *kept]))
    return found


def flat(value):
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in flat(each)]
    return [value]


@pytest.mark.filterwarnings("ignore:the step is captured again")
@pytest.mark.parametrize("names", ["abab", (0, 1, 0, 1), "aaaa"], ids=str)
@pytest.mark.parametrize(
    "step", [counts, counts_pairs, updates, in_a_table, makes_dicts], ids=lambda f: f.__name__
)
def test_keys_are_the_users_own(step, names):
    found, want = flat(calls(step, names, True)), flat(calls(step, names, False))
    assert len(found) == len(want)
    for ours, theirs in zip(found, want, strict=True):
        if isinstance(theirs, torch.Tensor | float):
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours == theirs


ASKED = {
    "int": int, "float": float, "floor": math.floor, "sqrt": math.sqrt, "isnan": math.isnan,
    "item": torch.Tensor.item,
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_many_elements_are_no_number(name):
    """Of the kind that the user's own handler expects."""

    def step(x):
        try:
            asked = ASKED[name](x)
        except ValueError:
            return x + 1
        except RuntimeError:
            return x + 2
        return asked

    compiled = treadle.compile(step, model=nn.Linear(2, 2))
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x), step(x))
