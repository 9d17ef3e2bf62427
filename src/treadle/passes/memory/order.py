"""A step as plain integers, and an order of its operations in which some happen twice.

Planning tries hundreds of orders; building a graph for each would cost more than evaluating it.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from treadle.compat.operators.operator_facts import accumulates
from treadle.compat.tensors import storage_of
from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import OpOverload, may_recompute
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import tensors_in
from treadle.graph.custom_ops.host_copies import is_on_host
from treadle.passes.memory.cost import CALLS, FUSIBLE, Kind, kind_of, seconds_of
from treadle.targets.model import DeviceModel

PHASES: Mapping[str, int] = {"forward": 0, "backward": 1, "optimizer": 2}
PHASE = 1 << 20
"""So much stands between the levels of two phases, which never meet."""
_NUMBER = 8
"""Bytes of one."""


@dataclass(frozen=True)
class Facts:
    """What planning needs of a step. Lists are by position in the graph, the output left out.

    ``inherits[i]`` has one entry per storage of ``i``: ``(operand, slot)`` where the bytes are
    those of an operand's storage, ``None`` where they are new. ``sizes[i]`` are their bytes.
    ``writes``: output position -> the placeholder that is overwritten.
    """

    step: StepGraph
    nodes: tuple[fx.Node, ...]
    operands: tuple[tuple[int, ...], ...]
    kinds: tuple[Kind, ...]
    phases: tuple[int, ...]
    inherits: tuple[tuple[tuple[int, int] | None, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    keep: tuple[bool, ...]  # random numbers and effects: happen exactly once, read or not
    returned: tuple[int | None, ...]
    writes: Mapping[int, int]
    fixed_bytes: int

    def seconds(self, device: DeviceModel) -> tuple[float, ...]:
        """Estimated seconds of each node on ``device``."""
        pairs = zip(self.nodes, self.kinds, strict=True)
        return tuple(seconds_of(node, kind, device) for node, kind in pairs)

    @functools.cached_property
    def head(self) -> int:
        """The position after the forward pass's last library call.

        From there to the first library call of the backward pass, usually through the loss, both
        passes can share kernels.
        """
        pairs = enumerate(zip(self.kinds, self.phases, strict=True))
        calls = [i for i, (kind, phase) in pairs if kind in CALLS and phase == 0]
        return calls[-1] + 1 if calls else 0

    @functools.cached_property
    def first_late(self) -> int:
        """The first position of a later phase than the forward pass."""
        late = (i for i, phase in enumerate(self.phases) if phase > 0)
        return next(late, len(self.phases))

    @functools.cached_property
    def placeholders(self) -> tuple[bool, ...]:
        """Whether each node is an input of the graph."""
        return tuple(node.op == "placeholder" for node in self.nodes)

    @functools.cached_property
    def updates(self) -> tuple[bool, ...]:
        """Whether each node is of the optimizer and may run at another time."""
        pairs = zip(self.phases, self.keep, strict=True)
        return tuple(phase == PHASES["optimizer"] and not kept for phase, kept in pairs)

    @functools.cached_property
    def last_forward_readers(self) -> tuple[int, ...]:
        """The last operation of the forward pass that reads each value or a view of it; -1 if
        none."""
        last = [-1] * len(self.operands)
        for i in range(len(last) - 1, -1, -1):
            if self.phases[i] == 0:
                reader = max(last[i], i) if self.views[i] else i
                for operand in self.operands[i]:
                    last[operand] = max(last[operand], reader)
        return tuple(last)

    @functools.cached_property
    def lasting(self) -> tuple[bool, ...]:
        """Whether the later phases find each value whatever is kept, itself: inputs, results,
        random numbers, and what they make."""
        results = {i for i in self.returned if i is not None}
        triples = enumerate(zip(self.kinds, self.phases, self.keep, strict=True))
        return tuple(
            phase > 0 or keep or kind is Kind.INPUT or i in results
            for i, (kind, phase, keep) in triples
        )

    @functools.cached_property
    def overwritten(self) -> frozenset[int]:
        """The placeholders that outputs are written back to."""
        return frozenset(self.writes.values())

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Unfusible operations on the longest path to each node.

        It is also the level of a second computation in any ``Order``: its operands are those of
        the first, or second computations of those.
        """
        levels_: list[int] = []
        unfusible = [kind not in (*FUSIBLE, Kind.VIEW, Kind.INPUT) for kind in self.kinds]
        for operands in self.operands:
            levels_.append(
                max((levels_[operand] + unfusible[operand] for operand in operands), default=0)
            )
        return tuple(levels_)

    @functools.cached_property
    def chunks(self) -> tuple[int, ...]:
        """Which chunk of rows each node is of, from 1; 0 for what is of none."""
        chunk_names = (info(node).chunk for node in self.nodes)
        return tuple(0 if chunk is None else chunk + 1 for chunk in chunk_names)

    @functools.cached_property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Phase, chunk of rows and level of each node as one number, and those of its second
        computation: that and the head of the forward pass belong to the backward pass."""
        phases = [max(phase, i >= self.head) for i, phase in enumerate(self.phases)]
        pairs = zip(self.chunks, self.levels, strict=True)
        inside = [len(PHASES) * PHASE * chunk + level for chunk, level in pairs]
        again = tuple(max(p, 1) * PHASE + n for p, n in zip(phases, inside, strict=True))
        return tuple(p * PHASE + n for p, n in zip(phases, inside, strict=True)), again

    @functools.cached_property
    def alone(self) -> tuple[bool, ...]:
        """Whether a node has one storage, which is its own."""
        return tuple(sources == (None,) for sources in self.inherits)

    @functools.cached_property
    def views(self) -> tuple[bool, ...]:
        """Whether each node is a view."""
        return tuple(kind is Kind.VIEW for kind in self.kinds)

    @functools.cached_property
    def fusible(self) -> tuple[bool, ...]:
        """Whether each node is a formula that may be computed where it is read."""
        return tuple(kind in FUSIBLE for kind in self.kinds)

    @functools.cached_property
    def continued(self) -> Mapping[int, int]:
        """Which operand of a node has the bytes of its result, if nobody reads that operand later:
        the sum that a product is added to."""
        found: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            first = node.args[0] if self._accumulates(i) else None
            if isinstance(first, fx.Node):
                at = node.all_input_nodes.index(first)
                if self.sizes[self.operands[i][at]] == self.sizes[i]:
                    found[i] = at
        return found

    def _accumulates(self, i: int) -> bool:
        target = self.nodes[i].target
        return self.alone[i] and isinstance(target, OpOverload) and accumulates(target)

    @functools.cached_property
    def condensed(self) -> tuple[bool, ...]:
        """Whether each node sums everything up to a number: that is there from then on, and what it
        was made of need not wait for its readers."""
        return tuple(
            kind is Kind.REDUCTION and self.new_bytes(i) <= _NUMBER
            for i, kind in enumerate(self.kinds)
        )

    @functools.cached_property
    def filled(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of each storage behind a node as a plan counts them: none for an input's."""
        pairs = zip(self.sizes, self.kinds, strict=True)
        return tuple((0,) * len(s) if kind is Kind.INPUT else s for s, kind in pairs)

    def new_bytes(self, i: int) -> int:
        """Bytes of the storages that first exist with ``i``."""
        slots = zip(self.inherits[i], self.sizes[i], strict=True)
        return sum(size for source, size in slots if source is None)

    def held_bytes(self, i: int) -> int:
        """Bytes of the storages that node ``i`` makes."""
        return sum(self.sizes[i])


