"""Entries of containers, as parts of an object: how each kind is read, set and put back."""

import types
from collections import OrderedDict, deque
from typing import Any, final

from treadle.capture.python_state.parts import MISSING, Part, Reading
from treadle.capture.python_state.plain_values import is_plain, plain_fact


@final
class Entries(Part):
    """The entries of a dict or of an instance of a subclass."""

    __slots__ = ("_kind", "values")
    entries = True

    def __init__(self, label: str, values: dict[Any, Any]) -> None:
        super().__init__(label)
        self.values: Reading = values
        self._kind: type[Reading] = OrderedDict if isinstance(values, OrderedDict) else dict
        """Whose methods are used: an ``OrderedDict`` holds an order beside that of the dict."""

    def now(self) -> Reading:
        kind = self._kind
        return dict(zip(kind.keys(self.values), kind.values(self.values), strict=True))

    def get(self, name: object) -> object:
        return dict.get(self.values, name, MISSING)

    def put(self, name: object, value: object) -> None:
        if value is not MISSING:
            self._kind.__setitem__(self.values, name, value)
        elif dict.__contains__(self.values, name):
            self._kind.__delitem__(self.values, name)

    def restore(self, before: Reading) -> None:
        now = self.now()
        if list(now) != list(before):
            self._kind.clear(self.values)
            for name, value in before.items():
                self._kind.__setitem__(self.values, name, value)
            return
        super().restore(before)

    def dictionary(self) -> Reading | None:
        """The dict; ``None`` if its entries may be reordered, which the dict's version does not
        count."""
        moves = self._kind is OrderedDict and len(self.values) > 1
        return None if moves else self.values


_Sequence = list[object] | tuple[object, ...] | deque[object]


@final
class Sequenced(Part):
    """The entries of a list or deque, or the fixed ones of a tuple."""

    __slots__ = ("values",)
    entries = True

    def __init__(self, label: str, values: _Sequence) -> None:
        super().__init__(label)
        self.values = values

    @property
    def settable(self) -> bool:  # type: ignore[override]
        """Whether entries can be set: not those of a tuple."""
        return not isinstance(self.values, tuple)

    def now(self) -> Reading:
        values = self.values
        if isinstance(values, list):
            return dict(enumerate(list.__iter__(values)))
        if isinstance(values, tuple):
            return dict(enumerate(tuple.__iter__(values)))
        return dict(enumerate(deque.__iter__(values)))

    def put(self, name: Any, value: object) -> None:
        values: Any = self.values
        values[name] = value

    def restore(self, before: Reading) -> None:
        values = self.values
        if isinstance(values, tuple) or list(map(id, before.values())) == list(
            map(id, self.now().values())
        ):
            return
        values.clear()
        values.extend(before.values())


@final
class Members(Part):
    """The members of a set, by their values."""

    __slots__ = ("values",)
    entries = True
    settable = False

    def __init__(self, label: str, values: set[object] | frozenset[object]) -> None:
        super().__init__(label)
        self.values = values

    def now(self) -> Reading:
        """The members in an order that is the same in every process, as far as members have
        names."""
        values = self.values
        members = set.__iter__(values) if isinstance(values, set) else frozenset.__iter__(values)
        return {member(value): value for value in sorted(members, key=_name_of_member)}

    def is_same(self, one: Reading, other: Reading) -> bool:
        return one.keys() == other.keys()

    def restore(self, before: Reading) -> None:
        if isinstance(self.values, set) and self.now().keys() != before.keys():
            self.values.clear()
            self.values.update(before.values())


def _name_of_member(value: object) -> tuple[str, str]:
    """The sort key for members of a set: hashes differ between processes."""
    if is_plain(value):
        return type(value).__name__, repr(value)
    if isinstance(value, type | types.FunctionType):
        return value.__module__, value.__qualname__
    return "", ""


def member(value: object) -> object:
    """The name of a set's member in a snapshot."""
    return plain_fact(value) if is_plain(value) else (None, id(value))
