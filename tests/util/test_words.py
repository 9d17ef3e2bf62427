"""Words of objects are what Python says, and nothing is said where they are not known."""

import dataclasses
import gc
import sys
from collections import OrderedDict
from types import CellType

import pytest
from torch import nn

from treadle.capture.introspect import parts_of
from treadle.util import memory_words as words

KNOWN = sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12))
"""Where every kind has to be found; other Pythons may have another layout."""


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
    "dict": lambda: words.of_dict({}),
    "class": lambda: words.of_class(thing),
    "attributes": lambda: words.of_space(thing, vars(thing)),
    "attributes of a module": lambda: words.of_space(*(lambda m: (m, vars(m)))(nn.Linear(1, 1))),
    "no attributes of a function": lambda: words.of_own_space(slots),
    "attributes of a function": lambda: words.of_own_space(with_attributes),
    "no attributes of an ordered dict": lambda: words.of_own_space(OrderedDict(a=1)),
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
    if not KNOWN and (words.layout() is None or (kind == "dict" and words.of_dict({}) is None)):
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
    assert words.of_own_space(value) is not None
    assert parts_of(value, "").parts[1].now() == {}
    assert not words.has_space(value)
    value.a = 1
    assert words.has_space(value)
    assert words.of_own_space(thing) is words.of_own_space({}) is None


def test_what_is_not_there_is_not_said():
    assert words.of_cell(CellType()) is None
    assert words.of_space(thing, {}) is None
    assert words.of_set(set(range(1 << 12))) is None


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_of_another_python(kind, monkeypatch):
    monkeypatch.setattr(words, "layout", lambda: None)
    monkeypatch.setattr(words, "_dicts_count", lambda: False)
    assert KINDS[kind]() is None


def test_a_layout_that_is_not_found_is_none(monkeypatch):
    words.layout.cache_clear()
    monkeypatch.setattr(words, "_definition", lambda: {}["member"])
    try:
        assert words.layout() is None
    finally:
        words.layout.cache_clear()
