"""The live memory while kernels are chosen, so that no merge raises the peak.

::

    unfused:   f1  b1 -> g1   f2  b2 -> g2   s = g1 + g2     f1, b1 are gone before f2 is there
    merged:    f1  f2   (b1, b2, s)                          f1 and f2 wait for one kernel

A kernel of two steps runs at the position of the later one: the inputs of the earlier one live
until then. The limit is the peak of the steps in program order, each as a separate kernel, plus a
small margin, because small values are worth fewer launches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from treadle.algebra.extents import sample_of
from treadle.loop.program import Buffer, BufferKind, Call, Step
from treadle.schedule.depend import Dependencies

LITTLE = 1 << 18
"""Bytes over the peak of the unfused program that fewer kernels are worth."""

_COUNTED = LITTLE >> 6
"""Bytes of a value from which it counts: most are smaller, and hundreds of steps read some."""

_Span = tuple[int, int]
_Change = tuple[str, _Span | None, _Span | None]  # a value, and where it lives before and after
_Piece = tuple[int, int, int]  # the first and the last of some steps, and bytes more at each
Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Merge:
    """Steps that become one kernel at ``place``, and those that wait for one of them and so run no
    earlier. ``names``: the buffers that all of them touch."""

    members: frozenset[int]
    delayed: frozenset[int]
    place: int
    names: frozenset[str]

    @property
    def moving(self) -> frozenset[int]:
        """The steps that run no earlier than at ``place`` then; others stay where they are."""
        return self.members | self.delayed if self.delayed else self.members


_NOTHING = Merge(frozenset(), frozenset(), 0, frozenset())


@final
class MemoryPressure:
    """Bytes of temporaries that are alive at each step, as far as groups are known.

    Each value lives from the place of the group that writes it first to that of the last which
    reads it; a group stands where its last member does.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        buffers: Mapping[str, Buffer],
        facts: Dependencies,
        kept: frozenset[str],
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        """``kept``: the buffers that never die; ``elsewhere``: those on another device."""
        self._facts = facts
        self._kept = kept
        self._end = len(steps)
        self.places = list(range(len(steps)))
        """Where the kernel of each step runs."""
        self._sizes = {
            name: sample_of(buffers[name].allocated)
            for name in facts.writers
            if buffers[name].kind is BufferKind.TEMPORARY and name not in elsewhere
        }
        self._sizes = {name: size for name, size in self._sizes.items() if size >= _COUNTED}
        self._touching = {
            name: (*facts.writers[name], *facts.readers.get(name, ())) for name in self._sizes
        }
        self._spans = {name: self._span(name, _NOTHING, _NOTHING.moving) for name in self._sizes}
        self._alive = np.zeros(len(steps) + 1, np.int64)
        for i, step in enumerate(steps):
            self._alive[i] += step.workspace if isinstance(step, Call) else 0
        spans = [(span, self._sizes[name]) for name, span in self._spans.items()]
        _add_all(self._alive, [(*span, size) for span, size in spans if span is not None])
        self._peak = int(self._alive.max(initial=0))
        self._allowed: tuple[Merge, list[_Change], list[_Piece]] = _NOTHING, [], []

    def allows(self, merge: Merge, *, spare: int = LITTLE) -> bool:
        """Whether that keeps the peak. ``spare``: bytes above it that the merge is worth."""
        changes = self._changes(merge)
        pieces = [
            (first, last, sign * self._sizes[name])
            for name, before, after in changes
            for first, last, sign in _pieces(before, after)
        ]
        if not self._keeps(pieces, self._peak + spare):
            return False
        self._allowed = merge, changes, pieces
        return True

    def make(self) -> None:
        """Note that what was allowed last is so from now on."""
        merge, changes, pieces = self._allowed
        _add_all(self._alive, pieces)
        for name, _, after in changes:
            self._spans[name] = after
        for step in merge.moving:
            self.places[step] = max(merge.place, self.places[step])

    def _keeps(self, pieces: list[_Piece], most: int) -> bool:
        longer = [piece for piece in pieces if piece[2] > 0]
        if not longer:
            return True
        low, high = min([piece[0] for piece in longer]), max([piece[1] for piece in longer])
        alive = self._alive[low : high + 1]
        if int(alive.max()) + sum([piece[2] for piece in longer]) <= most:
            return True
        alive = alive.copy()
        _add_all(alive, [(first - low, last - low, size) for first, last, size in pieces])
        return int(alive.max()) <= most

    def _changes(self, merge: Merge) -> list[_Change]:
        """The values that live otherwise then."""
        spans, moving = self._spans, merge.moving
        changes: list[_Change] = []
        for name in merge.names:
            if name in spans:
                before, after = spans[name], self._span(name, merge, moving)
                if before != after:
                    changes.append((name, before, after))
        return changes

    def _span(self, name: str, merge: Merge, moving: frozenset[int]) -> _Span | None:
        """From where to where a value lives; ``None`` for one that stays within a kernel."""
        touching = self._touching[name]
        if name not in self._kept and merge.members.issuperset(touching):
            return None
        at, places = merge.place, self.places
        then = [at if step in moving and places[step] < at else places[step] for step in touching]
        first = min(then[: len(self._facts.writers[name])])
        return first, self._end if name in self._kept else max(then)


def _pieces(before: _Span | None, after: _Span | None) -> list[tuple[int, int, int]]:
    """What a merge changes of the steps at which a value is alive: the first and the last of them,
    and 1 where it is alive from now on, -1 where it no longer is. Most of its steps stay."""
    if before is None:
        return [] if after is None else [(*after, 1)]
    if after is None:
        return [(*before, -1)]
    if after[0] > before[1] or before[0] > after[1]:
        return [(*before, -1), (*after, 1)]
    pieces: list[tuple[int, int, int]] = []
    if after[0] != before[0]:
        low, high = sorted((after[0], before[0]))
        pieces.append((low, high - 1, 1 if low == after[0] else -1))
    if after[1] != before[1]:
        low, high = sorted((after[1], before[1]))
        pieces.append((low + 1, high, 1 if high == after[1] else -1))
    return pieces


def _add_all(alive: Bytes, pieces: Sequence[_Piece]) -> None:
    """Change what is alive by all pieces; equal stretches of steps at once."""
    sizes: dict[_Span, int] = {}
    for first, last, size in pieces:
        sizes[first, last] = sizes.get((first, last), 0) + size
    for (first, last), size in sizes.items():
        alive[max(first, 0) : max(last + 1, 0)] += size
