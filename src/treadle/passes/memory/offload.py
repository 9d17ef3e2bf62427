"""Values that are on the host between two uses, chosen on the simulated timeline.

A value that nothing reads for long goes to the host once it is made, and comes back before it is
read again. Each direction is one queue with the bandwidth of the link to the host. A copy to the
host begins when its value is there and the queue is free; one back begins as late as it can::

    compute   ...| x |...................................| reads x |...
    to host          |====|                                              x is in memory until here
    from host                                    |====|                  and again from here

Each wait stands at the first place after the end of its copy, by the estimates: then compute waits
for none, and what is on the host costs the plan its traffic in the device's memory. More can be
there if compute waits, so places are also tried as if the link were faster, and those waits that
the peak does not need are put back. A second simulation says how long compute waits then.

Offloading what backward reads late, on streams beside compute, is the method of vDNN (Rhu et al.,
MICRO 2016, section III). The choice, the largest wait at the peak first, is treadle's.
"""

import bisect
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from treadle.graph.analysis.alias import storages
from treadle.graph.core.arguments import map_nodes
from treadle.graph.core.copying import make_node
from treadle.graph.core.node_info import set_value, value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import is_tensor
from treadle.graph.core.values import compute, emit, emit_ahead
from treadle.graph.custom_ops.host_copies import ARRIVED, FROM_HOST, TO_HOST
from treadle.graph.custom_ops.incoming import INCOMING_GRADIENT
from treadle.graph.rewrite.order import restore_order
from treadle.passes.memory.cost import Kind
from treadle.passes.memory.order import Order
from treadle.passes.memory.simulate import Lifetimes, lifetimes_of
from treadle.targets.model import DeviceModel

_LEAST = 1 << 20
"""Bytes that are worth a copy of their own: 1 MiB takes 20 us of a link of 50 GB/s."""
_HASTE = (1.0, 1.5, 2.25, 4.0)
"""How many times faster than it is the link is supposed to be, where compute may wait: each is
about half as much again."""
_STEP = 0.02
"""Share of the peak by which one plan with values on the host is smaller than the one before, which
is how close plans that compute again are kept (``_NEAR`` in ``search.py``)."""


@dataclass(frozen=True, slots=True)
class OffloadedValue:
    """A value on the host between two uses. Positions in the order of the plan: ``value``, which
    makes it; ``left``, before which the copy to the host is waited for; ``called``, before which
    the one back begins; ``needed``, before which that is waited for; ``readers``, which read it
    then."""

    value: int
    left: int
    called: int
    needed: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Idle:
    """A storage that nothing reads between ``last`` and ``next``: of a value that is made at
    ``start`` by ``value``."""

    value: int
    nbytes: int
    start: int
    last: int
    next: int
    slot: int


@dataclass(frozen=True)
class OffloadedPlan:
    """Values on the host, and the simulated peak with them; ``nbytes``: of all of them;
    ``waiting``: seconds that compute waits for copies."""

    values: tuple[OffloadedValue, ...]
    peak_bytes: int
    nbytes: int
    waiting: float


def may_offload(step: StepGraph, device: DeviceModel) -> bool:
    """Whether plans of a step may have values on the host: there is a link to it, and the step runs
    as one. Where it stops for gradients that its caller brings, it is recorded in two parts, and a
    copy would begin in one of them and be waited for in the other."""
    stops = any(node.target is INCOMING_GRADIENT.op for node in step.graph.nodes)
    return device.host_link > 0 and not stops


def offloaded_plans(
    order: Order, seconds: Sequence[float], bandwidth: float
) -> Iterator[OffloadedPlan]:
    """Plans with more and more of an order's values on the host. ``seconds``: of each operation of
    the order; ``bandwidth``: of the link, in bytes a second."""
    for haste in _HASTE:
        yield from _smaller_and_smaller(_Search(order, seconds, bandwidth, haste * bandwidth))


def _smaller_and_smaller(search: "_Search") -> Iterator[OffloadedPlan]:
    largest = reached = int(search.alive.max(initial=0))
    while search.improve():
        peak = int(search.alive.max())
        if peak <= reached - _STEP * largest:
            reached = peak
            yield search.plan()
    if int(search.alive.max(initial=0)) < reached:
        yield search.plan()


