"""Containers among the arguments: what they hold beside their entries counts as well."""

import collections
import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import treadle
from contract.worlds import OPTIONS


class Settings:
    """A part of a container that is no tensor."""

    def __init__(self, scale: int) -> None:
        self.scale = scale


@dataclasses.dataclass
class Batch:
    x: Tensor


@dataclasses.dataclass
class Posted:
    x: Tensor

    def __post_init__(self) -> None:
        self.extra = 1


class Entries(dict[str, Any]): ...


class Listed(list[Any]): ...


class Words(collections.UserDict[str, Any]): ...


class Pair(collections.namedtuple("Pair", "x y")): ...


class Object:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Slots:
    __slots__ = ("__dict__", "extra", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Registered:
    def __init__(self, x: Tensor) -> None:
        self.x = x


pytree.register_pytree_node(
    Registered,
    lambda each: ([each.x], vars(each).get("extra")),
    lambda values, extra: _registered(values[0], extra),
)


def _registered(x: Tensor, extra: Any) -> Registered:
    made = Registered(x)
    if extra is not None:
        made.extra = extra
    return made


CONTAINERS: dict[str, Any] = {
    "data class": Batch,
    "data class that computes": Posted,
    "dict": lambda x: Entries(x=x),
    "list": lambda x: Listed([x]),
    "UserDict": lambda x: Words(x=x),
    "named tuple": lambda x: Pair(x, 1),
    "OrderedDict": lambda x: collections.OrderedDict(x=x),
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "object": Object,
    "slots": Slots,
    "registered class": Registered,
}


def beside_eager(step, batches):
    """Every call with a batch of its own, as eager has it; how often it was compiled again."""
    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for batch in batches:
        torch.testing.assert_close(compiled(batch), step(batch))
    return len(compiled.recompiles)


def made(kind, **attributes):
    batch = CONTAINERS[kind](torch.ones(2))
    for name, value in attributes.items():
        setattr(batch, name, value)
    return batch


@pytest.mark.parametrize("kind", CONTAINERS)
def test_attributes_beside_the_entries_are_looked_at(kind):
    def step(batch):
        return torch.ones(2) * getattr(batch, "extra", 0)

    batches = [made(kind), made(kind, extra=3), made(kind, extra=4), made(kind, extra=3)]
    assert beside_eager(step, batches) == 2


@pytest.mark.parametrize("kind", sorted(CONTAINERS.keys() - {"registered class"}))
def test_objects_beside_the_entries_are_followed(kind):
    """(Of a registered class there is what it says when it is taken apart.)"""

    def step(batch):
        return torch.ones(2) * batch.settings.scale

    def batches():
        yield made(kind, settings=Settings(1))
        batch = made(kind, settings=Settings(1))
        for scale in (1, 2, 1, 3):
            batch.settings.scale = scale
            yield batch
        yield made(kind, settings=Settings(3))

    assert beside_eager(step, batches()) <= 2


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_no_code_mentions_may_differ(kind):
    def step(batch):
        return torch.ones(2) * getattr(batch, "extra", 0)

    batches = [made(kind, extra=1, number_of_batch=nth) for nth in range(3)]
    opened = kind in ("namespace", "registered class", "object")  # its numbers are leaves
    assert beside_eager(step, batches) <= opened


@pytest.mark.parametrize("kind", ["data class", "dict", "list", "object"])
def test_all_attributes_at_once(kind):
    def step(batch):
        return torch.ones(2) * len(vars(batch))

    batch = made(kind)
    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for name in ("one", "two"):
        torch.testing.assert_close(compiled(batch), step(batch))
        setattr(batch, name, 1)
    torch.testing.assert_close(compiled(batch), step(batch))


def test_attributes_of_its_class():
    class Scaled(Entries):
        scale = 2

    def step(batch):
        return batch["x"] * batch.scale

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for scale in (2, 3, 2):
        Scaled.scale = scale
        batch = Scaled(x=torch.ones(2))
        torch.testing.assert_close(compiled(batch), step(batch))


def test_a_container_within_another_and_one_given_twice():
    def step(first, second):
        return first["a"][0].x * getattr(first["a"][0], "extra", 0) + getattr(second, "extra", 0)

    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    one, other = made("data class", extra=1), made("data class", extra=1)
    for a, b in ((one, one), (one, other), (other, one)):
        torch.testing.assert_close(compiled({"a": [a]}, b), step({"a": [a]}, b))
    other.extra = 5
    for a, b in ((one, one), (one, other), (other, one)):
        torch.testing.assert_close(compiled({"a": [a]}, b), step({"a": [a]}, b))


GLOBAL = made("data class")


def test_one_that_is_a_global_as_well():
    def step(batch):
        return batch.x * len(vars(batch))

    assert GLOBAL is not None
    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    torch.testing.assert_close(compiled(GLOBAL), step(GLOBAL))
    GLOBAL.extra = 1
    torch.testing.assert_close(compiled(GLOBAL), step(GLOBAL))
