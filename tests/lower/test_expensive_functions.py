"""Two tables say what is expensive: of operators, and of the functions in their formulas."""

import pytest
import torch

from lower.lowering_help import trace
from lower.operator_samples import SAMPLES
from lower.operator_table import Sample
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.loop.expr import SAME, Apply
from treadle.loop.functions import DIVIDES, EXPENSIVE
from treadle.loop.program import Compute
from treadle.loop.traverse import walk
from treadle.lower import lower

aten = torch.ops.aten


def is_slow(node) -> bool:
    """A power may have an exponent with which it is a product or a root."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket is aten.pow:
        return False
    return facts_of(node.target).slow_elements


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.family}: {s.name}" for s in SAMPLES])
def test_a_slow_operator_has_an_expensive_formula(sample: Sample) -> None:
    step = trace(sample.program(), *sample.make())
    if not any(map(is_slow, step.graph.nodes)):
        return
    bodies = [each.array.body for each in lower(step).steps if isinstance(each, Compute)]
    functions = {node.fn for body in bodies for node in walk(body) if isinstance(node, Apply)}
    assert functions & EXPENSIVE


def test_every_function_is_one_of_the_formulas():
    assert EXPENSIVE | DIVIDES <= SAME
    assert EXPENSIVE.isdisjoint(DIVIDES)
