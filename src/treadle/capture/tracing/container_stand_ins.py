"""Substitutes for the user's containers that an earlier run changed."""

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from treadle.capture.python_state.changes import refused
from treadle.capture.python_state.containers.container_changes import (
    ChangedContainer,
    ContainersChanged,
    read_keys,
    recorded,
)
from treadle.capture.python_state.containers.container_recorders import (
    ContainerRecorder,
    OperationLog,
)
from treadle.capture.python_state.containers.list_slices import Cut
from treadle.capture.python_state.external import ExternalState
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.symbolic.computations import Key
from treadle.capture.symbolic.deferred import calls_real
from treadle.capture.symbolic.functions.number_lists import (
    IsOf,
    NumberList,
    caller_of_library,
)
from treadle.capture.symbolic.functions.reductions import asks_reduction
from treadle.capture.symbolic.numbers import Number, Uses
from treadle.util.errors import CaptureError


@final
class ContainerStandIns:
    """The stand-ins of one run; ``None``: there are none. ``log``: the operations on them."""

    def __init__(self, containers: Sequence[ChangedContainer] | None, uses: Uses | None) -> None:
        """``uses``: what becomes of numbers that stand in for lengths; ``None``: none do."""
        self.log = OperationLog()
        self._containers, self._uses = containers, uses
        self._entries: dict[Key, _Entries] = {}  # whose numbers stand in
        if uses is not None:
            self.log.length_at_call, self.log.asked = self._length, self._note_asked
            self.log.entry_at_call = self._entry
            self.log.numbers_at_call = self._numbers

    @property
    def values(self) -> list[object]:
        """The user's own."""
        return [container.value for container in self._containers or ()]

    def standing_in(self) -> AbstractContextManager[None]:
        """While inside, stand-ins record what is done to the containers."""
        return recorded(self._containers or (), self.log)

    def refuse_others(self, external: ExternalState) -> None:
        """``ContainersChanged`` for containers without stand-ins that the run changed."""
        if self._containers is None:
            return
        containers = external.changed_containers()
        known = set(map(id, self.values))
        if any(id(container.value) not in known for container in containers):
            raise ContainersChanged([*self._containers, *containers])

    def entries_read(self) -> dict[int, frozenset[object] | None]:
        """The entries that were read, by the ids of the user's containers; ``None``: all."""
        return read_keys(self.log.recorders)

    def read(self, walk: ReadsWalk) -> None:
        """The properties of the containers, besides entries, on which the step depends."""
        needed: set[Key] = set() if self._uses is None else self._uses.needed
        for recorder in self.log.recorders:
            is_read = recorder.reads_length or _root(recorder) in needed
            if is_read and not recorder.reads_all:
                walk.add_computed(f"len({recorder.label})", functools.partial(_length, recorder))
            node = walk.graph.node_of(recorder.real)
            if node is not None and recorder.reads_all and isinstance(recorder.real, list | deque):
                node.note = f", all of which are read: {recorder.read_at} ({_REMEDY})"
        for root, entries in self._entries.items():
            if root in needed and not entries.recorder.reads_all:
                walk.add_computed(entries.label, entries.compute)

    def _length(self, recorder: ContainerRecorder) -> object:
        """The present number of entries, computed from that at the beginning of a call."""
        uses, most = self._uses, recorder.maxlen
        if uses is None or recorder.grown is None or (most is not None and recorder.grown < 0):
            return None
        length = self._length_at_call(recorder, uses)
        if recorder.grown:
            length = length.derived(operator.add, recorder.grown)
        return length if most is None else length.derived(min, most)

    def _length_at_call(self, recorder: ContainerRecorder, uses: Uses) -> Number:
        """The number of entries at the beginning of a call."""
        root = _root(recorder)
        uses.decisions.labels[root] = f"len({recorder.label})"
        now, at_call = len(recorder.real), _LengthAtCall(recorder)
        return Number(now, at_call, frozenset({root}), uses, scales=True)

    def _entry(self, recorder: ContainerRecorder, at: int, value: object) -> object:
        """The number at ``at`` at the beginning of a call."""
        uses = self._uses
        if uses is None or not is_real(value):
            return None
        root: Key = "entry", recorder.at, at
        entry = _EntryAtCall(recorder, at)
        self._note(recorder, root, entry, f"{recorder.label}[{at}]")
        number = Number(value, entry, frozenset({root}), uses, scales=True)
        number.decided(IsOf(type(value)), (number,))
        return number

    def _numbers(self, recorder: ContainerRecorder, cut: Cut) -> NumberList | None:
        """The numbers that are there at the beginning of a call, as far as they are in a part."""
        uses = self._uses
        if uses is None:
            return None
        compute, label = _NumbersAtCall(recorder, cut), _label(recorder, cut)
        note = functools.partial(self._note, recorder)
        numbers = NumberList(compute, (recorder.at, cut), label, uses, note)
        if not cut.is_whole:
            length = self._length_at_call(recorder, uses)
            length.decided(_PutPlaces(cut), (length,))
        return numbers

    def _note(
        self, recorder: ContainerRecorder, root: Key, compute: Callable[[], object], label: str
    ) -> None:
        """``compute`` gives what stands in, and the user's words for it are ``label``."""
        assert self._uses is not None
        self._entries.setdefault(root, _Entries(recorder, compute, label))
        self._uses.decisions.labels[root] = label

    def _note_asked(self, frame: FrameType) -> None:
        if self._uses is None or self._uses.ours:
            return
        asking = caller_of_library(frame)
        if calls_real(asking) or asks_reduction(asking) or self._uses.note_call(asking):
            self._uses.note_asked(asking)

    def placed(self, graph: ReadsGraph) -> None:
        """From now on each is found where its owner is at a call."""
        for recorder in self.log.recorders:
            node = graph.node_of(recorder.real)
            if node is not None:
                recorder.current = node.current
            elif not self.log.is_got(recorder):
                raise refused_container(recorder)


