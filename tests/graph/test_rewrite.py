import pytest
import torch

from testing import check_pass, node_of, refusal, trace
from treadle.graph.alias import analyse
from treadle.graph.node_info import info, with_info
from treadle.graph.passes import run_passes
from treadle.graph.rewrite import NoMatch, Rewrite, Rule, any_of, explain, shared
from treadle.util.errors import require

aten = torch.ops.aten
X, W, ROW, FULL = torch.randn(4, 8), torch.randn(8, 2), torch.randn(2), torch.randn(4, 2)


def _check(x, w, b):
    require(b.shape == w.shape[1:], NoMatch, f"b is not a row of the product: {b}")
    require(b.dtype == x.dtype, NoMatch, f"b would be converted: {b} + {x}")


BIAS = Rule(
    "bias-into-matmul",
    pattern=lambda x, w, b: aten.add.Tensor(aten.mm.default(x, w), b),
    replacement=lambda x, w, b: aten.addmm.default(b, x, w),
    check=_check,
)
DOUBLE = Rule(
    "double",
    pattern=lambda x: aten.add.Tensor(x, x),
    replacement=lambda x: aten.mul.Tensor(x, 2),
)


def test_folds_a_row_vector():
    step = check_pass(
        Rewrite((BIAS,)),
        lambda x, w, b: x @ w + b,
        (X, W, ROW),
        exact=False,  # addmm rounds once, mm then add round twice
        after="""
            x: f32[4, 8]
            w: f32[8, 2]
            b: f32[2]
            addmm: f32[4, 2] = addmm(b, x, w)
            return [addmm]
        """,
    )
    assert info(node_of(step, aten.addmm.default)).phase == "forward"


@pytest.mark.parametrize(
    ("program", "bias", "reason"),
    [
        (lambda x, w, b: x @ w + b, FULL, "b is not a row of the product: f32[4, 2]"),
        (lambda x, w, b: x @ w + b, ROW.double(), "b would be converted: f64[2] + f32[4, 8]"),
        (lambda x, w, b: (p := x @ w) * (p + b), ROW, "mm is used outside the match"),
        (lambda x, w, b: torch.add(x @ w, b, alpha=2), ROW, "add has alpha=2, not 1"),
        (lambda x, w, b: (x @ w).relu() + b, ROW, "relu is not mm"),
    ],
    ids=["bias-is-a-matrix", "bias-is-wider", "product-used-twice", "scaled-add", "other-op"],
)
def test_says_why_it_leaves_a_program_alone(program, bias, reason):
    step = trace(program, X, W, bias)
    assert explain(BIAS, node_of(step, aten.add.Tensor)) == reason
    assert Rewrite((BIAS,)).run(step) == 0


def test_a_repeated_variable_must_be_one_value():
    step = trace(lambda a, b: a + b, torch.randn(2), torch.randn(2))
    assert explain(DOUBLE, node_of(step, aten.add.Tensor)) == "x is both a and b"


def test_results_are_rewritten_too():
    check_pass(
        Rewrite((DOUBLE,)),
        lambda x: (y := x + x) + y,
        (X,),
        after="""
            x: f32[4, 8]
            mul: f32[4, 8] = mul.Tensor(x, 2)
            mul.1: f32[4, 8] = mul.Tensor(mul, 2)
            return [mul.1]
        """,
    )


SHARED = Rule(
    "relu-of-neg",
    pattern=lambda x: aten.relu.default(shared(aten.neg.default(x))),
    replacement=lambda x: aten.neg.default(aten.clamp_max.default(x, 0)),
)


def test_a_shared_value_stays_for_its_other_readers():
    check_pass(
        Rewrite((SHARED,)),
        lambda x: (n := x.neg()).relu() * n,
        (torch.rand(3) + 1,),
        exact=False,  # the sign of zero
        after="""
            x: f32[3]
            neg: f32[3] = neg(x)
            clamp_max: f32[3] = clamp_max(x, 0)
            neg.1: f32[3] = neg(clamp_max)
            mul: f32[3] = mul.Tensor(neg.1, neg)
            return [mul]
        """,
    )


CAT = Rule(
    "cat-of-two-negs",
    pattern=lambda x, y, dim: aten.cat.default([aten.neg.default(x), aten.neg.default(y)], dim),
    replacement=lambda x, y, dim: aten.neg.default(aten.cat.default([x, y], dim)),
)


def test_lists_of_patterns_and_constants_as_variables():
    check_pass(
        Rewrite((CAT,)),
        lambda x, y: torch.cat([-x, -y], 1),
        (X, FULL),
        after="""
            x: f32[4, 8]
            y: f32[4, 2]
            cat: f32[4, 10] = cat([x, y], 1)
            neg: f32[4, 10] = neg(cat)
            return [neg]
        """,
    )
    three = trace(lambda x, y: torch.cat([-x, -y, -x], 1), X, FULL)
    assert "expected 2 values, found" in explain(CAT, node_of(three, aten.cat.default))


