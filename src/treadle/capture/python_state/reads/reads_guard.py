"""Whether a later call finds what a captured run read.

The same objects must be in the same places; other objects in these places must have the same type
and equal contents, recursively.
"""

from collections.abc import Iterator
from typing import final

from treadle.capture.python_state.computed_parts import Computed
from treadle.capture.python_state.reads.guarded_parts import GuardedParts
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.object_match import Match
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.guards.watching import Watches


@final
class ReadsGuard:
    """The check of a graph that has been settled. ``graph`` follows equal objects that stand where
    others stood."""

    def __init__(self, graph: ReadsGraph) -> None:
        self.graph = graph
        self._parts = GuardedParts(graph.nodes)

    def hold(self) -> bool:
        """Whether nothing has changed."""
        match = Match(self.graph.by_identity)
        if any(True for _ in self._differences(match)):
            return False
        self._parts.accept()
        for node, at in match.renewed:
            self.graph.renew(node, at, node.watched[at].part)
        if moved := match.held():
            self.graph.rebind(moved)
            self._parts = GuardedParts(self.graph.nodes)
        return True

    def join(self, watches: Watches) -> bool:
        """All of it, while the very same objects are there, but for what is found anew at every
        call; whether that can be said."""
        seen = self._parts.join(watches, self.graph.by_identity)
        if seen is None:
            return False
        self.graph.tensors.join(watches, seen)
        return True

    def changed(self) -> list[str]:
        """The differences, in words; empty if there are none."""
        return list(self._differences(Match(self.graph.by_identity)))

    def other_numbers(self) -> list[Location]:
        """The places of numbers, and of arrays with numbers, that have changed."""
        match = Match(self.graph.by_identity)
        list(self._differences(match))
        locations = match.numbers
        for array in match.arrays:
            for node, at in self.graph.holders_of([array]):
                watched = node.watched[at]
                if watched.part.settable and node.parts is None:
                    names = [name for name, entry in watched.held.items() if entry is array]
                    where = watched.part.where
                    locations += [Location(node, at, name, where(name), True) for name in names]
        return locations

    def _differences(self, match: Match) -> Iterator[str]:
        parts = self._parts.polled
        if not self._parts.are_untouched():
            yield from self._parts.other_classes()
            parts = self._parts.written() + parts
        for node, at in parts:
            watched = node.watched[at]
            now = watched.now()
            if watched.is_same(now):
                continue
            if match.part(node, at, watched, now):
                if not isinstance(watched.part, Computed):  # it is another object at each reading
                    match.renewed.append((node, at))
            else:
                yield match.said()
        for node in self._parts.given:
            if not match.object(node, node.current()):
                yield match.said()
        yield from self.graph.tensors.differences()
        holders = self.graph.holders_of(node for node, _ in match.held())
        if not all(match.holds_throughout(node, at) for node, at in holders):
            yield match.said()
