"""Communication blocks: a collective, its waits, and what only rearranges their results.

::

    s = mul(g, 0.5)                                         an input
    r = all_gather(s, 2, "0"); w = wait(r)                  the collective, its wait
    p = split(w, 4); a = p[0]; b = p[1]; t = cat([a, b], 1) the tail; ``t`` is the output
    y = mm(x, t)                                            no part of it

Found by what operators are and who reads whom: neither names of nodes nor distances matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.graph.analysis.alias import storages
from treadle.graph.core.collectives import Collective, collective_of, is_wait
from treadle.graph.core.dim_maps import JOINS, MOVES
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import effects_of, is_item

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class CommunicationBlock:
    """One collective with its ``waits`` and its ``tail``, both in the order of the graph.

    The tail is what reads nothing but the results that were waited for, and each other, and only
    rearranges elements: views, pieces, and copies of them beside each other.
    """

    collective: Collective
    waits: tuple[fx.Node, ...]
    tail: tuple[fx.Node, ...]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What this rank gives."""
        return self.collective.inputs

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All of it. The results of a coalesced collective, one node each, stand behind it."""
        start = self.collective.node
        items = self.collective.results if self.collective.coalesced else ()
        return start, *items, *self.waits, *self.tail

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """What is read from outside, the step's return included."""
        own = set(self.nodes)
        return tuple([each for each in self.nodes if not own.issuperset(each.users)])


def blocks_in(graph: fx.Graph) -> list[CommunicationBlock]:
    """The blocks of the graph, in the order in which their collectives start."""
    found: dict[fx.Node, tuple[Collective, list[fx.Node], list[fx.Node]]] = {}
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        collective = collective_of(node)
        if collective is not None:
            found[node] = collective, [], []
            owner[node] = node
            continue
        owners = {owner.get(each) for each in node.all_input_nodes}
        start = owners.pop() if len(owners) == 1 else None
        if start is None:
            continue
        _, waits, tail = found[start]
        if is_wait(node):
            waits.append(node)
        elif is_item(node) and node.args[0] is start:
            pass  # one of several results: nobody may read it yet
        elif rearranges(node):
            tail.append(node)
        else:
            continue
        owner[node] = start
    return [CommunicationBlock(c, tuple(w), tuple(t)) for c, w, t in found.values()]


def rearranges(node: fx.Node) -> bool:
    """Whether the node gives the elements of its operands and nothing else: views of them, or
    copies."""
    return is_view(node) or node.target in MOVES or node.target in JOINS


def is_view(node: fx.Node) -> bool:
    """Whether the node shows elements of its one operand, in its memory; also one that gives
    several such, and an item of those."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or effects_of(node):
        return False
    (operand,) = node.all_input_nodes
    return bool(storages(value_of(node)) & storages(value_of(operand)))


def views_towards(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The views that ``nodes`` are, and those that they are views of."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and is_view(node):
            found.add(node)
            pending += node.all_input_nodes
    return found


__all__ = [
    "CommunicationBlock",
    "blocks_in",
    "is_view",
    "rearranges",
    "views_towards",
]
