"""Sharded parameters, gathered for each pass that reads them and dropped in between.

::

    f1  f2  f3 | b3  b2  b1          forward and backward of three groups
    1 2 3        (3) 2   1           what is gathered: 3 is still there when the backward begins

Each group is gathered while the one before it computes. (Rajbhandari et al., 2020, stage 3; Zhao et
al., 2023, section 3.3.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, final

from torch import fx

from treadle.graph.analysis.dataflow import ancestors
from treadle.graph.core.collectives import collective_of, is_wait
from treadle.graph.core.node_info import copy_notes, info, set_value, value_of, with_info
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import compute, like
from treadle.graph.rewrite.order import restore_order
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.comm.blocks import is_view, rearranges
from treadle.passes.comm.overlap.kept_order import is_fence
from treadle.passes.memory.cost import Kind, kind_of

_Key: TypeAlias = tuple[int, str]
"""The number of a group, and the phase that it is gathered in."""


@dataclass(frozen=True)
class GatherAgain(GraphPass):
    """What a module drops after its forward pass is gathered anew for its backward pass.

    before:  a = all_gather(p); w = wait(a); h = mm(x, w); ...; g = mm(d, w)        | a, w: gathered
    after:   a = all_gather(p); w = wait(a); h = mm(x, w); ...
             a' = all_gather(p); ...; w' = wait(a'); g = mm(d, w')

    A group that is gathered together (``NodeInfo.gathered``) is read in runs of consecutive
    operations of one phase. Each run has its own gather, unless no other group is read since the
    run before of the same group: then both use one gather. A gather starts ahead of the first
    operation that reads the group of the run before, so that it can be hidden; no other group is
    there meanwhile. Views and
    casts of what is gathered are made again with it. None passes a user's operator.

    Memory: two groups are whole at a time, where all were. What is sent grows by what is gathered
    again.
    """

    contract = Contract(after=(RemoveCommonSubexpressions,))  # it merges what is computed again

    def run(self, step: StepGraph) -> int:
        groups = _groups_of(step.graph)
        if not groups:
            return 0
        runs = _Runs(groups, step.graph)
        changes = sum(map(runs.gather_for, range(len(runs.runs))))
        if changes:
            for group in groups:
                group.drop_unread()
            restore_order(step.graph)
        return changes


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Parameters that are gathered together, for operations of one phase at first. ``nodes``: from
    what ranks hold to what is gathered, and what is made of that alone; ``sent``: those of them up
    to the collectives; ``there``: what stands for each of them by now."""

    nodes: dict[fx.Node, None]
    sent: frozenset[fx.Node]
    there: dict[fx.Node, fx.Node]

    def needed_for(self, readers: Iterable[fx.Node]) -> list[fx.Node]:
        """Of its nodes those that ``readers`` read, and what these are made of: as captured, which
        is the order that ranks have in common."""
        read = {node for reader in readers for node in reader.all_input_nodes}
        needed = ancestors(read.intersection(self.nodes), self.nodes.__contains__)
        return [node for node in self.nodes if node in needed]

    def drop_unread(self) -> None:
        """What was made again, and is not for the first run."""
        for node in reversed(self.nodes):
            if not node.users:
                node.graph.erase_node(node)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Operations of one phase that read a group, in order."""

    group: _Group
    readers: list[fx.Node]


class _Runs:
    """All runs of a graph, by their first readers."""

    def __init__(self, groups: Sequence[_Group], graph: fx.Graph) -> None:
        self._position = {node: at for at, node in enumerate(graph.nodes)}
        runs = [run for group in groups for run in _runs_of(group, self._position)]
        self.runs = sorted(runs, key=lambda run: self._position[run.readers[0]])
        self._before: list[int | None] = []  # the run of the same group before each
        last: dict[_Group, int] = {}
        for at, run in enumerate(self.runs):
            self._before.append(last.get(run.group))
            last[run.group] = at

    def gather_for(self, at: int) -> int:
        """What the readers of a run need is there; how many gathers were made or moved for it."""
        run, group = self.runs[at], self.runs[at].group
        if not group.there:
            group.there.update(zip(group.nodes, group.nodes, strict=True))
            return self._start_early(at)
        anew = not self._is_still_there(at)
        if anew:
            group.there.clear()
        early = self._place(at, run.readers[0])
        for node in group.needed_for(run.readers):
            self._copy(node, run, early)
        for reader in run.readers:
            for node in reader.all_input_nodes:
                if node in group.nodes:
                    reader.replace_input_with(node, group.there[node])
        return (
            sum(collective_of(value) is not None for value in group.there.values()) if anew else 0
        )

    def _is_still_there(self, at: int) -> bool:
        """Whether no other group is read since this one was."""
        last = self._before[at]
        assert last is not None, "a group is there because of a run"
        end = self._position[self.runs[last].readers[-1]]
        return all(self._position[between.readers[0]] < end for between in self.runs[last + 1 : at])

    def _start_early(self, at: int) -> int:
        """The gathers of a first run, which stand where they were captured, ahead of the run before
        it; how many of them moved."""
        if not at:
            return 0
        position, group = self._position, self.runs[at].group
        before = position[self.runs[at - 1].readers[0]]
        late = [node for node in group.nodes if node in group.sent and position[node] > before]
        starts = [node for node in late if collective_of(node) is not None]
        if not starts:
            return 0
        place = self._place(at, starts[0])
        behind = {*_until(place, starts[-1])}
        last, moved = place.prev, 0
        for node in late:
            if node not in behind:
                continue
            if last.next is not node:
                last.append(node)
                moved += collective_of(node) is not None
            last = node
        return moved

    def _place(self, at: int, end: fx.Node) -> fx.Node:
        """Ahead of which node what is sent for a run starts: the first reader of the run before, or
        what stands behind the last user's operator from there to ``end``."""
        place = self.runs[at - 1].readers[0]
        for node in _until(place, end):
            place = node.next if node is not end and is_fence(node) else place
        return place

    def _copy(self, node: fx.Node, run: _Run, early: fx.Node) -> None:
        """Something stands for ``node`` in a later run, if nothing does yet."""
        there = run.group.there
        if node in there:
            return
        with node.graph.inserting_before(early if node in run.group.sent else run.readers[0]):
            call = node.graph.node_copy(node, lambda operand: there.get(operand, operand))
        copy_notes(call, node)
        with_info(call, phase=info(run.readers[0]).phase)
        set_value(call, compute(call) if is_view(node) else like(value_of(node)))
        there[node] = call


