"""The requirements for recording the launches of a step: a recorder, and a policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treadle.runtime.replay.unchanged_inputs import SteadyInputs, WatchInputs

Launches = Callable[[], dict[str, Tensor]]
"""Launches everything; gives the results that calls allocated, by the names of their buffers."""


class Recorder(Protocol):
    """What records launches; on a GPU CUDA does."""

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        """Run; seconds until everything was launched, and until everything was done."""
        ...

    def start(self) -> None:
        """A new recording: of all launches, or of several parts that share their memory."""
        ...

    def record(self, run: Launches) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Run without doing the work. What it gave, and what does the work, into those tensors.
        ``RuntimeError`` if that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """What a recording has to know of a step. ``moving``: inputs that are elsewhere at each call;
    ``written``: those that change in place; ``room``: bytes it may cost beside the plan's own;
    ``clear``: gives the workspaces of libraries back; ``watch``: watches inputs that stay;
    ``records``: whether anything is to be recorded."""

    moving: frozenset[int]
    written: frozenset[int]
    room: int
    clear: Callable[[], None]
    watch: WatchInputs | None = None
    records: bool = True

    def steady_inputs(self, count: int, moving: frozenset[int]) -> SteadyInputs | None:
        """Of ``count`` inputs those that stay, where layouts are watched."""
        return None if self.watch is None else SteadyInputs(count, moving, self.watch)
