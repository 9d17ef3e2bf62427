import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from testing import check_numbers, check_pass, trace
from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.compiler.cleaning import clean
from treadle.compiler.memory import applied
from treadle.graph.analysis.alias import analyse
from treadle.graph.core.node_info import info, with_info
from treadle.graph.core.signature import Role
from treadle.graph.core.verify import verify
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.memory.choose import fastest_plan
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import H200

aten = torch.ops.aten
X = torch.randn(3, 5)


def test_equal_values_are_computed_once_and_cascade():
    check_pass(
        RemoveCommonSubexpressions(),
        lambda x: x.exp().sum([0]) + x.exp().sum([0]),
        (X,),
        after="""
            x: f32[3, 5]
            exp: f32[3, 5] = exp(x)
            sum: f32[5] = sum.dim_IntList(exp, [0])
            add: f32[5] = add.Tensor(sum, sum)
            return [add]
        """,
    )


def test_lists_are_compared_by_what_they_hold():
    check_pass(
        RemoveCommonSubexpressions(),
        lambda x: (
            aten.sum.dim_IntList(x, [0]) * aten.sum.dim_IntList(x, [0])
            - aten.cat.default([x, x])[0] / aten.cat.default([x, x], 0)[0]
        ),
        (X,),
        after="""
            x: f32[3, 5]
            sum: f32[5] = sum.dim_IntList(x, [0])
            mul: f32[5] = mul.Tensor(sum, sum)
            cat: f32[6, 5] = cat([x, x])
            select: f32[5] = select.int(cat, 0, 0)
            div: f32[5] = div.Tensor(select, select)
            sub: f32[5] = sub.Tensor(mul, div)
            return [sub]
        """,
    )


def test_spelled_out_defaults_are_the_same_call():
    step = trace(lambda x: x.sum([0]) + x.sum([0]), X)
    first, _ = step.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    first.args, first.kwargs = (first.args[0], [0], False), {"dtype": None}
    assert RemoveCommonSubexpressions().run(step) == 1


def test_results_of_one_operation_merge():
    def program(x):
        a, b = torch.var_mean(x, dim=1)
        c, d = torch.var_mean(x, dim=1)
        return a * c, b + d

    step = trace(program, X)
    assert RemoveCommonSubexpressions().run(step) > 0
    check_numbers(step, program, (X,))


STAYS = {
    "random": lambda x: torch.rand_like(x) + torch.rand_like(x),
    "dropout": lambda x: torch.bernoulli(x, 0.5) + torch.bernoulli(x, 0.5),
    "other option": lambda x: x.sum([0]) + x.sum([0], keepdim=True),
    "number kinds": lambda x: (x.argmax(1) * 1).sum() + (x.argmax(1) * 1.0).sum() * 0,
    "zero signs": lambda x: (x + 0.0).atan2(x + -0.0),
    "dtypes": lambda x: (
        aten.full.default([2], 1, dtype=torch.float32).sum()
        + aten.full.default([2], 1, dtype=torch.float64).sum()
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    step = trace(STAYS[name], X)
    expected = 1 if name == "number kinds" else 0  # the two argmax are the same
    assert RemoveCommonSubexpressions().run(step) == expected
    check_numbers(step, STAYS[name], (X,))


def test_regions_stay_apart_and_phase_is_that_of_the_first():
    def program(x):
        return x.exp() + x.exp() * x.exp()

    step = trace(program, X)
    first, second, third = step.graph.find_nodes(op="call_function", target=aten.exp.default)
    with_info(second, region="recompute 0")
    with_info(third, phase="backward")
    assert RemoveCommonSubexpressions().run(step) == 1
    kept = step.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert kept == [first, second]
    assert info(first).phase == "forward"
    check_numbers(step, program, (X,))


def test_two_results_stay_two_tensors():
    for program in (
        lambda x: (x.exp(), x.exp()),
        lambda x: (x.exp().t(), x.exp().view(-1)),
    ):
        step = trace(program, X)
        assert RemoveCommonSubexpressions().run(step) == 0
        aliases = analyse(step)
        assert not aliases.share(*step.returned)


def test_a_result_may_take_the_place_of_an_inner_value():
    def program(x):
        return x.exp().sum(), x.exp(), x.exp()

    step = trace(program, X)
    assert RemoveCommonSubexpressions().run(step) == 1
    verify(step)
    _, first, second = step.returned
    assert not analyse(step).share(first, second)
    check_numbers(step, program, (X,))


UNARY = (torch.exp, torch.neg, torch.relu, lambda x: x + 1, lambda x: x * 1.0, torch.rand_like)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=8))
def test_any_program_keeps_its_numbers(steps):
    def program(x):
        values = [x]
        for operation, operand in steps:
            values.append(UNARY[operation](values[operand % len(values)]))
        return tuple(values[-3:]) if len(values) > 3 else tuple(values[1:])

    step = trace(program, X)
    RemoveCommonSubexpressions().run(step)
    verify(step)
    check_numbers(step, program, (X,))
    assert RemoveCommonSubexpressions().run(step) == 0


