"""Nodes lowered before, in another graph of the same step: the same program as without."""

import pytest
import torch
from torch.nn import functional as F

from testing import trace
from treadle.graph.node_info import with_info
from treadle.graph.signature import StepGraph
from treadle.loop.printing import show_program
from treadle.loop.simplify import simplify_program
from treadle.lower.graph import lower
from treadle.lower.reuse import LoweredNodes
from treadle.passes.memory.order import facts_of
from treadle.passes.memory.rematerialise import build, recompute
from treadle.schedule.loop_nest import LoopNests
from treadle.schedule.plan import schedule


def program(x, w, v, b):
    h = F.layer_norm(torch.relu(torch.mm(x, w)), (6,))
    left, right = torch.split(h, 3, dim=1)
    y = torch.softmax(torch.mm(h, v), dim=1) * 1.0 + b
    late = (torch.mm(y, h) * 2).sum() + left.sum() + (right * -0.0).max()
    return late, w - 0.1 * y.sum()


def traced() -> StepGraph:
    inputs = torch.randn(4, 5), torch.randn(5, 6), torch.randn(6, 4), torch.randn(4)
    step = trace(program, *inputs, writes={1: 1})
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    for node in nodes[len(nodes) // 2 :]:
        with_info(node, phase="backward")
    return step


def candidates() -> list[StepGraph]:
    """Of one step: as it is, everything computed again, and half of it."""
    facts = facts_of(traced())
    forward = [i for i, phase in enumerate(facts.phases) if phase == 0]
    kept = [frozenset(forward), frozenset[int](), frozenset(forward[::2])]
    return [build(recompute(facts, each)) for each in kept]


@pytest.mark.parametrize("library", [False, True])
def test_programs_and_plans_are_those_of_each_alone(library):
    known, small, nests = LoweredNodes(), {}, LoopNests()
    for step in candidates():
        alone = simplify_program(lower(step, library=library))
        shared = simplify_program(lower(step, library=library, known=known), small)
        assert show_program(shared) == show_program(alone)
        plan = schedule(shared, nests=nests)
        assert plan.peak_bytes == schedule(alone).peak_bytes
        assert plan.offsets == schedule(alone).offsets


def test_a_node_of_two_graphs_is_lowered_once():
    known = LoweredNodes()
    first, second = (lower(step, known=known) for step in candidates()[:2])
    for name in ("mm", "relu"):  # the norm after them has several results: it is lowered anew
        one, other = (
            [each for each in made.steps if each.origin.nodes == (name,)]
            for made in (first, second)
        )
        assert len(one) == 1
        assert one[0] is other[0]


def test_numbers_that_print_alike_are_told_apart():
    known = LoweredNodes()
    one = trace(lambda x: x * 1.0, torch.randn(3))
    other = trace(lambda x: x * 1, torch.randn(3))
    third = trace(lambda x: x * -0.0, torch.randn(3))
    fourth = trace(lambda x: x * 0.0, torch.randn(3))
    for step in (one, other, third, fourth):
        assert show_program(lower(step, known=known)) == show_program(lower(step))
