"""What is lowered to formulas is planned as formulas: no rule whose operator counts as a call."""

import pytest
import torch

import treadle.lower.graph  # noqa: F401  # imports all rules
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload, schema_of
from treadle.lower.registry import _RULES

aten = torch.ops.aten
WHERE_VALUES_SAY = {
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.embedding_dense_backward.default,
}
"""They write at places that are values, so that nothing else is computed there."""
PARTS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
}
"""Memory of their operand's, though their schemas do not say so."""


def is_view(op: OpOverload) -> bool:
    returns = schema_of(op).returns
    return op in PARTS or any(each.alias_info is not None for each in returns)


FORMULAS = [op for op in _RULES if op.namespace == "aten" and not is_view(op)]
"""Rules for ``treadle``'s operators lower one form of a call of a library's."""


@pytest.mark.parametrize("op", FORMULAS, ids=str)
def test_what_has_a_rule_is_no_call(op: OpOverload):
    assert facts_of(op).cost.is_expensive == (op in WHERE_VALUES_SAY)
