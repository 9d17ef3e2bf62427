"""The collectives that a wrapper's plan requires of a graph, and the check for them.

::

    DistributedDataParallel   p' = f(p, wait(all_reduce(g)))                 over its group
    fully_shard               w = wait(all_gather(p)) ahead of what computes with p,
                              p' = f(p, wait(reduce_scatter(g)))             along the parts,
                              and wait(all_reduce(...)) of that              along the copies

The wrappers insert these while the step is traced, where hooks fire. This check is independent of
that: it follows gradients from the backward pass to the values that are written, along all paths,
and each must pass through the collectives that the plan has for its parameter.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.capture.integrations.fully_sharded import group_of_ranks
from treadle.compat.distributed.fully_sharded import ShardedGroupPlan, ShardedStatePlan
from treadle.graph.analysis.dataflow import operands
from treadle.graph.core.collectives import Collective, CollectiveKind, collective_of
from treadle.graph.core.node_info import info, known_value
from treadle.graph.core.signature import Role, StepGraph
from treadle.graph.core.types import tensors_in
from treadle.util.errors import CaptureError

aten = torch.ops.aten

_OF_SIZES = frozenset({
    aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, aten.new_empty.default, aten.new_empty_strided.default,
})  # fmt: skip
"""Operations that use only the sizes of their operand and none of its elements."""


@final
@dataclass(frozen=True, slots=True)
class ReductionContract:
    """``wrapper``: the wrapper that demands it. ``reductions``: the kinds and groups of the
    reductions of a gradient, in order. ``gathers``: the group in which a sharded parameter is
    gathered before it is used."""

    wrapper: str
    reductions: tuple[tuple[CollectiveKind, str], ...]
    gathers: str | None = None


def contract_of_wrapper(group: str) -> ReductionContract:
    """The contract of ``DistributedDataParallel`` over the ranks of ``group``."""
    return ReductionContract("DistributedDataParallel", ((CollectiveKind.ALL_REDUCE, group),))


def sharded_contracts(plans: Iterable[ShardedStatePlan]) -> Iterator[tuple[int, ReductionContract]]:
    """The contracts of ``fully_shard`` for the parameters whose gradients are reduced, by their
    ids."""
    for plan in plans:
        for group in plan.groups:
            if group.reduces:
                demand = _sharded(group)
                yield from ((id(parameter.sharded), demand) for parameter in group.parameters)


def _sharded(group: ShardedGroupPlan) -> ReductionContract:
    parts, copies = group_of_ranks(group.gathers), group_of_ranks(group.copies)
    reductions: list[tuple[CollectiveKind, str]] = []
    if parts is not None:
        reductions.append((CollectiveKind.REDUCE_SCATTER, parts.name))
    if copies is not None:
        reductions.append((CollectiveKind.ALL_REDUCE, copies.name))
    return ReductionContract(
        "fully_shard", tuple(reductions), None if parts is None else parts.name
    )


def check_contracts(
    step: StepGraph, demands: Mapping[int, ReductionContract], written: Mapping[int, Iterable[int]]
) -> None:
    """``CaptureError`` TR-517 if what is written for a parameter is not reduced as demanded, TR-518
    if a parameter is not gathered. ``demands``: by the parameter's place among the inputs;
    ``written``: the places of outputs that depend on its gradient."""
    of_batch = _of_batch(step)
    places: dict[ReductionContract, dict[fx.Node, int]] = {}
    for at, demand in demands.items():
        if not demand.reductions:
            continue
        if demand not in places:
            places[demand] = _missing(step, demand, of_batch)
        for place in written[at]:
            node = step.returned[place]
            if node is not None and (missing := places[demand].get(node, 0)):
                raise _unreduced(step.signature.inputs[at].name, demand, missing, node)
    for at, demand in demands.items():
        if demand.gathers is not None:
            _check_gathered(step, at, demand, of_batch)


def _of_batch(step: StepGraph) -> set[fx.Node]:
    """The nodes that depend on the elements of this rank's batch."""
    nodes = {node for node, step_input in step.inputs() if step_input.role is Role.BATCH}
    for node in step.graph.nodes:
        if node.target not in _OF_SIZES and not nodes.isdisjoint(operands(node)):
            nodes.add(node)
    return nodes


