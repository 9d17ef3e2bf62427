"""Whether the same objects are in the same places, by memory words.

Only identities are compared. Other guards compare the values of what differs.
"""

from _abc import get_cache_token  # pyright: ignore
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import final

from treadle.capture.python_state.computed_parts import Registered
from treadle.capture.python_state.container_parts import Members, Sequenced
from treadle.capture.python_state.introspect import attributes_of, is_heap
from treadle.capture.python_state.parts import (
    Accessors,
    FixedAttributes,
    OfFunction,
    OwnAttributes,
    Part,
    Slots,
    Variable,
)
from treadle.guards import memory_fingerprint as words
from treadle.guards.dict_fingerprint import of_dict, of_own_space
from treadle.guards.watching import FingerprintWatch, Look, PolledDicts, Watches


def _look(part: Part, owner: object) -> Look | None:
    """The reader for the memory words of a part, if it may have any."""
    match part:
        case Variable() if isinstance(owner, CellType):
            return partial(words.of_cell, owner)
        case Sequenced() if isinstance(owner, list):
            return partial(words.of_list, owner)
        case Members() if isinstance(owner, set):
            return partial(words.of_set, owner)
        case Slots():
            return partial(words.of_slots, owner, tuple(part.members.values()))
        case OwnAttributes():
            return partial(of_own_space, owner)
        case OfFunction() if isinstance(owner, FunctionType):
            return partial(words.of_function, owner)
        case Accessors() if type(owner) is property:
            return partial(words.of_property, owner)
        case _:
            return None


@final
class IdentityGuards:
    """Compares the parts that have been added, by number; ``differing`` tells which have
    changed."""

    def __init__(self) -> None:
        self._words = FingerprintWatch()
        self._of_words: list[int | None] = []  # numbers of parts; ``None``: of a class or a space
        self._dicts: list[dict[object, object]] = []  # without words
        self._of_dicts: list[int] = []
        self._polled_dicts = PolledDicts(())
        self._kinds: list[tuple[object, type]] = []
        self._spaces: list[tuple[object, dict[str, object]]] = []
        self._polled_kinds: list[tuple[object, type]] = []  # those without words
        self._asked_spaces: list[tuple[object, dict[str, object]]] = []
        self._registered: list[int] = []
        self._token = get_cache_token()

    def add_type(self, value: object) -> None:
        """Add an object whose class may be changed."""
        kind = type(value)
        if not is_heap(kind):
            return
        self._kinds.append((value, kind))
        if not self._watch(partial(words.of_class, value), None):
            self._polled_kinds.append((value, kind))
        space = attributes_of(value)
        if space is None or kind.__getattribute__ is not object.__getattribute__:
            return
        self._spaces.append((value, space))
        if not self._watch(partial(words.of_space, value, space), None):
            self._asked_spaces.append((value, space))

    def add(self, part: Part, owner: object, number: int) -> bool:
        """Add a part; whether it can be compared in this way."""
        reading = part.dictionary()
        if reading is not None:
            if not self._watch(partial(of_dict, reading), number):
                self._dicts.append(reading)
                self._of_dicts.append(number)
            return True
        if isinstance(part, Registered):
            self._registered.append(number)
            return True
        look = _look(part, owner)
        if look is not None:
            return self._watch(look, number)
        return isinstance(part, FixedAttributes)

    def _watch(self, look: Look, number: int | None) -> bool:
        watch = self._words.add(look)
        if watch:
            self._of_words.append(number)
        return watch

    def settle(self) -> None:
        """Called after the last part is added."""
        self._words.settle()
        self._polled_dicts = PolledDicts(self._dicts)

    def is_same(self) -> bool:
        """Whether nothing has changed."""
        return self._words.is_same() and self._is_same_beside_words()

    def _is_same_beside_words(self) -> bool:
        return (
            get_cache_token() == self._token
            and not (self._dicts and not self._polled_dicts.is_same())
            and not (self._polled_kinds and _other_types(self._polled_kinds))
            and not (self._asked_spaces and _other_spaces(self._asked_spaces))
        )

    def join(self, watches: Watches, excuse: Callable[[int], bool]) -> None:
        """All of it, while it is as it was. ``excuse``: whether what counts of a part that was
        written to is still so, by its number."""

        def excused(position: int) -> bool:
            number = self._of_words[position]
            return number is not None and excuse(number)

        self._words.excuse = excused
        watches.add(self._words)
        watches.polled.append(self._is_same_beside_words)

    def other_types(self) -> list[tuple[object, type]]:
        """Objects whose class has changed, with the earlier class."""
        return _other_types(self._kinds)

    def other_spaces(self) -> list[object]:
        """Objects whose ``__dict__`` has been replaced."""
        return _other_spaces(self._spaces)

    def differing(self) -> list[int]:
        """The numbers of parts that have changed."""
        numbers = (self._of_words[at] for at in self._words.changed())
        known = [number for number in numbers if number is not None]
        known += [self._of_dicts[at] for at in self._polled_dicts.changed()]
        return known + (self._registered if get_cache_token() != self._token else [])

    def accept(self) -> None:
        """Accept the changes that ``differing`` has found."""
        self._words.accept()
        self._polled_dicts.accept()
        self._token = get_cache_token()


def _other_types(known: Sequence[tuple[object, type]]) -> list[tuple[object, type]]:
    return [(value, kind) for value, kind in known if type(value) is not kind]


def _other_spaces(known: Sequence[tuple[object, dict[str, object]]]) -> list[object]:
    return [value for value, space in known if attributes_of(value) is not space]
