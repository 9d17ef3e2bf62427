"""What a run changed outside the step, and what was there before."""

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


class RunPlaces(Protocol):
    """Where a run has what stands in for objects of the user's."""

    def argument_part(self, node: int, at: int) -> Part:
        """The part ``at`` of the ``node``th container among the arguments."""
        ...

    def tensor_for(self, tensor: object) -> Tensor | None:
        """What is traced in the place of a tensor of the user's."""
        ...

    def recorded(self, at: int) -> Sequence[object]:
        """What is in the ``at``th container that stands in for another one."""
        ...

    def is_seeded(self, generator: Generator) -> bool:
        """Whether the step put one of PyTorch's generators into another state."""
        ...

    def draws_otherwise(self) -> bool:
        """Whether Python's or NumPy's generators were used otherwise than by draws that each call
        makes again."""
        ...


Look = Callable[[RunPlaces], Sequence[object]]
"""What is in a place of a run now."""


class LateError(CaptureError):
    """What was found when the step's code was done, so that nobody knows its line. ``look``: at the
    place that it is about; where it is about no place it is about what the step returns."""

    look: Look | None = None

    def seen_by(self, look: Look) -> "LateError":
        """This error, about that place, unless it is about one already."""
        self.look = self.look or look
        return self

    def at(self, where: str) -> CaptureError:
        """What the user is told: the same for a line of theirs."""
        told = CaptureError(self.message, code=self.code, where=where, remedy=self.remedy)
        return told.with_traceback(self.__traceback__)


def holds(part: Part) -> list[object]:
    """All that a part holds: its names and its values."""
    now = part.now()
    return [*now, *now.values()]


def look_at(change: Change) -> Look:
    """At the place of a change that is not an argument's."""
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
    """What Python itself keeps in a class."""
    return name in ("_abc_impl", "__abstractmethods__", "__annotations_cache__", "__doc__")


def is_log(now: Reading, before: Reading) -> bool:
    """Whether what came is records of a log, or the like: they are made once."""
    new = [value for name, value in now.items() if before.get(name, MISSING) is not value]
    return bool(new) and all(isinstance(value, _EVENTS) for value in new)


def are_equal(old: object, new: object) -> bool:
    """Whether another object is the same plain value."""
    return is_plain(new) and type(new) is type(old) and repr(new) == repr(old)


def refused(label: str, kind: str, where: str = "") -> LateError:
    """TR-117 for a change that would happen only when the step is captured; ``where``: the user's
    line, as far as it is known."""
    return LateError(
        f"the step changes {label}, a {kind} outside the step: this would happen during capture, "
        "and not at later calls",
        code="TR-117",
        where=where,
        remedy="return the value and store it outside, or assign a new one",
    )
