"""Which values are the same on all ranks of a group, as far as the graph shows.

::

    p                                  a parameter: the same          x    a batch: another one
    a = all_reduce(mm(x, w))           the same                       d = rand(...)    another one
    b = mul(wait(a), p)                made of what is the same       c = mul(b, d)    another one
"""

from torch import fx

from treadle.compat.operators.operator_facts import Effect
from treadle.graph.analysis.dataflow import operands
from treadle.graph.core.collectives import CollectiveKind, collective_of
from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.operators import effects_of
from treadle.graph.core.signature import Input, Role, StepGraph
from treadle.graph.core.types import is_tensor

_GIVES_ALL = frozenset({
    CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST,
})  # fmt: skip
"""After these every rank of the group has the same."""
_SAME = frozenset({Role.PARAMETER, Role.STATE, Role.SCALAR})


def may_differ(step: StepGraph, group: str) -> set[fx.Node]:
    """Values that ranks of ``group`` need not have in common. Parameters and state of optimizers
    that are not in parts are, and numbers; tensors that come from elsewhere may be anything."""
    nodes = {node for node, step_input in step.inputs() if not _is_same(node, step_input)}
    for node in step.graph.nodes:
        collective = collective_of(node)
        if collective is not None and collective.group == group:
            if collective.kind not in _GIVES_ALL:
                nodes.add(node)
        elif not nodes.isdisjoint(operands(node)) or _is_own(node):
            nodes.add(node)
    return nodes


def _is_same(node: fx.Node, step_input: Input) -> bool:
    is_number = is_tensor(node) and not tensor_of(node).dim() and step_input.role is Role.BATCH
    return (step_input.role in _SAME or is_number) and not step_input.sharded


def _is_own(node: fx.Node) -> bool:
    """Whether it belongs to this rank, whatever its operands are."""
    if node.op != "call_function":
        return False
    apart = Effect.DRAWS | Effect.READS_OUTSIDE | Effect.UNKNOWN
    return info(node).own_rows is not None or bool(effects_of(node) & apart)
