"""Which nodes of a step may change places.

A wait, and views of its result, have no position of their own: they are placed before the first
node that computes with them, and so are the parts if the result is split. The results of an
operation with several results are placed after it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from treadle.compat.operators.operator_facts import Effect
from treadle.graph.core.collectives import is_same_on_all_ranks
from treadle.graph.core.operators import effects_of, is_item
from treadle.passes.comm.overlap.kept_order import updates_in
from treadle.passes.comm.simulate import Work
from treadle.passes.memory.cost import Kind

_IN_ORDER = (
    Effect.DRAWS
    | Effect.RAISES
    | Effect.CONDITION
    | Effect.READS_OUTSIDE
    | Effect.UNKNOWN
    | Effect.WRITES
)
"""Nodes with one of these keep their order among each other."""
_FOREIGN = Effect.COMMUNICATES | Effect.UNKNOWN
"""What meets other processes and is not a known collective, or may: neither collectives nor
waits change sides of it."""


@final
@dataclass(frozen=True, slots=True)
class Precedence:
    """By position in the graph; ``first``: the inputs, which stay where they are.

    ``placed``: the nodes that have a place. Of those ``before``: the ones that come earlier, by
    data or by effect; ``awaited``: the starts whose ends it needs; ``shown``: the nodes without a
    place that come before it, in their order; ``behind``: its results. ``late``: all nodes without
    a place.
    """

    first: tuple[int, ...]
    placed: tuple[int, ...]
    before: tuple[frozenset[int], ...]
    awaited: tuple[frozenset[int], ...]
    shown: tuple[tuple[int, ...], ...]
    behind: tuple[tuple[int, ...], ...]
    late: tuple[int, ...]


@dataclass(slots=True)
class _Needs:
    """What a node needs, through what has no place."""

    before: set[int]
    awaited: set[int]
    shown: set[int]

    def join(self, other: "_Needs") -> None:
        self.before |= other.before
        self.awaited |= other.awaited
        self.shown |= other.shown


def precedence_of(work: Work) -> Precedence:
    """Which nodes of a step have to come before which others."""
    nodes, makers = work.facts.nodes, _makers(work)
    first = [i for i, node in enumerate(nodes) if node.op == "placeholder"]
    late, needs = _by_data(work, makers)
    shown = set(late)
    makers = {item: maker for item, maker in makers.items() if maker not in shown}
    apart = {*first, *makers, *late}
    placed = [i for i in range(len(nodes)) if i not in apart]
    for earlier, later in _by_effect(work, placed):
        needs[later].before.add(earlier)
    _keep_updates(work, placed, needs)
    for i in placed:
        effects = effects_of(nodes[i])
        if effects & (_FOREIGN | Effect.WRITES) and i not in work.starts:
            _keep_waits(i, late, needs)
        if Effect.WRITES in effects:
            _keep_sides(i, placed, needs)
    behind: list[list[int]] = [[] for _ in nodes]
    for item, maker in makers.items():
        behind[maker].append(item)
    return Precedence(
        tuple(first),
        tuple(placed),
        tuple(frozenset(need.before.difference(first)) for need in needs),
        tuple(frozenset(need.awaited) for need in needs),
        tuple(tuple(sorted(need.shown)) for need in needs),
        tuple(map(tuple, behind)),
        tuple(late),
    )


def _by_data(work: Work, makers: Mapping[int, int]) -> tuple[list[int], list[_Needs]]:
    """The nodes without a place, and what each node of a step needs for its operands."""
    late: dict[int, None] = {}
    needs: list[_Needs] = []
    for i, operands in enumerate(work.facts.operands):
        own = _Needs(set(), set(), set())
        for operand in operands:
            if operand in late:
                own.join(needs[operand])
                own.shown.add(operand)
            else:
                own.before.add(makers.get(operand, operand))
        if i in work.awaits:
            own.awaited.add(work.awaits[i])
            late[i] = None
        elif own.shown and _shows(work, i, makers, late):
            late[i] = None
        needs.append(own)
    return [*late], needs


def _shows(work: Work, i: int, makers: Mapping[int, int], late: Collection[int]) -> bool:
    """Whether it is a view, and no result of an operation that has a place."""
    return work.facts.kinds[i] is Kind.VIEW and (i not in makers or makers[i] in late)


def _makers(work: Work) -> dict[int, int]:
    """The operation that made each single result of several, by the result."""
    makers: dict[int, int] = {}
    for i, node in enumerate(work.facts.nodes):
        if is_item(node):
            source = work.facts.operands[i][0]
            makers[i] = makers.get(source, source)
    return makers


def _by_effect(work: Work, placed: Iterable[int]) -> list[tuple[int, int]]:
    """Pairs that keep their order: of draws, checks and users' operators; and of collectives with
    what may be one that nobody knows of: all ranks must meet in one order. Where their graphs
    differ, of collectives with each other."""
    pairs: list[tuple[int, int]] = []
    if not is_same_on_all_ranks(work.facts.step):
        pairs += pairwise([i for i in placed if i in work.starts])
    ordered: int | None = None
    foreign: int | None = None
    starts: list[int] = []
    for i in placed:
        effects = effects_of(work.facts.nodes[i])
        if effects & _IN_ORDER:
            pairs += [(ordered, i)] if ordered is not None else []
            ordered = i
        if i in work.starts:
            pairs += [(foreign, i)] if foreign is not None else []
            starts.append(i)
        elif effects & _FOREIGN:
            pairs += [(start, i) for start in (*starts, foreign) if start is not None]
            foreign, starts = i, []
    return pairs


def _keep_updates(work: Work, placed: list[int], needs: list[_Needs]) -> None:
    """Updates come when the collectives are over that start ahead of the first of them: see
    ``updates_in``."""
    updates = {*updates_in(work.facts.step)}
    places = [i for i in placed if work.facts.nodes[i] in updates]
    early = {i for i in work.starts if places and i < places[0]}
    waits = {wait for wait, start in work.awaits.items() if start in early}
    for i in places:
        needs[i].shown |= waits
        needs[i].before |= early
        needs[i].awaited |= early


def _keep_waits(i: int, late: list[int], needs: list[_Needs]) -> None:
    """Waits stay before ``i``: nothing more is on its way beside it, and none reads what it
    writes."""
    for node in late:
        if node < i:
            needs[i].join(needs[node])
            needs[i].shown.add(node)


def _keep_sides(wall: int, placed: list[int], needs: list[_Needs]) -> None:
    """Nothing moves across ``wall``."""
    for node in placed:
        if node < wall:
            needs[wall].before.add(node)
        elif node > wall:
            needs[node].before.add(wall)
