"""Slices of a user's list, during capture: numbers that each call takes from the list that it has.

::

    sum(losses[-10:]) / len(losses[-10:])     two numbers of the call, however long the list is
    for loss in losses[-3:]: ...              three of them; a call with another length is another
                                              variant's

Python's own slice would have the entries of this run. What asks for more than numbers of all
entries opens the slice: from then on it is a list of one number for each entry.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeGuard, final


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """Entries of a list or a deque: ``[start:stop]`` of it, once a run has put ``put`` at its end.
    ``most``: how many a deque may have."""

    put: int
    most: int | None = None
    start: int | None = None
    stop: int | None = None

    def places(self, before: int) -> tuple[range, range]:
        """Which of those that were there ``before``, and which of those that are put."""
        places = range(before + self.put)
        if self.most is not None:
            places = places[max(0, len(places) - self.most) :]
        places = places[self.start : self.stop]
        kept = range(places.start, min(places.stop, before))
        return kept, range(max(places.start - before, 0), max(places.stop - before, 0))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of a list."""
        return self.most is None and self.start is None and self.stop is None


@final
@dataclass(frozen=True, slots=True, eq=False)
class SliceAtCall:
    """``before``: stands in for the numbers that were there before the run; ``put``: those that the
    run has put behind them. ``opened``: one number for each entry. ``asked``: a frame asks for the
    length, or goes through the entries."""

    before: Any
    put: list[Any]
    opened: Callable[[], list[Any]]
    asked: Callable[[FrameType], None]


@final
class ListSlice:
    """In the place of a list that is a slice of another one."""

    __slots__ = ("_list", "_slice")
    __hash__: Any = None  # as that of a list

    def __init__(self, slice_: SliceAtCall) -> None:
        self._slice = slice_
        self._list: list[Any] | None = None

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return list

    @property
    def numbers(self) -> tuple[Any, list[Any]]:
        """What stands in for those that were there before the run, ``None`` once it is opened, and
        the numbers behind them."""
        opened = self._list
        return (self._slice.before, self._slice.put) if opened is None else (None, opened)

    @property
    def length(self) -> Any:
        """How many there are: a number that stands in, until it is opened."""
        before, put = self.numbers
        return len(put) if before is None else before.count() + len(put)

    def opened(self) -> list[Any]:
        """A list with one number for each entry: always the same one."""
        if self._list is None:
            self._list = self._slice.opened()
        return self._list

    def __len__(self) -> int:
        self._slice.asked(sys._getframe(1))  # pyright: ignore
        return len(self.opened())

    def __bool__(self) -> bool:
        return bool(self.length)

    def __iter__(self) -> Iterator[Any]:
        self._slice.asked(sys._getframe(1))  # pyright: ignore
        return iter(self.opened())

    def __radd__(self, other: Any) -> Any:
        return other + self.opened()

    def __copy__(self) -> list[Any]:
        return list(self.opened())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened(), name)


def _opening(name: str) -> Callable[..., Any]:
    def call(self: ListSlice, *args: Any) -> Any:
        args = tuple(arg.opened() if is_list_slice(arg) else arg for arg in args)
        return getattr(self.opened(), name)(*args)

    return call


for _name in (
    "add", "contains", "delitem", "eq", "format", "ge", "getitem", "gt", "iadd", "imul", "le", "lt",
    "mul", "ne", "reduce_ex", "repr", "reversed", "rmul", "setitem", "str",
):  # fmt: skip
    setattr(ListSlice, f"__{_name}__", _opening(f"__{_name}__"))


def is_list_slice(value: object) -> TypeGuard[ListSlice]:
    """Whether it stands in for a slice of a list."""
    return type(value) is ListSlice
