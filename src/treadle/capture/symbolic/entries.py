"""Entries of lists, tuples, dicts and arrays at a substitute number: substitutes again.

::

    lr = schedule[step]     ->    lr = entry(schedule, step)

Python needs the number itself to find an entry, and the entry would become part of the graph.
``source_rewriting`` inserts the call there. The entry is read from the list at each call.
"""

from dataclasses import dataclass
from types import FrameType
from typing import Any, final

import numpy as np

from treadle.capture.python_state.code.bytecode import Instructions
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.numbers import (
    Number,
    PlainNumber,
    SourcePosition,
    is_number,
    position,
    value_now,
)

_KINDS = frozenset({list, tuple, dict, np.ndarray})


def asked_position(frame: FrameType) -> SourcePosition | None:
    """Where ``frame`` looks for an entry just now; ``None`` if it does something else."""
    steps = Instructions(frame.f_code)
    return position(frame) if steps.op(steps.at(frame.f_lasti)) == "SUBSCR" else None


@final
@dataclass(frozen=True, slots=True)
class _Lookup:
    """``container[key]``, a number of type ``kind``."""

    container: Any
    kind: type

    def __call__(self, key: object) -> PlainNumber:
        return self.container[key]

    def __hash__(self) -> int:
        return hash((id(self.container), self.kind))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Lookup)
            and other.container is self.container
            and other.kind is self.kind
        )

    def has(self, key: object) -> bool:
        """Whether there is a number of that type."""
        try:
            return type(self.container[key]) is self.kind
        except (LookupError, TypeError):
            return False


@final
@dataclass(frozen=True, slots=True)
class _Has:
    """Whether a lookup finds a number of its kind."""

    lookup: _Lookup

    def __call__(self, key: object) -> bool:
        return self.lookup.has(key)


def looked_up(container: Any, key: object) -> object:
    """The result of ``container[key]``; its errors are also eager's."""
    return container[key]


def entry(container: Any, key: object) -> object:
    """``container[key]``."""
    if type(key) is not Number or type(container) not in _KINDS:
        return looked_up(container, key)
    try:
        value = container[key.value]
    except (LookupError, TypeError):
        return looked_up(container, key)  # it raises an error
    if is_number(value):
        return _among(container, key, type(value.value))
    if not is_real(value):
        return looked_up(container, key)
    lookup = _Lookup(container, type(value))
    key.decided(_Has(lookup), (key,))  # a call in which it finds none is another variant's
    return key.derived(lookup)


def _among(container: Any, key: Number, kind: type) -> object:
    """An entry of a list that the step makes of numbers which stand in, all of type ``kind``."""
    values = container if type(container) in (list, tuple) else ()
    if not values or not all(type(value_now(value)) is kind for value in values):
        return looked_up(container, key)
    key.decided(_IsWithin(len(values)), (key,))
    return Number.of(_picked, (key, *values))


@final
@dataclass(frozen=True, slots=True)
class _IsWithin:
    """Whether a position is within a list."""

    count: int

    def __call__(self, at: int) -> bool:
        return -self.count <= at < self.count


def _picked(at: int, *values: PlainNumber) -> PlainNumber:
    return values[at]
