"""D4: a wait is placed where its result is needed."""

from dataclasses import dataclass
from math import ceil

from torch import fx

from treadle.graph.core.collectives import Collective, CollectiveKind, collectives_in, is_wait
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.order import arrange
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.comm.blocks import is_view
from treadle.passes.comm.overlap.in_flight import InFlight
from treadle.passes.comm.overlap.kept_order import is_fence, updates_in

_OrderKey = tuple[int, int, int]


@dataclass(frozen=True)
class SinkWaits(GraphPass):
    """Each wait stands just ahead of the first operation that reads its result.

    before:  r = all_reduce(s, "sum", "0"); w = wait(r); v = t(w); a = mm(x, y); b = add(v, a)
    after:   r = all_reduce(s, "sum", "0"); a = mm(x, y); w = wait(r); v = t(w); b = add(v, a)

    A view reads nothing: it goes with the wait, and who reads the view counts. What is returned is
    waited for at the end. None passes a user's operator, or communication that is not a functional
    collective: see ``kept_order.py``. A wait that nobody reads stays. ``in_flight_bytes``: a wait
    goes no farther than to the start of the collective that would be too much with its own; what
    was more than that before stays as it is.

    Memory: the input of a collective, or the bucket that it sends, lives until the wait, since
    nothing says earlier that it has been sent. So it lives longer, by as much as the wait moves:
    that is what ``in_flight_bytes`` bounds. The result has its memory since the start, either way.
    A reduce-scatter sends more than it gives: it is waited for at the latest where the next one of
    its group has started, which cannot begin to send before. So no more than two are there at once,
    and a wait that stands behind that place goes back to it, unless a bound is given.
    And no wait stands behind the first update, which is computed behind all of them anyway.
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
        return sum(node in moved and at > was[node] for at, node in enumerate(order))

    def _order(self, step: StepGraph) -> list[fx.Node]:
        """All nodes by place. At one place, nodes that move there come before those that stay."""
        graph = step.graph
        wanted = _wanted(graph)
        for limits in (_behind_the_next(graph), _ahead_of_updates(step)):
            for wait in wanted.keys() & limits.keys():
                wanted[wait] = min(limits[wait], wanted[wait])
        place: dict[fx.Node, _OrderKey] = {node: (at, 1, 0) for at, node in enumerate(graph.nodes)}
        for node, (at, _, _) in list(place.items()):
            if node in wanted and wanted[node] > at:
                place[node] = wanted[node], 0, at
        if self.in_flight_bytes is not None:
            self._hold_back(graph, place)
        else:
            position = {node: at for at, node in enumerate(graph.nodes)}
            place |= {wait: (at, 0, position[wait]) for wait, at in _too_late(graph).items()}
        return sorted(place, key=place.__getitem__)

    def _hold_back(self, graph: fx.Graph, place: dict[fx.Node, _OrderKey]) -> None:
        """Put the waits that went too far nearer to where they were. The last collective first:
        then what started first is waited for first, and something is always under way."""
        flight = InFlight(graph, self.in_flight_bytes)
        position = {node: at for at, node in enumerate(graph.nodes)}
        for collective in reversed(collectives_in(graph)):
            waits = sorted(collective.waits, key=position.__getitem__)
            end = max((_spot(place[wait]) for wait in waits), default=0.0)
            allowed = flight.end_late(collective.node, end)
            for wait in waits:
                if _spot(place[wait]) > allowed:
                    at, limit = position[wait], ceil(allowed)
                    place[wait] = (limit, 0, at) if limit > at else (at, 1, 0)


def _behind_the_next(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each wait for a reduce-scatter: where the next one of its group has started."""
    targets: dict[fx.Node, int] = {}
    latest: dict[str, Collective] = {}
    position = {node: at for at, node in enumerate(graph.nodes)}
    for collective in collectives_in(graph):
        if collective.kind is CollectiveKind.REDUCE_SCATTER:
            before = latest.get(collective.group)
            targets |= dict.fromkeys(before.waits if before else (), position[collective.node] + 1)
            latest[collective.group] = collective
    return targets


def _too_late(graph: fx.Graph) -> dict[fx.Node, int]:
    """Waits that stand behind ``_behind_the_next``, with something else in between, and where they
    go: there, or behind the last fence."""
    nodes = list(graph.nodes)
    position = {node: at for at, node in enumerate(nodes)}
    too_late: dict[fx.Node, int] = {}
    for wait, limit in _behind_the_next(graph).items():
        between = nodes[limit : position[wait]]
        fences = [position[node] + 1 for node in between if is_fence(node)]
        at = max([limit, *fences])
        if not all(map(is_wait, nodes[at : position[wait]])):
            too_late[wait] = at
    return too_late


def _ahead_of_updates(step: StepGraph) -> dict[fx.Node, int]:
    """For each wait for what is under way there: where the first update stands."""
    position = {node: at for at, node in enumerate(step.graph.nodes)}
    updates = updates_in(step)
    if not updates:
        return {}
    first = position[updates[0]]
    early = [
        collective for collective in collectives_in(step.graph) if position[collective.node] < first
    ]
    return {wait: first for collective in early for wait in collective.waits}


def _spot(place: _OrderKey) -> float:
    """Between which positions that is: ahead of one is half a position less."""
    at, stays, _ = place
    return at if stays else at - 0.5


def _movable(graph: fx.Graph) -> set[fx.Node]:
    """Waits that somebody reads, and views of them."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        of_wait = is_view(node) and nodes.issuperset(node.all_input_nodes)
        if node.users and (is_wait(node) or of_wait):
            nodes.add(node)
    return nodes


def _wanted(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node that may move: the position of the first that reads it or its views."""
    movable = _movable(graph)
    nodes = list(graph.nodes)
    first: dict[fx.Node, int] = {}
    position = {node: at for at, node in enumerate(nodes)}
    fence = len(nodes)
    for node in reversed(nodes):
        if node in movable:
            limit = fence if is_wait(node) else len(nodes)
            first[node] = min([limit, *(first.get(user, position[user]) for user in node.users)])
        elif is_fence(node):
            fence = position[node]
    return first
