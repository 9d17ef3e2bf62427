"""The changes of a run outside the step, and the values before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import Generator, Tensor

from treadle.capture.integrations.registry import all_of
from treadle.capture.python_state.parts import MISSING, Part, Reading
from treadle.capture.python_state.plain_values import is_plain
from treadle.util.errors import CaptureError

_EVENTS = all_of(lambda integration: integration.events)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The value that the run left in a place. ``owner`` and ``at``: the object and its part that
    has the place."""

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


class RunPlaces(Protocol):
    """The stand-ins of a run for objects of the user's."""

    def argument_part(self, node: int, at: int) -> Part:
        """The part ``at`` of the ``node``th container among the arguments."""
        ...

    def tensor_for(self, tensor: object) -> Tensor | None:
        """The traced tensor for one of the user's."""
        ...

    def recorded(self, at: int) -> Sequence[object]:
        """The contents of the ``at``th container that stands in for another one."""
        ...

    def is_seeded(self, generator: Generator) -> bool:
        """Whether the step set the state of one of PyTorch's generators."""
        ...

    def draws_otherwise(self) -> bool:
        """Whether Python's or NumPy's generators were used otherwise than by draws that each call
        makes again."""
        ...


Look = Callable[[RunPlaces], Sequence[object]]
"""Reads the present value of a place in a run."""


class LateError(CaptureError):
    """An error that was found after the step's code had run, so that its line is not known.
    ``look`` reads the place that it is about; an error about no place is about the step's
    result."""

    look: Look | None = None

    def seen_by(self, look: Look) -> "LateError":
        """This error, about that place, unless it is about one already."""
        self.look = self.look or look
        return self

    def at(self, where: str) -> CaptureError:
        """The error for the user, with their line."""
        told = CaptureError(self.message, code=self.code, where=where, remedy=self.remedy)
        return told.with_traceback(self.__traceback__)


def holds(part: Part) -> list[object]:
    """The contents of a part: its names and its values."""
    now = part.now()
    return [*now, *now.values()]


def look_at(change: Change) -> Look:
    """A function that reads the place of a change outside the arguments."""
    part, name = change.part, change.name
    return lambda _: (part.get(name),)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A part with what it held before the run."""

    owner: object
    at: int
    part: Part
    before: Reading


def is_cache(name: object) -> bool:
    """Whether it is state that Python itself keeps in a class."""
    return name in ("_abc_impl", "__abstractmethods__", "__annotations_cache__", "__doc__")


def is_log(now: Reading, before: Reading) -> bool:
    """Whether the additions are log records or the like, which are made once."""
    new = [value for name, value in now.items() if before.get(name, MISSING) is not value]
    return bool(new) and all(isinstance(value, _EVENTS) for value in new)


def are_equal(old: object, new: object) -> bool:
    """Whether another object is the same plain value."""
    return is_plain(new) and type(new) is type(old) and repr(new) == repr(old)


_REMEDY = "return the value and store it outside, or assign a new one"


def refused(label: str, kind: str, where: str = "", remedy: str = _REMEDY) -> LateError:
    """TR-117 for a change that would happen only when the step is captured; ``where``: the user's
    line, if it is known."""
    return LateError(
        f"the step changes {label}, a {kind} outside the step: this would happen during capture, "
        "and not at later calls",
        code="TR-117",
        where=where,
        remedy=remedy,
    )
