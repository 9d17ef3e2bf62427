"""Where Python keeps values between calls: attributes, entries of dicts, variables; and what of
such a value decides a graph."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import CellType
from typing import Any, cast, final

import torch
from torch import Tensor

MISSING: Any = object()
"""In the place of a value that is not there."""

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Types whose values are what they are."""

_CHANGES: Any = object()  # no value of the user's
CONTAINERS = (list, tuple, deque, dict, set, frozenset)
"""Whose entries are looked into, in those of other classes that are made from them as well."""

MANY = 64
"""Entries of a container beyond which it is taken as it is when captured."""

_DEEP = 4  # containers within containers


@final
@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """``holder[name]``, or what a cell holds. ``label``: the user's words for it."""

    holder: dict[Any, Any] | CellType
    name: Any
    label: str

    @property
    def identity(self) -> tuple[int, Any]:
        """Equal for two that are the same place."""
        return id(self.holder), self.name

    def get(self) -> Any:
        """What is there now, or ``MISSING``."""
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:  # a variable that is not assigned yet
                return MISSING
        return self.holder.get(self.name, MISSING)

    def put(self, value: Any) -> None:
        """From now on ``value`` is there; ``MISSING`` for nothing."""
        if isinstance(self.holder, CellType):
            if value is MISSING:
                del self.holder.cell_contents
            else:
                self.holder.cell_contents = value
        elif value is MISSING:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Equal to what holds the same object, which need not be hashable."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def fact(value: Any, depth: int = 0) -> Any:
    """What of a value that is read outside of a step decides its graph: of numbers and texts the
    value, of tensors the type, of small containers their entries, of others which object it is."""
    kind = cast(type[Any], type(value))
    if kind in (float, complex):
        return kind, repr(value)  # 0.0 is not -0.0, and nan is nan
    if kind in PLAIN:
        return kind, value
    if isinstance(value, Tensor):
        return tensor_fact(value)
    if isinstance(value, CONTAINERS) and len(value) <= MANY and depth < _DEEP:
        if isinstance(value, set | frozenset):
            return kind, frozenset(fact(each, depth + 1) for each in value)
        entries: Iterable[Any] = value.items() if isinstance(value, dict) else value
        return kind, tuple(fact(each, depth + 1) for each in entries)
    return kind, Same(value)


def tensor_fact(value: Tensor) -> Any:
    """What of a tensor decides a graph: all but its numbers."""
    shape = tuple(value.shape)
    return value.dtype, shape, value.stride(), value.device, value.requires_grad


def first_of_each(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """For each tensor the position of the first one that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(each), at) for at, each in enumerate(tensors))


def tensors_held(value: Any, depth: int = 0) -> list[Tensor]:
    """The tensors whose types are in ``fact(value)``, in its order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple | deque | dict) and len(value) <= MANY and depth < _DEEP:
        entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return [each for entry in entries for each in tensors_held(entry, depth + 1)]
    return []


@final
class Reads:
    """What a captured run read outside of the step, and as what. Equal reads are those of the
    same places that saw the same."""

    def __init__(self, seen: Iterable[tuple[Place, Any]]) -> None:
        """``seen``: places and the values that they had."""
        rows = list(seen)
        self._rows = [(p, fact(v), v if _stays(v) else _CHANGES) for p, v in rows]
        self._same = first_of_each(t for _, v in rows for t in tensors_held(v))
        self._key = (tuple((*p.identity, f) for p, f, _ in self._rows), self._same)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reads) and other._key == self._key

    def __hash__(self) -> int:
        return self._hash

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        return not self.changed()

    def changed(self) -> str:
        """What is different now, in words; empty if nothing is."""
        tensors: list[Tensor] = []
        for place, before, value in self._rows:
            now = place.get()
            if now is value:
                continue
            if fact(now) != before:
                return f"{place.label}: {_words(before)} became {_words(fact(now))}"
            tensors += tensors_held(now)
        if first_of_each(tensors) != self._same:
            return "tensors outside of the step that were one are several, or the other way round"
        return ""


def _stays(value: Any) -> bool:
    """Whether the same object has the same fact for ever."""
    if isinstance(value, tuple):
        return all(type(each) in PLAIN for each in cast(tuple[Any, ...], value))
    return not isinstance(value, Tensor | list | deque | dict | set)


def _words(found: Any) -> str:
    if len(found) == 5:
        return f"a tensor {list(found[1])} of {found[0]}"
    kind, value = found
    if isinstance(value, Same):
        return "nothing" if value.held is MISSING else f"a {kind.__name__}"
    if isinstance(value, tuple | frozenset):
        return f"a {kind.__name__} of {len(cast(tuple[Any, ...], value))}"
    return value if kind in (float, complex) else repr(value)
