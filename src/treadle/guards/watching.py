"""Objects that were not written to since they were checked, compared all at once.

Their memory words are compared with the earlier values: by one call of C code, or by NumPy if there
is no compiler and all words are in the objects themselves. If words are not known, dicts and
tensors are queried.
"""

import functools
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import is_
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treadle.compat.tensors import SameLayouts
from treadle.guards.dict_fingerprint import of_dict
from treadle.guards.first_difference import (
    FirstDifference,
    FirstOther,
    FirstOtherItem,
    first_difference,
    first_other,
    first_other_item,
)
from treadle.guards.memory_fingerprint import MemoryFingerprint, gathered, items_offset
from treadle.guards.tensor_fingerprint import of_tensor
from treadle.options import Options
from treadle.runtime.replay.unchanged_inputs import are_at

Look = Callable[[], MemoryFingerprint | None]
"""The words of an object now."""
_RENEWALS = operator.attrgetter("renewals")
_ONE = np.ones(1, dtype=np.uint64)
_NEVER = MemoryFingerprint((_ONE.ctypes.data,), (0,), (_ONE,))
"""Always another one than expected: for objects that no longer have words."""


class Unchanged(Protocol):
    """Some objects and what they were like."""

    def is_same(self) -> bool:
        """Whether all are as they were."""
        ...


def comparison() -> FirstDifference | None:
    """The compiled one, where there is a compiler."""
    return first_difference(str(Options().cache_dir))


def comparison_of_floats() -> FirstOther | None:
    """Likewise."""
    return first_other(str(Options().cache_dir))


def item_comparison() -> FirstOtherItem | None:
    """Likewise, where lists are known to be an address of items."""
    return first_other_item(str(Options().cache_dir)) if items_offset() else None


@final
class FingerprintWatch:
    """Objects by their words. ``add`` them, ``settle``, and ask."""

    def __init__(self) -> None:
        self._compare = comparison()
        self._looks: list[Look] = []
        self._found: list[MemoryFingerprint] = []
        self._pending: dict[int, MemoryFingerprint] = {}
        self._flags: list[int] = []
        self._none = 0
        self.renewals = 0  # how often what is expected was set
        self.excuse: Callable[[int], bool] | None = None
        """Whether an object that was written to is still what counts of it; by its position."""

    def __len__(self) -> int:
        return len(self._looks)

    def add(self, look: Look) -> bool:
        """Whether an object can be watched. Its position: how many there were before."""
        found = look()
        if found is None or not (found.direct or self._compare is not None):
            return False
        self._looks.append(look)
        self._found.append(found)
        return True

    def settle(self, flags: Sequence[int] = (), none: int = 0) -> "FingerprintWatch":
        """After the last one. ``flags``: addresses of words of which it only counts whether they
        are ``none``, and which are there while all others are as they were."""
        self.renewals += 1
        self._flags, self._none = list(flags), none
        sizes = [len(each.at) for each in self._found]
        self._ends = list(accumulate(sizes))
        self._exact = sum(sizes)
        at = [address for each in self._found for address in each.at]
        expected = [value for each in self._found for value in each.expected]
        self._expected = np.array([*expected, *[none] * len(flags)], dtype=np.uint64)
        if self._compare is None:
            self._read = gathered(at)
            self._first = self._first_gathered
            return self
        self._at = np.array([*at, *flags], dtype=np.uint64)
        held = self._at.ctypes.data, self._expected.ctypes.data
        self._table = np.array([*held, self._exact, len(self._at), none], dtype=np.uint64)
        self._first = functools.partial(self._compare, self._table.ctypes.data)
        return self

    @property
    def table(self) -> "Table | None":
        """What is compared; ``None`` without a compiler."""
        if self._compare is None:
            return None
        return Table(self._at, self._expected, self._exact, self._none)

    def _first_gathered(self, begin: int) -> int:
        found = np.flatnonzero(self._read()[begin:] != self._expected[begin:])
        return begin + int(found[0]) if len(found) else -1

    def is_same(self) -> bool:
        """Whether all of them are as they were."""
        if self._first(0) >= 0:
            return False
        self._pending = {}  # what an earlier look found was taken back since
        return True

    def are_same(self) -> tuple[bool, bool]:
        """Whether all objects are as they were, and whether the flags are; these are not looked at
        if an object is not."""
        at = self._first(0)
        return at < 0 or at >= self._exact, at < 0

    def changed(self) -> list[int]:
        """The positions of those that are not as they were at ``accept``."""
        found: list[int] = []
        at = self._first(0)
        while 0 <= at < self._exact:
            found.append(bisect_right(self._ends, at))
            at = self._first(self._ends[found[-1]])
        self._pending = {each: self._looks[each]() or _NEVER for each in found}
        return found

    def accept(self) -> None:
        """Those that ``changed`` has found are as they were then."""
        for position, now in self._pending.items():
            self.renewals += 1
            before, self._found[position] = self._found[position], now
            if now.at == before.at:
                end = self._ends[position]
                self._expected[end - len(now.at) : end] = now.expected
            else:
                self.settle(self._flags, self._none)
        self._pending = {}

    def excused(self, at: int) -> slice | None:
        """Whose word this is: the place of its words, which are expected to be from here on what
        they are now, if what counts of it is as it was. ``None`` if not, or if it is elsewhere."""
        position = bisect_right(self._ends, at)
        now = self._looks[position]()  # before it is asked: what is written later is seen later
        if now is None or self.excuse is None or now.at != self._found[position].at:
            return None
        if not self.excuse(position):
            return None
        end = self._ends[position]
        place = slice(end - len(now.at), end)
        self.renewals += 1
        self._found[position] = now
        self._expected[place] = now.expected
        return place

    def set_flags(self, values: Iterable[bool]) -> None:
        """For each flag, whether it is another word than ``none``."""
        self.renewals += 1
        found = [0 if each else self._none for each in values]
        self._expected[self._exact :] = found


