"""Objects that a run created and stored outside the step: recreated for every call."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from treadle.capture.python_state.changes import refused
from treadle.capture.python_state.containers.made_objects import (
    MadeObject,
    objects_inside,
    values_inside,
)
from treadle.capture.python_state.parts import MISSING
from treadle.capture.python_state.plain_values import is_plain
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.compat.fake import is_traced
from treadle.compat.unsized import is_symbol


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeferredValue:
    """A leaf that Python computes at every call."""

    compute: Callable[[], object]


@final
@dataclass(frozen=True, slots=True, eq=False)
class LeftObjects:
    """``known``: the objects that existed before the run, by their ids; they are not copied."""

    known: Mapping[int, object]
    _apart: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """For each object that was taken apart, by its id, the ids of everything inside it."""

    def hides_traced(self, value: object) -> bool:
        """Whether an object that is not a container holds a tensor or number of the run."""
        if is_traced(value) or is_stand_in(value) or is_symbol(value):
            return False
        return bool(values_inside(value, self.known))

    def taken_apart(self, value: object, label: str) -> MadeObject:
        """An object that holds some, as a container of these. TR-117 if it cannot be copied, or if
        it is stored in two places, which would get one copy each."""
        inside = objects_inside(value, self.known)
        twice = any(id(value) in held or top in inside for top, held in self._apart.items())
        if twice:
            raise refused(f"{label} and a second place, in both", type(value).__name__)
        self._apart[id(value)] = inside
        try:
            made_object = MadeObject.of(value, dict(self.known))
        except Exception as error:
            raise refused(label, type(value).__name__) from error
        if made_object is None:
            raise refused(label, type(value).__name__)
        return made_object

    def again(self, value: object, label: str) -> object:
        """A new copy for every call if the run made the object; otherwise the object itself."""
        known_before = value is MISSING or id(value) in self.known or isinstance(value, type)
        if known_before or is_plain(value):
            return value
        known = dict(self.known)
        try:
            copy.deepcopy(value, dict(known))
        except Exception as error:
            raise refused(label, type(value).__name__) from error
        return DeferredValue(lambda: copy.deepcopy(value, dict(known)))
