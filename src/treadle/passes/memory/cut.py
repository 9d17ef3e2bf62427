"""Which values to keep: a minimum cut in which recomputation has a price.

::

    source --price(v)--> v.in --bytes(v)--> v.out --inf--> u.in   for every u that reads v
                                            v.out --inf--> sink   if backward reads v

A kept value is cut at ``bytes``; a recomputed value is cut at ``price``, and then all its operands
must be on the sink's side too: kept, or recomputed. Inputs are always available and not part of the
network. The textbook formulation has an infinite price for everything that must not be recomputed;
with a finite price, the same cut finds block checkpointing automatically.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.graph.core.node_info import info
from treadle.passes.memory.classify import SaveCandidates, can_keep, is_result, must_save
from treadle.passes.memory.drawing import cut_failure
from treadle.passes.memory.fused import stored_anyway
from treadle.passes.memory.order import Facts
from treadle.util.errors import VerifyError

_LIMIT = 1 << 29  # scipy's capacities are int32: everything finite together stays below


_REMOVED = 2.0
"""A value that fusion would never store costs that many times its bytes."""
_AGE = 0.05
"""The first value of the forward pass costs ``1 + _AGE`` times its bytes, the last one 1 time: what
is close to backward is kept for less long."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Arcs of a flow network, as parallel lists; infinite capacities are ``math.inf``."""

    tail: list[int]
    head: list[int]
    capacity: list[float]

    def add(self, tail: int, head: int, capacity: float) -> None:
        """An edge from ``tail`` to ``head``."""
        self.tail.append(tail)
        self.head.append(head)
        self.capacity.append(capacity)


def cheapest_cut(
    facts: Facts,
    claims: SaveCandidates,
    prices: Sequence[float],
    *,
    products: bool = False,
    costs: Mapping[int, float] | None = None,
) -> frozenset[int]:
    """The candidates to keep. ``prices[i]``: bytes it is worth not to compute ``i`` again;
    ``costs``: what ``keeping_costs`` says, if that is known already."""
    members = sorted(claims.candidates)
    if not members:
        return frozenset()
    place = {i: 2 + 2 * k for k, i in enumerate(members)}  # in; out = in + 1
    edges = Edges([], [], [])
    if costs is None:
        costs = keeping_costs(facts, claims, stored_anyway(facts))
    for i in members:
        inner = place[i]
        once = must_save(facts, i, products=products, banned=claims.banned)
        edges.add(0, inner, math.inf if once else prices[i])
        edges.add(inner, inner + 1, costs[i])
        for operand in set(facts.operands[i]) & claims.candidates:
            edges.add(place[operand] + 1, inner, math.inf)
        if i in claims.needed:
            edges.add(inner + 1, 1, math.inf)
    try:
        sink_side = minimum_cut(edges, 2 + 2 * len(members))
    except VerifyError as error:
        chain = dict.fromkeys(members[vertex // 2 - 1] for vertex in _uncut(edges))
        if not chain:
            raise
        raise cut_failure(facts, claims, tuple(chain), products=products) from error
    return frozenset(i for i in members if sink_side[place[i] + 1] and not sink_side[place[i]])


def _uncut(edges: Edges) -> list[int]:
    """The vertices between source and sink on a path of infinite capacity, if there is one."""
    ahead: dict[int, list[int]] = {}
    for tail, head, capacity in zip(edges.tail, edges.head, edges.capacity, strict=True):
        if capacity == math.inf:
            ahead.setdefault(tail, []).append(head)
    came, found = {0: 0}, [0]
    for vertex in found:  # grows
        for head in ahead.get(vertex, ()):
            if head not in came:
                came[head] = vertex
                found.append(head)
    path: list[int] = []
    vertex = came.get(1, 0)
    while vertex:
        path.append(vertex)
        vertex = came[vertex]
    return path[::-1]


def keeping_costs(facts: Facts, claims: SaveCandidates, stored: Sequence[bool]) -> dict[int, float]:
    """Bytes, weighted. Views and containers are never kept themselves; what leaves the step
    anyway is kept for nothing."""
    members = sorted(claims.candidates)
    leaving = {i for i in facts.returned if i is not None}
    last = max(members[-1], 1) if members else 1
    costs: dict[int, float] = {}
    for i in members:
        size = facts.held_bytes(i)
        if not can_keep(facts, i):
            costs[i] = math.inf
        elif i in leaving:
            costs[i] = 0.0
        else:
            weight = 1.0 if stored[i] else _REMOVED
            costs[i] = size * weight * (1 + _AGE * (1 - i / last))
        if info(facts.nodes[i]).asked == "must_recompute" and not _is_drawn(facts, i):
            costs[i] = math.inf
    return costs


def _is_drawn(facts: Facts, i: int) -> bool:
    """A random operation or one of its results, which cannot be repeated."""
    maker = facts.operands[i][0] if is_result(facts, i) else i
    return facts.keep[maker]


def least_capacity(edges: Edges, sink_side: NDArray[np.bool_]) -> float:
    """A lower bound of the capacity of every cut of ``edges``. ``sink_side`` is the cut that
    ``minimum_cut`` found, with capacities ``c`` scaled by ``s`` and rounded up::

        s * sum(c, found) <= sum(ceil(s * c), found) <= sum(ceil(s * c), any) <= s * sum(c, any) + n

    for the ``n`` edges of finite capacity. So ``sum(c, any) >= sum(c, found) - n / s``.
    """
    ends = zip(edges.tail, edges.head, edges.capacity, strict=True)
    found = sum(
        capacity for tail, head, capacity in ends if not sink_side[tail] and sink_side[head]
    )
    rounded = sum(capacity != math.inf for capacity in edges.capacity)
    return max(found - rounded / _scale(edges), 0.0)


def _scale(edges: Edges) -> float:
    """What capacities are multiplied by, so that their sum, rounded up, is a 32-bit number."""
    finite = sum(capacity for capacity in edges.capacity if capacity != math.inf)
    return (_LIMIT - len(edges.capacity)) / max(finite, 1.0)


def minimum_cut(edges: Edges, count: int) -> NDArray[np.bool_]:
    """Which of ``count`` vertices are on the sink's side of the minimum cut nearest to it.

    Vertex 0 is the source, 1 the sink. The cut's capacity is checked against the flow.
    """
    # Here and not above: a step from the cache never needs it, and it takes 0.2 s to import.
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    scale = _scale(edges)
    whole = [
        0 if capacity == math.inf else math.ceil(capacity * scale) for capacity in edges.capacity
    ]
    infinite = sum(whole) + 1
    scaled = [
        infinite if capacity == math.inf else small
        for capacity, small in zip(edges.capacity, whole, strict=True)
    ]
    arcs = (np.array(scaled, dtype=np.int32), (edges.tail, edges.head))
    graph = csr_matrix(arcs, shape=(count, count))
    result = maximum_flow(graph, 0, 1)
    if result.flow_value >= infinite:
        raise VerifyError("a value that must not be saved cannot be recomputed either")
    residual = (graph - result.flow).tocsr()
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    reached = breadth_first_order(residual.T.tocsr(), 1, directed=True, return_predecessors=False)
    sink_side = np.zeros(count, dtype=np.bool_)
    sink_side[reached] = True
    crossing = ~sink_side[edges.tail] & sink_side[edges.head]
    if int(np.array(scaled, dtype=np.int64)[crossing].sum()) != result.flow_value:
        raise VerifyError("the minimum cut and the maximum flow differ")
    return sink_side