@dataclass(frozen=True)
class Order:
    """Operations in order: ``origin[k]`` says which node the ``k``-th is, ``operands[k]`` which
    operations it reads, ``again[k]`` whether it is a second computation of a forward value."""

    facts: Facts
    origin: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    again: tuple[bool, ...]
    returned: tuple[int | None, ...]

    def permuted(self, places: Iterable[int]) -> "Order":
        """The same operations; ``places`` lists their old positions in the new order."""
        old = tuple(places)
        new = [-1] * len(self.origin)
        for k, place in enumerate(old):
            new[place] = k
        renamed, operands = new.__getitem__, self.operands
        return Order(
            self.facts,
            tuple([self.origin[p] for p in old]),
            tuple([tuple(map(renamed, operands[p])) for p in old]),
            tuple([self.again[p] for p in old]),
            tuple([None if r is None else new[r] for r in self.returned]),
        )


def facts_of(step: StepGraph) -> Facts:
    """What planning asks of a step, by the position of each node."""
    nodes = tuple(node for node in step.graph.nodes if node.op != "output")
    index = {node: i for i, node in enumerate(nodes)}
    operands = tuple(tuple(index[operand] for operand in node.all_input_nodes) for node in nodes)
    held = [_storages_in_order(node) for node in nodes]
    inherits = tuple(
        tuple(_source(value, operands[i], held) for value in held[i]) for i in range(len(nodes))
    )
    places = [index[node] for node in step.placeholders]
    outputs = tuple(None if node is None else index[node] for node in step.returned)
    kinds = tuple(map(kind_of, nodes))
    fixed: dict[int, int] = {}
    for i, kind in enumerate(kinds):
        if kind is Kind.INPUT:
            fixed |= held[i]
    return Facts(
        step=step,
        nodes=nodes,
        operands=operands,
        kinds=kinds,
        phases=tuple(PHASES[info(node).phase or "forward"] for node in nodes),
        inherits=inherits,
        sizes=tuple(tuple(storages.values()) for storages in held),
        keep=tuple(not may_recompute(node) for node in nodes),
        returned=outputs,
        writes={
            position: places[output.writes]
            for position, output in enumerate(step.signature.outputs)
            if output.writes is not None
        },
        fixed_bytes=sum(fixed.values()),
    )


def _storages_in_order(node: fx.Node) -> dict[int, int]:
    """Identity -> bytes of each storage behind a node, none of one on the host meanwhile."""
    held: dict[int, int] = {}
    away = is_on_host(node)
    for tensor in tensors_in(value_of(node)):
        held[storage_of(tensor)] = 0 if away else tensor.untyped_storage().nbytes()
    return held


def _source(
    storage: int, operands: tuple[int, ...], held: list[dict[int, int]]
) -> tuple[int, int] | None:
    for position, operand in enumerate(operands):
        if storage in held[operand]:
            return position, list(held[operand]).index(storage)
    return None


def as_traced(facts: Facts) -> Order:
    """Every operation once, in graph order."""
    count = len(facts.nodes)
    return Order(facts, tuple(range(count)), facts.operands, (False,) * count, facts.returned)
