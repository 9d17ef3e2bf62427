"""Words of memory of many Python objects at once: whether anything was written to them.

CPython keeps in every dict a number that each write replaces, and in functions, cells and other
objects the addresses of what they refer to. One indexed read gathers such words of thousands of
objects, where asking one object after another takes some 100 ns each::

    words = gathered([address of a word, ...])
    before = words()
    ...
    words() == before      # element by element

Where a word lies is found by looking at objects whose words are known, once; where that fails
(another Python, a debug build) nothing is gathered, and callers ask the objects.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, final

import numpy as np

_WORD = ctypes.sizeof(ctypes.c_uint64)
_FLOAT = ctypes.sizeof(ctypes.c_float)
_MANAGED_DICT = 1 << 4  # a flag of types whose instances have their dict in front of them

Words = Callable[[], Any]
"""Gives the words now: an array of the same length at every call."""


def gathered(addresses: Iterable[int]) -> Words:
    """The words at these addresses, in objects that the caller keeps alive."""
    places = np.fromiter(addresses, dtype=np.int64)
    if not len(places):
        return lambda: places
    first = int(places.min())
    length = (int(places.max()) - first) // _WORD + 1
    window = np.ctypeslib.as_array((ctypes.c_uint64 * length).from_address(first))
    at = (places - first) // _WORD
    return lambda: window.take(at)  # what lies between the objects is not touched


@final
class Floats:
    """Numbers of four bytes at these addresses, in memory that the caller keeps alive."""

    def __init__(self, addresses: Sequence[int]) -> None:
        places = np.array(addresses, dtype=np.int64)
        first = int(places.min())
        length = (int(places.max()) - first) // _FLOAT + 1
        self._window = np.ctypeslib.as_array((ctypes.c_float * length).from_address(first))
        self._at = (places - first) // _FLOAT

    def read(self) -> Any:
        """The numbers now."""
        return self._window.take(self._at)

    def write(self, value: float) -> None:
        """From now on every one of them is this."""
        self._window[self._at] = value


def write_counts(dicts: Sequence[Mapping[Any, Any]]) -> Words | None:
    """Of each dict a number that is another one after each write."""
    found = _layout()
    if found is None or not dicts:
        return None
    return gathered(id(each) + found.version for each in dicts)


def types(values: Sequence[Any]) -> Words | None:
    """Of each object the address of its class."""
    found = _layout()
    return None if found is None else gathered(id(each) + found.kind for each in values)


def contents(values: Sequence[Any]) -> Words | None:
    """The addresses of what cells hold, or of code and defaults of functions."""
    found = _layout()
    offsets = None if found is None else found.offsets(set(map(type, values)))
    if offsets is None:
        return None
    return gathered(id(each) + offset for each in values for offset in offsets)


def spaces(values: Sequence[Any], held: Sequence[Mapping[str, Any]]) -> Words | None:
    """Of each object the address of its ``__dict__``, which is ``held``."""
    found = _layout()
    if found is None:
        return None
    at = [_space(value, space) for value, space in zip(values, held, strict=True)]
    return None if None in at else gathered(each for each in at if each is not None)


def _space(value: Any, held: Mapping[str, Any]) -> int | None:
    """Where an object keeps the address of its ``__dict__``."""
    kind = type(value)
    if kind.__flags__ & _MANAGED_DICT:
        offset = -3 * _WORD
    elif kind.__dictoffset__ > 0:
        offset = kind.__dictoffset__
    else:
        return None
    return id(value) + offset if _word(id(value) + offset) == id(held) else None


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


class _Layout:
    """Where words lie, counted from an object's address. ``LookupError`` where that cannot be
    said."""

    def __init__(self) -> None:
        def function(a: int = 1, *, b: int = 2) -> int:
            return a + b + len(own)

        own: list[Any] = []
        cell = next(iter(function.__closure__ or ()))
        self.kind = _find(own, list)
        self.version = object.__basicsize__ + _WORD  # behind the length
        self._cell = _find(cell, own)
        parts = function.__code__, function.__defaults__, function.__kwdefaults__
        self._function = tuple(_find(function, each) for each in parts)
        if not _counts_writes(self.version):
            raise LookupError("dicts do not count")

    def offsets(self, kinds: set[type]) -> tuple[int, ...] | None:
        """Of the words of objects of one class."""
        if kinds == {CellType}:
            return (self._cell,)
        return self._function if kinds == {FunctionType} else None


@functools.cache
def _layout() -> _Layout | None:
    usual = sys.implementation.name == "cpython" and object.__basicsize__ == 2 * _WORD
    if not usual or not (3, 11) <= sys.version_info < (3, 13):
        return None
    try:
        return _Layout()
    except LookupError:
        return None


def _find(owner: Any, held: Any) -> int:
    """Where ``owner`` keeps the address of ``held``."""
    for offset in range(0, type(owner).__basicsize__, _WORD):
        if _word(id(owner) + offset) == id(held):
            return offset
    raise LookupError(type(owner).__name__)


def _counts_writes(offset: int) -> bool:
    """Whether writes of each kind show, and reads do not."""
    values: dict[Any, Any] = {"a": 1, "b": 2}
    others: dict[Any, Any] = {}
    words = gathered([id(values) + offset, id(others) + offset])
    seen = {tuple(words().tolist())}
    writes: tuple[Callable[[], Any], ...] = (
        lambda: values.__setitem__("a", 3),
        lambda: values.__setitem__("c", 4),
        lambda: values.pop("b"),
        lambda: others.update(x=1),
        lambda: others.clear(),
        lambda: values.setdefault("d", 5),
    )
    for write in writes:
        write()
        now = tuple(words().tolist())
        if now in seen:
            return False
        seen.add(now)
        _ = values.get("a"), list(values.items()), "x" in others
        if tuple(words().tolist()) != now:
            return False
    return True


__all__ = ["Floats", "Words", "contents", "gathered", "spaces", "types", "write_counts"]