def _missing(
    step: StepGraph, demand: ReductionContract, of_batch: set[fx.Node]
) -> dict[fx.Node, int]:
    """For each value that depends on gradients before all of their reductions: a bit for each
    reduction that is still missing next. A number computed from a tensor, such as a norm, and a
    tensor made of numbers no longer count as gradients."""
    bits: dict[fx.Node, int] = {}
    reduced: set[fx.Node] = set()  # and what is made of it and of no batch
    for node in step.graph.nodes:
        if node.target in _OF_SIZES or node.op == "placeholder":
            continue
        own = 0
        for operand in operands(node):
            own |= bits.get(operand, 0) if _is_followed(operand, node) else 0
        missing = [
            operand for operand in operands(node) if operand in of_batch and operand not in reduced
        ]
        collective = collective_of(node)
        at = _place_of(collective, demand)
        if at is not None and own:
            own = own & ~(1 << at) | (own >> at & 1) << (at + 1)
            reduced.add(node)
        elif missing and info(node).phase == "backward":
            own |= 1
        elif not missing and node in of_batch:
            reduced.add(node)
        bits[node] = own & ((1 << len(demand.reductions)) - 1)
    return bits


def _is_followed(operand: fx.Node, node: fx.Node) -> bool:
    if info(node).phase == "backward" or node.op != "call_function":
        return True
    return _has_dims(operand) == _has_dims(node)


def _has_dims(node: fx.Node) -> bool:
    return any(tensor.dim() for tensor in tensors_in(known_value(node)))


def _place_of(collective: Collective | None, demand: ReductionContract) -> int | None:
    if collective is None:
        return None
    wanted = collective.kind, collective.group
    return demand.reductions.index(wanted) if wanted in demand.reductions else None


def _check_gathered(
    step: StepGraph, at: int, demand: ReductionContract, of_batch: set[fx.Node]
) -> None:
    """Check that no forward combines the batch with this rank's part of a parameter only."""
    parts = {step.placeholders[at]}
    for node in step.graph.nodes:
        sources = operands(node)
        collective = collective_of(node)
        if parts.isdisjoint(sources) or (collective and collective.group == demand.gathers):
            continue
        if info(node).phase != "forward":  # a backward pass has what its forward had
            continue
        others = [operand for operand in sources if operand not in parts]
        if not of_batch.isdisjoint(others):
            raise _ungathered(step.signature.inputs[at].name, demand, node)
        parts.add(node)


def _unreduced(name: str, demand: ReductionContract, missing: int, node: fx.Node) -> CaptureError:
    kind, group = demand.reductions[(missing & -missing).bit_length() - 1]
    return CaptureError(
        f"{demand.wrapper} requires {_words(kind)} over group {group} of the gradient of {name}, "
        "but the value written for it comes from a gradient without that reduction",
        code="TR-517",
        where=info(node).where,
        remedy=(
            "compute gradients with backward() from the output of the wrapper's forward; to "
            "train without its reductions, use no_sync() or the wrapped module"
        ),
    )


def _ungathered(name: str, demand: ReductionContract, node: fx.Node) -> CaptureError:
    return CaptureError(
        f"{demand.wrapper} requires {_words(CollectiveKind.ALL_GATHER)} over group "
        f"{demand.gathers} of {name}, but {node} computes with this rank's shard",
        code="TR-518",
        where=info(node).where,
        remedy=(
            "use parameters in the forward of the module that fully_shard was applied to, or in "
            "a method registered with register_fsdp_forward_method"
        ),
    )


def _words(kind: CollectiveKind) -> str:
    return {
        CollectiveKind.ALL_REDUCE: "an all-reduce",
        CollectiveKind.REDUCE_SCATTER: "a reduce-scatter",
        CollectiveKind.ALL_GATHER: "an all-gather",
    }.get(kind, kind.value)
