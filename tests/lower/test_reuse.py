"""Nodes like ones that were lowered before, in the same graph or in another of its step: the same
program as without, and the same kernels."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from testing import trace
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import StepGraph
from treadle.loop.kernel import Kernel, KernelPlan
from treadle.loop.printing import show, show_call, show_kernel, show_program
from treadle.loop.program import Compute, Program
from treadle.loop.simplify import simplify_program
from treadle.loop.verify import verify_program
from treadle.lower.graph import lower
from treadle.lower.reuse import LoweredNodes
from treadle.passes.memory.order import facts_of
from treadle.passes.memory.rematerialise import build, recompute
from treadle.schedule.build import KnownKernels
from treadle.schedule.plan import schedule
from treadle.schedule.workers import PROGRAMS, THREADS


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
    known, small, kernels = LoweredNodes(), {}, KnownKernels()
    for step in candidates():
        alone = simplify_program(lower(step, library=library))
        shared = simplify_program(lower(step, library=library, known=known), small)
        assert show_program(shared) == show_program(alone)
        for workers in (THREADS, PROGRAMS):
            plan = schedule(shared, known=kernels, workers=workers)
            assert text_of(plan) == text_of(schedule(alone, workers=workers))


def test_a_kernel_of_two_candidates_is_made_once():
    known, kernels = LoweredNodes(), KnownKernels()
    plans = [schedule(lower(step, known=known), known=kernels) for step in candidates()[:2]]
    bodies = [{id(s.body) for s in plan.steps if isinstance(s, Kernel)} for plan in plans]
    assert bodies[0] & bodies[1]
    names = [s.name for plan in plans for s in plan.steps if isinstance(s, Kernel)]
    assert all(name.removeprefix("kernel_").isdecimal() for name in names)


def test_a_write_back_of_two_candidates_is_one_template():
    known = LoweredNodes()
    copies = [
        next(s for s in lower(step, known=known).steps if s.writes == ("w",))
        for step in candidates()[:2]
    ]
    one, other = copies
    assert isinstance(one, Compute)
    assert isinstance(other, Compute)
    assert one.template is other.template


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


Part = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PARTS: tuple[Part, ...] = (
    lambda x, w: torch.relu(x) + x,
    lambda x, w: x * w[0],
    lambda x, w: x @ w,
    lambda x, w: F.layer_norm(x, (4,)),
    lambda x, w: torch.softmax(x, dim=0) * x.sum(),
    lambda x, w: torch.cat([x[:, :3], x[:, 3:] * 2], dim=1),
    lambda x, w: x.t().contiguous().view(4, 4) - x.amax(dim=1, keepdim=True),
    lambda x, w: torch.maximum(x, x) + torch.maximum(x, w),
    lambda x, w: x[torch.argmax(x, dim=0)],
    lambda x, w: sum(torch.split(x, 2, dim=1)).repeat(1, 2),
    lambda x, w: F.dropout(x, 0.5),
    lambda x, w: x * torch.full_like(x, 0.5) + torch.arange(4),
)


def layers(parts: list[int], depth: int, shared: list[bool]) -> StepGraph:
    """Up to four equal blocks, each with a weight of its own, which is written back, or with that
    of the one before."""

    def program(x, w0, w1, w2, w3):
        weights = w0, w1, w2, w3
        results = []
        for layer in range(depth):
            at = layer - 1 if layer and shared[layer] else layer
            before = x
            for part in parts:
                x = PARTS[part](x, weights[at])
            x = x + before
            results.append(weights[layer] - 0.1 * x.mean(dim=0))
        return (x.sum(), *results)

    inputs = (torch.randn(4, 4) for _ in range(5))
    return trace(program, *inputs, writes={1 + layer: 1 + layer for layer in range(depth)})


def both(step: StepGraph) -> tuple[Program, Program]:
    """The program with every node lowered by itself, and with what is equal lowered once."""
    alone = simplify_program(lower(step))
    return alone, simplify_program(lower(step, known=LoweredNodes()), {})


def text_of(plan: KernelPlan) -> list[str]:
    """Everything that a plan is."""
    steps = [show_kernel(s) if isinstance(s, Kernel) else show_call(s) for s in plan.steps]
    how = [repr((s.schedule, s.scratch)) for s in plan.steps if isinstance(s, Kernel)]
    return [*steps, *how, repr(plan.offsets), repr(plan.buffers), str(plan.peak_bytes)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=5),
    st.integers(1, 4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_equal_blocks_are_what_each_is_alone(parts, depth, shared):
    alone, together = both(layers(parts, depth, shared))
    assert show_program(together) == show_program(alone)
    verify_program(together)
    for step in together.steps:
        if isinstance(step, Compute):
            assert step.array.shape == step.output.shape
            assert {*step.reads} == {*Compute(step.output, step.array, step.origin).reads}
    assert text_of(schedule(together)) == text_of(schedule(alone))


def templates(depth: int) -> int:
    """How many formulas there are to look at, in a program of that many blocks."""
    _, together = both(layers([0, 3, 2, 4, 9], depth, [False] * depth))
    return len({id(step.template) for step in together.steps if isinstance(step, Compute)})


def test_deeper_steps_have_no_more_templates():
    assert templates(2) == templates(3) == templates(4)


def test_operands_that_are_one_are_told_apart_from_two():
    def program(x, y):
        return torch.maximum(x, y), torch.maximum(x, x), torch.maximum(y, y), torch.maximum(y, x)

    alone, together = both(trace(program, torch.randn(3), torch.randn(3)))
    assert show_program(together) == show_program(alone)
    first, twice, again, swapped = (step for step in together.steps if isinstance(step, Compute))
    assert first.template is swapped.template
    assert swapped.reads == first.reads[::-1]
    assert twice.template is again.template
    assert twice.template is not first.template


def test_a_template_that_reads_to_index_is_renamed_inside():
    def program(table, these, those):
        return table[these], table[those]

    inputs = torch.randn(5, 3), torch.tensor([1, 2]), torch.tensor([0, 4])
    alone, together = both(trace(program, *inputs))
    assert show_program(together) == show_program(alone)
    first, second = (step for step in together.steps if isinstance(step, Compute))
    assert show(second.array) == show(first.array).replace(first.reads[0], second.reads[0])


def test_the_results_that_are_read_decide_what_a_node_becomes():
    def program(x, y):
        one, _ = torch.max(x, dim=1)
        two, place = torch.max(y, dim=1)
        return one, two, place

    alone, together = both(trace(program, torch.randn(3, 4), torch.randn(3, 4)))
    assert show_program(together) == show_program(alone)
