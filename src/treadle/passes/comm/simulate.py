"""A step on a timeline: one stream of compute, and a stream of each group's collectives.

::

    compute     | mm  | mm  | mm  |.....| add |         waits: until what they wait for has ended
    group 0        |  all_reduce  |  all_reduce |        each after the one before it

    exposed  =  union of the groups' intervals  minus  union of compute's intervals

A collective starts when the compute before it and the earlier collectives of its group have ended;
only its waits, and the end of the step, wait for it. So the step takes the time of its compute plus
the exposed time, which is never a sum of the collectives' own times.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import fx

from treadle.graph.core.collectives import Collective, CollectiveKind, collectives_in, is_wait
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import is_item, operation_name
from treadle.graph.core.signature import StepGraph
from treadle.passes.comm.cost import CommunicationModel
from treadle.passes.memory.cost import Kind
from treadle.passes.memory.order import Facts, as_traced, facts_of
from treadle.passes.memory.simulate import timeline
from treadle.targets.model import DeviceModel

Interval = tuple[float, float]
_BESIDE = 6
"""So many operations are named that hide a collective."""


@final
@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """An operation that takes time; ``start`` and ``end`` are seconds after the start of the
    step."""

    node: str
    operation: str
    phase: str
    module: str
    start: float
    end: float


@final
@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """A collective: ``issued`` when compute reached it, in flight from ``start`` to ``end``, and
    ``awaited`` when compute reached its first wait (``None`` without a wait).

    ``exposed``: seconds during which nothing is computed. ``beside``: the operations that overlap
    with it, the longest overlap first, with their seconds.
    """

    node: str
    kind: CollectiveKind
    group: str
    nbytes: int
    phase: str
    module: str
    issued: float
    start: float
    end: float
    awaited: float | None
    exposed: float
    beside: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """How long it is in flight."""
        return self.end - self.start

    @property
    def hidden(self) -> float:
        """Seconds that overlap with compute."""
        return max(self.seconds - self.exposed, 0.0)


@final
@dataclass(frozen=True, slots=True)
class CommunicationTimeline:
    """A step's compute and collectives, in the order of the step.

    ``seconds``: the whole step. ``communication_seconds``: the union of the collectives' intervals;
    ``exposed_seconds``: the part of it without compute. ``inflation_seconds``: how much slower
    compute is because of concurrent communication. ``in_flight_bytes``: the maximum of bytes that
    were sent and not yet waited for, with the larger side of each collective. ``peak_bytes``: the
    memory planner's prediction for this order, in which the inputs of a collective live until its
    wait. ``groups``: each group of the step, and the source of its costs as text.
    """

    compute: tuple[ComputeSpan, ...]
    collectives: tuple[CollectiveSpan, ...]
    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    inflation_seconds: float
    in_flight_bytes: int
    peak_bytes: int
    groups: tuple[tuple[str, str], ...] = ()

    @property
    def hidden_seconds(self) -> float:
        """The communication that overlaps with compute."""
        return max(self.communication_seconds - self.exposed_seconds, 0.0)

    @property
    def exposed_share(self) -> float:
        """The share of communication that does not overlap with compute: 0.0 to 1.0; 0.0 if there
        is none."""
        return self.exposed_seconds / self.communication_seconds if self.exposed_seconds else 0.0


@final
@dataclass(frozen=True, slots=True)
class Started:
    """The start of a collective, as orders are compared by: which stream, seconds, bytes."""

    channel: str
    seconds: float
    nbytes: int


@final
@dataclass(frozen=True)
class Work:
    """A step as plain numbers, by position in its graph: planning tries many orders of it.

    ``seconds``: of compute; nothing for starts and waits. ``starts``: by the position of the start;
    ``awaits``: by the position of a wait, that of the start. In ``facts`` a wait shows the bytes of
    what it waits for, and reads what the collective reads.
    """

    facts: Facts
    seconds: tuple[float, ...]
    starts: Mapping[int, Started]
    awaits: Mapping[int, int]
    collectives: Mapping[int, Collective]
    costs: CommunicationModel


@final
@dataclass(frozen=True, slots=True)
class TimedOrder:
    """When things happen in one order: by position, ``(start, end)`` of compute and of collectives;
    when a collective was issued and first awaited; and the end of all."""

    compute: Mapping[int, Interval]
    collectives: Mapping[int, Interval]
    issued: Mapping[int, float]
    awaited: Mapping[int, float]
    seconds: float
    in_flight_bytes: int


def work_of(step: StepGraph, costs: CommunicationModel, device: DeviceModel) -> Work:
    """What a timeline of the step asks, with the compute of ``device``."""
    facts = facts_of(step)
    index = {node: i for i, node in enumerate(facts.nodes)}
    collectives = {index[collective.node]: collective for collective in collectives_in(step.graph)}
    starts = {
        i: Started(collective.group, costs.seconds(collective), collective.nbytes)
        for i, collective in collectives.items()
    }
    awaits: dict[int, int] = {}
    for i, node in enumerate(facts.nodes):
        awaited = index[collective_awaited(node)] if is_wait(node) else None
        if awaited is not None and awaited in starts:
            awaits[i] = awaited
    seconds = list(facts.seconds(device))
    for i in (*starts, *awaits):
        seconds[i] = 0.0
    shared = _waits_show_memory(facts, awaits)
    return Work(shared, tuple(seconds), starts, awaits, collectives, costs)


def collective_awaited(wait: fx.Node) -> fx.Node:
    """The node that starts what ``wait`` waits for, whichever of its results that is."""
    started = wait.args[0]
    assert isinstance(started, fx.Node), wait
    if is_item(started):
        started = started.args[0]
        assert isinstance(started, fx.Node), wait
    return started


def _waits_show_memory(facts: Facts, awaits: Mapping[int, int]) -> Facts:
    """A wait is a view of what it waits for; what the collective reads is needed until then."""
    operands, kinds, inherits = map(list, (facts.operands, facts.kinds, facts.inherits))
    for wait, start in awaits.items():
        kinds[wait] = Kind.VIEW
        operands[wait] = (*facts.operands[wait], *facts.operands[start])
        inherits[wait] = tuple((0, slot) for slot in range(len(facts.sizes[wait])))
    return replace(facts, operands=tuple(operands), kinds=tuple(kinds), inherits=tuple(inherits))


def run_order(work: Work, order: Iterable[int]) -> TimedOrder:
    """The timeline of ``order``, which lists positions, definitions before uses."""
    now, flying, most = 0.0, 0, 0
    free: dict[str, float] = {}
    compute: dict[int, Interval] = {}
    collectives: dict[int, Interval] = {}
    issued: dict[int, float] = {}
    awaited: dict[int, float] = {}
    busy: list[Interval] = []  # of communication, not over yet, by its end
    for i in order:
        start = work.starts.get(i)
        if start is not None:
            issued[i] = now
            begin = max(now, free.get(start.channel, 0.0))
            free[start.channel] = begin + start.seconds
            collectives[i] = begin, begin + start.seconds
            heapq.heappush(busy, (begin + start.seconds, begin))
            flying += start.nbytes
            most = max(most, flying)
        elif i in work.awaits:
            source = work.awaits[i]
            if source not in awaited:
                awaited[source] = now
                flying -= work.starts[source].nbytes
            now = max(now, collectives[source][1])
        elif work.seconds[i]:
            end = _computed(now, work.seconds[i], busy, work.costs.interference)
            compute[i] = now, end
            now = end
    last = max((now, *free.values()))
    return TimedOrder(compute, collectives, issued, awaited, last, most)


def _computed(now: float, seconds: float, busy: list[Interval], interference: float) -> float:
    """The end of compute that begins now: slower while one of ``busy`` is on its way. Those of one
    group follow each other, and nothing starts before the end, so the rest is known."""
    while busy and busy[0][0] <= now:
        heapq.heappop(busy)
    if not interference or not busy:
        return now + seconds
    for begin, end in union((begin, end) for end, begin in busy):
        if begin > now:
            alone = min(begin - now, seconds)
            now, seconds = now + alone, seconds - alone
        beside = min(max(end - now, 0.0) / (1 + interference), seconds)
        now, seconds = now + beside * (1 + interference), seconds - beside
        if seconds <= 0.0:
            return now
    return now + seconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Of disjoint intervals together."""
    return sum(end - begin for begin, end in intervals)


