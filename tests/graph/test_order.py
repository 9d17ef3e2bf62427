import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, node_of, refusal, trace
from treadle.graph.core.verify import verify
from treadle.graph.rewrite.order import restore_order

aten = torch.ops.aten
X = torch.randn(3)


def program(x):
    a, b = x.neg(), x.exp()
    return a + b, x.relu()


def names(step):
    return [node.name for node in step.graph.nodes]


def test_only_the_early_node_moves():
    step = trace(program, X)
    node_of(step, aten.neg.default).prepend(node_of(step, aten.add.Tensor))
    assert names(step) == ["x", "add", "neg", "exp", "relu", "output"]
    assert restore_order(step.graph) == 1
    assert names(step) == ["x", "neg", "exp", "add", "relu", "output"]
    verify(step)
    assert restore_order(step.graph) == 0


def test_a_late_input_comes_first():
    step = trace(program, X)
    node_of(step, aten.relu.default).append(step.placeholders[0])
    assert restore_order(step.graph) == 4
    verify(step)


def test_a_circle_is_named():
    step = trace(lambda x: x.neg().exp().relu(), X)
    neg, relu = node_of(step, aten.neg.default), node_of(step, aten.relu.default)
    neg.args = (relu,)
    words = refusal(lambda: restore_order(step.graph))
    assert words == "values depend on each other in a circle: neg -> exp -> relu -> neg"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_any_shuffle_becomes_valid(seed):
    step = trace(program, X)
    nodes = list(step.graph.nodes)
    inner = nodes[1:-1]
    random.Random(seed).shuffle(inner)
    for before, node in zip([nodes[0], *inner], inner, strict=False):
        before.append(node)
    restore_order(step.graph)
    verify(step)
    check_numbers(step, program, (X,))


@pytest.mark.parametrize("count", [0, 3])
def test_a_valid_order_stays(count):
    step = trace(lambda x: sum((x + i for i in range(count)), x), X)
    before = names(step)
    assert restore_order(step.graph) == 0
    assert names(step) == before


def test_what_must_stand_earlier_does():
    """``relu`` reads nothing of ``neg``: it stands behind it, and so does all that reads it."""
    step = trace(lambda x: (x.relu().sin(), x.exp(), x.neg()), X)
    relu, neg = node_of(step, aten.relu.default), node_of(step, aten.neg.default)
    assert restore_order(step.graph, {relu: [neg, step.placeholders[0]]}) == 2
    assert names(step) == ["x", "exp", "neg", "relu", "sin", "output"]
    assert restore_order(step.graph, {relu: [neg]}) == 0


def test_a_circle_through_what_must_stand_earlier_is_named():
    step = trace(lambda x: x.neg().exp(), X)
    neg, exp = node_of(step, aten.neg.default), node_of(step, aten.exp.default)
    words = refusal(lambda: restore_order(step.graph, {neg: [exp]}))
    assert words == "values depend on each other in a circle: neg -> exp -> neg"
