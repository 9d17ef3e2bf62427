"""Every sample of the table, traced once: the interpreted program gives what eager gives, without
fallbacks; tables say which operators are expensive, and where results are."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from lower.lowering_help import calls_of, fallbacks, run, trace
from lower.operator_samples import SAMPLES
from lower.operator_table import Sample
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.alias import storages
from treadle.graph.core.signature import StepGraph
from treadle.loop.expr import SAME, Apply
from treadle.loop.functions import DIVIDES, EXPENSIVE
from treadle.loop.program import Compute, Program
from treadle.loop.traverse import walk
from treadle.lower import lower

aten = torch.ops.aten
FALLBACKS = frozenset({
    "fft", "linalg solve", "erfinv", "lgamma", "digamma", "i0", "whole numbers", "nextafter",
    "multi_margin_loss", "multilabel losses",
})  # fmt: skip
"""Samples with operators that have no formula: each is counted."""
"""Samples with complex numbers in them."""


@dataclass(frozen=True)
class Traced:
    """A sample, inputs for it, and its graph."""

    sample: Sample
    inputs: list[torch.Tensor]
    step: StepGraph

    @cached_property
    def program(self) -> Program:
        return lower(self.step)


@pytest.fixture(scope="module", params=SAMPLES, ids=lambda each: f"{each.family}: {each.name}")
def traced(request: pytest.FixtureRequest) -> Traced:
    """Tests of one sample follow each other, so that one graph is there at a time."""
    sample: Sample = request.param
    inputs = sample.make()
    return Traced(sample, inputs, trace(sample.program(), *inputs))


def test_sample_equals_eager(traced: Traced) -> None:
    sample = traced.sample
    torch.manual_seed(7)
    expected = sample.program()(*[x.clone() for x in traced.inputs])
    torch.manual_seed(7)
    found = run(traced.program, [x.clone() for x in traced.inputs])
    for mine, eager in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (eager.dtype, eager.shape)
        torch.testing.assert_close(mine, eager, rtol=sample.rtol, atol=sample.atol, equal_nan=True)
    if sample.name not in FALLBACKS:
        assert not fallbacks(traced.program)
    assert all(call.op for call in calls_of(traced.program))


def is_slow(node) -> bool:
    """A power may have an exponent with which it is a product or a root."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket is aten.pow:
        return False
    return facts_of(node.target).slow_elements


def test_a_slow_operator_has_an_expensive_formula(traced: Traced) -> None:
    if not any(map(is_slow, traced.step.graph.nodes)):
        return
    bodies = [each.array.body for each in traced.program.steps if isinstance(each, Compute)]
    functions = {node.fn for body in bodies for node in walk(body) if isinstance(node, Apply)}
    assert functions & EXPENSIVE


def test_every_expensive_function_is_one_of_the_formulas():
    assert EXPENSIVE | DIVIDES <= SAME
    assert EXPENSIVE.isdisjoint(DIVIDES)


def test_what_allocates_gives_no_memory_of_its_operands(traced: Traced) -> None:
    """A result is new memory, or a part of an operand's."""
    for node in traced.step.graph.nodes:
        if isinstance(node.target, OpOverload) and facts_of(node.target).allocates:
            mine = storages(node.meta["val"])
            assert all(mine.isdisjoint(storages(each.meta["val"])) for each in node.all_input_nodes)