def without(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """``left`` minus ``right``, both disjoint and in order."""
    uncovered: list[Interval] = []
    at = 0
    for begin, end in left:
        while at < len(right) and right[at][1] <= begin:
            at += 1
        here = at
        while here < len(right) and right[here][0] < end:
            if right[here][0] > begin:
                uncovered.append((begin, right[here][0]))
            begin = max(begin, right[here][1])
            here += 1
        if begin < end:
            uncovered.append((begin, end))
    return uncovered


def peak_of(work: Work, order: Sequence[int]) -> int:
    """The peak bytes of an order, as the memory planner predicts them for a graph in that order."""
    return timeline(as_traced(_in_order(work.facts, order))).peak_bytes


def _in_order(facts: Facts, order: Sequence[int]) -> Facts:
    """The facts of the graph with its nodes in ``order``: where the head of the forward pass ends
    is a matter of the order, too."""
    place = [0] * len(facts.nodes)
    for at, i in enumerate(order):
        place[i] = at
    return replace(
        facts,
        nodes=tuple([facts.nodes[i] for i in order]),
        operands=tuple([tuple([place[operand] for operand in facts.operands[i]]) for i in order]),
        kinds=tuple([facts.kinds[i] for i in order]),
        phases=tuple([facts.phases[i] for i in order]),
        inherits=tuple([facts.inherits[i] for i in order]),
        sizes=tuple([facts.sizes[i] for i in order]),
        keep=tuple([facts.keep[i] for i in order]),
        returned=tuple([None if value is None else place[value] for value in facts.returned]),
        writes={output: place[write] for output, write in facts.writes.items()},
    )


def simulate_communication(
    step: StepGraph, costs: CommunicationModel, device: DeviceModel
) -> CommunicationTimeline:
    """The timeline of a step in the order of its graph, with the compute of ``device``."""
    work = work_of(step, costs, device)
    return timeline_of(work, range(len(work.seconds)))


def timeline_of(work: Work, order: Sequence[int]) -> CommunicationTimeline:
    """The timeline of a step in another order of its positions."""
    run = run_order(work, order)
    computing = union(run.compute.values())
    communicating = union(run.collectives.values())
    alone = sum(work.seconds)
    names = {collective.group for collective in work.collectives.values()}
    spent = length(run.compute.values()) if work.costs.interference else alone
    return CommunicationTimeline(
        compute=tuple(_computed_span(work, i, run.compute[i]) for i in run.compute),
        collectives=tuple(_collective_span(work, i, run, computing) for i in run.collectives),
        seconds=run.seconds,
        compute_seconds=spent,
        communication_seconds=length(communicating),
        exposed_seconds=length(without(communicating, computing)),
        inflation_seconds=max(spent - alone, 0.0),
        in_flight_bytes=run.in_flight_bytes,
        peak_bytes=peak_of(work, order),
        groups=tuple((name, work.costs.groups[name].words) for name in sorted(names)),
    )


def timeline_from_data(data: Mapping[str, Any]) -> CommunicationTimeline:
    """The inverse of ``dataclasses.asdict``, after a way through JSON."""
    collectives: list[CollectiveSpan] = []
    for span in data["collectives"]:
        beside = tuple((str(name), float(seconds)) for name, seconds in span["beside"])
        fields: dict[str, Any] = {**span, "kind": CollectiveKind(span["kind"]), "beside": beside}
        collectives.append(CollectiveSpan(**fields))
    compute = tuple(ComputeSpan(**span) for span in data["compute"])
    groups = tuple((str(name), str(words)) for name, words in data["groups"])
    fields = {**data, "compute": compute, "collectives": tuple(collectives), "groups": groups}
    return CommunicationTimeline(**fields)


def _computed_span(work: Work, i: int, interval: Interval) -> ComputeSpan:
    node = work.facts.nodes[i]
    known = info(node)
    name = operation_name(node.target)
    return ComputeSpan(str(node), name, known.phase, known.module, *interval)


def _collective_span(
    work: Work, i: int, run: TimedOrder, computing: Sequence[Interval]
) -> CollectiveSpan:
    collective, (start, end) = work.collectives[i], run.collectives[i]
    known = info(collective.node)
    return CollectiveSpan(
        node=str(collective.node),
        kind=collective.kind,
        group=collective.group,
        nbytes=collective.nbytes,
        phase=known.phase,
        module=known.module,
        issued=run.issued[i],
        start=start,
        end=end,
        awaited=run.awaited.get(i),
        exposed=length(without(union([(start, end)]), computing)),
        beside=_beside(work, run, start, end),
    )


def _beside(work: Work, run: TimedOrder, start: float, end: float) -> tuple[tuple[str, float], ...]:
    """What is computed between the two, by operation, most of the time first."""
    beside: dict[str, float] = {}
    for i, (begin, over) in run.compute.items():
        both = min(end, over) - max(start, begin)
        if both > 0.0:
            name = operation_name(work.facts.nodes[i].target)
            beside[name] = beside.get(name, 0.0) + both
    return tuple(sorted(beside.items(), key=lambda item: (-item[1], item[0]))[:_BESIDE])
