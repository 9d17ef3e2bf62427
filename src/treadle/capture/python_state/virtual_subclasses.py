"""The classes that are registered with an abstract class.

A library that is imported late registers its own: which rank imports it, and when, is not the same
everywhere. Of a class that did not exist when a run ended, the run has met no instance; and a class
of a module that is loaded now, and was not then, did not exist. One of a module that was there
counts as if it had been: to know each class takes a walk over some 10,000 of them at every capture.
"""

import sys
from _abc import _get_dump as get_dump  # pyright: ignore
from abc import ABCMeta
from collections.abc import Set
from typing import final
from weakref import ReferenceType

from treadle.capture.python_state.classes import class_module


@final
class VirtualSubclasses:
    """Those of ``kind`` that are there now. ``loaded``: the names of the modules that there were
    when a run ended which this is part of; ``None``: there may have been any."""

    def __init__(self, kind: ABCMeta) -> None:
        pairs = ((weak(), weak) for weak in get_dump(kind)[0])
        self._found: dict[int, ReferenceType[type]] = {
            id(subclass): reference for subclass, reference in pairs if subclass is not None
        }
        self.loaded: Set[str] | None = None

    def classes(self) -> list[type]:
        """The classes that still exist."""
        return [
            subclass for reference in self._found.values() if (subclass := reference()) is not None
        ]

    def __eq__(self, other: object) -> bool:
        """Nothing can be asked that has another answer now: nobody unregisters, what is gone has no
        instances, and neither had what did not exist."""
        if not isinstance(other, VirtualSubclasses):
            return NotImplemented
        known = {**self._found, **other._found}
        subclasses = (known[key]() for key in self._found.keys() ^ other._found.keys())
        known_then = [loaded for loaded in (self.loaded, other.loaded) if loaded is not None]
        return all(
            subclass is None or any(_is_newer(subclass, loaded) for loaded in known_then)
            for subclass in subclasses
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _is_newer(kind: type, loaded: Set[str]) -> bool:
    """Whether a class was made after only these modules were loaded."""
    name = class_module(kind)
    return name in sys.modules and name not in loaded
