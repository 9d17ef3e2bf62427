"""Regions of a step that run a second time in its backward pass, as ``checkpoint`` has it."""

from collections.abc import Callable
from typing import final

from torch.utils.checkpoint import CheckpointPolicy

from treadle.compat.tracing import traced_nodes

Span = tuple[int, int]
"""Nodes of a trace, by their numbers: from one to before another."""


@final
class CheckpointedRegions:
    """Those of one run. ``again``: nodes of second runs. ``marks``: what a policy says of nodes."""

    def __init__(self) -> None:
        self.again: list[Span] = []
        self.marks: list[tuple[Span, CheckpointPolicy]] = []
        self.hears: Callable[[bool], None] = lambda _: None  # that a region runs again, or ends
        self._began: int | None = None

    def begin(self) -> None:
        """A region runs again from here on."""
        self.end()  # a region within a region
        self._began = traced_nodes()
        self.hears(True)

    def end(self) -> None:
        """No region runs from here on."""
        if self._began is not None:
            self.hears(False)
            self.again.append((self._began, traced_nodes()))
        self._began = None

    def mark(self, start: int, policy: CheckpointPolicy) -> None:
        """What a policy says of the nodes from ``start`` on."""
        self.marks.append(((start, traced_nodes()), policy))