_REMEDY = "remedy: read a figure such as its sum, or keep the last few in a deque with a maxlen"


def refused_container(recorder: ContainerRecorder) -> CaptureError:
    """TR-117 for a container whose changes cannot be made again."""
    error = refused(recorder.label, type(recorder.real).__name__)
    return error.seen_by(lambda run: run.recorded(recorder.at))


@final
@dataclass(frozen=True, slots=True)
class _Entries:
    """How numbers are computed at a call that are in the user's own, and the words for them."""

    recorder: ContainerRecorder
    compute: Callable[[], object]
    label: str


@final
@dataclass(frozen=True, slots=True)
class _PutPlaces:
    """Which of the entries that a run puts at the end are in a part, by how many there were."""

    cut: Cut

    def __call__(self, before: int) -> range:
        return self.cut.places(before)[1]


def _label(recorder: ContainerRecorder, cut: Cut) -> str:
    """The user's words for a part."""
    start = "" if cut.start is None else cut.start
    stop = "" if cut.stop is None else cut.stop
    is_slice = cut.start is not None or cut.stop is not None
    return f"{recorder.label}[{start}:{stop}]" if is_slice else recorder.label


@final
@dataclass(frozen=True, slots=True, eq=False)
class _LengthAtCall:
    """The number of entries of the user's container before a call changes it."""

    recorder: ContainerRecorder

    def __call__(self) -> int:
        return _length(self.recorder)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _EntryAtCall:
    """A number of the user's own before a call changes it; ``None`` where there is none."""

    recorder: ContainerRecorder
    at: int

    def __call__(self) -> object:
        entries = self.recorder.get()
        return entries[self.at] if -len(entries) <= self.at < len(entries) else None


@final
@dataclass(frozen=True, slots=True, eq=False)
class _NumbersAtCall:
    """The contents of a part of the user's container before a call changes it."""

    recorder: ContainerRecorder
    cut: Cut

    def __call__(self) -> tuple[Any, ...]:
        entries = self.recorder.get()
        kept, _ = self.cut.places(len(entries))
        return tuple(itertools.islice(entries, kept.start, max(kept.start, kept.stop)))


def _root(recorder: ContainerRecorder) -> Key:
    return "length", recorder.at


def _length(recorder: ContainerRecorder) -> int:
    return len(recorder.get())
