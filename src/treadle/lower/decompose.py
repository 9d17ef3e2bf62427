"""Operations without a rule, lowered through PyTorch's own decompositions.

::

    before:  y = huber_loss_backward(g, x, t, 1, 0.5)
    after:   d = x - t;  a = d < -0.5;  b = d > 0.5;  ...;  y = where(a, ..., where(b, ..., ...))

Decompositions compute half precisions in float32 where eager does. A decomposition is used only if
every operation in it has a rule or is a library call by choice: otherwise the operation stays
whole.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import fx

from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.operators import is_mutable
from treadle.graph.rewrite.inline import traced_call
from treadle.lower.library import is_chosen
from treadle.lower.registry import rule_for

Decomposition = Callable[..., object]


def decomposition_of(node: fx.Node) -> fx.GraphModule | None:
    """``node`` as a graph of its tensor operands, or ``None`` where it has no decomposition."""
    op = node.target
    if not isinstance(op, OpOverload) or op not in _table() or facts_of(op).draws:
        return None
    chosen = {op: _table()[op]} | _without_rules()
    module = traced_call(node, op, chosen)
    calls = [call for call in module.graph.nodes if call.op == "call_function"]
    if any(call.target is op for call in calls) or any(_is_unfit(call) for call in calls):
        return None
    return module


def _is_unfit(node: fx.Node) -> bool:
    draws = isinstance(node.target, OpOverload) and facts_of(node.target).draws
    return draws or is_mutable(node)


@functools.cache
def _table() -> Mapping[OpOverload, Decomposition]:
    """PyTorch's decompositions into its core operations."""
    known = dict(torch.export.default_decompositions())
    return {op: fn for op, fn in known.items() if isinstance(op, OpOverload)}


@functools.cache
def _without_rules() -> dict[OpOverload, Decomposition]:
    """Those of operations that would be fallbacks."""
    return {op: fn for op, fn in _table().items() if rule_for(op) is None and not is_chosen(op)}
