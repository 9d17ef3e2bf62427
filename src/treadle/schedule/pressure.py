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
Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Merge:
    """Steps that become one kernel at ``place``, and those that wait for one of them and so run no
    earlier. ``names``: the buffers that all of them touch."""

    members: frozenset[int]
    delayed: frozenset[int]
    place: int
    names: frozenset[str]

    def moved(self, places: Sequence[int]) -> dict[int, int]:
        """Where each step of it runs then; others stay at ``places``."""
        return {step: max(self.place, places[step]) for step in (*self.members, *self.delayed)}


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
        self._place = list(range(len(steps)))
        self._sizes = {
            name: sample_of(buffers[name].nbytes)
            for name in facts.writers
            if buffers[name].kind is BufferKind.TEMPORARY and name not in elsewhere
        }
        self._sizes = {name: size for name, size in self._sizes.items() if size >= _COUNTED}
        self._touching = {
            name: (*facts.writers[name], *facts.readers.get(name, ())) for name in self._sizes
        }
        self._spans = {name: self._span(name, _NOTHING, {}) for name in self._sizes}
        self._alive = np.zeros(len(steps) + 1, np.int64)
        for i, step in enumerate(steps):
            self._alive[i] += step.workspace if isinstance(step, Call) else 0
        for name, span in self._spans.items():
            _add(self._alive, span, self._sizes[name])
        self._peak = int(self._alive.max(initial=0))
        self._allowed: tuple[Merge, list[_Change]] = _NOTHING, []

    def place(self, step: int) -> int:
        """Where the kernel of ``step`` runs."""
        return self._place[step]

    def allows(self, merge: Merge, *, spare: int = LITTLE) -> bool:
        """Whether that keeps the peak. ``spare``: bytes above it that the merge is worth."""
        changes = self._changes(merge)
        if not self._keeps(changes, self._peak + spare):
            return False
        self._allowed = merge, changes
        return True

    def make(self) -> None:
        """Note that what was allowed last is so from now on."""
        merge, changes = self._allowed
        for name, before, after in changes:
            for first, last, sign in _pieces(before, after):
                self._alive[first : last + 1] += sign * self._sizes[name]
            self._spans[name] = after
        for step, place in merge.moved(self._place).items():
            self._place[step] = place

    def _keeps(self, changes: list[_Change], most: int) -> bool:
        pieces = [
            (first, last, sign * self._sizes[name])
            for name, before, after in changes
            for first, last, sign in _pieces(before, after)
        ]
        longer = [piece for piece in pieces if piece[2] > 0]
        if not longer:
            return True
        low, high = min(piece[0] for piece in longer), max(piece[1] for piece in longer)
        alive = self._alive[low : high + 1].copy()
        for first, last, size in pieces:
            alive[max(first - low, 0) : max(last + 1 - low, 0)] += size
        return int(alive.max()) <= most

    def _changes(self, merge: Merge) -> list[_Change]:
        """The values that live otherwise then."""
        names = [name for name in merge.names if name in self._sizes]
        if not names:
            return []
        moved = merge.moved(self._place)
        spans = [(name, self._spans[name], self._span(name, merge, moved)) for name in names]
        return [span for span in spans if span[1] != span[2]]

    def _span(self, name: str, merge: Merge, moved: Mapping[int, int]) -> _Span | None:
        """From where to where a value lives; ``None`` for one that stays within a kernel."""
        touching = self._touching[name]
        if name not in self._kept and merge.members.issuperset(touching):
            return None
        places = [moved[step] if step in moved else self._place[step] for step in touching]
        first = min(places[: len(self._facts.writers[name])])
        return first, self._end if name in self._kept else max(places)


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


def _add(alive: Bytes, span: _Span | None, size: int) -> None:
    if span is not None:
        alive[span[0] : span[1] + 1] += size
