"""Parameters that would diverge between ranks.

::

    g = mm(t(x), d)                       this rank's own: of its batch, by a backward pass
    a = wait(all_reduce(g)); p' = p - a   every rank writes the same
    q' = q - g                            every rank writes something else: TR-516

``treadle.DataParallel`` averages the gradients in ``.grad``. A gradient that reaches a parameter on
another path would be applied without averaging. So every written value is traced back to its
sources, along all paths.
"""

from torch import fx

from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.compat.distributed.collectives import group_named
from treadle.compat.distributed.process_groups import ranks_of
from treadle.graph.analysis.dataflow import operands
from treadle.graph.core.collectives import collective_of
from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.signature import Role, StepGraph
from treadle.util.errors import CaptureError


def refuse_unsynced_gradients(step: StepGraph, group: RankGroup) -> None:
    """``CaptureError`` TR-516 if the step writes an unaveraged gradient of this rank's batch to a
    parameter, or to optimizer state that all ranks of ``group`` have.
    """
    if group.ranks == 1:
        return
    own = _unsynced_gradients(step, group)
    for node, output in step.outputs():
        if output.writes is None or node is None or node not in own:
            continue
        input_ = step.signature.inputs[output.writes]
        if input_.role in (Role.PARAMETER, Role.STATE) and not input_.sharded:
            raise CaptureError(
                f"{input_.name} would differ between ranks: the value written to it comes from a "
                "gradient of this rank's batch that is not averaged",
                code="TR-516",
                where=info(node).where,
                remedy="put the gradient into .grad before optimizer.step(), or average it with "
                "torch.distributed.all_reduce",
            )


def _unsynced_gradients(step: StepGraph, group: RankGroup) -> set[fx.Node]:
    """The nodes that depend on gradients that only this rank has."""
    of_batch = {
        node
        for node, input_ in step.inputs()
        if input_.role is Role.BATCH and tensor_of(node).dim()  # a number may be that of all ranks
    }
    ranks = _ranks(group.name)
    own: set[fx.Node] = set()
    for node in step.graph.nodes:
        collective = collective_of(node)
        if collective is not None and len(ranks & _ranks(collective.group)) > 1:
            continue  # its result is that of several, or this rank's part of it
        sources = operands(node)
        if not of_batch.isdisjoint(sources):
            of_batch.add(node)
        is_gradient = node in of_batch and info(node).phase == "backward"
        if is_gradient or not own.isdisjoint(sources):
            own.add(node)
    return own


def _ranks(group: str) -> frozenset[int]:
    return frozenset(ranks_of(group_named(group)))
