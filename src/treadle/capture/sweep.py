"""Whether the very same objects stand in the same places, at C speed.

Parts of one kind are read together: of all functions the code and defaults, of all cells the
contents. Nothing is compared but identities; what differs is compared in other ways by others.
"""

import operator
from _abc import get_cache_token  # pyright: ignore
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from types import FunctionType, MethodType
from typing import Any, final

from treadle.capture.parts import (
    Fixed,
    Members,
    OfFunction,
    Part,
    Registered,
    Sequenced,
    Slots,
    Variable,
    attributes_of,
    is_heap,
)
from treadle.capture.torch_private import DictVersions
from treadle.util import words

_CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_SPACE = operator.attrgetter("__dict__")
_CELL = operator.attrgetter("cell_contents")
_READERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    FunctionType: _CODE,
    property: operator.attrgetter("fget", "fset", "fdel"),
}
_WHOLE = (list, set, deque)
_SEALED = (MethodType, staticmethod, classmethod)
"""What is bound for life."""


@final
class _Group:
    """Objects that one reader reads, and what was read. ``read`` gives of all of them one flat
    list, and may raise where something is missing."""

    def __init__(self, read: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._read = read
        self.objects: list[Any] = []
        self.positions: list[int] = []
        self.held: list[list[Any]] = []
        self._flat: list[Any] = []
        self._words: words.Words | None = None  # the same, where memory says it
        self._seen: Any = None

    def add(self, value: Any, position: int) -> None:
        self.objects.append(value)
        self.positions.append(position)
        self.held.append(self._read([value]))

    def settle(self) -> None:
        """After the last one, and whenever ``held`` changed."""
        self._flat = list(chain.from_iterable(self.held))
        self._words = words.contents(self.objects)
        self._seen = self._words and self._words()

    def differing(self) -> list[int]:
        """Indices of those that are not as they were."""
        if self._words is not None and (self._words() == self._seen).all():
            return []
        found = self._now(self.objects)
        if found is not None and _are_same(found, self._flat):
            return []
        return [
            at
            for at, (value, held) in enumerate(zip(self.objects, self.held, strict=True))
            if (now := self._now([value])) is None or not _are_same(now, held)
        ]

    def accept(self, indices: list[int]) -> None:
        """As they are now is how they are."""
        for at in indices:
            self.held[at] = self._now([self.objects[at]]) or []
        self.settle()

    def _now(self, values: Sequence[Any]) -> list[Any] | None:
        try:
            return self._read(values)
        except (AttributeError, ValueError):  # something was deleted
            return None


def _are_same(now: list[Any], held: list[Any]) -> bool:
    return len(now) == len(held) and all(map(operator.is_, now, held))


_END = (object(),)
"""After the last object of each container."""


def _read_whole(values: Sequence[Any]) -> list[Any]:
    ended = chain.from_iterable(zip(values, repeat(_END), strict=False))
    return list(chain.from_iterable(ended))


def _read_cells(values: Sequence[Any]) -> list[Any]:
    return list(map(_CELL, values))


def _reading(reader: Callable[[Any], Iterable[Any]]) -> Callable[[Sequence[Any]], list[Any]]:
    return lambda values: list(chain.from_iterable(map(reader, values)))


@final
class Sweep:
    """The parts that have been added, by number; ``differing`` says which are not as they were."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._of_dicts: list[int] = []
        self._groups: dict[Any, _Group] = {}
        self._owners: list[Any] = []
        self._kinds: list[type] = []
        self._named: list[Any] = []
        self._spaces: list[dict[str, Any]] = []
        self._registered: list[int] = []
        self._token = get_cache_token()
        self._versions = DictVersions(())
        self._words: tuple[words.Words | None, ...] = ()  # of classes, and of dicts of objects
        self._seen: tuple[Any, ...] = ()
        self._changed: list[tuple[_Group, list[int]]] = []

    def add_type(self, value: Any) -> None:
        """An object whose class may be set to another one."""
        if not is_heap(type(value)):
            return
        self._owners.append(value)
        self._kinds.append(type(value))
        space = attributes_of(value)
        if space is not None and type(value).__getattribute__ is object.__getattribute__:
            self._named.append(value)
            self._spaces.append(space)

    def add(self, part: Part, owner: Any, position: int) -> bool:
        """Whether such a part can be swept."""
        found = part.dictionary()
        if found is not None:
            self._dicts.append(found)
            self._of_dicts.append(position)
            return True
        if isinstance(part, Registered):
            self._registered.append(position)
            return True
        group = self._group(part, owner)
        if group is None:
            return isinstance(part, Fixed) and type(owner) in _SEALED
        group.add(owner, position)
        return True

    def _group(self, part: Part, owner: Any) -> _Group | None:
        kind = type(owner)
        match part:
            case Variable():
                return self._of("cells", _read_cells) if part.now() else None
            case Sequenced() | Members() if kind in _WHOLE:
                return self._of(kind, _read_whole)
            case Slots() if len(part.now()) == len(part.members) and len(part.members) > 1:
                reader = operator.attrgetter(*part.members)
                return self._of((kind, *part.members), _reading(reader))
            case OfFunction() | Fixed() if kind in (FunctionType, property):
                return self._of(kind, _reading(_READERS[kind]))
            case _:
                return None

    def _of(self, key: Any, read: Callable[[Sequence[Any]], list[Any]]) -> _Group:
        return self._groups.setdefault(key, _Group(read))

    def settle(self) -> None:
        """After the last one."""
        self._versions = DictVersions(self._dicts)
        self._words = words.types(self._owners), words.spaces(self._named, self._spaces)
        self._seen = tuple(each and each() for each in self._words)
        for group in self._groups.values():
            group.settle()

    def other_types(self) -> list[tuple[Any, type]]:
        """Objects whose class is another one, with the one they had."""
        if self._is_seen(0) or list(map(type, self._owners)) == self._kinds:
            return []
        pairs = zip(self._owners, self._kinds, strict=True)
        return [(value, kind) for value, kind in pairs if type(value) is not kind]

    def other_spaces(self) -> list[Any]:
        """Objects whose ``__dict__`` is another one."""
        if self._is_seen(1) or _are_same(list(map(_SPACE, self._named)), self._spaces):
            return []
        pairs = zip(self._named, self._spaces, strict=True)
        return [value for value, space in pairs if attributes_of(value) is not space]

    def _is_seen(self, at: int) -> bool:
        """Whether memory says what it said."""
        now = self._words[at]
        return now is not None and bool((now() == self._seen[at]).all())

    def differing(self) -> list[int]:
        """The numbers of parts that are not as they were."""
        found = [self._of_dicts[at] for at in self._versions.changed()]
        self._changed = []
        for group in self._groups.values():
            indices = group.differing()
            if indices:
                self._changed.append((group, indices))
                found += [group.positions[at] for at in indices]
        if get_cache_token() != self._token:
            found += self._registered
        return found

    def accept(self) -> None:
        """What ``differing`` has found is how it is."""
        self._versions.accept()
        self._token = get_cache_token()
        for group, indices in self._changed:
            group.accept(indices)
        self._changed = []


__all__ = ["Sweep"]