def test_a_result_that_only_the_second_reads_becomes_one_of_the_first():
    """What the backward pass reads of the forward's operation stands in the forward pass."""

    def program(x):
        first, average, _ = aten.native_layer_norm(x, [5], None, None, 1e-5)
        again, _, spread = aten.native_layer_norm(x, [5], None, None, 1e-5)
        return first + average, again * spread

    step = trace(program, X, backward_from="native_layer_norm_1")
    assert RemoveCommonSubexpressions().run(step) > 0
    verify(step)
    made, *others = [node for node in step.graph.nodes if node.op == "call_function"]
    results = [node for node in others if node.target is operator.getitem]
    assert made.target is aten.native_layer_norm.default
    assert others[: len(results)] == results
    assert {info(node).phase for node in results} == {"forward"}
    assert {node.args[1] for node in results if node.users} == {0, 1, 2}
    check_numbers(step, program, (X,))


def test_attention_that_drops_nothing_is_an_operation_like_others():
    def attend(drop):
        def program(q):
            flash = aten._scaled_dot_product_flash_attention_for_cpu
            return flash(q, q, q, drop)[0] + flash(q, q, q, drop)[0]

        return program

    q = torch.randn(1, 2, 3, 4)
    for drop, left in ((0.0, 1), (0.1, 2)):
        step = trace(attend(drop), q)
        RemoveCommonSubexpressions().run(step)
        names = [str(node.target) for node in step.graph.nodes]
        assert sum("attention" in name for name in names) == left


def test_views_of_merged_values_merge_in_the_same_run():
    """One of the two products is returned as a view: from then on both are that one."""

    def program(x, y):
        p, q = x @ y, x @ y
        return q.t().exp() + p.t().sin() + p.t().cos(), p.view(-1)

    step = trace(program, torch.randn(5, 2), torch.randn(2, 5))
    assert RemoveCommonSubexpressions().run(step) == 3
    assert RemoveCommonSubexpressions().run(step) == 0
    check_numbers(step, program, (torch.randn(5, 2), torch.randn(2, 5)))


@pytest.mark.parametrize("model", [CPU_MODEL, H200])
def test_the_bfloat16_copy_of_a_parameter_is_made_once_a_step(model):
    """However often autocast makes it, in forward and backward, and whatever the plan repeats."""
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x, y):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(net(net(x)), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = capture(
        step,
        models=named_models(net),
        optimizers=named_optimizers(optimizer),
        args=(torch.randn(5, 6), torch.randn(5, 6)),
        kwargs={},
    )
    cleaned = clean(captured.step)
    planned = applied(cleaned, fastest_plan(cleaned, model))
    for each in (cleaned, planned):
        parameters = [node for node, known in each.inputs() if known.role is Role.PARAMETER]
        for parameter in parameters:
            copies = [use for use in parameter.users if use.target is aten._to_copy.default]
            assert len(copies) == 1
