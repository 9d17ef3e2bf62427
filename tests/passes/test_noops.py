import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, check_pass, node_of, trace
from treadle.graph.analysis.alias import analyse
from treadle.graph.rewrite.rules import explain
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps

aten = torch.ops.aten


def fresh(*shape):
    x = torch.randn(*shape)
    x.view(-1)[:1] = -0.0
    return x


GOES = {
    "whole slice": lambda x: aten.slice.Tensor(x, 1, 0, 9223372036854775807),
    "whole slice_scatter": lambda x: aten.slice_scatter.default(torch.zeros(3, 5), x, 1, 0, 5),
    "repeat of ones": lambda x: aten.repeat.default(x, [1, 1]),
    "no padding": lambda x: aten.constant_pad_nd.default(x, [0, 0, 0, 0]),
    "same dtype": lambda x: aten._to_copy.default(x, dtype=torch.float32),
    "same device": lambda x: aten._to_copy.default(x, device=torch.device("cpu")),
    "first power": lambda x: aten.pow.Tensor_Scalar(x, 1),
    "cat of one": lambda x: aten.cat.default([x], 1),
    "same view": lambda x: aten.view.default(x, [3, -1]),
    "same _unsafe_view": lambda x: aten._unsafe_view.default(x, [3, 5]),
    "copy": lambda x: aten.copy.default(torch.zeros(3, 5), x),
    "alias": lambda x: aten.alias.default(x),
    "detach": lambda x: aten.detach.default(x),
    "clone": lambda x: aten.clone.default(x),
    "same expand": lambda x: aten.expand.default(x, [3, -1]),
    "squeeze of nothing": lambda x: aten.squeeze.dim(x, 1),
    "permute in order": lambda x: aten.permute.default(x, [0, 1]),
    "times 1": lambda x: aten.mul.Tensor(x, 1),
    "ones times": lambda x: aten.mul.Tensor(torch.ones(5), x),
    "over 1": lambda x: aten.div.Tensor(x, 1.0),
    "minus 0": lambda x: aten.sub.Tensor(x, 0),
    "plus -0": lambda x: aten.add.Tensor(x, -0.0),
}


@pytest.mark.parametrize("name", GOES)
def test_goes(name):
    def program(x):
        return GOES[name](x.neg()).exp() if name != "whole slice" else GOES[name](x).exp()

    inputs = (fresh(3, 5),)
    step = trace(program, *inputs)
    assert RemoveNoOps().run(step) >= 1
    RemoveDeadCode().run(step)
    targets = [node.target for node in step.graph.nodes if node.op == "call_function"]
    assert set(targets) <= {aten.neg.default, aten.exp.default}
    check_numbers(step, program, inputs)
    assert RemoveNoOps().run(step) == 0


def test_rounding_of_whole_numbers_goes():
    check_pass(
        RemoveNoOps(),
        lambda x: aten.ceil.default(aten.round.default(x)).neg(),
        (torch.arange(6).view(2, 3),),
        after="""
            x: i64[2, 3]
            neg: i64[2, 3] = neg(x)
            return [neg]
        """,
    )


