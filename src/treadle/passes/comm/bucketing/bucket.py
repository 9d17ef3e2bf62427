"""D3: several collectives as one."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch
from torch import fx

from treadle.compat.distributed.collectives import collective_op
from treadle.graph.analysis.alias import storages
from treadle.graph.analysis.dataflow import readers_of
from treadle.graph.core.collectives import is_same_on_all_ranks
from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import OpOverload, arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import inherit, refresh
from treadle.graph.rewrite.order import Earlier, restore_order
from treadle.graph.rewrite.passes import Contract, GraphPass, until_settled
from treadle.passes.comm.blocks import is_view
from treadle.passes.comm.bucketing.candidates import JoinCandidate, candidates_in
from treadle.passes.comm.bucketing.dependence import Dependence, joined_sequence
from treadle.passes.comm.bucketing.layout import packed, unpacked
from treadle.passes.comm.bucketing.merge import MergeEqualCollectives
from treadle.passes.comm.overlap.hoist import HoistCollectives
from treadle.passes.comm.overlap.kept_order import kept_order
from treadle.passes.comm.overlap.sink import SinkWaits

aten = torch.ops.aten


_SHARES = 8
_SMALLEST, _LARGEST = 1 << 20, 25 << 20
"""Tried on two CPU ranks that send 12 MiB; the largest is ``DistributedDataParallel``'s."""


