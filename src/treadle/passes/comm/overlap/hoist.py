"""D2: a collective starts as soon as it can."""

from dataclasses import dataclass
from typing import final

from torch import fx

from treadle.graph.core.collectives import collective_of, collectives_in, is_same_on_all_ranks
from treadle.graph.core.node_info import info
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.order import arrange
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.comm.blocks import rearranges, views_towards
from treadle.passes.comm.overlap.in_flight import InFlight
from treadle.passes.comm.overlap.kept_order import is_fence
from treadle.passes.memory.cost import Kind, kind_of

_OrderKey = tuple[int, int, int]
"""A position of the graph as it was; of the collective that moved there, 0 for what stays; of the
node itself."""


@dataclass(frozen=True)
class HoistCollectives(GraphPass):
    """Each collective stands right behind the last value that others compute for it.

    before:  g = mm(x, y); a = mm(x, g); b = relu(a); s = mul(g, 0.5); r = all_reduce(s, "sum", "0")
    after:   g = mm(x, y); s = mul(g, 0.5); r = all_reduce(s, "sum", "0"); a = mm(x, g); b = relu(a)

    What is computed element by element, and for collectives alone, goes with them, and so do views
    of an input. Of several that are ready at the same place, the first stays the first; where the
    graphs of ranks differ, all keep their order, which is all that ranks have in common. Parameters
    that are gathered for a while (``gather_again.py``) are gathered where they were. None
    passes a user's operator, or communication that is not a functional collective: see
    ``kept_order.py``. ``in_flight_bytes``: a collective starts no earlier than what is under way
    with it allows; what was more than that before stays as it is.

    Memory: an input is read earlier, and so lives no longer than it did. The result has its memory
    from the start on, so it lives longer, by as much as the collective moves: that is what
    ``in_flight_bytes`` bounds.
    """

    contract = Contract()

    in_flight_bytes: int | None = None

    def run(self, step: StepGraph) -> int:
        nodes = list(step.graph.nodes)
        hoisted = _Hoisted(step, self.in_flight_bytes)
        order = hoisted.order()
        if order == nodes:
            return 0
        was = {node: at for at, node in enumerate(nodes)}
        arrange(nodes, order)
        return sum(hoisted.may_move(node) and at < was[node] for at, node in enumerate(order))


@final
class _Hoisted:
    """Where each node stands: at its position, or behind what has the position that it moves to."""

    def __init__(self, step: StepGraph, in_flight_bytes: int | None) -> None:
        self._graph = step.graph
        self._keeps_order = not is_same_on_all_ranks(step)
        self._flight = InFlight(step.graph, in_flight_bytes)
        self._companions = _companions(step.graph)
        self._behind = len(step.placeholders) - 1  # or the last fence: nothing moves to before it
        self._place: dict[fx.Node, _OrderKey] = {}
        self._ready: dict[fx.Node, int] = {}  # of companions: where they could stand

    def may_move(self, node: fx.Node) -> bool:
        """Whether it is a collective, or goes with one."""
        return node in self._companions or collective_of(node) is not None

    def order(self) -> list[fx.Node]:
        """All nodes."""
        last = 0  # where the collective before stands
        for at, node in enumerate(self._graph.nodes):
            self._place[node] = at, 0, at
            if node in self._companions:
                self._ready[node] = self._ready_for(node)
            elif info(node).gathered is not None:
                last = at if collective_of(node) is not None else last
            elif collective_of(node) is not None:
                start = int(self._flight.start_early(node, self._ready_for(node) + 0.5))
                last = max(last, start) if self._keeps_order else start
                self._move(node, (last, at))
            elif is_fence(node):
                self._behind = at
        return sorted(self._place, key=self._place.__getitem__)

    def _ready_for(self, node: fx.Node) -> int:
        """The position after which all operands of ``node`` exist."""
        known = [
            self._ready.get(operand, self._place[operand][0]) for operand in node.all_input_nodes
        ]
        return max(self._behind, *known) if known else self._behind

    def _move(self, node: fx.Node, to: tuple[int, int]) -> None:
        """``node``, and what goes with it, unless they stand there or earlier already."""
        pending = [node]
        while pending:
            current = pending.pop()
            place = *to, self._place[current][2]
            if place < self._place[current]:
                self._place[current] = place
                pending += [
                    operand for operand in current.all_input_nodes if operand in self._companions
                ]


def _companions(graph: fx.Graph) -> set[fx.Node]:
    """What may go with collectives: views of what they read, and what is computed for collectives
    alone, element by element."""
    starts = collectives_in(graph)
    nodes = views_towards(input_ for start in starts for input_ in start.inputs)
    serving = {start.node for start in starts}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not node.users or not serving.issuperset(node.users):
            continue
        if kind_of(node) in (Kind.POINTWISE, Kind.VIEW) or rearranges(node):
            serving.add(node)
            nodes.add(node)
    return nodes
