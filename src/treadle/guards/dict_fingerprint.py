"""Memory words of dicts: whether anything was written to them.

CPython 3.11 and 3.12 replace a version number in a dict at each write: this number is the word.
Since 3.13, attribute writes to an object do not touch the dict that ``vars`` returned for it, and
since 3.14 there is no version: then the words are the contents of the dict, keys and values, after
the addresses of its tables. The behaviour of a Python is found by writing to dicts and reading
their memory. A dict whose words do not match what Python reports has no words, and is queried.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, final

from treadle.guards.memory_fingerprint import WORD, MemoryFingerprint, layout, made, word

_USED = object.__basicsize__
_VERSION = _USED + WORD  # behind the length
_KEYS = _VERSION + WORD  # the table, which several dicts may share
_VALUES = _KEYS + WORD  # where the table is shared: this dict's own values
_HEADER = WORD  # in a table behind a count: sizes and kind, a byte each
_ENTRIES = 3 * WORD  # how many there are, with those that were taken out
_INDEX = 4 * WORD  # then an index, then the entries
_GENERAL = 0  # a kind of table: an entry has a hash too
_MOST = 1 << 16  # words of what a dict holds; larger ones are asked
_SHARED = 32  # values at most
_HOT = 100  # writes until the interpreter has its fast ways


@final
@dataclass(frozen=True, slots=True)
class DictLayout:
    """What is known of this Python's dicts."""

    own: bool  # each write to a dict that shares no table replaces its number
    every: bool  # so does each write to any dict
    contents: bool  # where a dict keeps what it holds


def of_dict(value: dict[Any, Any]) -> MemoryFingerprint | None:
    """Words that are others after each write. (The order of an ``OrderedDict`` is not written
    there.)"""
    kinds = dict_layout()
    if kinds.every:
        return _of_version(value)
    if kinds.own and not word(id(value) + _VALUES):
        at = id(value) + _VALUES, id(value) + _VERSION
        return MemoryFingerprint(at, (0, word(at[1])), (value,))
    return _of_contents(value) if kinds.contents else None


def of_own_space(value: object) -> MemoryFingerprint | None:
    """Of an object that makes its ``__dict__`` when somebody asks for it: that it has none; or
    which one, and that nobody has written to it."""
    found = layout()
    offset = found and found.spaces.get(type(value))
    if not offset:
        return None
    at = id(value) + offset
    if not word(at):
        return MemoryFingerprint((at,), (0,), (value,))
    held = value.__dict__
    inside = of_dict(held)
    if inside is None:
        return None
    places, expected = (at, *inside.at), (id(held), *inside.expected)
    return made(places, expected, (value, held, inside.held), direct=inside.direct)