@final
@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Addresses of words and what they have to be; of those from ``exact`` on it only counts
    whether they are ``none``."""

    at: NDArray[np.uint64]
    expected: NDArray[np.uint64]
    exact: int
    none: int

    @property
    def flags(self) -> int:
        """How many of those there are."""
        return len(self.at) - self.exact

    def without(self, other: "Table") -> "Table":
        """Without the words that ``other`` expects to be the same."""
        at, expected = other.at[: other.exact], other.expected[: other.exact]
        order = np.argsort(at, kind="stable")
        places = np.minimum(np.searchsorted(at[order], self.at), len(at) - 1)
        found = order[places]
        kept = (at[found] != self.at) | (expected[found] != self.expected)
        kept[self.exact :] = True
        return Table(self.at[kept], self.expected[kept], int(kept[: self.exact].sum()), self.none)


@final
class Watches:
    """Several watches as one. Words are compared in one pass, those first that were added first;
    what is not a word is asked after them. ``whole``: the ids of dicts and tensors that are watched
    in all that counts of them, so that nobody else has to.

    A loop at the level of a module writes to its globals at every turn: a watch is asked whether
    what was written counts (``FingerprintWatch.excuse``), which costs less than to look at all
    again.
    """

    def __init__(self) -> None:
        self.polled: list[Callable[[], bool]] = []
        self.whole: set[int] = set()
        self._watches: list[FingerprintWatch] = []
        self._tables: list[Table] = []

    def add(self, watch: Unchanged) -> None:
        """One that says now that all is as it was."""
        found = watch.table if isinstance(watch, FingerprintWatch) else None
        if found is None or (found.flags and any(each.flags for each in self._tables)):
            self.polled.append(watch.is_same)
        elif isinstance(watch, FingerprintWatch):
            self._watches.append(watch)
            self._tables.append(found)

    def settle(self) -> "Watches":
        """After the last one."""
        self._renewals = self._renewed()
        self._tables = self._once()
        self._ends = list(accumulate(each.exact for each in self._tables))
        exact = [(each, slice(0, each.exact)) for each in self._tables]
        parts = exact + [(each, slice(each.exact, None)) for each in self._tables]
        empty = np.zeros(0, dtype=np.uint64)
        self._at = np.concatenate([empty, *(each.at[part] for each, part in parts)])
        self._expected = np.concatenate([empty, *(each.expected[part] for each, part in parts)])
        none = max((each.none for each in self._tables if each.flags), default=0)
        held = self._at.ctypes.data, self._expected.ctypes.data
        counts = sum(each.exact for each in self._tables), len(self._at)
        self._table = np.array([*held, *counts, none], dtype=np.uint64)
        compare = comparison() if self._tables else None
        self._first = compare and functools.partial(compare, self._table.ctypes.data)
        return self

    def _once(self) -> "list[Table]":
        """The tables without words that stand in one before them, of a watch that excuses nothing.
        What a watch may excuse stays, so that it is asked."""
        known: Table | None = None
        tables: list[Table] = []
        for watch, table in zip(self._watches, self._tables, strict=True):
            excuses = watch.excuse is not None
            tables.append(table if excuses or known is None else table.without(known))
            if known is None and table.exact and not excuses:
                known = table
        return tables

    def is_same(self) -> bool:
        """Whether all is as it was, and no watch was told since ``settle`` that it is otherwise."""
        if self._renewed() != self._renewals:
            return False  # what it said of may be gone
        at = -1 if self._first is None else self._first(0)
        while at >= 0 and self._first is not None:
            after = self._excused(at)
            if after is None:
                return False
            at = self._first(after)
        for ask in self.polled:  # noqa: SIM110  # a generator takes as long as what it asks
            if not ask():
                return False
        return True

    def _excused(self, at: int) -> int | None:
        """Where the words of another object begin; ``None`` if this one is not what it was."""
        which = bisect_right(self._ends, at)
        if which == len(self._watches):
            return None  # a flag
        begin = self._ends[which] - self._tables[which].exact
        place = self._watches[which].excused(at - begin)
        if place is None:
            return None
        own = self._tables[which].expected  # the watch's
        self._expected[begin + place.start : begin + place.stop] = own[place]
        self._renewals = self._renewed()
        return begin + place.stop

    def _renewed(self) -> list[int]:
        return list(map(_RENEWALS, self._watches))


@final
class PolledDicts:
    """Dicts that are asked for their keys and values, at some 20 ns each."""

    def __init__(self, dicts: Sequence[dict[object, object]]) -> None:
        self._dicts = dicts
        self._known = self._found = [_held(each) for each in dicts]

    def is_same(self) -> bool:
        """Whether all hold what they held at ``accept``."""
        return not self.changed()

    def changed(self) -> list[int]:
        """The positions of those that do not."""
        self._found = [_held(each) for each in self._dicts]
        pairs = enumerate(zip(self._known, self._found, strict=True))
        return [
            at for at, (one, two) in pairs if len(one) != len(two) or not all(map(is_, one, two))
        ]

    def accept(self) -> None:
        """What was found last is how it is."""
        self._known = self._found


def _held(value: dict[object, object]) -> tuple[object, ...]:
    return *dict.keys(value), *dict.values(value)


@final
class PolledTensors:
    """Tensors that are asked for their layouts and addresses."""

    def __init__(self, tensors: Sequence[Tensor], layouts: SameLayouts) -> None:
        self._tensors = tensors
        self._layouts = layouts
        self._addresses = self._read()

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "PolledTensors | None":
        """``None`` if some are not dense, or not PyTorch's own."""
        layouts = SameLayouts.of(tensors)
        return None if layouts is None else PolledTensors(tensors, layouts)

    def _read(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def is_same(self) -> bool:
        """Whether each is as it was."""
        return self._layouts.hold() and self._read() == self._addresses


@final
class WatchedTensors:
    """Tensors at some places of the inputs of calls, which are lists."""

    def __init__(
        self, places: Sequence[int], tensors: Sequence[Tensor], layouts: Unchanged
    ) -> None:
        self._places, self._tensors = places, tensors
        self._layouts = layouts
        self._compare = item_comparison()
        self._at = np.array(places, dtype=np.uint64)
        self._expected = np.array(list(map(id, tensors)), dtype=np.uint64)
        held = self._at.ctypes.data, self._expected.ctypes.data
        self._table = np.array([*held, len(places), items_offset()], dtype=np.uint64)
        self._address = self._table.ctypes.data
        self._length = 1 + max(places, default=-1)

    def are_in(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the very same stand there."""
        compare = self._compare
        if compare is None or type(inputs) is not list or len(inputs) < self._length:
            return are_at(self._places, self._tensors, inputs)
        return compare(self._address, id(inputs)) < 0

    def is_same(self) -> bool:
        """Whether each is as it was."""
        return self._layouts.is_same()

    def join(self, watches: Watches) -> None:
        """That each is as it was."""
        watches.add(self._layouts)


def watch_inputs(places: Sequence[int], tensors: Sequence[Tensor]) -> WatchedTensors | None:
    """Tensors that stand at these places of inputs; ``None`` if some cannot be watched."""
    layouts = watch_tensors(tensors)
    return None if layouts is None else WatchedTensors(places, tensors, layouts)


def watch_dicts(dicts: Sequence[dict[object, object]]) -> FingerprintWatch | PolledDicts:
    """Dicts, for writes to them."""
    found = FingerprintWatch()
    if all(found.add(functools.partial(of_dict, each)) for each in dicts):
        return found.settle()
    return PolledDicts(dicts)


def watch_tensors(tensors: Sequence[Tensor]) -> Unchanged | None:
    """Tensors, for their class, dtype, device, sizes, strides, addresses and whether they want
    gradients; ``None`` if some cannot be watched."""
    found = FingerprintWatch()
    if all(found.add(functools.partial(of_tensor, each)) for each in tensors):
        return found.settle()
    return PolledTensors.of(tensors)
