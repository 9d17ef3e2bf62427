"""What the table says of memory, against what operators give: a result is new memory, or a part of
an operand's."""

import pytest

from lower.lowering_help import trace
from lower.operator_samples import SAMPLES
from lower.operator_table import Sample
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.alias import storages


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.family}: {s.name}" for s in SAMPLES])
def test_what_allocates_gives_no_memory_of_its_operands(sample: Sample) -> None:
    for node in trace(sample.program(), *sample.make()).graph.nodes:
        if isinstance(node.target, OpOverload) and facts_of(node.target).allocates:
            mine = storages(node.meta["val"])
            assert all(mine.isdisjoint(storages(each.meta["val"])) for each in node.all_input_nodes)
