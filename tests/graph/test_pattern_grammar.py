"""Chains, operands in either order, calls under a name: what each form of a pattern matches, what
it stands for, and why it refuses."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from testing import node_of, refusal, trace
from treadle.graph.rewrite.pattern_programs import roots_of
from treadle.graph.rewrite.rules import (
    NoMatch,
    Rule,
    any_of,
    anything,
    bindings_of,
    call_of,
    commuting,
    constant,
    explain,
    named,
    through,
    users,
)
from treadle.util.errors import VerifyError
from treadle.util.refusals import attempt

aten = torch.ops.aten
X, W = torch.randn(4, 8), torch.randn(6, 8)
VIEWS = (aten.t.default, aten.unsqueeze.default, aten.squeeze.dim)


def last_call(program, *inputs: torch.Tensor) -> fx.Node:
    """The value that a program returns, in its graph."""
    (returned,) = trace(program, *inputs).returned
    assert returned is not None
    return returned


def targets(nodes) -> list[object]:
    return [node.target for node in nodes]


# Chains.


def product_of_shown(x, w, views):
    return aten.mm.default(x, through(VIEWS, w, views))


@pytest.mark.parametrize(
    ("program", "chain"),
    [
        (lambda x, w: aten.mm.default(x, w), []),
        (lambda x, w: aten.mm.default(x, aten.t.default(w)), [aten.t.default]),
        (
            lambda x, w: aten.mm.default(
                x, aten.t.default(aten.squeeze.dim(aten.unsqueeze.default(w, 0), 0))
            ),
            [aten.t.default, aten.squeeze.dim, aten.unsqueeze.default],
        ),
    ],
    ids=["no-view", "one-view", "three-views"],
)
def test_a_chain_is_any_number_of_views_the_last_first(program, chain):
    weight = W if chain else W.t().contiguous()
    product = last_call(program, X, weight)
    bindings = bindings_of(product_of_shown, product)
    assert targets(bindings["views"]) == chain
    assert bindings["w"].op == "placeholder"


def test_a_chain_ends_at_the_pattern_inside_of_it():
    def pattern(x, w, views):
        return aten.mm.default(x, through(VIEWS, aten.exp.default(w), views))

    fitting = last_call(lambda x, w: aten.mm.default(x, aten.t.default(w.exp())), X, W)
    assert targets(bindings_of(pattern, fitting)["views"]) == [aten.t.default]
    other = last_call(lambda x, w: aten.mm.default(x, aten.t.default(w.neg())), X, W)
    assert refusal(lambda: bindings_of(pattern, other)) == "neg is not exp"


def test_others_may_read_a_chain_but_a_rule_replaces_only_what_it_covers_alone():
    def program(x, w):
        shown = aten.t.default(w)
        return aten.mm.default(x, shown), shown.exp()

    product, _ = trace(program, X, W).returned
    assert targets(bindings_of(product_of_shown, product)["views"]) == [aten.t.default]
    rule = Rule("shown", product_of_shown, lambda x, w: aten.mm.default(x, w))
    assert explain(rule, product) == "t is used outside the match"


# Operands in either order.


def scaled(x, y):
    return commuting(aten.mul.Tensor)(aten.exp.default(x), y)


@pytest.mark.parametrize(
    "program", [lambda x, y: x.exp() * y, lambda x, y: y * x.exp()], ids=["as-written", "exchanged"]
)
def test_operands_are_found_in_either_order(program):
    step = trace(program, X, X + 1)
    bindings = bindings_of(scaled, node_of(step, aten.mul.Tensor))
    assert [bindings["x"], bindings["y"]] == list(step.placeholders)


def test_what_was_written_is_tried_first():
    product = last_call(lambda x, y: x.exp() * y.exp(), X, X + 1)
    assert bindings_of(scaled, product)["y"] is product.args[1]


def test_an_order_that_fails_leaves_nothing_behind():
    def pattern(x, y, z):
        return commuting(aten.mul.Tensor)(
            aten.add.Tensor(x, aten.exp.default(y)), aten.neg.default(z)
        )

    product = last_call(lambda x, y: y.neg() * (y + x.exp()), X, X + 1)
    bindings = bindings_of(pattern, product)
    first, second = product.graph.find_nodes(op="placeholder")
    assert (bindings["x"], bindings["y"], bindings["z"]) == (second, first, second)


def test_the_order_that_came_further_says_why():
    def pattern(x, y):
        return commuting(aten.mul.Tensor)(aten.exp.default(aten.neg.default(x)), y)

    product = last_call(lambda x, y: y * x.abs().exp(), X, X + 1)
    assert refusal(lambda: bindings_of(pattern, product)) == "abs_1 is not neg"


# Calls under a name.


def test_a_named_call_is_the_call_itself():
    def pattern(x, y, product):
        return aten.exp.default(named(product, aten.mul.Tensor(x, y)))

    end = last_call(lambda x, y: (x * y).exp(), X, X + 1)
    assert bindings_of(pattern, end)["product"] is end.args[0]
    other = last_call(lambda x, y: (x + y).exp(), X, X + 1)
    assert refusal(lambda: bindings_of(pattern, other)) == "add is not mul.Tensor"


def test_a_named_call_that_is_read_twice_is_one_value():
    def pattern(x, exponent):
        return aten.mul.Tensor(named(exponent, aten.exp.default(x)), exponent)

    def once(x, _):
        value = x.exp()
        return value * value

    assert bindings_of(pattern, last_call(once, X, X + 1))["x"].op == "placeholder"
    twice = last_call(lambda x, y: x.exp() * y.exp(), X, X + 1)
    assert refusal(lambda: bindings_of(pattern, twice)) == "exponent is both exp and exp_1"


def test_call_of_ignores_what_the_call_is_given():
    def pattern(reduction, y):
        return aten.mul.Tensor(call_of(reduction, aten.sum.dim_IntList, aten.amax.default), y)

    for program in (lambda x, y: x.sum([1], True) * y, lambda x, y: x.amax(0) * y):
        product = last_call(program, X, X + 1)
        assert bindings_of(pattern, product)["reduction"] is product.args[0]
    other = last_call(lambda x, y: x.amin(0) * y, X, X + 1)
    assert refusal(lambda: bindings_of(pattern, other)) == "amin is not sum.dim_IntList or amax"


# Whole patterns over one value.


@pytest.mark.parametrize(
    ("pattern", "program", "reason"),
    [
        (
            lambda x, y: aten.mul.Tensor(aten.exp.default(x), y),
            lambda x, y: x * y.exp(),
            "x is not exp",
        ),
        (
            lambda x: aten.mul.Tensor(x, x),
            lambda x, y: x * y,
            "x is both x and y",
        ),
        (
            lambda x: any_of(aten.sum.dim_IntList)(
                x, constant(None, lambda dims: dims == [0]), ...
            ),
            lambda x, y: (x + y).sum([1]),
            "[1] is not a constant",
        ),
        (
            lambda x, y: aten.mul.Tensor(users(aten.exp.default(x), 2), y),
            lambda x, y: x.exp() * y,
            "exp has 1 users, not 2",
        ),
    ],
    ids=["other-call", "two-values", "other-constant", "other-count"],
)
def test_bindings_of_says_why_a_pattern_does_not_fit(pattern, program, reason):
    assert refusal(lambda: bindings_of(pattern, last_call(program, X, X + 1))) == reason


def test_arguments_that_do_not_matter_are_ignored():
    def pattern(x):
        return aten.sum.dim_IntList(x, anything, ...)

    for program in (lambda x, _: x.sum([1]), lambda x, _: x.sum([0], True)):
        assert bindings_of(pattern, last_call(program, X, X + 1))["x"].op == "placeholder"


def test_a_pattern_may_be_a_chain_alone_but_a_rule_ends_in_an_operation():
    def shown(w, views):
        return through(VIEWS, w, views)

    view = last_call(lambda x, _: aten.unsqueeze.default(aten.t.default(x), 0), X, W)
    found = bindings_of(shown, view)
    assert targets(found["views"]) == [aten.unsqueeze.default, aten.t.default]
    with pytest.raises(VerifyError, match="does not end in an operation"):
        roots_of(shown)


# Chains and exchanged operands of any program, against the definition.

_UNARY = (aten.neg.default, aten.abs.default, aten.exp.default, aten.relu.default)
_CALLS = st.lists(st.sampled_from(_UNARY), max_size=6)


def _applied(calls, value):
    for call in calls:
        value = call(value)
    return value


@settings(max_examples=60, deadline=None)
@given(_CALLS, st.sets(st.sampled_from(_UNARY), min_size=1))
def test_a_chain_takes_all_it_can_and_no_more(calls, allowed):
    def pattern(x, y, chain):
        return aten.mul.Tensor(through(allowed, x, chain), y)

    product = last_call(lambda x, y: _applied(calls, x) * y, X, X + 1)
    bindings = bindings_of(pattern, product)
    taken = list(itertools.takewhile(allowed.__contains__, reversed(calls)))
    assert targets(bindings["chain"]) == taken
    kept = calls[: len(calls) - len(taken)]
    assert bindings["x"].target == (kept[-1] if kept else "x")


@settings(max_examples=60, deadline=None)
@given(_CALLS, _CALLS, st.sampled_from(_UNARY))
def test_either_order_fits_if_one_of_them_does(left, right, wanted):
    def pattern(x, y):
        return commuting(aten.mul.Tensor)(wanted(x), y)

    product = last_call(lambda x, y: _applied(left, x) * _applied(right, y), X, X + 1)
    bindings = attempt(bindings_of, pattern, product)
    fitting = [at for at, calls in enumerate((left, right)) if calls[-1:] == [wanted]]
    if not fitting:
        assert isinstance(bindings, NoMatch)
        return
    assert not isinstance(bindings, NoMatch)
    chosen, other = product.args[fitting[0]], product.args[1 - fitting[0]]
    assert bindings == {"x": chosen.args[0], "y": other}
