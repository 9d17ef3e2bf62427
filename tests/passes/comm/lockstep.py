"""All ranks of a step in one process: each runs its graph, and collectives really exchange data.

::

    run = run_ranks(step, [inputs of rank 0, inputs of rank 1], {"0": [[0, 1]]})
    run.outputs[rank]      its outputs, in signature order
    run.started[rank]      what it started, in order: "all_reduce f32[6] on 0"

A rank goes on until it waits for a collective that another rank of the group has not started yet.
The results of a collective may be read after a wait alone. What would hang, or exchange bytes that
do not fit, on a real network is a ``LockstepError``: ranks of a group that start different
collectives, or the same in another order, and ranks that wait for each other.

Reductions add rank 0 to rank 1, then rank 2 and so on, element by element: how elements are put
together in messages does not change a bit of the result.
"""

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from treadle.graph.core.arguments import given_of
from treadle.graph.core.collectives import (
    Collective,
    CollectiveKind,
    collective_of,
    is_wait,
    started_by,
)
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import is_item
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import short_dtype

GroupRanks = Mapping[str, Sequence[Sequence[int]]]
"""By name of a group: the ranks of each group that is called so, by the ranks in it. Names that the
graph has once (``"tp"``) are those of several groups where each rank is in one."""
Outputs = list[Tensor | None]


class LockstepError(Exception):
    """Ranks that do not fit together."""


@dataclass(eq=False)
class Pending:
    """A result that nobody may read yet."""

    name: str
    result: Tensor | None = None


@dataclass(eq=False)
class Started:
    """One collective on one rank: what it sends, and where its results go."""

    rank: int
    collective: Collective
    sent: list[Tensor]
    results: list[Pending]

    def __str__(self) -> str:
        kinds = [f"{short_dtype(each.dtype)}{list(each.shape)}" for each in self.sent]
        return f"{self.collective.kind.value} {', '.join(kinds)} on {self.collective.group}"


Rank = Generator[Started | Pending, None, Outputs]


@dataclass
class LockstepRun:
    """What came of it: outputs and started collectives, by rank."""

    outputs: list[Outputs]
    started: list[list[str]] = field(default_factory=list)


def run_ranks(
    steps: StepGraph | Sequence[StepGraph],
    inputs: Sequence[Sequence[Tensor]],
    groups: GroupRanks,
    seed: int = 0,
) -> LockstepRun:
    """Run one step, or each rank's own, on each rank's ``inputs``. Random numbers of rank ``r``
    are those of the seed ``seed + r``."""
    count = len(inputs)
    per_rank = [steps] * count if isinstance(steps, StepGraph) else list(steps)
    network = _Network(count, groups)
    pairs = zip(per_rank, inputs, strict=True)
    ranks = [_run(r, step, given) for r, (step, given) in enumerate(pairs)]
    states = [_seeded(seed + rank) for rank in range(count)]
    outputs: dict[int, Outputs] = {}
    blocked: dict[int, Pending] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        while len(outputs) < count:
            ready = [
                rank
                for rank in range(count)
                if rank not in outputs and (rank not in blocked or blocked[rank].result is not None)
            ]
            if not ready:
                raise LockstepError(_deadlock(blocked))
            for rank in ready:
                torch.random.set_rng_state(states[rank])
                _advance(rank, ranks[rank], network, blocked, outputs)
                states[rank] = torch.random.get_rng_state()
    network.require_done()
    return LockstepRun([outputs[rank] for rank in range(count)], network.log)


def _advance(
    rank: int, steps: Rank, network: "_Network", blocked: dict[int, Pending], outputs: dict
) -> None:
    """One rank, until it has to wait or is done."""
    blocked.pop(rank, None)
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            outputs[rank] = end.value
            return
        if isinstance(event, Started):
            network.start(event)
        elif event.result is None:
            blocked[rank] = event
            return


