"""Numbers in Python objects (attributes, entries, variables) that change from call to call, and
arrays of them.

::

    self.n += 1; loss = loss * 0.9 ** self.n      n: read before the launch, written after it

During capture, these places contain substitute numbers and arrays. Values that the step stores
there, including computed ones, are recomputed at each call, exactly as Python does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from treadle.capture.python_state.changes import Change, LateError, look_at
from treadle.capture.python_state.plain_values import RealNumber, is_real
from treadle.capture.python_state.reads.object_graph import Location, Node, Watched, first_of_each
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.stored.names import NOT_STORED
from treadle.capture.symbolic.arrays.arrays import (
    ArrayLeaf,
    NdArray,
    array_fact,
    is_numeric,
    overlaps,
)
from treadle.capture.symbolic.numbers import Number, Uses, is_number
from treadle.capture.symbolic.size_numbers import is_size


@final
@dataclass(slots=True)
class _InPlace:
    """The value of a place at a call. ``owner``: the object that has the place."""

    place: Location
    owner: object = field(default=None, metadata=NOT_STORED)
    key: tuple[int, object] = field(default=(0, None), metadata=NOT_STORED)

    def __call__(self) -> Any:
        return self.place.get()


@final
class ChangingNumbers:
    """The changing numbers of one run."""

    def __init__(
        self, places: Sequence[Location], uses: Uses, beside: Callable[[], Sequence[object]]
    ) -> None:
        """``beside``: what may share memory with arrays: the leaves of a call."""
        self._places, self._uses, self._beside = places, uses, beside
        self._found: list[_InPlace] = []
        self.arrays: dict[int, ArrayLeaf] = {}  # by the id of the array

    @property
    def real_arrays(self) -> list[NdArray]:
        """The real arrays that have stand-ins."""
        return [array.value for array in self.arrays.values()]

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, numbers have stand-ins for their values at a call. A tuple with some is replaced
        by another one, because it may be in other places as well, where its numbers stay."""
        places = [place for place in self._places if _holds_number(place)]
        for place in places:
            if place.around is not None:
                place.put(place.get())
        before = [(place.outermost, place.outermost.get()) for place in places]
        found = [(place, self._standing_in(place, place.get())) for place in places]
        try:
            for place, instead in found:
                place.put(instead)
            yield
        finally:
            for place, value in reversed(before):
                place.put(value)

    def _standing_in(self, place: Location, value: RealNumber | NdArray) -> "Number | ArrayLeaf":
        in_place = _InPlace(place, place.keeper, (place.owner, place.name))
        self._found.append(in_place)
        self._uses.decisions.labels[in_place.key] = place.label
        if is_numeric(value):
            leaf = ArrayLeaf(value, in_place, frozenset(), self._uses)
            leaf = self.arrays.setdefault(id(value), leaf)  # an array in two places is one
            leaf.roots |= {in_place.key}
            return leaf
        assert is_real(value)
        return Number(value, in_place, frozenset({in_place.key}), self._uses, scales=True)

    def read(self, walk: ReadsWalk) -> None:
        """The properties that must be unchanged at a call: the kinds of arrays, and which of them
        are the same."""
        arrays = [in_place for in_place in self._found if is_numeric(in_place())]
        if arrays:
            label = ", ".join(in_place.place.label for in_place in arrays)
            walk.add_computed(f"the kind of {label}", functools.partial(self._kinds, arrays))

    def _kinds(self, places: Sequence[_InPlace]) -> object:
        values = [place() for place in places]
        facts = [array_fact(value) if is_numeric(value) else None for value in values]
        return facts, first_of_each(values), overlaps([*values, *self._beside()])

    def keys(self) -> list[tuple[int, object]]:
        """The ids of their owners, and their names."""
        return [in_place.key for in_place in self._found]

    def placed(self, graph: ReadsGraph) -> None:
        """Set the places where calls find their owners."""
        for in_place in self._found:
            at, name = in_place.place.at, in_place.place.name
            place = graph.place_of(in_place.owner, at, name, in_place.place.label)
            if place is not None:  # a tuple is another one each time
                in_place.place = replace(place, rooted=place.around is not None)

    def places(self) -> tuple[Location, ...]:
        """Their places, found from the roots."""
        return tuple(replace(in_place.place, rooted=True) for in_place in self._found)

    def depends_on(self, before: object, now: object) -> bool:
        """Whether a number that the run read and set changes at every call and is a constant in the
        graph: then the graph serves no second call."""
        is_made = is_number(now) or is_size(now)
        if is_number(before):
            other = is_made or (is_real(now) and before.value != now)
            return other and self._uses.is_in_graph(before.roots)
        return is_real(before) and (is_made or (is_real(now) and before != now))


def _holds_number(place: Location) -> bool:
    value = place.get()
    return is_real(value) or is_numeric(value)


class Counted(LateError):
    """TR-118, with the places: a run with stand-ins there may succeed."""

    places: tuple[Location, ...] = ()

    def places_beside(self, others: Sequence[Location]) -> list[Location]:
        """Those that are none of ``others``."""
        known = {(other.owner, other.at, other.name) for other in others}
        return [e for e in self.places if (e.owner, e.at, e.name) not in known]


def counted(changes: Sequence[Change]) -> Counted:
    """TR-118 for numbers that are read and set to others."""
    label = changes[0].label
    before, now = (
        value.value if is_number(value) else value for value in (changes[0].before, changes[0].now)
    )
    error = Counted(
        f"the step counts: it reads {label} and changes it from {before!r} to {now!r}, and what "
        "it computes depends on the number itself, so every call would recompile",
        code="TR-118",
        remedy=(
            "use the number only in arithmetic and comparisons (not in a string, as a size or as "
            "the end of a range), or count outside the step"
        ),
    )
    error.places = tuple(map(direct_place, changes))
    error.look = look_at(changes[0])
    return error


def direct_place(change: Change) -> Location:
    """The place of a change, by the object that holds it."""
    node = Node(type(change.owner), change.part.label, change.owner)
    node.watched.extend([Watched(change.part, None, {})] * (change.at + 1))
    return Location(node, change.at, change.name, change.label)
