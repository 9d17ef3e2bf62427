"""The smallest part of a step of which something is still true."""

import zlib
from textwrap import dedent

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import trace
from treadle.graph.analysis.reduce import count_of, ddmin, reduced
from treadle.graph.analysis.resize import resized
from treadle.graph.core.signature import Role
from treadle.graph.core.verify import verify
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show

aten = torch.ops.aten
W, X = torch.randn(8, 8), torch.randn(6, 8)


@given(st.sets(st.integers(0, 40)), st.integers(0, 41))
@settings(max_examples=100, deadline=None)
def test_ddmin_finds_what_is_needed(needed, count):
    items = list(range(count))
    needed &= set(items)
    assert ddmin(items, lambda some: needed <= set(some)) == sorted(needed)


def test_ddmin_leaves_nothing_that_can_be_left_out():
    def fails(some):  # not monotonic: two of the three are not enough, but one is
        return set(some) >= {1, 5, 9} or set(some) == {7}

    found = ddmin(list(range(12)), fails)
    assert fails(found)
    assert not any(fails([each for each in found if each != out]) for out in found)


def calls(target):
    def fails(step):
        verify(step)
        return bool(step.graph.find_nodes(op="call_function", target=target))

    return fails


def train(w, m, x):
    h = (x @ w).relu()
    c = h.cumsum(0) * 0.5
    loss = c.tanh().mean()
    g = x.t() @ (h - c)
    new = m * 0.9 + g
    values, at = h.max(dim=1)
    return loss, w - 0.1 * new, new, values, at


def test_one_operation_is_left():
    step = trace(train, W, W.clone(), X, writes={1: 0, 2: 1}, roles={"w": Role.PARAMETER})
    said = []
    found = reduced(step, calls(aten.cumsum.default), lambda *told: said.append(told))
    text = """
        from_relu: f32[1, 1]  # batch
        cumsum: f32[1, 1] = cumsum(from_relu, 0)
        return [cumsum]
    """
    assert show(found) == dedent(text).strip()
    counts = [count_of(smaller) for _, smaller, _ in said]
    assert counts == sorted(counts, reverse=True)
    assert str(counts[-1]) == "1 operation, 1 input, 1 result"
    assert said[0][0] == "operations"
    assert 1 < said[-1][2] < 20
    assert all(calls(aten.cumsum.default)(smaller) for _, smaller, _ in said)
    again = reduced(found, calls(aten.cumsum.default))
    assert show(again, exact=True) == show(found, exact=True)


def test_the_same_each_time():
    step = trace(train, W, W.clone(), X, writes={1: 0, 2: 1})
    fails = calls(aten.tanh.default)
    texts = {show(reduced(step, fails), exact=True) for _ in range(2)}
    assert len(texts) == 1


def test_several_results_of_one_operation_stay_together():
    step = trace(train, W, W.clone(), X)
    found = reduced(step, calls(aten.max.dim))
    assert count_of(found).operations <= 2
    assert "max.dim(" in show(found)


def test_operations_that_are_needed_together():
    def fails(step):
        return calls(aten.relu.default)(step) and calls(aten.tanh.default)(step)

    found = reduced(trace(train, W, W.clone(), X), fails)
    assert count_of(found).operations == 2
    assert count_of(found).inputs == 1, "both read the same input, as they may"


def test_writes_stay_where_they_matter():
    def fails(step):
        return any(output.writes is not None for output in step.signature.outputs)

    step = trace(train, W, W.clone(), X, writes={1: 0, 2: 1})
    found = reduced(step, fails)
    assert len(found.signature.outputs) == 1
    assert count_of(found).operations == 1


def test_effects_and_random_numbers_do_not_keep_operations():
    def program(x):
        noise = torch.bernoulli(x.sigmoid())
        return x.exp() + noise

    found = reduced(trace(program, X), calls(aten.exp.default))
    assert count_of(found).operations == 1


def test_a_step_that_does_not_fail_is_left_alone():
    step = trace(train, W, W.clone(), X)
    assert reduced(step, lambda _: False) is step


def test_sizes_are_as_small_as_they_may_be():
    def program(x):
        return x.view(3, 16).sum(0)

    def fails(step):
        shapes = [node.meta["val"].shape for node in step.placeholders]
        return calls(aten.sum.dim_IntList)(step) and all(shape[-1] > 4 for shape in shapes)

    found = reduced(trace(program, X), fails)
    (node,) = found.placeholders
    assert tuple(node.meta["val"].shape) == (1, 8)


@pytest.mark.parametrize(
    ("text", "old", "new", "after"),
    [
        (
            "x: f32[8, 1]\ny: f32[8, 4] = expand(x, [8, 4])\nreturn [y]",
            8,
            2,
            "x: f32[2, 1]  # batch\nexpand: f32[2, 4] = expand(x, [2, 4])\nreturn [expand]",
        ),
        ("x: f32[8, 3]\ny: f32[24] = view(x, [24])\nreturn [y]", 8, 2, None),
    ],
)
def test_resized(text, old, new, after):
    made = resized(parse(text), old, new)
    assert (None if made is None else show(made)) == after


def test_resized_keeps_the_order_in_memory():
    made = resized(parse("x: f32[8, 4] strides [1, 8]\nreturn [x]"), 8, 2)
    assert show(made, exact=True).startswith("x: f32[2, 4] strides [1, 2]")


@given(st.integers(0, 10**6), st.sampled_from([aten.tanh.default, aten.mul.Tensor, aten.t.default]))
@settings(max_examples=10, deadline=None)
def test_any_predicate_gives_a_step_that_fails_and_parses(seed, target):
    """A predicate that says no at random, but always the same of the same text."""

    def fails(step):
        text = show(step, exact=True)
        return calls(target)(step) and (
            zlib.crc32(f"{seed} {text}".encode()) % 3 != 0 or text == whole
        )

    step = parse(show(trace(train, W, W.clone(), X, writes={1: 0}), exact=True))
    whole = show(step, exact=True)
    found = reduced(step, fails)
    assert fails(found)
    assert count_of(found).operations <= count_of(step).operations