def _seeded(seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.random.get_rng_state()


def _deadlock(blocked: Mapping[int, Pending]) -> str:
    waits = [f"rank {rank} waits for {each.name}" for rank, each in sorted(blocked.items())]
    return f"nobody goes on: {'; '.join(waits)}"


def _run(rank: int, step: StepGraph, inputs: Sequence[Tensor]) -> Rank:
    """The rank's nodes, one after another. Yields what it starts, and what it waits for."""
    values: dict[fx.Node, Any] = dict(zip(step.placeholders, inputs, strict=True))
    for node in step.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(step.graph.owning_module)
            continue
        if node.op == "output":
            return [None if each is None else _read(each, values) for each in step.returned]
        collective = collective_of(node)
        if collective is not None:
            results = [Pending(str(each)) for each in collective.inputs]
            sent = [_read(each, values) for each in collective.inputs]
            yield Started(rank, collective, sent, results)
            values[node] = results if collective.coalesced else results[0]
        elif is_wait(node):
            pending = values[started_by(node)]
            if isinstance(pending, Pending):
                yield pending
                pending = pending.result
            values[node] = pending
        elif is_item(node):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            args, kwargs = given_of(node, lambda each: _read(each, values))
            values[node] = node.target(*args, **kwargs)
    raise LockstepError("the graph does not end in a return")


def _read(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(values[node], Pending):
        raise LockstepError(f"{node} is read before it is waited for")
    return values[node]


class _Network:
    """Matches what the ranks of a group start: the first of each, then the second, and so on."""

    def __init__(self, count: int, groups: GroupRanks) -> None:
        self._of: dict[tuple[str, int], tuple[int, ...]] = {}
        for name, parts in groups.items():
            for ranks, rank in ((tuple(part), rank) for part in parts for rank in part):
                self._of[name, rank] = ranks
        self._queues: dict[tuple[str, int], deque[Started]] = {key: deque() for key in self._of}
        self.log: list[list[str]] = [[] for _ in range(count)]

    def start(self, event: Started) -> None:
        name = event.collective.group
        if (name, event.rank) not in self._of:
            raise LockstepError(f"rank {event.rank} is in no group called {name}")
        self.log[event.rank].append(str(event))
        self._queues[name, event.rank].append(event)
        queues = [self._queues[name, rank] for rank in self._of[name, event.rank]]
        if all(queues):
            _exchange([each.popleft() for each in queues])

    def require_done(self) -> None:
        left = [str(each) for queue in self._queues.values() for each in queue]
        if left:
            raise LockstepError(f"not all ranks start {left[0]}")


def _exchange(events: Sequence[Started]) -> None:
    first = events[0]
    for other in events[1:]:
        same = [each.shape for each in first.sent] == [each.shape for each in other.sent]
        dtypes = [each.dtype for each in first.sent] == [each.dtype for each in other.sent]
        alike = first.collective.agreement[:-2] == other.collective.agreement[:-2]
        if not (same and dtypes and alike):
            raise LockstepError(
                f"rank {first.rank} starts {first}, rank {other.rank} starts {other}"
            )
    for at in range(len(first.sent)):
        made = _results(first.collective, events, [each.sent[at] for each in events])
        for event, result in zip(events, made, strict=True):
            event.results[at].result = _laid_out(result, value_of(event.collective.node), at)


def _laid_out(result: Tensor, value: Any, at: int) -> Tensor:
    """A copy in the strides that the graph says."""
    kind = value if isinstance(value, Tensor) else value[at]
    made = torch.empty_strided(kind.shape, kind.stride(), dtype=kind.dtype)
    return made.copy_(result)


def _results(
    collective: Collective, events: Sequence[Started], sent: Sequence[Tensor]
) -> list[Tensor]:
    """What each rank of the group gets."""
    count = len(sent)
    if collective.ranks not in (None, count):
        raise LockstepError(f"{collective.group} has {count} ranks, and not {collective.ranks}")
    match collective.kind:
        case CollectiveKind.ALL_REDUCE:
            return [_reduced(sent, collective.reduce)] * count
        case CollectiveKind.REDUCE_SCATTER:
            return list(_reduced(sent, collective.reduce).contiguous().chunk(count))
        case CollectiveKind.ALL_GATHER:
            return [torch.cat(list(sent))] * count
        case CollectiveKind.BROADCAST:
            return [sent[collective.root or 0]] * count
        case CollectiveKind.ALL_TO_ALL:
            return _exchanged(events, sent)


_REDUCE: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _reduced(sent: Sequence[Tensor], reduction: str | None) -> Tensor:
    total = functools.reduce(_REDUCE[reduction], sent)
    return total / len(sent) if reduction == "avg" else total


def _exchanged(events: Sequence[Started], sent: Sequence[Tensor]) -> list[Tensor]:
    """Rank ``r`` gets the part number ``r`` of each, one behind the other."""
    parts = []
    for event, each in zip(events, sent, strict=True):
        splits = event.collective.splits
        sizes = list(splits[1]) if splits and splits[1] else [len(each) // len(sent)] * len(sent)
        parts.append(each.split(sizes))
    return [torch.cat(list(column)) for column in itertools.zip_longest(*parts)]
