"""Independent products of equal shapes as one batch."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from treadle.algebra.extents import sample_of
from treadle.graph.analysis.alias import leaves_step, read_by_strides
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, has_effect, is_in_order
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.core.values import refresh
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.order import restore_order
from treadle.graph.rewrite.passes import Contract, GraphPass

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchProducts(GraphPass):
    """One call for several small products that do not wait for each other.

    before:  q = mm(x, u); k = mm(x, v)
    after:   s = stack([u, v]); e = expand(unsqueeze(x, 0), [2, m, n])
             b = bmm(e, s); q = select(b, 0, 0); k = select(b, 0, 1)

    One product takes less time than several where starting it takes longer than multiplying: small
    ones, on a GPU. Against that stands a copy of every factor that is not shared. ``distance``: the
    most nodes between the first and the last of a batch, since all results live from the last one
    on. ``room``: the most bytes of copies for a batch, which are also what memory it costs beside
    the factors. Products of one phase and region; none that another one of the batch waits for, and
    none that is returned, since the others would be returned with it. What draws or has an effect
    keeps its place: no batch reaches across it.
    """

    contract = Contract()

    distance: int = 64
    room: int = 1 << 20

    def run(self, step: StepGraph) -> int:
        count = 0
        while batch := self._next(step.graph):
            results = _fuse(batch)
            restore_order(step.graph)
            refresh(step.graph, results)
            count += len(batch)
        return count

    def _next(self, graph: fx.Graph) -> list[fx.Node]:
        """The first batch of two products or more."""
        place = {node: at for at, node in enumerate(graph.nodes)}
        fixed = [place[node] for node in graph.nodes if is_in_order(node) or has_effect(node)]
        alike: defaultdict[Hashable, list[fx.Node]] = defaultdict(list)
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            if not leaves_step(node) and not read_by_strides(node):
                alike[_kind(node)].append(node)
        for nodes in alike.values():
            for at, first in enumerate(nodes):
                batch = self._from(first, nodes[at + 1 :], place, fixed)
                if len(batch) > 1:
                    return batch
        return []

    def _from(
        self,
        first: fx.Node,
        others: Sequence[fx.Node],
        place: dict[fx.Node, int],
        fixed: Sequence[int],
    ) -> list[fx.Node]:
        batch, waiting = [first], _Waiting(first)
        end = min(
            (at for at in fixed if at > place[first]), default=place[first] + self.distance + 1
        )
        for other in others:
            if place[other] - place[first] > self.distance or place[other] > end:
                break
            if waiting.waits(other, place) or _copied_bytes([*batch, other]) > self.room:
                continue
            batch.append(other)
            waiting.add(other)
        return batch


class _Waiting:
    """Some nodes, of which others may depend: operands are followed back to the first of them."""

    def __init__(self, first: fx.Node) -> None:
        self._sources = {first}

    def add(self, node: fx.Node) -> None:
        self._sources.add(node)

    def waits(self, node: fx.Node, place: dict[fx.Node, int]) -> bool:
        """Whether ``node`` needs one of them, directly or not."""
        start = min(place[source] for source in self._sources)
        worklist, seen = [node], {node}
        while worklist:
            for operand in worklist.pop().all_input_nodes:
                if operand in self._sources:
                    return True
                if operand not in seen and place[operand] > start:
                    seen.add(operand)
                    worklist.append(operand)
        return False


def _kind(node: fx.Node) -> Hashable:
    """Equal for products that one call can do."""
    args, known = arguments(node), info(node)
    left, right = type_of(args["self"]), type_of(args["mat2"])
    sizes = tuple(map(sample_of, (*left.shape, *right.shape)))
    marks = known.phase, known.region, known.checkpoint, known.asked
    return sizes, left, right, marks


def _copied_bytes(batch: Sequence[fx.Node]) -> int:
    total = 0
    for name in ("self", "mat2"):
        factors = [arguments(node)[name] for node in batch]
        if len(set(factors)) > 1:
            total += sum(sample_of(type_of(factor).nbytes) for factor in factors)
    return total


def _fuse(batch: Sequence[fx.Node]) -> list[fx.Node]:
    """The batch stands where its last product stood; readers of the others move behind it."""
    build = ReplacementBuilder(batch[-1])
    left, right = (_factor(build, batch, name) for name in ("self", "mat2"))
    product = build.call(aten.bmm.default, left, right)
    results = [build.call(aten.select.int, product, 0, at) for at in range(len(batch))]
    for node, result in zip(batch, results, strict=True):
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)
    return results


def _factor(build: ReplacementBuilder, batch: Sequence[fx.Node], name: str) -> fx.Node:
    """All factors, one after the other; one that is shared is not copied."""
    factors = [arguments(node)[name] for node in batch]
    if len(set(factors)) > 1:
        return build.call(aten.stack.default, factors)
    lifted = build.call(aten.unsqueeze.default, factors[0], 0)
    return build.call(aten.expand.default, lifted, [len(batch), -1, -1])
