"""D2: a collective starts as soon as it can."""

from dataclasses import dataclass

from torch import fx

from treadle.graph.collectives import collective_of, collectives_in
from treadle.graph.order import arrange
from treadle.graph.passes import Contract, GraphPass
from treadle.graph.signature import StepGraph
from treadle.passes.comm.blocks import views_towards
from treadle.passes.comm.in_flight import InFlight
from treadle.passes.comm.kept_order import is_fence


@dataclass(frozen=True)
class HoistCollectives(GraphPass):
    """Each collective stands right behind the last of its inputs.

    before:  s = mul(g, 0.5); a = mm(x, y); b = relu(a); r = all_reduce(s, "sum", "0")
    after:   s = mul(g, 0.5); r = all_reduce(s, "sum", "0"); a = mm(x, y); b = relu(a)

    Views of an input go with it. Of several that are ready at the same place, the first stays the
    first. None passes a user's operator, or communication that is no functional collective: see
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
        order = self._order(step)
        if order == nodes:
            return 0
        was = {node: at for at, node in enumerate(nodes)}
        moved = _movable(step.graph)
        arrange(nodes, order)
        return sum(node in moved and at < was[node] for at, node in enumerate(order))

    def _order(self, step: StepGraph) -> list[fx.Node]:
        """All nodes; by place, and behind what stays at a place those that move there."""
        movable = _movable(step.graph)
        flight = InFlight(step.graph, self.in_flight_bytes)
        behind = len(step.placeholders) - 1  # or the last fence: nothing moves to before it
        place: dict[fx.Node, tuple[int, int]] = {}
        for at, node in enumerate(step.graph.nodes):
            place[node] = at, 0
            if node in movable:
                ready = max([behind, *(place[each][0] for each in node.all_input_nodes)])
                start = ready + 0.5
                if collective_of(node) is not None:
                    start = flight.start_early(node, start)
                if start < at:
                    place[node] = int(start), at + 1
            elif is_fence(node):
                behind = at
        return sorted(place, key=place.__getitem__)


def _movable(graph: fx.Graph) -> set[fx.Node]:
    """Collectives, and the views that they read."""
    starts = collectives_in(graph)
    views = views_towards(given for each in starts for given in each.inputs)
    return views | {each.node for each in starts}


__all__ = ["HoistCollectives"]