@dataclass(frozen=True)
class BucketCollectives(GraphPass):
    """One collective for several that agree, up to a number of bytes.

    before:  a = all_reduce(g, "sum", "0"); u = wait(a); x = relu(u)       g: f32[2, 3]
             b = all_reduce(h, "sum", "0"); v = wait(b); y = relu(v)       h: f32[4]
    after:   c = cat([view(g, [6]), h]); a = all_reduce(c, "sum", "0"); w = wait(a)
             u = view(slice(w, 0, 0, 6), [2, 3]); v = slice(w, 0, 6, 10)
             x = relu(u); y = relu(v)

    Joined are collectives of one kind, group, reduction, dtype, device, phase and region whose
    results are first read in the same phase, in the order of the graph: a bucket is full when the
    next one would make it larger than its cap, or depends on one that is in it. The first of each
    kind is full at ``first_bucket_bytes``, so that communication begins early (but for parameters
    that are gathered for a while, each of whose groups is a kind of its own), others at
    ``bucket_bytes``: by default an eighth of all that is sent, from 1 to 25 MiB, so that most of it
    has something to hide behind. What is larger by itself is left, and so is what stays alone.

    The one collective starts where the last of them did, and the wait stands where the first behind
    that did. Readers that stood ahead of it move behind it; what draws, checks or is a user's
    operator keeps its order, and no collective passes a user's operator (``kept_order.py``).

    Which are joined, and in which order the buckets start, is the same on all ranks: it depends on
    the graph, or, where the graphs of ranks differ, on nothing but the order of collectives, their
    bytes, and which of them need which.

    Memory: all inputs are together in one buffer from the last of them on, and all results in
    another, which lives until the last reader of any of them. A result that the caller gets, or
    that is read by its strides, is copied out of it.
    """

    contract = Contract(
        requires=(MergeEqualCollectives, HoistCollectives),  # one wait each; in order of readiness
        invalidates=(SinkWaits,),  # a new wait stands where an old one did
    )

    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 << 20

    def run(self, step: StepGraph) -> int:
        return until_settled(self._once, step)  # readers that move may change who is behind whom

    def _once(self, step: StepGraph) -> int:
        buckets = [bucket for bucket in self.choose(step).buckets if len(bucket) > 1]
        if not buckets:
            return 0
        earlier = kept_order(step.graph)
        sequence: list[fx.Node] = []
        if not is_same_on_all_ranks(step):
            sequence = joined_sequence(step.graph, [[m.start for m in b] for b in buckets], earlier)
        caller = _Caller(step)
        moved: dict[fx.Node, fx.Node] = {}
        results: list[fx.Node] = []
        for bucket in buckets:
            start, wait, new_nodes = _join(bucket, caller)
            moved |= {old.start: start for old in bucket} | {old.wait: wait for old in bucket}
            results += new_nodes
        earlier = _renamed(earlier, moved)
        for before, node in pairwise([moved.get(original, original) for original in sequence]):
            earlier.setdefault(node, []).append(before)
        restore_order(step.graph, earlier)
        refresh(step.graph, results)
        return sum(map(len, buckets))

    def _cap(self, candidates: Sequence[JoinCandidate]) -> int:
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        total = sum(candidate.collective.nbytes for candidate in candidates)
        return min(max(total // _SHARES, _SMALLEST), _LARGEST)

    def choose(self, step: StepGraph) -> "BucketChoice":
        """Which collectives would be joined, and why the others would not; changes nothing."""
        candidates, reasons = candidates_in(step.graph)
        pairs = [(candidate.start, candidate.wait) for candidate in candidates]
        dependence = Dependence(step.graph, pairs, kept_order(step.graph))
        choice = BucketChoice([], reasons)
        later = self._cap(candidates)
        open_buckets: dict[Hashable, _Open] = {}
        for at, candidate in enumerate(candidates):
            key = tuple(candidate.kind.values())
            bucket = open_buckets.get(key)
            reason = f"{candidate.start} is the first of its kind"
            if bucket is not None:
                reason = bucket.refusal(candidate, at, dependence)
            if bucket is not None and not reason:
                dependence.join(bucket.first, at)
                bucket.members.append(candidate)
                bucket.nbytes += candidate.collective.nbytes
                continue
            choice.reasons[candidate.start] = reason
            is_early = bucket is None and info(candidate.start).gathered is None
            cap = self.first_bucket_bytes if is_early else later
            open_buckets[key] = _Open(at, cap, candidate.collective.nbytes, [candidate])
            choice.buckets.append(open_buckets[key].members)
        return choice


@final
@dataclass(frozen=True, slots=True)
class BucketChoice:
    """Buckets, those of one among them, and for each collective that is not behind another one in
    its bucket the reason."""

    buckets: list[list[JoinCandidate]]
    reasons: dict[fx.Node, str]


@final
@dataclass(slots=True)
class _Open:
    """A bucket that may get more. ``first``: the number of its first member."""

    first: int
    cap: int
    nbytes: int
    members: list[JoinCandidate] = field(default_factory=list[JoinCandidate])

    def refusal(self, other: JoinCandidate, at: int, dependence: Dependence) -> str:
        """Why ``other``, the candidate number ``at``, does not come in; empty if it does."""
        last = self.members[-1].start
        if self.nbytes + other.collective.nbytes > self.cap:
            return f"{other.start} would make the bucket of {last} larger than {self.cap} bytes"
        if not dependence.may_join(self.first, at):
            return f"{other.start} and the bucket of {last} depend on each other"
        return ""


@final
class _Caller:
    """What the caller of the step gets, write-backs aside: those are copied anyway."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._position = {node: at for at, node in enumerate(step.graph.nodes)}
        results = [node for node, output in step.outputs() if output.writes is None]
        self._results = {node for node in results if node is not None}

    def storages_of_views(self) -> frozenset[int]:
        """The storages of results that are views."""
        return frozenset().union(
            *(storages(value_of(result)) for result in self._results if is_view(result))
        )

    def gets(self, node: fx.Node) -> bool:
        """Whether ``node`` itself is a result."""
        return node in self._results

    def give_copy(self, node: fx.Node) -> None:
        """Return a copy of ``node``, made before its first reader."""
        graph = self._step.graph
        known = [reader for reader in readers_of(node, is_view) if reader in self._position]
        with graph.inserting_before(min(known, key=self._position.__getitem__)):
            copy = graph.call_function(aten.clone.default, (node,))
        inherit(copy, node)
        returned = [
            copy if result is node and output.writes is None else result
            for result, output in self._step.outputs()
        ]
        (end,) = graph.find_nodes(op="output")
        end.args = (tuple(returned),)


def _join(
    members: Sequence[JoinCandidate], caller: _Caller
) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
    """The start and the wait that stand for those of ``members``, and the results."""
    last = members[-1].start
    args = dict(arguments(last)) | {"input": packed(members)}
    with last.graph.inserting_before(last):
        start = last.graph.call_function(_operator_of(last), tuple(args.values()))
    inherit(start, last)
    root = _place_of_wait(members)
    with last.graph.inserting_before(root):
        wait = last.graph.call_function(collective_op("wait_tensor"), (start,))
    inherit(wait, root)
    results = unpacked(members, wait, caller.storages_of_views())
    for old, new in zip(members, results, strict=True):
        old.wait.replace_all_uses_with(new)
        if caller.gets(old.wait) and storages(value_of(new)) & storages(value_of(wait)):
            caller.give_copy(new)
        last.graph.erase_node(old.wait)
        last.graph.erase_node(old.start)
    return start, wait, results


def _operator_of(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload), node
    return node.target


def _place_of_wait(members: Sequence[JoinCandidate]) -> fx.Node:
    """The first of the waits that stands behind the start of the last member."""
    waits = {member.wait for member in members}
    node = members[-1].start
    while node not in waits:
        node = node.next
    return node


def _renamed(earlier: Earlier, moved: dict[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """``earlier``, with the replacements of nodes instead of the nodes that they replaced."""
    renamed: dict[fx.Node, list[fx.Node]] = {}
    for node, others in earlier.items():
        names = renamed.setdefault(moved.get(node, node), [])
        names += [moved.get(other, other) for other in others]
    return renamed
