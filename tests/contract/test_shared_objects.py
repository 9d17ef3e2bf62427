"""Objects that stand in several places: which one stands where counts, not only what it holds."""

import copy
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import treadle
from contract.worlds import OPTIONS

LOOKED: list[Any] = []
"""What the step looks at, beside its argument."""


class Plain:
    """An object with a ``__dict__``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.first: Any = None
        self.second: Any = None


class Slotted:
    """One without."""

    __slots__ = ("first", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.first: Any = None


@dataclass(eq=False)
class Keyed:
    """One whose parts are the keys of a dict, in their order."""

    held: dict[Any, int]


class Module(nn.Module):
    """One of PyTorch's own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.first: Any = None


def put(value: Any, part: Any) -> None:
    """Modules keep other modules elsewhere than other attributes, and share that with copies."""
    if isinstance(value, Module):
        vars(value).pop("first", None)
        value._modules.pop("first", None)
    value.first = part


def parts_of(value: Any) -> list[Any]:
    """What an object holds, in order."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, Keyed):
        return [*value.held.keys(), *value.held.values()]
    if isinstance(value, Plain):
        return [value.number, value.first, value.second]
    if isinstance(value, Slotted | Module):
        return [value.number, getattr(value, "first", None)]
    return []


def is_circle(value: Any, above: list[Any]) -> bool:
    """Whether a list, tuple, dict or data class holds itself through others."""
    if not isinstance(value, list | tuple | dict | Keyed):
        return False
    if any(each is value for each in above):
        return True
    return any(is_circle(each, [*above, value]) for each in parts_of(value))


def told(roots: list[Any]) -> str:
    """All that can be seen from some objects: numbers, kinds, and which are one and the same."""
    seen: list[Any] = []
    words: list[str] = []
    todo = list(roots)
    while todo:
        value = todo.pop(0)
        if value is None or isinstance(value, int):
            words.append(f"{value}")
            continue
        at = next((nth for nth, each in enumerate(seen) if each is value), None)
        if isinstance(value, tuple):
            at = None  # Python makes them anew as it likes
        words.append(f"{type(value).__name__} {len(seen) if at is None else at}")
        if at is None:
            seen.append(value)
            todo.extend(parts_of(value))
    return " ".join(words)


def step(x: torch.Tensor, given: Any) -> torch.Tensor:
    code = 0
    for letter in told([*LOOKED, given]):
        code = (code * 31 + ord(letter)) % 9973
    return x * code


class World:
    """Objects in no order, of which some can be reached."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool: list[Any] = []
        for _ in range(8):
            self.pool.append(self.made())
        LOOKED[:] = [self.any(), self.any(), self.any()]
        self.given = self.leaf()

    def any(self) -> Any:
        return self.random.choice(self.pool)

    def leaf(self) -> Any:
        """One that is no container of arguments."""
        made = self.kept(Plain(1))
        put(made, self.any())
        return self.random.choice([x for x in self.pool if isinstance(x, Plain | Slotted | Module)])

    def given_turns(self) -> bool:
        """Whether containers of the argument hold themselves, which is refused."""
        return any(is_circle(each, []) for each in parts_of(self.given))

    def part(self) -> Any:
        """What an object may hold; a tuple holds others."""
        chance = self.random.random()
        if chance < 0.2:
            return self.random.randrange(3)
        return (self.any(), 1) if chance < 0.3 and self.pool else self.any() if self.pool else None

    def made(self) -> Any:
        kind = self.random.randrange(6)
        number = self.random.randrange(3)
        if kind == 0:
            return [self.part(), number]
        if kind == 1:
            return {"a": self.part(), "b": number}
        if kind == 2 and self.pool:
            keys = [each for each in (self.any(), self.any()) if isinstance(each, Plain | Keyed)]
            return Keyed(dict.fromkeys(keys, number))
        made = (Plain, Slotted, Module)[kind % 3](number)
        put(made, self.part())
        return made

    def change(self) -> None:
        """One place holds another object, or another number, which often is an equal one."""
        chance, value = self.random.random(), self.any()
        if chance < 0.3:  # an equal object in one place
            place = self.random.randrange(4)
            if place == 3:
                self.given = self.kept(copy.copy(self.given))
            else:
                LOOKED[place] = self.kept(copy.copy(LOOKED[place]))
        elif chance < 0.45:  # equal ones all the way down
            place = self.random.randrange(3)
            LOOKED[place] = self.kept(copy.deepcopy(LOOKED[place]))
        elif isinstance(value, list):
            value[0] = self.another(value[0])
        elif isinstance(value, dict):
            value["a"] = self.another(value["a"])
        elif isinstance(value, Keyed):
            others = [copy.copy(each) for each in value.held]
            value.held = dict(zip(map(self.kept, others), value.held.values(), strict=True))
        elif chance < 0.7:
            value.number = self.random.randrange(3)
        else:
            put(value, self.another(getattr(value, "first", None)))

    def another(self, value: Any) -> Any:
        if self.random.random() < 0.6 and value is not None:
            return self.kept(copy.copy(value))
        return self.part()

    def kept(self, value: Any) -> Any:
        """An object that may change later."""
        if not isinstance(value, int | tuple | None):
            self.pool.append(value)
        return value


def stale(seed: int, changes: int) -> list[str]:
    """What a compiled step did not see."""
    world, found, x = World(seed), [], torch.ones(2)
    compiled = treadle.compile(step, model=nn.Linear(1, 1), options=OPTIONS)
    for nth in range(changes):
        if nth:
            world.change()
        if world.given_turns():
            continue
        if not torch.equal(compiled(x, world.given), step(x, world.given)):
            found.append(f"seed {seed}, after {nth} changes: {told([*LOOKED, world.given])}")
    return found


@pytest.mark.parametrize("seed", range(20))
def test_which_object_stands_where_is_seen(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of compiling often
        assert not stale(seed, 25)


def test_one_tensor_that_is_left_in_two_places_and_returned_stays_one():
    places = {"one": None, "other": None}
    model = torch.nn.Linear(3, 2)

    def step(x):
        places["one"] = places["other"] = model(x).sum().detach()
        return places["one"]

    found = treadle.compile(step, model=model, optimizer=[])(torch.ones(2, 3))
    assert places["one"] is places["other"] is found
