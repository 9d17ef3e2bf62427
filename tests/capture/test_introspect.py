"""The parts of objects: what changes shows, and is put back."""

import array
import collections
import contextvars
import ctypes
import functools
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.capture.python_state.introspect import attributes_of, has_buffer, parts_of, slots_of
from treadle.capture.python_state.parts import MISSING


class Plain:
    def __init__(self):
        self.a = 1


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


class Both(Slotted):
    pass


def readings(value):
    return [(part, dict(part.now())) for part in parts_of(value, "value").parts]


def differing(before):
    return [part for part, held in before if not part.is_same(part.now(), held)]


def function(x=1, *, y=2):
    return x + y


def cell():
    held = 1

    def inside():
        return held

    return inside.__closure__[0]


CHANGES = {
    "attributes": (Plain(), lambda it: setattr(it, "a", 2)),
    "a new attribute": (Plain(), lambda it: setattr(it, "b", 2)),
    "an attribute gone": (Plain(), lambda it: delattr(it, "a")),
    "slots": (Slotted(), lambda it: setattr(it, "b", 2)),
    "a slot emptied": (Both(), lambda it: delattr(it, "a")),
    "a dict": ({"a": 1}, lambda it: it.update(b=2)),
    "another order of a dict": ({"a": 1, "b": 2}, lambda it: it.update(a=it.pop("a"))),
    "an ordered dict": (collections.OrderedDict(a=1, b=2), lambda it: it.move_to_end("a")),
    "an attribute of an ordered dict": (
        collections.OrderedDict(), lambda it: setattr(it, "own", 1),
    ),
    "a list": ([1, 2], lambda it: it.append(3)),
    "a deque": (collections.deque([1, 2]), lambda it: it.rotate()),
    "a set": ({1, 2}, lambda it: it.add(3)),
    "a variable": (cell(), lambda it: setattr(it, "cell_contents", 2)),
    "an unassigned variable": (types.CellType(), lambda it: setattr(it, "cell_contents", 2)),
    "defaults": (function, lambda it: setattr(it, "__defaults__", (3,))),
    "an attribute of a function": (function, lambda it: setattr(it, "own", 1)),
    "a class": (Plain, lambda it: setattr(it, "own", 1)),
    "an array": (np.zeros(3), lambda it: it.fill(1)),
    "bytes": (bytearray(b"ab"), lambda it: it.__setitem__(0, 0)),
    "a buffer": ((ctypes.c_int * 2)(), lambda it: it.__setitem__(0, 1)),
    "a namespace": (types.SimpleNamespace(a=1), lambda it: setattr(it, "a", 2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_shows_in_one_part_and_is_put_back(kind):
    value, change = CHANGES[kind]
    before = readings(value)
    assert differing(before) == []
    change(value)
    (part,) = differing(before)
    for each, held in before:
        each.restore(held)
    assert differing(before) == []
    assert list(part.now()) == list(next(held for each, held in before if each is part))


def test_what_is_set_in_a_context_is_put_back():
    variable = contextvars.ContextVar("variable", default=1)
    variable.set(2)
    ((part, held),) = readings(variable)
    variable.set(3)
    part.restore(held)
    assert variable.get() == 2


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2) | st.none())))
def test_a_dict_is_put_back_whatever_was_done_to_it(writes):
    value = {"a": 1, "b": 2, "c": 3}
    ((part, held),) = readings(value)
    for key, new in writes:
        if new is None:
            value.pop(key, None)
        else:
            value[key] = new
    part.restore(held)
    assert list(value.items()) == [("a", 1), ("b", 2), ("c", 3)]


@pytest.mark.parametrize(
    "value", [torch.finfo(torch.float32), len, np.dtype("f4"), functools.wraps.__code__]
)
def test_what_code_cannot_set_has_no_parts(value):
    found = parts_of(value, "")
    assert found.parts == ()
    assert not found.opaque


def test_a_generator_is_opaque():
    assert parts_of((each for each in [1]), "").opaque


def test_a_value_that_is_not_there():
    (part,) = parts_of({"a": 1}, "value").parts
    assert part.get("b") is MISSING
    assert part.where("b") == "value['b']"


def test_attributes_are_found_past_what_a_class_puts_in_the_way():
    class Hidden:
        def __getattribute__(self, name):
            raise AttributeError(name)

    value = Hidden()
    object.__setattr__(value, "a", 1)
    assert attributes_of(value) == {"a": 1}
    assert list(slots_of(Both)) == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(array.array("i", [1]), True), (np.zeros(2), True), (b"ab", False), ([1], False), (1, False)],
)
def test_memory_that_can_be_read(value, expected):
    assert has_buffer(value) is expected
