"""Words of objects are what Python says, and nothing is said where they are not known."""

import dataclasses
import gc
import random
import sys
from collections import OrderedDict
from dataclasses import replace
from types import CellType

import pytest
from torch import nn

from treadle.capture.python_state.introspect import parts_of
from treadle.guards import dict_fingerprint
from treadle.guards import memory_fingerprint as words
from treadle.guards.dict_fingerprint import DictLayout, dict_layout, of_dict, of_own_space

KNOWN = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info < (3, 14)
"""Where every kind has to be found; other Pythons may have another layout."""
NOTHING = DictLayout(own=False, every=False, contents=False)
CONTENTS = replace(dict_layout(), own=False)


class Thing:
    def __init__(self) -> None:
        self.a = 1


class Slotted:
    __slots__ = ("missing", "there")

    def __init__(self) -> None:
        self.there = object()


def function(a=(1,), *, b=2):
    return a, b


def slots(value):
    kind = type(value)
    return words.of_slots(value, [vars(kind)[name] for name in kind.__slots__])


def with_attributes(): ...


with_attributes.a = 1
thing = Thing()
field = dataclasses.fields(dataclasses.make_dataclass("Made", ["x"]))[0]
KINDS = {
    "dict": lambda: of_dict({}),
    "class": lambda: words.of_class(thing),
    "attributes": lambda: words.of_space(thing, vars(thing)),
    "attributes of a module": lambda: words.of_space(*(lambda m: (m, vars(m)))(nn.Linear(1, 1))),
    "no attributes of a function": lambda: of_own_space(slots),
    "attributes of a function": lambda: of_own_space(with_attributes),
    "no attributes of an ordered dict": lambda: of_own_space(OrderedDict(a=1)),
    "cell": lambda: words.of_cell(CellType(1)),
    "function": lambda: words.of_function(function),
    "function without defaults": lambda: words.of_function(slots),
    "property": lambda: words.of_property(property(function)),
    "slots": lambda: slots(Slotted()),
    "slots of a field": lambda: slots(field),
    "list": lambda: words.of_list([1, object()]),
    "no list": lambda: words.of_list([]),
    "set": lambda: words.of_set({1, "x"}),
    "no set": lambda: words.of_set(set()),
    "larger set": lambda: words.of_set(set(range(100)) - {3}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_this_python_is_known(kind):
    if not KNOWN and (words.layout() is None or (kind == "dict" and of_dict({}) is None)):
        pytest.skip("this Python is not known")
    found = KINDS[kind]()
    assert found is not None
    assert tuple(map(words.word, found.at)) == found.expected
    gc.collect()
    assert tuple(map(words.word, found.at)) == found.expected  # reading is no change


@pytest.mark.skipif(words.layout() is None, reason="this Python is not known")
def test_a_dict_that_nobody_asked_for_is_not_made():
    value = OrderedDict()
    assert not words.has_space(value)
    assert of_own_space(value) is not None
    assert parts_of(value, "").parts[1].now() == {}
    assert not words.has_space(value)
    value.a = 1
    assert words.has_space(value)
    assert of_own_space(thing) is of_own_space({}) is None


def test_what_is_not_there_is_not_said():
    assert words.of_cell(CellType()) is None
    assert words.of_space(thing, {}) is None
    assert words.of_set(set(range(1 << 12))) is None


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_of_another_python(kind, monkeypatch):
    monkeypatch.setattr(words, "layout", lambda: None)
    monkeypatch.setattr(dict_fingerprint, "layout", lambda: None)
    monkeypatch.setattr(dict_fingerprint, "dict_layout", lambda: NOTHING)
    assert KINDS[kind]() is None


def test_a_layout_that_is_not_found_is_none(monkeypatch):
    words.layout.cache_clear()
    monkeypatch.setattr(words, "_definition", lambda: {}["member"])
    try:
        assert words.layout() is None
    finally:
        words.layout.cache_clear()


@pytest.fixture(params=(dict_layout(), CONTENTS), ids=("found", "contents"))
def by(request, monkeypatch):
    """What this Python has, and how dicts are read where nothing counts their writes."""
    if not (request.param.contents or request.param is dict_layout()):
        pytest.skip("writes are counted")
    monkeypatch.setattr(dict_fingerprint, "dict_layout", lambda: request.param)


def some_dict(rng):
    thing = Thing()
    thing.b = None
    return rng.choice(
        (
            lambda: (thing, vars(thing)),
            lambda: (None, {f"k{nth}": nth for nth in range(rng.choice((0, 1, 7, 400)))}),
            lambda: (None, {nth: str(nth) for nth in range(rng.choice((1, 300)))}),
            lambda: (None, vars(thing).copy()),
        )
    )()


def write(rng, thing, value):
    """One that is no change at times."""
    key = rng.choice([*value, "a", "new", 7.5])
    rng.choice(
        (
            lambda: value.__setitem__(key, object()),
            lambda: value.pop(key, None),
            lambda: value.update({key: object()}),
            lambda: value.setdefault(key, 1),
            lambda: setattr(thing, str(key), object()) if thing else value.clear(),
            lambda: thing and hasattr(thing, "a") and delattr(thing, "a"),
            lambda: value.update([(nth, nth) for nth in range(rng.choice((0, 0, 40)))]),
            lambda: rng.random() < 0.1 and value.clear(),
            lambda: value and value.__setitem__(*value.popitem()),
        )
    )()


@pytest.mark.skipif(dict_layout() == NOTHING, reason="this Python is not known")
def test_every_change_of_a_dict_shows(by):
    rng = random.Random()
    for _ in range(200):
        thing, value = some_dict(rng)
        for _ in range(20):
            found = of_dict(value)
            assert found is not None
            before = list(value.items())
            write(rng, thing, value)
            now = list(value.items())
            same = len(now) == len(before) and all(
                one[0] is two[0] and one[1] is two[1] for one, two in zip(before, now, strict=True)
            )
            pairs = zip(found.at, found.expected, strict=True)
            shown = any(words.word(at) != known for at, known in pairs)  # up to the first one
            assert shown or same