STAYS = {
    "part of x": (lambda x: aten.slice.Tensor(x, 1, 0, 4), aten.slice.Tensor, "changes f32[3, 5]"),
    "repeat": (lambda x: aten.repeat.default(x, [2, 1]), aten.repeat.default, "changes f32[3, 5]"),
    "pads to and fro": (
        lambda x: aten.constant_pad_nd.default(x, [1, -1]),
        aten.constant_pad_nd.default,
        "pads by [1, -1]",
    ),
    "other dtype": (
        lambda x: aten._to_copy.default(x, dtype=torch.float64),
        aten._to_copy.default,
        "changes f32[3, 5] to f64[3, 5]",
    ),
    "rounds floats": (lambda x: aten.round.default(x), aten.round.default, "rounds torch.float32"),
    "square": (lambda x: aten.pow.Tensor_Scalar(x, 2), aten.pow.Tensor_Scalar, "power of 2"),
    "cat of two": (lambda x: aten.cat.default([x, x]), aten.cat.default, "neg is not a slice"),
    "other view": (lambda x: aten.view.default(x, [5, 3]), aten.view.default, "changes f32[3, 5]"),
    "other strides": (
        lambda x: aten.clone.default(x.t(), memory_format=torch.contiguous_format),
        aten.clone.default,
        "or its strides or device",
    ),
    "transpose of a square": (
        lambda x: aten.permute.default(x[:, :3], [1, 0]),
        aten.permute.default,
        "or its strides",
    ),
    "expand": (lambda x: aten.expand.default(x, [2, 3, 5]), aten.expand.default, "changes"),
    "times 2": (lambda x: aten.mul.Tensor(x, 2), aten.mul.Tensor, "2 is not 1"),
    "over almost 1": (lambda x: aten.div.Tensor(x, 1.5), aten.div.Tensor, "1.5 is not 1"),
    "plus 0": (lambda x: aten.add.Tensor(x, 0), aten.add.Tensor, "-0.0 + 0.0 is 0.0"),
    "plus 0.0": (lambda x: aten.add.Tensor(x, 0.0), aten.add.Tensor, "-0.0 + 0.0 is 0.0"),
    "minus -0": (lambda x: aten.sub.Tensor(x, -0.0), aten.sub.Tensor, "-0.0 - (-0.0) is 0.0"),
    "scaled zero": (lambda x: aten.add.Tensor(x, -0.0, alpha=-1), aten.add.Tensor, "alpha is -1"),
    "becomes float": (
        lambda x: aten.div.Tensor(x.argmax(1), 1),
        aten.div.Tensor,
        "changes i64[3] to f32[3]",
    ),
    "complex": (
        lambda x: aten.mul.Tensor(aten._to_copy.default(x, dtype=torch.complex64), 1),
        aten.mul.Tensor,
        "c64[3, 5] is complex",
    ),
    "no rule": (
        lambda x: aten.exp.default(x),
        aten.exp.default,
        "no rule of RemoveNoOps() ends",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays_and_says_why(name):
    body, target, reason = STAYS[name]
    inputs = (fresh(3, 5),)

    def program(x):
        return body(x.neg()).sum()

    step = trace(program, *inputs)
    assert reason in explain(RemoveNoOps(), node_of(step, target))
    RemoveNoOps().run(step)
    assert node_of(step, target)
    check_numbers(step, program, inputs)


ALIASES = {
    "output would be the input": (lambda x: x.clone(), "clone is an output, x an input"),
    "even through a view": (lambda x: x.alias(), "alias is an output, x an input"),
    "view of a copy of the input": (
        lambda x: x.clone().view(-1),
        "clone is returned and would share the bytes of x, which is an input",
    ),
    "two outputs, one tensor": (
        lambda x: (y := x.neg(), y.clone()),
        "neg and clone are both outputs",
    ),
    "two outputs, one storage": (
        lambda x: ((y := x.neg()).view(-1), y.clone().t()),
        "clone is returned and would share the bytes of neg, which is returned too",
    ),
}


@pytest.mark.parametrize("name", ALIASES)
def test_makes_no_new_alias(name):
    program, reason = ALIASES[name]
    if name == "even through a view":
        program = lambda x: aten.alias.default(x)  # noqa: E731
    step = trace(program, torch.randn(2, 3))
    (node,) = [
        each for each in step.graph.nodes if each.target in (aten.clone.default, aten.alias.default)
    ]
    words = {reason, reason.replace("neg and clone", "clone and neg")}
    assert explain(RemoveNoOps(), node) in words
    assert RemoveNoOps().run(step) == 0


def test_no_alias_through_two_steps():
    """The first clone may go; then the second would tie its view to the returned value."""

    def program(x):
        y = x.neg()
        z = y.clone()
        return z.view(-1), z.clone()

    step = trace(program, torch.randn(2, 3))
    assert RemoveNoOps().run(step) == 1
    aliases = analyse(step)
    first, second = step.returned
    assert not aliases.share(first, second)


def test_views_of_a_removed_copy_are_views_of_the_original():
    def program(x):
        return x.clone().view(-1).exp()

    step = trace(program, torch.randn(2, 3))
    assert RemoveNoOps().run(step) == 1
    assert analyse(step).base(node_of(step, aten.view.default)) is not None


def test_a_copy_that_feeds_a_written_output_of_its_own_stays():
    step = trace(lambda w: (w.clone(), w.neg()), torch.randn(3), writes={1: 0})
    assert RemoveNoOps().run(step) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 1, -1, 0.0, -0.0, 1.0, math.inf, math.nan]),
    st.sampled_from([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
)
def test_arithmetic_keeps_every_bit(number, operation, dtype):
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.5, -1e-40])
    x = special.to(dtype) if dtype.is_floating_point else torch.arange(-3, 4)

    def program(x):
        return operation(x, number).abs(), operation(x, number).sign()

    step = trace(program, x)
    RemoveNoOps().run(step)
    check_numbers(step, program, (x,))
    if not step.graph.find_nodes(op="call_function", target=operation):
        y = operation(x, number)
        assert torch.equal(y.signbit() & ~y.isnan(), x.signbit() & ~x.isnan())


UNDONE = {
    "t of t": lambda x: aten.t.default(aten.t.default(x)),
    "view of view": lambda x: aten.view.default(aten.view.default(x, [15]), [3, 5]),
    "view of views": lambda x: aten._unsafe_view.default(
        aten.view.default(aten.reshape.default(x, [15]), [5, 3]), [3, 5]
    ),
}


@pytest.mark.parametrize("name", UNDONE)
def test_views_that_undo_each_other_go(name):
    def program(x):
        return UNDONE[name](x.neg()).exp()

    step = trace(program, fresh(3, 5))
    assert RemoveNoOps().run(step) == 1
    (x,) = node_of(step, aten.exp.default).all_input_nodes
    assert x.target is aten.neg.default
    check_numbers(step, program, (fresh(3, 5),))


def test_views_that_do_not_undo_each_other_stay():
    """The same shape, and the elements in another order."""

    def program(x):
        return aten.view.default(aten.t.default(x), [3, 5]).exp()

    x = torch.randn(5, 3).t()
    step = trace(program, x)
    assert RemoveNoOps().run(step) == 0
    check_numbers(step, program, (x,))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.cat([each.clone() for each in x.neg().split(2)]).exp(),
        lambda x: torch.stack([each.clone() for each in x.neg().clone().unbind()]).exp(),
        lambda x: x.neg().view(15).clone().view(3, 5).exp(),
        lambda x: aten.t.default(aten.alias.default(x.neg().t())).exp(),
    ],
)
def test_what_only_no_ops_stand_between_goes_in_one_run(program):
    step = trace(program, fresh(3, 5))
    assert RemoveNoOps().run(step) > 1
    (x,) = node_of(step, aten.exp.default).all_input_nodes
    assert x.target is aten.neg.default
    assert RemoveNoOps().run(step) == 0
