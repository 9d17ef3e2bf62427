"""Collectives among the nodes of a graph: one node starts it, another waits for its result.

::

    s = all_reduce(g, "sum", "0")             starts: ``s`` may not be read yet
    w = wait_tensor(s)                        ``w`` is what all ranks have

These are PyTorch's functional collectives. They are recognized by the facts about their operators
(``compat/operators/operator_facts.py``), never by the names of nodes or their distance.
"""

import enum
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from torch import Tensor, fx

from treadle.algebra.extents import size_key
from treadle.compat.distributed.collectives import NAMESPACE
from treadle.compat.operators.operator_facts import Effect
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import arguments, effects_of
from treadle.graph.core.signature import StepGraph

aten = torch.ops.aten

_WAIT = "wait_tensor"


class CollectiveKind(enum.StrEnum):
    """What a collective does with the tensors of all ranks of its group."""

    ALL_REDUCE = "all_reduce"  # each rank gets the sum, or another reduction
    REDUCE_SCATTER = "reduce_scatter_tensor"  # each rank gets its part of the sum, along dim 0
    ALL_GATHER = "all_gather_into_tensor"  # each rank gets all of them, along dim 0
    BROADCAST = "broadcast"  # each rank gets that of one
    ALL_TO_ALL = "all_to_all_single"  # each rank gets a part of each


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """The node that starts a collective, and what its operator says.

    ``group``: the name of its process group. ``ranks``: how many it has, where the operator is told
    (gathers and scatters). ``reduce``: ``"sum"``, ``"avg"``...; ``root``: the rank that sends, for
    a broadcast. ``splits``: for an all-to-all, how many rows come from each rank, and how many go
    to each. ``inputs``: what this rank gives, several for one that is coalesced.
    """

    node: fx.Node
    kind: CollectiveKind
    group: str
    inputs: tuple[fx.Node, ...]
    ranks: int | None = None
    reduce: str | None = None
    root: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    coalesced: bool = False

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes of its results that are read, which may be read only after a wait."""
        if not self.coalesced:
            return (self.node,)
        return tuple([user for user in self.node.users if user.target is operator.getitem])

    @property
    def waits(self) -> tuple[fx.Node, ...]:
        """The nodes that wait for it, in no order."""
        return tuple([user for result in self.results for user in result.users if is_wait(user)])

    @property
    def agreement(self) -> tuple[object, ...]:
        """All but what this rank gives: equal for two that do the same to equal inputs."""
        sizes = None if self.splits is None else tuple(map(size_key, chain(*self.splits)))
        known = self.kind, self.group, self.ranks, self.reduce, self.root
        return *known, sizes, self.coalesced

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side on this rank: what goes in, or what comes out."""
        value = value_of(self.node)
        outputs = [value] if isinstance(value, Tensor) else list(value)
        sides = outputs, [value_of(input_) for input_ in self.inputs]
        return max(sum(tensor.numel() * tensor.dtype.itemsize for tensor in side) for side in sides)


def communicates_otherwise(node: fx.Node) -> bool:
    """Whether the node may communicate without being a ``Collective`` or a wait for one: what it
    sends, and in which order, is not known."""
    if node.op != "call_function" or is_wait(node) or collective_of(node) is not None:
        return False
    return bool(effects_of(node) & (Effect.COMMUNICATES | Effect.UNKNOWN))


_WHOLE = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST})
"""After these all ranks have the same; after others each has a part, or had one before."""


def is_same_on_all_ranks(step: StepGraph) -> bool:
    """Whether ranks have one graph: no input is a part of a DTensor, and all that is sent are whole
    values. Otherwise parts may be uneven, and one rank pads what another sends as it is. What
    follows from the places of nodes, or from which values are equal, is then a rank's own; all that
    they have in common is which collectives depend on which, and their order as captured."""
    if any(input_.sharded for input_ in step.signature.inputs):
        return False
    return all(collective.kind in _WHOLE for collective in collectives_in(step.graph))


_IN_EQUAL_PIECES = frozenset({aten.split.Tensor, aten.chunk.default})
"""What cuts a dim in pieces of one size, and a smaller last one where it does not divide."""


def has_equal_parts(step: StepGraph) -> bool:
    """Whether no rank has more of anything than another, as far as the step says: no input is a
    part beside which others are larger or smaller, and nothing is cut in pieces of several sizes,
    of which ranks would take one each. Then what follows from sizes follows on all ranks."""
    if any(input_.uneven for input_ in step.signature.inputs):
        return False
    cuts = [node for node in step.graph.nodes if node.target in _IN_EQUAL_PIECES]
    return all(len({part.shape for part in value_of(node)}) <= 1 for node in cuts)


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective to end."""
    return _name_of(node) == _WAIT


def collective_of(node: fx.Node) -> Collective | None:
    """What the node starts; ``None`` for every other node, waits among them."""
    name = _name_of(node)
    single = name.removesuffix("_coalesced")
    if not name or single not in CollectiveKind.__members__.values():
        return None
    args = arguments(node)
    several = "inputs" in args
    inputs: tuple[fx.Node, ...] = tuple(args["inputs"]) if several else (args["input"],)
    ranks, root, group = args.get("group_size"), args.get("src"), args["group_name"]
    return Collective(
        node,
        CollectiveKind(single),
        group if isinstance(group, str) else group.group_name,
        inputs,
        ranks,
        args.get("reduce_op"),
        root,
        _splits_of(args),
        coalesced=several,
    )


def collectives_in(graph: fx.Graph) -> list[Collective]:
    """All that the graph starts, in its order."""
    collectives = [collective_of(node) for node in graph.nodes]
    return [collective for collective in collectives if collective is not None]


def started_by(wait: fx.Node) -> fx.Node:
    """The node whose result ``wait`` waits for: that of the collective, or one of several
    results."""
    started = wait.args[0]
    assert isinstance(started, fx.Node), wait
    return started


def _splits_of(
    args: Mapping[str, Sequence[int]],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if "output_split_sizes" not in args:
        return None
    return tuple(args["output_split_sizes"]), tuple(args["input_split_sizes"])


def _name_of(node: fx.Node) -> str:
    """The name of the operator if it is a functional collective or the wait for one; else none."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != NAMESPACE:
        return ""
    return target.overloadpacket.__name__
