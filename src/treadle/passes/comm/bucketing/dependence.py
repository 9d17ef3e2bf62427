"""Which collectives may be bucketed without creating a dependency cycle.

::

    r = all_reduce(a); w = wait(r); b = mul(w, c); s = all_reduce(b)      s depends on r

Joining two collectives contracts two nodes into one; a cycle may go through several contracted
nodes. ``a, b`` are joined already: ``c, d`` may not be if ``c`` depends on ``a`` and ``b`` on
``d``, though neither of the two depends on the other::

    a -> c        b <- d

Each start and each wait has a bit, and each set of nodes is one integer.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import final

from torch import fx

from treadle.graph.core.collectives import collectives_in
from treadle.graph.rewrite.order import Earlier


@final
class Dependence:
    """What each of some collectives depends on among the others, with those drawn together that
    were joined so far.

    ``pairs``: start and wait of each. ``earlier``: what must stand before a node though no value
    says so, in an order that the graph has.
    """

    def __init__(
        self, graph: fx.Graph, pairs: Sequence[tuple[fx.Node, fx.Node]], earlier: Earlier
    ) -> None:
        nodes = [node for pair in pairs for node in pair]
        bits = {node: 1 << at for at, node in enumerate(nodes)}
        behind: dict[fx.Node, int] = {}  # what a node depends on, itself included
        for node in graph.nodes:
            needed = bits.get(node, 0)
            for operand in (*node.all_input_nodes, *earlier.get(node, ())):
                needed |= behind[operand]
            behind[node] = needed
        self._together = list(bits.values())
        self._needs = [behind[node] & ~bits[node] for node in nodes]

    def may_join(self, left: int, right: int) -> bool:
        """Whether the pairs ``left`` and ``right`` (by their places in ``pairs``), with all that
        each was joined with, may become one."""
        return not any(self._circular(2 * left + side, 2 * right + side) for side in (0, 1))

    def join(self, left: int, right: int) -> None:
        """Join the pairs ``left`` and ``right``."""
        for side in (0, 1):
            one, other = 2 * left + side, 2 * right + side
            together = self._together[one] | self._together[other]
            needs = self._needs[one] | self._needs[other]
            for bit in _bits_of(together):
                self._together[bit] = together
                self._needs[bit] = needs

    def _circular(self, left: int, right: int) -> bool:
        """Whether one of the two depends on the other, directly or not."""
        together = self._together[left] | self._together[right]
        reached, pending = 0, self._needs[left] | self._needs[right]
        while pending:
            lowest = (pending & -pending).bit_length() - 1
            reached |= self._together[lowest]
            pending |= self._needs[lowest]
            pending &= ~reached
        return bool(reached & together)


def joined_sequence(
    graph: fx.Graph, joined: Iterable[Sequence[fx.Node]], earlier: Earlier
) -> list[fx.Node]:
    """An order for the collectives of a graph, after some are joined. A collective comes before
    those that need it; otherwise the group whose last member starts first comes first. The last
    member stands for a group.

    ::

        a; b; c = f(wait(b)); d           joined: a and d        ->  b, c, d

    ``joined``: the starts of each group, in the graph's order; no group may need itself. What comes
    of it depends on the order of collectives and on which of them need which, and on no other node.
    """
    starts = [collective.node for collective in collectives_in(graph)]
    place = {node: at for at, node in enumerate(starts)}
    last = {at: at for at in range(len(starts))}  # the last member of the group of each
    last |= {place[node]: place[group[-1]] for group in joined for node in group}
    behind: dict[fx.Node, int] = {}
    needs: dict[int, set[int]] = {}  # what all of a group need, by last members
    for node in graph.nodes:
        emitted = 0
        for operand in (*node.all_input_nodes, *earlier.get(node, ())):
            emitted |= behind[operand]
        behind[node] = emitted
        if node in place:
            group = last[place[node]]
            needs.setdefault(group, set()).update(last[at] for at in _bits_of(emitted))
            behind[node] |= 1 << place[node]
    missing = {group: len(others - {group}) for group, others in needs.items()}
    behind_of: dict[int, list[int]] = {group: [] for group in needs}
    for group, others in needs.items():
        for other in others - {group}:
            behind_of[other].append(group)
    ready = [group for group, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        first = heapq.heappop(ready)
        order.append(starts[first])
        for group in behind_of[first]:
            missing[group] -= 1
            if not missing[group]:
                heapq.heappush(ready, group)
    return order


def _bits_of(number: int) -> list[int]:
    """``0b1010`` -> ``[1, 3]``."""
    return [at for at in range(number.bit_length()) if number >> at & 1]
