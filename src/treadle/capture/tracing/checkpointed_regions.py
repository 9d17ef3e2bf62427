"""Regions of a step that ``checkpoint`` runs a second time in the backward pass."""

from collections.abc import Callable
from typing import final

from torch.utils.checkpoint import CheckpointPolicy

from treadle.compat.tracing import traced_nodes

Span = tuple[int, int]
"""Nodes of a trace, by their numbers: from one to before another."""


@final
class CheckpointedRegions:
    """The regions of one run. ``again``: nodes of second runs. ``marks``: the requests of a policy
    for nodes."""

    def __init__(self) -> None:
        self.again: list[Span] = []
        self.marks: list[tuple[Span, CheckpointPolicy]] = []
        self.hears: Callable[[bool], None] = lambda _: None  # that a region runs again, or ends
        self._began: int | None = None

    def begin(self) -> None:
        """A second run of a region begins here."""
        self.end()  # a region within a region
        self._began = traced_nodes()
        self.hears(True)

    def end(self) -> None:
        """The second run ends here."""
        if self._began is not None:
            self.hears(False)
            self.again.append((self._began, traced_nodes()))
        self._began = None

    def mark(self, start: int, policy: CheckpointPolicy) -> None:
        """Note the request of a policy for the nodes from ``start`` on."""
        self.marks.append(((start, traced_nodes()), policy))