KWARGS = Rule(
    "double-conversion",
    pattern=lambda x, dtype: aten._to_copy.default(
        aten._to_copy.default(x, dtype=torch.float64), dtype=dtype
    ),
    replacement=lambda x, dtype: aten._to_copy.default(x, dtype=dtype),
    check=lambda x, dtype: require(dtype == torch.bfloat16, NoMatch, f"to {dtype}"),
)


def test_keyword_arguments():
    check_pass(
        Rewrite((KWARGS,)),
        lambda x: x.double().bfloat16(),
        (X,),
        after="""
            x: f32[4, 8]
            _to_copy: bf16[4, 8] = _to_copy(x, dtype=bf16)
            return [_to_copy]
        """,
    )
    step = trace(lambda x: x.double().half(), X)
    last = list(step.graph.nodes)[-2]
    assert explain(KWARGS, last) == "to torch.float16"


@pytest.mark.parametrize("inner", [torch.neg, torch.abs])
def test_any_of_several_operations(inner):
    rule = Rule(
        "square",
        pattern=lambda x: aten.mul.Tensor(any_of(aten.neg.default, aten.abs.default)(x), 2.0),
        replacement=lambda x: aten.mul.Tensor(aten.relu.default(x), 2.0),
    )
    step = trace(lambda x: inner(x) * 2.0, X)
    run_passes(step, [Rewrite((rule,))])
    assert node_of(step, aten.relu.default)
    other = trace(lambda x: x.exp() * 2.0, X)
    assert explain(rule, node_of(other, aten.mul.Tensor)) == "exp is not neg or abs"


def test_random_numbers_are_never_moved():
    rule = Rule(
        "mask",
        pattern=lambda x: aten.neg.default(aten.bernoulli.p(x, 0.5)),
        replacement=lambda x: aten.bernoulli.p(aten.neg.default(x), 0.5),
    )
    step = trace(lambda x: torch.bernoulli(x, 0.5).neg(), X)
    assert explain(rule, node_of(step, aten.neg.default)) == "bernoulli draws random numbers"


def test_regions_are_not_crossed():
    step = trace(lambda x, w, b: x @ w + b, X, W, ROW)
    with_info(node_of(step, aten.mm.default), region=1)
    assert explain(BIAS, node_of(step, aten.add.Tensor)) == "mm is in region 1, not None"


def test_a_rule_that_changes_the_type_is_caught():
    rule = Rule(
        "wrong",
        pattern=lambda x: aten.neg.default(x),
        replacement=lambda x: aten.sum.default(x),
    )
    step = trace(lambda x: x.neg(), X)
    words = refusal(lambda: Rewrite((rule,)).run(step))
    assert words == "wrong turned f32[4, 8] into f32[] at neg"


TWICE = Rule(
    "neg-of-neg",
    pattern=lambda x: aten.neg.default(aten.neg.default(x)),
    replacement=lambda x: x,
)


def test_a_variable_may_be_the_result():
    step = check_pass(
        Rewrite((TWICE,)),
        lambda x: x.neg().neg().view(-1).exp(),
        (X,),
        after="""
            x: f32[4, 8]
            view: f32[32] = view(x, [-1])
            exp: f32[32] = exp(view)
            return [exp]
        """,
    )
    assert analyse(step).is_view_of_input(node_of(step, aten.view.default))


@pytest.mark.parametrize("end", [lambda y: y, lambda y: (y.exp(), y.view(-1))])
def test_a_variable_may_not_become_a_returned_value(end):
    step = trace(lambda x: end(x.neg().neg()), X)
    last = step.graph.find_nodes(op="call_function", target=aten.neg.default)[-1]
    assert explain(TWICE, last) == "neg_1 is returned and would share the bytes of x"
    assert Rewrite((TWICE,)).run(step) == 0


def test_random_numbers_nobody_reads_any_more_stay():
    rule = Rule(
        "times-0-is-0",
        pattern=lambda x, y: aten.mul.Tensor(y, aten.mul.Tensor(x, 0.0)),
        replacement=lambda x, y: aten.zeros_like.default(y),
    )
    step = trace(lambda x: x * (torch.bernoulli(x.exp(), 0.5) * 0.0), X)
    assert Rewrite((rule,)).run(step) == 1
    assert node_of(step, aten.bernoulli.p)
    assert node_of(step, aten.exp.default)


def test_a_rule_cannot_make_tensors_from_nothing():
    rule = Rule(
        "constant",
        pattern=lambda x: aten.neg.default(x),
        replacement=lambda x: aten.mul.Tensor(x, aten.full.default([], -1.0)),
    )
    step = trace(lambda x: x.neg(), X)
    assert "makes a tensor from no variable" in refusal(lambda: Rewrite((rule,)).run(step))
