"""Substitutes for the user's containers that an earlier run changed."""

import functools
import operator
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
from treadle.capture.python_state.external import ExternalState
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.symbolic.computations import Key
from treadle.capture.symbolic.deferred import calls_real
from treadle.capture.symbolic.functions.reductions import asks_reduction
from treadle.capture.symbolic.numbers import Number, Uses
from treadle.util.errors import CaptureError


@final
class ContainerStandIns:
    """Those of one run; ``None``: nothing stands in for any. ``log``: what was done to them."""

    def __init__(self, containers: Sequence[ChangedContainer] | None, uses: Uses | None) -> None:
        """``uses``: what becomes of numbers that stand in for lengths; ``None``: none do."""
        self.log = OperationLog()
        self._containers, self._uses = containers, uses
        self._entries: dict[Key, _EntryAtCall | _ReductionAtCall] = {}  # whose numbers stand in
        if uses is not None:
            self.log.length_at_call, self.log.asked = self._length, self._note_asked
            self.log.entry_at_call = self._entry
            self.log.reduction_at_call = self._reduction

    @property
    def values(self) -> list[object]:
        """The user's own."""
        return [container.value for container in self._containers or ()]

    def standing_in(self) -> AbstractContextManager[None]:
        """While inside, stand-ins record what is done to the containers."""
        return recorded(self._containers or (), self.log)

    def refuse_others(self, external: ExternalState) -> None:
        """``ContainersChanged`` for those that the run changed, and that nobody stood in for."""
        if self._containers is None:
            return
        containers = external.changed_containers()
        known = set(map(id, self.values))
        if any(id(container.value) not in known for container in containers):
            raise ContainersChanged([*self._containers, *containers])

    def entries_read(self) -> dict[int, frozenset[object] | None]:
        """By the ids of the user's, which entries were read; ``None``: all."""
        return read_keys(self.log.recorders)

    def read(self, walk: ReadsWalk) -> None:
        """What the step depends on of them beside entries."""
        needed: set[Key] = set() if self._uses is None else self._uses.needed
        for recorder in self.log.recorders:
            is_read = recorder.reads_length or _root(recorder) in needed
            if is_read and not recorder.reads_all:
                walk.add_computed(f"len({recorder.label})", functools.partial(_length, recorder))
        for root, entry in self._entries.items():
            if root in needed and not entry.recorder.reads_all:
                walk.add_computed(entry.label, entry)

    def _length(self, recorder: ContainerRecorder) -> object:
        """How much is in it now, from how much there is at the beginning of a call."""
        uses, most = self._uses, recorder.maxlen
        if uses is None or recorder.grown is None or (most is not None and recorder.grown < 0):
            return None
        root = _root(recorder)
        uses.decisions.labels[root] = f"len({recorder.label})"
        now, at_call = len(recorder.real), _LengthAtCall(recorder)
        length = Number(now, at_call, frozenset({root}), uses, scales=True)
        if recorder.grown:
            length = length.derived(operator.add, recorder.grown)
        return length if most is None else length.derived(min, most)

    def _entry(self, recorder: ContainerRecorder, at: int, value: object) -> object:
        """The number that is at ``at`` at the beginning of a call."""
        uses = self._uses
        if uses is None or not is_real(value):
            return None
        root: Key = "entry", recorder.at, at
        entry = self._entries.setdefault(root, _EntryAtCall(recorder, at))
        uses.decisions.labels[root] = entry.label
        number = Number(value, entry, frozenset({root}), uses, scales=True)
        number.decided(_IsOf(type(value)), (number,))
        return number

    def _reduction(
        self, recorder: ContainerRecorder, function: Callable[..., Any], put: frozenset[type]
    ) -> object:
        """What ``function`` gives of the numbers that are there at the beginning of a call.
        ``put``: the types of those that the run has put behind them."""
        reduction = _ReductionAtCall(recorder, function, put)
        uses, now = self._uses, reduction()
        if uses is None or now is None:
            return None
        root: Key = function.__name__, recorder.at, put
        self._entries.setdefault(root, reduction)
        uses.decisions.labels[root] = reduction.label
        number = Number(now, reduction, frozenset({root}), uses, scales=True)
        number.decided(_IsOf(type(now)), (number,))
        return number

    def _note_asked(self, frame: FrameType) -> None:
        if self._uses is None or self._uses.ours:
            return
        if calls_real(frame) or asks_reduction(frame):
            self._uses.note_asked()

    def placed(self, graph: ReadsGraph) -> None:
        """From now on each is found where its owner is at a call."""
        for recorder in self.log.recorders:
            node = graph.node_of(recorder.real)
            if node is not None:
                recorder.current = node.current
            elif not self.log.is_got(recorder):
                raise refused_container(recorder)


def refused_container(recorder: ContainerRecorder) -> CaptureError:
    """TR-117 for a container whose changes cannot be made again."""
    error = refused(recorder.label, type(recorder.real).__name__)
    return error.seen_by(lambda run: run.recorded(recorder.at))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _LengthAtCall:
    """How much is in the user's own before a call changes it."""

    recorder: ContainerRecorder

    def __call__(self) -> int:
        return _length(self.recorder)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _EntryAtCall:
    """A number of the user's own before a call changes it; ``None`` where there is none."""

    recorder: ContainerRecorder
    at: int

    @property
    def label(self) -> str:
        """The user's words for it."""
        return f"{self.recorder.label}[{self.at}]"

    def __call__(self) -> object:
        entries = self.recorder.get()
        return entries[self.at] if -len(entries) <= self.at < len(entries) else None


@final
@dataclass(frozen=True, slots=True, eq=False)
class _ReductionAtCall:
    """What a function gives of all entries of the user's own before a call changes them; ``None``
    where they are no numbers, or of several types of which the result has one. ``put``: the types
    of what comes behind them. A sum is a float if one of these is, also the sum of no entries."""

    recorder: ContainerRecorder
    function: Callable[..., Any]
    put: frozenset[type]

    @property
    def label(self) -> str:
        """The user's words for it."""
        return f"{self.function.__name__}({self.recorder.label})"

    def __call__(self) -> int | float | None:
        entries = self.recorder.get()
        kinds = {*map(type, entries), *self.put}
        if not kinds <= _REAL or (self.function is not sum and len(kinds) != 1):
            return None
        if self.function is sum:
            return float(sum(entries)) if float in self.put else sum(entries)
        return self.function(entries) if entries else None


_REAL = frozenset({int, float})


@final
@dataclass(frozen=True, slots=True)
class _IsOf:
    """Whether a value is of a type."""

    kind: type

    def __call__(self, value: object) -> bool:
        return type(value) is self.kind


def _root(recorder: ContainerRecorder) -> Key:
    return "length", recorder.at


def _length(recorder: ContainerRecorder) -> int:
    return len(recorder.get())