def _of_values(value: dict[object, object]) -> MemoryFingerprint | None:
    """What a dict that shares its table holds: a size in the first byte, the values, and their
    order in a byte each."""
    held = tuple(dict.items(value))
    first = word(id(value) + _VALUES)
    size = word(first) & 0xFF
    if size > _SHARED:
        return None
    words = _read(first, 1 + size + (size + WORD - 1) // WORD)
    there = words[1 : 1 + size]
    if size < len(held) or sorted(filter(None, there)) != sorted(id(each) for _, each in held):
        return None
    at = *_own(value), *_places(first, len(words))
    return MemoryFingerprint(at, (*map(word, _own(value)), *words), (value, held), direct=False)


def _of_entries(value: dict[object, object]) -> MemoryFingerprint | None:
    """What a dict with a table of its own holds: the entries, in order."""
    held = tuple(dict.items(value))
    table = word(id(value) + _KEYS)
    header, count = word(table + _HEADER), word(table + _ENTRIES)
    index, kind = header >> 8 & 0xFF, header >> 16 & 0xFF
    width = 3 if kind == _GENERAL else 2
    if index > 24 or width * count > _MOST:
        return None
    first = table + _INDEX + (1 << index)
    words = _read(first, width * count)
    entries = zip(words[width - 2 :: width], words[width - 1 :: width], strict=True)
    if [each for each in entries if each[1]] != [(id(key), id(each)) for key, each in held]:
        return None
    own = *_own(value), table + _HEADER, table + _ENTRIES
    at = *own, *_places(first, len(words))
    return MemoryFingerprint(at, (*map(word, own), *words), (value, held), direct=False)


def _own(value: object) -> tuple[int, int, int]:
    return id(value) + _USED, id(value) + _KEYS, id(value) + _VALUES


def _read(first: int, count: int) -> list[int]:
    return (ctypes.c_uint64 * count).from_address(first)[:]


def _places(first: int, count: int) -> range:
    return range(first, first + WORD * count, WORD)


class _Thing:
    a: int
    b: int


def _write_global(value: int) -> None:
    global _written
    _written = value


_written = 0
Writes = tuple[Callable[[], object], ...]


def _writes() -> tuple[dict[object, object], Writes]:
    """A dict that shares no table, and writes to it of every kind, each of which changes it."""
    names: dict[Any, Any] = {"a": 1, "b": 2}
    write = FunctionType(_write_global.__code__, names)

    def hot() -> None:
        for nth in range(_HOT):
            write(nth)

    return names, (
        lambda: names.__setitem__("a", 3),
        lambda: names.__setitem__("c", 4),
        lambda: names.pop("b"),
        lambda: names.update(x=1),
        lambda: write(1),
        hot,
        lambda: write(1),
        lambda: names.setdefault(5, 5),
        lambda: names.update({nth: str(nth) for nth in range(300)}),
        lambda: names.pop(7),
        hot,
        names.popitem,
        names.clear,
        lambda: names.update({"a": 1}),
    )


def _attribute_writes() -> tuple[dict[Any, Any], Writes]:
    """The attributes of an object, and writes to the object and to them."""
    thing, like = _Thing(), _Thing()
    thing.a = thing.b = 1
    like.a = 5
    space = vars(thing)

    def write(value: int) -> None:
        thing.a = value

    def hot() -> None:
        for nth in range(_HOT):
            write(1000 + nth)

    return space, (
        lambda: write(2),
        hot,
        lambda: write(3),
        lambda: space.__setitem__("a", 4),
        lambda: delattr(thing, "a"),
        lambda: write(5),
        lambda: space.__setitem__("another", 6),
        lambda: setattr(thing, "b", 7),
        hot,
        lambda: space.clear(),
        lambda: space.update(vars(like)),
    )


def _shows(
    make: Callable[[], tuple[dict[object, object], Writes]],
    look: Callable[[dict[object, object]], MemoryFingerprint | None],
) -> bool:
    """Whether each write shows in the words before it, and no reading."""
    value, writes = make()
    for write in writes:
        before = look(value)
        if before is None or tuple(map(word, before.at)) != before.expected:
            return False
        _ = value.get("a"), list(value.items()), "x" in value
        if tuple(map(word, before.at)) != before.expected:
            return False
        write()
        if tuple(map(word, before.at)) == before.expected:
            return False
    return True


def _of_version(value: dict[object, object]) -> MemoryFingerprint:
    at = id(value) + _VERSION
    return MemoryFingerprint((at,), (word(at),), (value,))


def _of_contents(value: dict[object, object]) -> MemoryFingerprint | None:
    return _of_values(value) if word(id(value) + _VALUES) else _of_entries(value)


@functools.cache
def dict_layout() -> DictLayout:
    """What this Python does."""
    if layout() is None or not _is_laid_out():
        return DictLayout(own=False, every=False, contents=False)
    own = _shows(_writes, _of_version)
    every = own and _shows(_attribute_writes, _of_version)
    follows = not every and all(_shows(each, _of_contents) for each in (_writes, _attribute_writes))
    return DictLayout(own, every, follows)


def _is_laid_out() -> bool:
    """Whether lengths and tables are where they are expected, before any table is followed."""
    alone: dict[object, object] = {nth: nth for nth in range(1000)}
    one, two = _Thing(), _Thing()
    one.a = two.a = 1
    several = vars(one), vars(two)
    return (
        dict.__basicsize__ == _VALUES + WORD
        and word(id(alone) + _USED) == 1000
        and word(id(alone) + _VALUES) == 0
        and all(word(id(each) + _USED) == 1 and word(id(each) + _VALUES) for each in several)
        and len({word(id(each) + _KEYS) for each in several}) == 1
        and word(id(alone) + _KEYS) != word(id(several[0]) + _KEYS)
    )
