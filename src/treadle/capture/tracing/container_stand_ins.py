"""Substitutes for the user's containers that an earlier run changed."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

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
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.util.errors import CaptureError


@final
class ContainerStandIns:
    """Those of one run; ``None``: nothing stands in for any. ``log``: what was done to them."""

    def __init__(self, containers: Sequence[ChangedContainer] | None) -> None:
        self.log = OperationLog()
        self._containers = containers

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
        for recorder in self.log.recorders:
            if recorder.reads_length and not recorder.reads_all:
                walk.add_computed(f"len({recorder.label})", functools.partial(_length, recorder))

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


def _length(recorder: ContainerRecorder) -> int:
    return len(recorder.get())
