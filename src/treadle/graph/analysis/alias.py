"""Which values share bytes. Fake values show this: a view's storage is its base's storage."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from treadle.compat.tensors import storage_of
from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import tensors_in
from treadle.util.reach import reached

aten = torch.ops.aten
_BY_STRIDES = frozenset({
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
})  # fmt: skip


def storages(value: object) -> frozenset[int]:
    """Identities of the storages behind a ``val``; comparable while the values live."""
    return frozenset(storage_of(tensor) for tensor in tensors_in(value))


@dataclass(frozen=True)
class Aliases:
    """Storages per node, the holder of each storage that outlives the step, those returned.

    ``fixed`` maps a storage to the placeholder or constant it belongs to.
    """

    of: Mapping[fx.Node, frozenset[int]]
    fixed: Mapping[int, fx.Node]
    returned: frozenset[int]

    def share(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether the two may show the same bytes."""
        return not self.of[left].isdisjoint(self.of[right])

    def base(self, node: fx.Node) -> fx.Node | None:
        """The placeholder or constant whose bytes ``node`` shows, if any."""
        return next(
            (self.fixed[storage] for storage in self.of[node] if storage in self.fixed), None
        )

    def groups(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Nodes that share bytes, in order of first definition; loners form groups of one."""
        members: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for node, held in self.of.items():
            for storage in held:
                members[storage].append(node)
        return tuple(map(tuple, members.values()))


def views_of(node: fx.Node) -> list[fx.Node]:
    """``node``, and the nodes that show its bytes, be it through others."""

    def shown(current: fx.Node) -> list[fx.Node]:
        held = storages(value_of(current))
        users = (user for user in current.users if user.op == "call_function")
        return [user for user in users if held & storages(value_of(user))]

    return list(reached([node], shown))


def leaves_step(node: fx.Node) -> bool:
    """Whether the bytes of ``node`` are returned, by itself or through its views."""
    return any(user.op == "output" for current in views_of(node) for user in current.users)


def read_by_strides(node: fx.Node) -> bool:
    """Whether a reader of ``node``, or of a view of it, counts in its storage."""
    return any(user.target in _BY_STRIDES for current in views_of(node) for user in current.users)


def analyse(step: StepGraph) -> Aliases:
    """Which values of a step share storage, and with which inputs, as it was when it was traced."""
    of = {node: storages(value_of(node)) for node in step.graph.nodes if node.op != "output"}
    holders = [node for node in of if node.op in ("placeholder", "get_attr")]
    fixed: dict[int, fx.Node] = {}
    for node in holders:
        for storage in of[node]:
            fixed.setdefault(storage, node)
    returned = _union(of[node] for node in step.returned if node is not None)
    return Aliases(of, fixed, returned)


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)
