"""Changes of a step to containers outside it, repeated at every call.

A run in which a list, dict, set or deque gets or loses entries is repeated with containers that
record it (``container_recorders``) in all the places of the originals.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from treadle.capture.python_state.containers.container_recorders import (
    TOUCH,
    ContainerRecorder,
    Contents,
    OperationLog,
    is_recorded,
)
from treadle.capture.python_state.introspect import parts_of
from treadle.capture.python_state.parts import Part
from treadle.util.errors import CaptureError


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChangedContainer:
    """A container that a run changed, and all its places: parts of objects, with a name in each."""

    value: Contents
    label: str
    places: tuple[tuple[object, Part, object], ...]  # with the object that has the part


@final
class ContainersChanged(Exception):
    """A run changed containers without stand-ins, and must be repeated."""

    def __init__(self, containers: Sequence[ChangedContainer]) -> None:
        super().__init__()
        self.containers = containers


@contextlib.contextmanager
def recorded(containers: Sequence[ChangedContainer], log: OperationLog) -> Iterator[None]:
    """Inside, recorders stand in their places, which note all operations in ``log``."""
    undo: list[tuple[Part, object, object]] = []
    known: dict[int, ContainerRecorder] = {}
    try:
        for container in _outside_in(containers):
            inside = [(owner, name) for owner, _, name in container.places if id(owner) in known]
            parent = (known[id(inside[0][0])], inside[0][1]) if inside else None
            stand_in = log.stand_in(container.value, container.label, parent)
            known[id(container.value)] = stand_in.recorder
            for _, part, name in container.places:
                undo.append((part, name, container.value))
                part.put(name, stand_in)
        log.settle()
        yield
    finally:
        for part, name, value in reversed(undo):
            part.put(name, value)


def _outside_in(containers: Sequence[ChangedContainer]) -> list[ChangedContainer]:
    """The containers, each after those that contain it."""
    left, ordered = list(containers), list[ChangedContainer]()
    while left:
        inner = {id(container.value) for container in left}
        free = [c for c in left if not any(id(owner) in inner for owner, _, _ in c.places)]
        ordered += free or left
        left = [c for c in left if c not in ordered]
    return ordered


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Stands for the user's own container in a result. (Callable: so it is not taken apart.)"""

    recorder: ContainerRecorder

    def __call__(self) -> object:
        return self.recorder.get()


def reference_to(value: object) -> Reference | None:
    """The reference for a container that stands in for one of the user's."""
    if not is_recorded(value):
        return None
    recorder: ContainerRecorder = value.recorder
    if recorder.is_made:
        raise CaptureError(
            f"the step creates {recorder.label} in a container outside the step, and stores it "
            "in a second place as well",
            code="TR-117",
            remedy="create it before the step",
        )
    return Reference(recorder)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ContainerChanges:
    """All operations of a run on containers outside it, as a place. A call puts the arguments of
    each operation there, and the containers themselves."""

    log: OperationLog

    @property
    def label(self) -> str:
        """The user's words for the containers."""
        return ", ".join(dict.fromkeys(recorder.label for recorder in self._changed()))

    def _changed(self) -> list[ContainerRecorder]:
        recorders = self.log.recorders
        places = dict.fromkeys(
            operation.at for operation in self.log.operations if operation.name != TOUCH
        )
        return [recorders[at] for at in places]

    def roots(self) -> list[Callable[[], object]]:
        """Where the containers are found."""
        return [recorder.get for recorder in self.log.recorders]

    def args(self) -> list[tuple[object, ...]]:
        """The arguments of the operations in this run."""
        return [
            operation.args[:1] if operation.name == TOUCH else operation.args
            for operation in self.log.operations
        ]

    def forget_args(self) -> None:
        """Forget the arguments of this run, which belong to no call."""
        self.log.operations[:] = [
            operation if operation.name == TOUCH else replace(operation, args=())
            for operation in self.log.operations
        ]

    def get(self) -> Any:
        """The present contents of the containers."""
        containers = [recorder.get() for recorder in self._changed() if not recorder.is_made]
        return [
            list(contents.values() if isinstance(contents, dict) else contents)
            for contents in containers
        ]

    def put(self, value: tuple[Sequence[Any], Sequence[tuple[Any, ...]]]) -> None:
        """Repeat the operations, in order."""
        roots, arguments = value
        targets = dict(enumerate(roots))
        for operation, args in zip(self.log.operations, arguments, strict=True):
            if operation.name == TOUCH:
                targets[operation.args[1].recorder.at] = targets[operation.at][args[0]]
            else:
                operator.methodcaller(operation.name, *args)(targets[operation.at])

    def kept(self) -> Callable[[], None]:
        """A function that restores the present contents."""
        containers = [recorder.get() for recorder in self._changed() if not recorder.is_made]
        parts = [part for contents in containers for part in parts_of(contents, "").parts]
        before = [(part, dict(part.now())) for part in parts]

        def restore() -> None:
            for part, reading in before:
                part.restore(reading)

        return restore


def read_keys(recorders: Iterable[ContainerRecorder]) -> dict[int, frozenset[object] | None]:
    """The entries that were read, by the ids of the user's containers; ``None``: all."""
    return {
        id(recorder.real): None if recorder.reads_all else frozenset(recorder.reads)
        for recorder in recorders
        if not recorder.is_made
    }
