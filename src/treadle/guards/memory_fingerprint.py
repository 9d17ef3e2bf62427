"""Memory words of Python objects: whether anything was written to them.

CPython keeps in functions, cells, lists and other objects the addresses of what they refer to. A
``MemoryFingerprint`` has such words of an object and their expected values. Querying the object
takes some 100 ns, comparing a word 1 ns. (Dicts: ``dict_fingerprint``.)

The expected value of a word comes from Python: the address of the object that is there, which is
kept alive, so no other object has its address. Words that do not match are not used, and callers
query the object; they also do so if a layout cannot be found from objects with known words (another
Python, free threading).
"""

import ctypes
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

WORD = ctypes.sizeof(ctypes.c_uint64)
_FLOAT = ctypes.sizeof(ctypes.c_float)
_MANAGED_DICT = 1 << 4  # a flag of types whose instances have their dict in front of them
_OBJECT_OR_ERROR = 16  # ``T_OBJECT_EX``: a member that is an object, or missing
_LARGE = 1 << 12  # places in the table of a set


@final
@dataclass(frozen=True, slots=True, eq=False)
class MemoryFingerprint:
    """Some words of an object, in order: a word may say where later ones are.

    ``direct``: all are in objects of ``held``, which live as long as this. Others are in memory
    that is the object's own while the words before them are ``expected``.
    """

    at: tuple[int, ...]
    expected: tuple[int, ...]
    held: tuple[object, ...]
    direct: bool = True


def word(address: int) -> int:
    """What is there now."""
    return ctypes.c_uint64.from_address(address).value


def of_class(value: object) -> MemoryFingerprint | None:
    """Which class it has."""
    found = layout()
    return found and _referring([(id(value) + found.kind, type(value))], value)


def of_space(value: object, held: Mapping[str, object]) -> MemoryFingerprint | None:
    """That its ``__dict__`` is ``held``."""
    kind = type(value)
    offset = -3 * WORD if kind.__flags__ & _MANAGED_DICT else kind.__dictoffset__
    if layout() is None or not offset or (offset < 0 and not kind.__flags__ & _MANAGED_DICT):
        return None
    return _referring([(id(value) + offset, held)], value)


def has_space(value: object) -> bool:
    """Whether it has a ``__dict__``, of a kind that makes it when somebody asks for it; where that
    cannot be said, it will have."""
    found = layout()
    offset = found and found.spaces.get(type(value))
    return not offset or word(id(value) + offset) != 0


def of_cell(value: CellType) -> MemoryFingerprint | None:
    """What a cell holds."""
    found = layout()
    if found is None:
        return None
    try:
        return _referring([(id(value) + found.cell, value.cell_contents)], value)
    except ValueError:  # a variable that is not assigned yet
        return None


def of_function(value: FunctionType) -> MemoryFingerprint | None:
    """Code and defaults."""
    found = layout()
    parts = value.__code__, value.__defaults__, value.__kwdefaults__
    return found and _referring_at(found.function, parts, value)


def of_property(value: property) -> MemoryFingerprint | None:
    """What it calls."""
    found = layout()
    return found and _referring_at(found.of_property, (value.fget, value.fset, value.fdel), value)


def of_slots(value: object, members: Iterable[Any]) -> MemoryFingerprint | None:
    """The values in its slots; of ``members`` as classes have them."""
    found = layout()
    if found is None:
        return None
    at: list[int] = []
    held: list[tuple[object, ...]] = []
    for member in members:
        definition = word(id(member) + found.member)
        if ctypes.c_int.from_address(definition + WORD).value != _OBJECT_OR_ERROR:
            return None
        at.append(id(value) + word(definition + 2 * WORD))
        try:
            held.append((member.__get__(value),))
        except AttributeError:
            held.append(())
        except TypeError:  # it has got another class
            return None
    expected = [id(each[0]) if each else 0 for each in held]
    return made(at, expected, (value, held))


def of_list(value: list[object]) -> MemoryFingerprint | None:
    """How long it is, and which objects are in it."""
    found = layout()
    if found is None:
        return None
    held = tuple(list.__iter__(value))
    ends = id(value) + found.size, id(value) + found.items
    items = word(ends[1])
    at = *ends, *(items + WORD * nth for nth in range(len(held)))
    return made(at, (len(held), items, *map(id, held)), (value, held), direct=False)


def items_offset() -> int:
    """Where in a list, and in no other sequence, the address is of its items, which are addresses
    themselves; 0 where that is not known."""
    found = layout()
    return 0 if found is None else found.items


def of_set(value: set[object]) -> MemoryFingerprint | None:
    """Its table: which objects are in it, by their hashes."""
    found = layout()
    if found is None:
        return None
    held = tuple(set.__iter__(value))
    own = tuple(id(value) + found.filled + WORD * nth for nth in range(4))
    _, used, mask, table = map(word, own)
    if used != len(held) or mask & (mask + 1) or mask >= _LARGE:
        return None
    at = *own, *(table + WORD * nth for nth in range(2 * mask + 2))
    expected = tuple(map(word, at))
    keys = {0, found.dummy, *map(id, held)}
    if not keys.issuperset(expected[4::2]):
        return None
    return MemoryFingerprint(at, expected, (value, held), direct=False)


def _referring(pairs: Sequence[tuple[int, object]], owner: object) -> MemoryFingerprint | None:
    """Words that are the addresses of objects; nothing at all may stand for ``None``."""
    expected = [0 if each is None and not word(at) else id(each) for at, each in pairs]
    held = tuple(each for _, each in pairs)
    return made([at for at, _ in pairs], expected, (owner, held))


