"""What a run left in places outside of it, and what was there before."""

from dataclasses import dataclass
from typing import Any, final

from treadle.capture.integrations.registry import all_of
from treadle.capture.python_state.parts import MISSING, Part, Reading
from treadle.capture.python_state.plain_values import is_plain
from treadle.util.errors import CaptureError

_EVENTS = all_of(lambda integration: integration.events)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What the run left in a place. ``owner`` and ``at``: whose part it is."""

    owner: object
    at: int
    part: Part
    name: object
    before: Any
    now: Any

    @property
    def label(self) -> str:
        """The user's words for the place."""
        return self.part.where(self.name)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A part with what it held before the run."""

    owner: object
    at: int
    part: Part
    before: Reading


def is_cache(name: object) -> bool:
    """What Python itself keeps in a class."""
    return name in ("_abc_impl", "__abstractmethods__", "__annotations_cache__", "__doc__")


def is_log(now: Reading, before: Reading) -> bool:
    """Whether what came is records of a log, or the like: they are made once."""
    new = [value for name, value in now.items() if before.get(name, MISSING) is not value]
    return bool(new) and all(isinstance(value, _EVENTS) for value in new)


def are_equal(old: object, new: object) -> bool:
    """Whether another object is the same plain value."""
    return is_plain(new) and type(new) is type(old) and repr(new) == repr(old)


def refused(label: str, kind: str, where: str = "") -> CaptureError:
    """TR-117 for a change that would happen only when the step is captured; ``where``: the user's
    line."""
    return CaptureError(
        f"the step changes {label}, a {kind} outside of it: that would happen when the step is "
        "captured, and not at later calls",
        code="TR-117",
        where=where,
        remedy="return the value and keep it outside, or assign a new one",
    )
