"""The parts of a graph of objects, arranged by how a call checks that they are unchanged."""

from collections.abc import Iterator, Mapping
from typing import final

from torch import Tensor

from treadle.capture.integrations.registry import all_of
from treadle.capture.python_state.computed_parts import Computed
from treadle.capture.python_state.reads.identity_guards import IdentityGuards
from treadle.capture.python_state.reads.object_graph import Node, Space, Watched
from treadle.capture.python_state.reads.object_match import AlikePart, tensors_within
from treadle.guards.watching import Watches
from treadle.util.errors import with_article

_UNCHANGEABLE = (tuple, frozenset, *all_of(lambda integration: integration.unchangeable))
"""Parts that are immutable."""


@final
class GuardedParts:
    """Flat lists. Parts whose memory words tell whether they were written to; ``polled``: parts
    that every call looks at; ``given``: objects that a call brings.

    They are of the objects that the graph has now: where it is bound to others, they are arranged
    again.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self.polled: list[tuple[Node, int]] = []
        self.given = [node for node in nodes if node.getter is not None]
        self._identities = IdentityGuards()
        self._of_words: list[tuple[Node, int]] = []  # by their numbers there
        for node in nodes:
            if not node.is_found_anew:
                self._arrange(node)
        self._identities.settle()

    def _arrange(self, node: Node) -> None:
        if type(node.value) is not Space:  # one of those here
            self._identities.add_type(node.value)
        for at, watched in enumerate(node.watched):
            if watched.names == frozenset():
                continue  # whatever is there
            if any(isinstance(e, Node) and e.is_found_anew for e in watched.held.values()):
                self.polled.append((node, at))
            elif self._identities.add(watched.part, node.value, len(self._of_words)):
                self._of_words.append((node, at))
            elif watched.part.settable or not isinstance(node.value, _UNCHANGEABLE):
                self.polled.append((node, at))

    def are_untouched(self) -> bool:
        """Whether no memory word shows a write."""
        return self._identities.is_same()

    def other_classes(self) -> Iterator[str]:
        """Objects that have another class, or another dict of attributes, in words."""
        for value, kind in self._identities.other_types():
            yield f"{with_article(kind.__name__)} became {with_article(type(value).__name__)}"
        for value in self._identities.other_spaces():
            yield f"{with_article(type(value).__name__)} got another __dict__"

    def written(self) -> list[tuple[Node, int]]:
        """The parts that were written to."""
        return [self._of_words[number] for number in self._identities.differing()]

    def accept(self) -> None:
        """Accept the present contents of parts that were written to."""
        self._identities.accept()

    def join(self, watches: Watches, nodes: Mapping[int, Node]) -> dict[int, Tensor] | None:
        """All of them, while the very same objects are there, but for what is found anew at every
        call; ``None`` if that cannot be said. ``nodes``: by the ids of their objects. The tensors
        of parts that are watched already, by the ids of their facts."""
        if self.given:
            return None
        parts: list[Watched | AlikePart] = []
        for node, at in self.polled:
            watched = node.watched[at]
            by_raw = watched.raw is not None or isinstance(watched.part, Computed)
            parts.append(watched if by_raw else AlikePart(nodes, watched))
        if not all(part.is_now_same() for part in parts):
            return None
        seen: dict[int, Tensor] = {}
        for (node, at), part in zip(self.polled, parts, strict=True):
            watched = node.watched[at]
            there = tensors_within(watched.part, watched.held, watches.whole)
            if there is None:
                watches.polled.append(part.is_now_same)
            else:
                seen |= there
        anew = {
            number: AlikePart(nodes, node.watched[at])
            for number, (node, at) in enumerate(self._of_words)
            if node.watched[at].raw is None
        }
        self._identities.join(watches, lambda number: self._is_untouched(number, anew.get(number)))
        return seen

    def _is_untouched(self, number: int, anew: AlikePart | None) -> bool:
        """Of a part that was written to: whether what counts of it is the very same, but for what
        comes and goes."""
        node, at = self._of_words[number]
        return node.watched[at].is_untouched() if anew is None else anew.is_now_same()