def _referring_at(
    offsets: Sequence[int], parts: Sequence[object], owner: object
) -> MemoryFingerprint | None:
    """Words of ``owner``, at these offsets, that are the addresses of ``parts``."""
    return _referring([(id(owner) + at, p) for at, p in zip(offsets, parts, strict=True)], owner)


def made(
    at: Sequence[int], expected: Sequence[int], held: tuple[object, ...], *, direct: bool = True
) -> MemoryFingerprint | None:
    """Words as Python says they are; ``None`` if memory says otherwise."""
    for address, value in zip(at, expected, strict=True):
        if word(address) != value:
            return None
    return MemoryFingerprint(tuple(at), tuple(expected), held, direct)


@final
class Floats:
    """Numbers of four bytes at these addresses, in memory that the caller keeps alive.
    ``first``: the one at the first address."""

    def __init__(self, addresses: Sequence[int]) -> None:
        places = np.array(addresses, dtype=np.int64)
        self.addresses = places
        first = int(places.min())
        length = (int(places.max()) - first) // _FLOAT + 1
        self._window = np.ctypeslib.as_array((ctypes.c_float * length).from_address(first))
        self._at = (places - first) // _FLOAT
        self.first = ctypes.c_float.from_address(addresses[0])

    def read(self) -> NDArray[np.float32]:
        """The numbers now."""
        return self._window.take(self._at)

    def write(self, value: float) -> None:
        """From now on every one of them is this."""
        self._window[self._at] = value


def gathered(addresses: Sequence[int]) -> Callable[[], NDArray[np.uint64]]:
    """Reads the words at these addresses, in objects that the caller keeps alive, all at once."""
    places = np.array(addresses, dtype=np.int64)
    if not len(places):
        return lambda: places.view(np.uint64)
    first = int(places.min())
    length = (int(places.max()) - first) // WORD + 1
    window = np.ctypeslib.as_array((ctypes.c_uint64 * length).from_address(first))
    at = (places - first) // WORD
    return lambda: window.take(at)  # what lies between the objects is not touched


class _Slotted:
    __slots__ = ("first", "second")
    first: object
    second: object


@final
class _Layout:
    """Where words lie, counted from an object's address. ``LookupError`` where that cannot be
    said."""

    def __init__(self) -> None:
        def function(a: int = 1, *, b: int = 2) -> int:
            return a + b + len(own)

        own: list[object] = [object() for _ in range(3)]
        ordered: OrderedDict[object, object] = OrderedDict()
        cell = next(iter(function.__closure__ or ()))
        called = property(lambda _: 1, lambda _, __: None, lambda _: None)
        parts = function.__code__, function.__defaults__, function.__kwdefaults__
        self.spaces: dict[type, int] = {type(each): _space(each) for each in (function, ordered)}
        self.kind = find(own, id(list))
        self.cell = find(cell, id(own))
        self.function = tuple(find(function, id(each)) for each in parts)
        self.of_property = tuple(
            find(called, id(each)) for each in (called.fget, called.fset, called.fdel)
        )
        self.size = find(own, len(own))
        self.items = self.size + WORD
        if [word(word(id(own) + self.items) + WORD * at) for at in range(3)] != list(map(id, own)):
            raise LookupError("list")
        self.filled = object.__basicsize__  # then: how many are used, the mask, the table
        self.dummy = _dummy(self.filled)
        self.member = _definition()


@functools.cache
def layout() -> _Layout | None:
    """Of this Python. Not where objects begin with more than a count and a class: with free
    threads, or when all objects are traced."""
    if sys.implementation.name != "cpython" or object.__basicsize__ != 2 * WORD:
        return None
    try:
        return _Layout()
    except LookupError:
        return None


def find(owner: object, held: int) -> int:
    """Where ``owner`` keeps a word."""
    for offset in range(0, type(owner).__basicsize__, WORD):
        if word(id(owner) + offset) == held:
            return offset
    raise LookupError(type(owner).__name__)


def _space(value: object) -> int:
    """Where an object that nobody has asked for its ``__dict__`` will have it."""
    offset = type(value).__dictoffset__
    if offset > 0 and not word(id(value) + offset):
        made = value.__dict__
        if word(id(value) + offset) == id(made):
            return offset
    raise LookupError(type(value).__name__)


def _definition() -> int:
    """Where a member of a class keeps the address of what it is made from: name, type, offset."""
    member, value, held = vars(_Slotted)["second"], _Slotted(), object()
    value.second = held
    offset = object.__basicsize__ + 3 * WORD  # behind class, name and qualified name
    if word(id(member) + object.__basicsize__) == id(_Slotted):
        definition = word(id(member) + offset)
        kind = ctypes.c_int.from_address(definition + WORD).value
        place = word(definition + 2 * WORD)
        if kind == _OBJECT_OR_ERROR and place == find(value, id(held)):
            return offset
    raise LookupError("member")


def _dummy(filled: int) -> int:
    """What stands in the table of a set where an entry was taken out."""
    values = {object(), object()}
    kept = values.pop()
    table = word(id(values) + filled + 3 * WORD)
    keys = {word(table + 2 * WORD * nth) for nth in range(word(id(values) + filled + 2 * WORD) + 1)}
    found = keys - {0, *map(id, values)}
    if len(found) != 1 or id(kept) in found:
        raise LookupError("set")
    return found.pop()


__all__ = [
    "WORD", "Floats", "MemoryFingerprint", "find", "gathered", "has_space", "items_offset",
    "layout", "made", "of_cell", "of_class", "of_function", "of_list", "of_property", "of_set",
    "of_slots", "of_space", "word",
]  # fmt: skip
