"""Objects with tensors that a run created, and that it returns or stores outside.

::

    best = copy.deepcopy(model)       the object, with a place for each tensor and number of a call
    (a, b, 3.0)                       what a call has for the places
    best                              a copy of the object, with these in their places

A container is taken apart (``capture/python_state/flatten``); of any other object, such as a
module, each call gets a copy.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

from treadle.capture.python_state.introspect import parts_of
from treadle.capture.python_state.ownership import is_machinery
from treadle.capture.python_state.plain_values import is_plain
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.compat import pytree
from treadle.compat.fake import is_traced
from treadle.compat.unsized import is_symbol


def values_inside(value: object, known: Mapping[int, object]) -> list[object]:
    """The tensors and numbers of a run that an object holds, however deep; not what ``known``
    objects hold, by their ids, which were there before."""
    return _inside(value, known)[0]


def objects_inside(value: object, known: Mapping[int, object]) -> frozenset[int]:
    """The ids of what an object holds beside these, and its own."""
    return _inside(value, known)[1]


def _inside(value: object, known: Mapping[int, object]) -> tuple[list[object], frozenset[int]]:
    inside: dict[int, object] = {}
    met: dict[int, object] = {}
    left = [value]
    while left:
        current = left.pop()
        if is_traced(current) or is_stand_in(current) or is_symbol(current):
            inside[id(current)] = current
            continue
        if is_plain(current) or id(current) in known or id(current) in met or is_machinery(current):
            continue
        met[id(current)] = current
        if not isinstance(current, type | ModuleType):
            readings = [part.now() for part in parts_of(current, "").parts]
            left += [held for reading in readings for held in reading.values()]
            left += [key for reading in readings for key in reading if type(key) is not str]
    return list(inside.values()), frozenset(met)


class _Placeholder:
    """Stands in a template for a value of a call."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ObjectTemplate:
    """An object without what is another one at every call. ``known``: what was there before the
    run, by its id, which copies share."""

    blank: object
    places: tuple[_Placeholder, ...]
    known: Mapping[int, object]

    def filled(self, values: Sequence[object]) -> object:
        """A new object with these values."""
        return copy.deepcopy(self.blank, _beside(self.known, self.places, values))


@final
@dataclass(frozen=True, slots=True, eq=False)
class MadeObject:
    """An object as a template and the values of the run: a container of these."""

    template: ObjectTemplate
    values: tuple[object, ...]

    @staticmethod
    def of(value: object, known: Mapping[int, object]) -> "MadeObject | None":
        """``None`` where copies would still hold what is of the run."""
        values = values_inside(value, known)
        places = tuple(_Placeholder() for _ in values)
        blank = copy.deepcopy(value, _beside(known, values, places))
        if values_inside(blank, known):
            return None
        return MadeObject(ObjectTemplate(blank, places, known), tuple(values))


def _beside(
    known: Mapping[int, object], these: Sequence[object], others: Sequence[object]
) -> dict[int, object]:
    """What ``deepcopy`` is told: ``others`` are the copies of ``these``."""
    return {**known, **{id(e): o for e, o in zip(these, others, strict=True)}}


def _keys(made_object: MadeObject) -> tuple[list[tuple[Any, Any]], ObjectTemplate]:
    key: object = pytree.SequenceKey
    return [(key(at), value) for at, value in enumerate(made_object.values)], made_object.template


pytree.register_pytree_node(
    MadeObject,
    lambda made_object: (list(made_object.values), made_object.template),
    lambda values, template: template.filled(list(values)),
    flatten_with_keys_fn=_keys,
)
