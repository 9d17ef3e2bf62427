import pytest
import torch

from testing import node_of, refusal, trace
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Input, Output, Role, Signature
from treadle.graph.core.verify import verify

aten = torch.ops.aten
W, X = torch.randn(3, 2), torch.randn(3, 2)


def step_of():
    return trace(lambda w, x: ((x * w).sum(), w - x), W, X, writes={1: 0})


def call(step, target, *args):
    (output,) = step.graph.find_nodes(op="output")
    with step.graph.inserting_before(output):
        node = step.graph.call_function(target, args)
    node.meta |= node_of(step, aten.sub.Tensor).meta
    return node


def use_before_definition(step):
    node_of(step, aten.mul.Tensor).append(step.placeholders[1])
    step.placeholders[1].append(node_of(step, aten.mul.Tensor))
    node_of(step, aten.mul.Tensor).prepend(node_of(step, aten.sum.default))


def late_input(step):
    node_of(step, aten.mul.Tensor).args = (step.placeholders[0],) * 2
    node_of(step, aten.sub.Tensor).args = (step.placeholders[0],) * 2
    node_of(step, aten.sub.Tensor).append(step.placeholders[1])


def no_value(step):
    del node_of(step, aten.sub.Tensor).meta["val"]


def no_phase(step):
    with_info(node_of(step, aten.sub.Tensor), phase="later")


def mutation(step):
    call(step, aten.add_.Tensor, step.placeholders[0], 1)


def method(step):
    (output,) = step.graph.find_nodes(op="output")
    with step.graph.inserting_before(output):
        step.graph.call_method("neg", (step.placeholders[0],)).meta["val"] = W


def too_many_results(step):
    (output,) = step.graph.find_nodes(op="output")
    output.args = ((*output.args[0], step.placeholders[0]),)


def too_few_inputs(step):
    step.signature = Signature((Input(Role.BATCH, "x"),), step.signature.outputs)


def wrong_shape(step):
    (output,) = step.graph.find_nodes(op="output")
    output.args = (tuple(reversed(output.args[0])),)


def writes_nothing(step):
    (output,) = step.graph.find_nodes(op="output")
    output.args = ((output.args[0][0], None),)


def writes_twice(step):
    outputs = (Output("a", 0), Output("b", 0))
    (output,) = step.graph.find_nodes(op="output")
    output.args = ((output.args[0][1],) * 2,)
    step.signature = Signature(step.signature.inputs, outputs)


def writes_nowhere(step):
    step.signature = Signature(step.signature.inputs, (Output("a"), Output("b", 7)))


def no_return(step):
    (output,) = step.graph.find_nodes(op="output")
    step.graph.erase_node(output)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (use_before_definition, "uses mul before it is defined"),
        (late_input, "x comes after work"),
        (no_value, "sub has no value"),
        (no_phase, "sub has no phase: 'later'"),
        (mutation, "writes to its argument: aten.add_.Tensor"),
        (method, "neg is a call_method, not an operation"),
        (too_many_results, "3 results, but 2 in the signature"),
        (too_few_inputs, "2 inputs, but 1 in the signature"),
        (wrong_shape, "out1 writes f32[] to w: f32[3, 2]"),
        (writes_nothing, "out1 writes nothing to w"),
        (writes_twice, "a and b write the same input w"),
        (writes_nowhere, "b writes input 7, which is not there"),
        (no_return, "the graph does not end in a return"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_damage_is_named(damage, reason):
    step = step_of()
    verify(step)
    damage(step)
    assert reason in refusal(lambda: verify(step))


def test_the_message_shows_the_lines_around():
    step = step_of()
    no_phase(step)
    assert "> sub: f32[3, 2] = sub.Tensor(w, x)" in refusal(lambda: verify(step))


def test_a_constant_none_is_a_result():
    step = trace(lambda w, x: (w - x, None), W, X)
    verify(step)
    assert step.returned[1] is None