@dataclass
class _Search:
    """What is on the host so far, and the bytes alive at each place with it. ``supposed``: the
    bandwidth by which the places of waits are chosen."""

    order: Order
    seconds: Sequence[float]
    bandwidth: float
    supposed: float
    chosen: "list[_Idle]" = field(default_factory=list["_Idle"])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __post_init__(self) -> None:
        self.lifetimes: Lifetimes = lifetimes_of(self.order)
        self.begins = [0.0, *itertools.accumulate(self.seconds)]
        self.whole = np.array(self.lifetimes.alive(), np.int64)
        self.alive = self.whole
        self.readers = self.lifetimes.readers()
        self.members: list[list[int]] = [[] for _ in self.lifetimes.size]
        for k, slots in enumerate(self.lifetimes.slots):
            for slot in slots:
                self.members[slot].append(k)
        self.left = self._idle()

    def _idle(self) -> list[_Idle]:
        """The longest wait of each storage, where the link has time for both copies."""
        lives, found = self.lifetimes, list[_Idle]()
        for slot, size in enumerate(lives.size):
            value = lives.owner[slot]
            returned = lives.end[slot] >= len(self.order.origin)
            root = None if size < _LEAST or returned else self._root(slot, value)
            if root is None:
                continue
            events = sorted({lives.start[slot], *(lives.place[k] for k in self.readers[slot])})
            pairs = [
                (self.begins[b] - self.begins[a + 1], a, b) for a, b in itertools.pairwise(events)
            ]
            idle, last, next_ = max(pairs, default=(0.0, 0, 0))
            if idle > 2 * size / self.supposed:
                found.append(_Idle(root, size, lives.start[slot], last, next_, slot))
        return found

    def _root(self, slot: int, maker: int) -> int | None:
        """The one operation that gives all of a storage as a tensor; every other value with its
        bytes is a view of that. ``None`` if there is none."""
        order, facts = self.order, self.order.facts
        members = [k for k in self.members[slot] if is_tensor(facts.nodes[order.origin[k]])]
        if not members or (members[0] != maker and maker not in order.operands[members[0]]):
            return None
        root = members[0]
        for member in members[1:]:
            is_view = facts.kinds[order.origin[member]] is Kind.VIEW
            if not is_view or order.operands[member][0] not in members:
                return None
        return root

    def improve(self) -> bool:
        """Put one more value of the peak on the host, of those that wait longest."""
        peak = int(self.alive.argmax()) if self.alive.size else 0
        at_peak = [each for each in self.left if each.last < peak < each.next]
        at_peak.sort(key=lambda each: self.begins[each.last] - self.begins[each.next])
        for idle in at_peak:
            self.left.remove(idle)
            chosen = [*self.chosen, idle]
            spans = self._spans(chosen)
            if spans is None:
                continue
            alive = self._alive(chosen, spans)
            if alive[peak] < self.alive[peak]:
                self.chosen, self.spans, self.alive = chosen, spans, alive
                return True
        return False

    def _alive(self, chosen: Sequence[_Idle], spans: Sequence[tuple[int, int]]) -> "np.ndarray":
        alive = self.whole.copy()
        for idle, (left, called) in zip(chosen, spans, strict=True):
            alive[left:called] -= idle.nbytes
        return alive

    def _spans(self, chosen: Sequence[_Idle]) -> list[tuple[int, int]] | None:
        """For each value the places between which it is on the host alone; ``None`` if the link has
        no time for one of them."""
        left, called = self._ends(chosen, self.supposed)
        spans = [(left[idle.slot], called[idle.slot]) for idle in chosen]
        return spans if all(begin < end for begin, end in spans) else None

    def _ends(
        self, chosen: Sequence[_Idle], bandwidth: float
    ) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """By storage the first place after its copy to the host, and the last from which the one
        back is there in time, with queues of a ``bandwidth``."""
        left: dict[int, int] = {}
        free = 0.0
        for idle in sorted(chosen, key=lambda each: each.start):
            free = max(free, self.begins[idle.start + 1]) + idle.nbytes / bandwidth
            left[idle.slot] = max(bisect.bisect_left(self.begins, free), idle.last + 1)
        called: dict[int, int] = {}
        until = self.begins[-1]
        for idle in sorted(chosen, key=lambda each: -each.next):
            until = min(until, self.begins[idle.next]) - idle.nbytes / bandwidth
            called[idle.slot] = bisect.bisect_right(self.begins, until) - 1
        return left, called

    def plan(self) -> OffloadedPlan:
        """What is chosen so far."""
        spans = self._relaxed()
        away = [
            (idle, span) for idle, span in zip(self.chosen, spans, strict=True) if span[0] < span[1]
        ]
        values = tuple(
            OffloadedValue(idle.value, left, called, idle.next, self._late(idle))
            for idle, (left, called) in away
        )
        nbytes = sum(idle.nbytes for idle, _ in away)
        return OffloadedPlan(values, int(self.alive.max()), nbytes, self._waiting(away))

    def _relaxed(self) -> list[tuple[int, int]]:
        """Spans that are as much shorter, up to what the link takes, as the peak allows."""
        alive, limit = self.alive.copy(), int(self.alive.max())
        left, called = self._ends(self.chosen, self.bandwidth)
        spans: list[tuple[int, int]] = []
        for idle, (begin, end) in zip(self.chosen, self.spans, strict=True):
            room = alive[begin:end] + idle.nbytes <= limit
            late = _leading(room[: max(left[idle.slot] - begin, 0)])
            early = _leading(room[late:][::-1][: max(end - called[idle.slot], 0)])
            alive[begin : begin + late] += idle.nbytes
            alive[end - early : end] += idle.nbytes
            spans.append((begin + late, end - early))
        return spans

    def _waiting(self, away: Sequence[tuple[_Idle, tuple[int, int]]]) -> float:
        """Seconds that compute waits for the copies with the bandwidth that there is."""
        events: list[tuple[int, int, _Idle]] = []
        for idle, (left, called) in away:
            places = idle.start + 1, called, left, idle.next
            events += [(place, kind, idle) for kind, place in enumerate(places)]
        events.sort(key=lambda event: (event[0], event[1], event[2].slot))
        waited, free, ends = 0.0, [0.0, 0.0], dict[tuple[int, int], float]()
        for place, kind, idle in events:  # two that begin a copy, two that wait for one
            now, way = self.begins[place] + waited, kind % 2
            if kind < 2:
                free[way] = max(free[way], now) + idle.nbytes / self.bandwidth
                ends[way, idle.slot] = free[way]
            else:
                waited += max(ends[way, idle.slot] - now, 0.0)
        return waited

    def _late(self, idle: _Idle) -> tuple[int, ...]:
        """The operations, views aside, that read a value or a view of it once it is back."""
        views = self.order.facts.views
        return tuple(
            k
            for k in self.readers[idle.slot]
            if self.lifetimes.place[k] >= idle.next and not views[self.order.origin[k]]
        )


