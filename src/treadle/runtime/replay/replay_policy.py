"""The requirements for recording the launches of a step: a recorder, and a policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treadle.runtime.replay.unchanged_inputs import SteadyInputs, WatchInputs

Launches = Callable[[], dict[str, Tensor]]
"""Launches everything, and returns the results that library calls allocated, by the names of their
buffers."""


class Recorder(Protocol):
    """Records launches; on a GPU as CUDA graphs."""

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        """Run it, and return the seconds until everything was launched and until everything was
        done."""
        ...

    def start(self) -> None:
        """Start a new recording: of all launches, or of several parts that share their memory."""
        ...

    def record(self, run: Launches) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Record a run without doing its work. Returns its results, and the function that does the
        work and fills them. ``RuntimeError`` if recording fails."""
        ...


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """The facts about a step that recording depends on. ``moving``: inputs that are elsewhere at
    each call; ``written``: inputs that change in place; ``room``: bytes that it may cost in
    addition to the plan; ``clear``: frees the workspaces of libraries; ``watch``: watches inputs
    that stay; ``records``: whether anything is to be recorded."""

    moving: frozenset[int]
    written: frozenset[int]
    room: int
    clear: Callable[[], None]
    watch: WatchInputs | None = None
    records: bool = True

    def steady_inputs(self, count: int, moving: frozenset[int]) -> SteadyInputs | None:
        """The steady ones of ``count`` inputs, if layouts are watched."""
        return None if self.watch is None else SteadyInputs(count, moving, self.watch)