def _until(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes from ``first`` to ``last``, both among them."""
    node = first
    while node is not last:
        yield node
        node = node.next
    yield last


def _groups_of(graph: fx.Graph) -> list[_Group]:
    """Without those of which the caller gets something, or that nobody else has a part of."""
    members: dict[_Key, dict[fx.Node, None]] = {}
    key_of: dict[fx.Node, _Key] = {}
    sent = _sent(graph)
    for node in graph.nodes:
        key = _key_of(node, key_of, sent)
        if key is not None:
            key_of[node] = key
            members.setdefault(key, {})[node] = None
    returned = {key_of.get(node) for node in graph.output_node().all_input_nodes}
    groups = [
        _Group(nodes, frozenset(sent.intersection(nodes)), {})
        for key, nodes in members.items()
        if key not in returned
    ]
    return [group for group in groups if group.sent]


def _sent(graph: fx.Graph) -> set[fx.Node]:
    """Collectives that gather parameters, and how these become what is sent."""
    sent: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if info(node).gathered is None:
            continue
        if collective_of(node) is not None or not sent.isdisjoint(node.users):
            sent.add(node)
    return sent


def _key_of(node: fx.Node, key_of: Mapping[fx.Node, _Key], sent: Set[fx.Node]) -> _Key | None:
    """The group that gathers ``node``, or of whose results alone it is made."""
    known = info(node)
    if known.gathered is not None:
        return known.gathered, known.phase
    keys = {key_of.get(operand) for operand in node.all_input_nodes}
    if len(keys) != 1 or not sent.isdisjoint(node.all_input_nodes) or not _is_remade(node):
        return None
    (key,) = keys
    return key if key is not None and key[1] == known.phase else None


def _is_remade(node: fx.Node) -> bool:
    """Whether it is made again rather than kept."""
    if node.op != "call_function" or is_wait(node):
        return False
    return is_view(node) or rearranges(node) or kind_of(node) is Kind.POINTWISE


def _runs_of(group: _Group, position: Mapping[fx.Node, int]) -> Iterator[_Run]:
    """Readers of one phase, until one of another phase comes. Who reads what is sent does not
    count: that is another value on each rank."""
    received = [node for node in group.nodes if node not in group.sent]
    readers = {user for node in received for user in node.users if user not in group.nodes}
    ordered = sorted(readers, key=position.__getitem__)
    for _, run in groupby(ordered, key=lambda node: info(node).phase):
        yield _Run(group, list(run))