def _leading(flags: "np.ndarray") -> int:
    """How many are true before the first that is not."""
    false = np.flatnonzero(~flags)
    return int(false[0]) if false.size else len(flags)


def seconds_in(order: Order, again: Sequence[float], total: float) -> list[float]:
    """Seconds of each operation of an order, which take ``total`` together. ``again``: of each node
    by itself, by which they are in proportion."""
    alone = [again[i] for i in order.origin]
    scale = total / max(sum(alone), 1e-12)
    return [each * scale for each in alone]


def offload(step: StepGraph, values: Sequence[OffloadedValue]) -> int:
    """Put ``values`` of the graph on the host between their uses; how many there are."""
    nodes = [node for node in step.graph.nodes if node.op != "output"]
    views = [view for each in values for view in _offload(nodes, each)]
    for view in reversed(dict.fromkeys(views)):  # at the end: each may be the place of a copy
        if not view.users:
            step.graph.erase_node(view)
    if values:
        restore_order(step.graph)
    return len(values)


def _offload(nodes: Sequence[fx.Node], each: OffloadedValue) -> list[fx.Node]:
    """Put one value there; the views of it, of which nothing may read some any more."""
    value, reader = nodes[each.value], nodes[each.needed]
    with value.graph.inserting_after(_last_result(value)):
        sent = emit(value, TO_HOST.op, value)
    there = emit_ahead(nodes[each.left], value, ARRIVED.op, sent, value)
    called = emit_ahead(nodes[each.called], reader, FROM_HOST.op, there, value_of(value).device)
    twins = {value: emit_ahead(reader, reader, ARRIVED.op, called, there)}
    views = _views_of(value)
    for late in (nodes[k] for k in each.readers):
        for operand in late.all_input_nodes:
            if operand is value or operand in views:
                late.replace_input_with(operand, _twin(operand, twins, reader))
    return views


def _last_result(value: fx.Node) -> fx.Node:
    """The place after a value, and after the other results of what gives it."""
    place = value
    maker = value.args[0] if value.target is operator.getitem else value
    while place.next.target is operator.getitem and place.next.args[0] is maker:
        place = place.next
    return place


def _views_of(value: fx.Node) -> list[fx.Node]:
    """What shows the memory of a value, each after what it is a view of."""
    found, shared = [value], storages(value_of(value))
    for node in found:
        found += [user for user in node.users if not shared.isdisjoint(storages(value_of(user)))]
    return list(dict.fromkeys(found[1:]))


def _twin(view: fx.Node, twins: dict[fx.Node, fx.Node], reader: fx.Node) -> fx.Node:
    """The view of what came back, ahead of ``reader``."""
    if view not in twins:
        for operand in view.all_input_nodes[:1]:
            _twin(operand, twins, reader)
        args = map_nodes(lambda node: twins.get(node, node), view.args)
        kwargs = map_nodes(lambda node: twins.get(node, node), view.kwargs)
        with view.graph.inserting_before(reader):
            twins[view] = make_node(view.graph, view, args, kwargs, f"{view.name}_back")
        set_value(twins[view], compute(twins[view]))
    return twins[view]
