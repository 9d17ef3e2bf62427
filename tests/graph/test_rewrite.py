import pytest
import torch

from testing import check_numbers, check_pass, node_of, refusal, show_plain, trace
from treadle.graph.analysis.alias import analyse
from treadle.graph.core.node_info import info, with_info
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.rewrite.rules import (
    NoMatch,
    Rewrite,
    Rule,
    any_of,
    anything,
    constant,
    explain,
    list_of,
    lowering,
    number,
    shared,
    users,
)
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
    assert analyse(step).base(node_of(step, aten.view.default)) is not None


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda y: y, "neg_1 is an output, x an input"),
        (
            lambda y: (y.exp(), y.view(-1)),
            "neg_1 is returned and would share the bytes of x, which is an input",
        ),
    ],
    ids=["itself", "a-view-of-it"],
)
def test_a_variable_may_not_become_a_returned_value(end, reason):
    step = trace(lambda x: end(x.neg().neg()), X)
    last = step.graph.find_nodes(op="call_function", target=aten.neg.default)[-1]
    assert explain(TWICE, last) == reason
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


def test_arguments_can_be_ignored():
    rule = Rule(
        "sums-are-nothing",
        pattern=lambda x, y: aten.add.Tensor(
            aten.sum.dim_IntList(x, ...), aten.sum.dim_IntList(y, [0], anything)
        ),
        replacement=lambda x, y: aten.add.Tensor(aten.sum.default(x), aten.sum.default(y)),
    )
    step = trace(lambda x, y: x.sum((0, 1)) + y.sum(0), X, X[:, 0])
    assert explain(rule, node_of(step, aten.add.Tensor)) == "applies"
    other = trace(lambda x, y: x.sum((0, 1)) + y.sum(1), X, X)
    assert explain(rule, node_of(other, aten.add.Tensor)) == "expected 0, found 1"


def test_ignored_arguments_are_the_last():
    rule = Rule("wrong", lambda x: aten.sum.dim_IntList(x, ..., True), lambda x: x)
    step = trace(lambda x: x.sum(0, keepdim=True), X)
    assert "... is not last" in refusal(lambda: Rewrite((rule,)).run(step))


@pytest.mark.parametrize(
    ("op", "reason"),
    [(aten.add.Tensor, "applies"), (aten.sub.Tensor, "sub has alpha=3, not 1")],
)
def test_any_of_several_operations_has_the_defaults_of_each(op, reason):
    rule = Rule(
        "any",
        lambda x, y: any_of(aten.add.Tensor, aten.sub.Tensor)(x, y),
        lambda x, y: aten.mul.Tensor(x, y),
    )
    alpha = 1 if reason == "applies" else 3
    step = trace(lambda x, y: op(x, y, alpha=alpha), X, X)
    assert explain(rule, node_of(step, op)) == reason


def test_constants_are_of_one_type_and_sign():
    rule = Rule("zero", lambda x: aten.mul.Tensor(x, 0.0), lambda x: aten.zeros_like.default(x))
    for factor, reason in (
        (0.0, "applies"),
        (-0.0, "mul has other=-0.0, not 0.0"),
        (0, "mul has other=0, not 0.0"),
    ):
        step = trace(over(lambda factor=factor: factor), X)
        assert explain(rule, node_of(step, aten.mul.Tensor)) == reason


PAIRS = [
    (lambda x: (n := x.neg()).relu() * n, 2, "applies"),
    (lambda x: x.neg().relu() * x, 2, "neg has 1 users, not 2"),
    (lambda x: (n := x.neg()).relu() * n + n, 2, "neg has 3 users, not 2"),
    (lambda x: (n := x.neg()).relu() * n + n, 3, "applies"),
]


@pytest.mark.parametrize(("program", "count", "reason"), PAIRS)
def test_exactly_so_many_users(program, count, reason):
    rule = Rule(
        "counted",
        pattern=lambda x: aten.relu.default(users(aten.neg.default(x), count)),
        replacement=lambda x: aten.neg.default(aten.clamp_max.default(x, 0)),
    )
    step = trace(program, torch.rand(3))
    assert explain(rule, node_of(step, aten.relu.default)) == reason
    assert Rewrite((rule,)).run(step) == (reason == "applies")
    check_numbers(step, program, (torch.rand(3) + 1,), exact=False)


def test_users_of_a_variable_and_of_the_result():
    rule = Rule(
        "last-reader",
        pattern=lambda x: users(aten.relu.default(users(x, 1)), 1),
        replacement=lambda x: aten.clamp_min.default(x, 0),
    )
    step = trace(lambda x: (y := x.exp()).relu() + y, X)
    assert explain(rule, node_of(step, aten.relu.default)) == "exp has 2 users, not 1"
    step = trace(lambda x: (y := x.exp().relu()) + y.neg(), X)
    assert explain(rule, node_of(step, aten.relu.default)) == "relu has 2 users, not 1"
    step = trace(lambda x: x.exp().relu() + 1, X)
    assert explain(rule, node_of(step, aten.relu.default)) == "applies"


def _one_gate(x):
    gate = aten.sigmoid.default(x)
    return aten.mul.Tensor(gate, aten.rsub.Scalar(gate, 1.0))


def test_a_part_that_is_used_twice_is_one_value():
    rule = Rule("slope", _one_gate, lambda x: aten.sigmoid.default(aten.abs.default(x)))
    step = trace(lambda x: (g := x.sigmoid()) * (1.0 - g), X)
    assert explain(rule, node_of(step, aten.mul.Tensor)) == "applies"
    step = trace(lambda x: x.sigmoid() * (1.0 - x.sigmoid()), X)
    words = "sigmoid_1 and sigmoid are not one value"
    assert explain(rule, node_of(step, aten.mul.Tensor)) == words


def _norms(x):
    return aten.sum.default(x), aten.sum.default(aten.mul.Tensor(x, x))


MOMENTS = Rule(
    "two-sums",
    pattern=_norms,
    replacement=lambda x: (
        aten.sum.dim_IntList(x, [0, 1]),
        aten.sum.dim_IntList(aten.mul.Tensor(x, x), [0, 1]),
    ),
)


@pytest.mark.parametrize("swapped", [False, True])
def test_several_results_are_replaced_together(swapped):
    def program(x):
        if swapped:
            square = (x * x).sum()
            total = x.sum()
        else:
            total = x.sum()
            square = (x * x).sum()
        return total.exp() + square.neg()

    step = trace(program, X)
    run_passes(step, [Rewrite((MOMENTS,))])
    assert len(step.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)) == 2
    assert not step.graph.find_nodes(op="call_function", target=aten.sum.default)
    check_numbers(step, program, (X,), exact=False)
    assert Rewrite((MOMENTS,)).run(step) == 0


def test_a_result_may_be_a_part_of_another():
    rule = Rule(
        "keep-both",
        pattern=lambda x: ((n := aten.neg.default(x)), aten.relu.default(n)),
        replacement=lambda x: (
            aten.mul.Tensor(x, -1),
            aten.clamp_min.default(aten.mul.Tensor(x, -1), 0),
        ),
    )
    program = lambda x: (n := x.neg()).relu() + n.exp()  # noqa: E731
    step = trace(program, X)
    run_passes(step, [Rewrite((rule,))])
    assert not step.graph.find_nodes(op="call_function", target=aten.neg.default)
    check_numbers(step, program, (X,))


def _split(b, x, w, v):
    wide = b.call(aten.cat.default, [w, v], 1)
    product = b.call(aten.mm.default, x, wide)
    at = b.type_of(w).shape[1]
    left = b.call(aten.slice.Tensor, product, 1, 0, at)
    right = b.call(aten.slice.Tensor, product, 1, at, b.type_of(wide).shape[1])
    plain = {"memory_format": torch.contiguous_format}
    return b.call(aten.clone.default, left, **plain), b.call(aten.clone.default, right, **plain)


def _alike(x, w, v):
    require(w.shape[1] <= 3, NoMatch, f"{w} is wide")
    require(v.shape[1] <= 3, NoMatch, f"{v} is wide")


PRODUCTS = Rule(
    "one-product",
    pattern=lambda x, w, v: (aten.mm.default(x, w), aten.mm.default(x, v)),
    replacement=lowering(_split),
    check=_alike,
)


def test_products_of_one_value_become_one_by_a_lowering():
    def program(x, w, v):
        return (x @ w).exp() + x @ v

    step = trace(program, X, W, W.clone())
    assert Rewrite((PRODUCTS,)).run(step) == 1
    assert node_of(step, aten.mm.default)
    check_numbers(step, program, (X, W, torch.randn(8, 2)), exact=False)
    assert Rewrite((PRODUCTS,)).run(step) == 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x, w, v: x @ w + x.neg() @ v, "no mm stands before mm_1 and belongs to it"),
        (  # the first and the last: the last needs the second
            lambda x, w, v: x @ w + x @ (v + (x @ w.neg()).sum()),
            "applies",
        ),
        (lambda x, w, v: (p := x @ w) + x @ (v + p.sum()), None),
    ],
    ids=["other-value", "one-of-three-depends", "one-depends-on-the-other"],
)
def test_results_that_need_each_other_stay(program, reason):
    step = trace(program, X, W, W.clone())
    last = step.graph.find_nodes(op="call_function", target=aten.mm.default)[-1]
    if reason is None:
        reason = "sum_1 reads a part of the match before add is there"
    assert explain(PRODUCTS, last) == reason
    Rewrite((PRODUCTS,)).run(step)
    run_passes(step, [])
    check_numbers(step, program, (X, W, torch.randn(8, 2)), exact=False)


def test_results_of_two_phases_stay():
    step = trace(lambda x, w, v: (x @ w).exp() + x @ v, X, W, W.clone(), backward_from="mm_1")
    last = step.graph.find_nodes(op="call_function", target=aten.mm.default)[-1]
    assert explain(PRODUCTS, last) == "mm_1 and mm are of backward and forward"


def test_the_check_may_refuse_one_way_and_take_another():
    narrow, wide = torch.randn(8, 2), torch.randn(8, 5)
    step = trace(lambda x, a, b, c: ((x @ a).exp(), (x @ b).exp(), (x @ c).exp()),
                 X, narrow, wide, narrow)  # fmt: skip
    assert Rewrite((PRODUCTS,)).run(step) == 1
    assert len(step.graph.find_nodes(op="call_function", target=aten.mm.default)) == 2


def test_a_lowering_that_refuses_leaves_the_graph_as_it_was():
    def build(b, x):
        made = b.call(aten.exp.default, x)
        raise NoMatch(f"{b.type_of(made)} is not what we want")

    rule = Rule("tries", lambda x: aten.neg.default(x), lowering(build))
    step = trace(lambda x: x.neg().abs(), X)
    before = show_plain(step)
    assert Rewrite((rule,)).run(step) == 0
    assert show_plain(step) == before
    assert explain(rule, node_of(step, aten.neg.default)) == "f32[4, 8] is not what we want"


@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        (
            lambda b, x: b.call(aten.bernoulli.p, x, 0.5),
            "puts bernoulli_p there, which writes or draws",
        ),
        (
            lambda b, x: b.call(aten.neg_.default, x),
            "puts neg__default there, which writes or draws",
        ),
        (lambda b, x: [x, x], "replaces 1 values by 2"),
        (lambda b, x: b.call(aten.sum.default, x), "turned f32[4, 8] into f32[] at neg"),
    ],
)
def test_what_a_lowering_may_not_do(replacement, words):
    rule = Rule("wrong", lambda x: aten.neg.default(x), lowering(replacement))
    step = trace(lambda x: x.neg().abs(), X)
    assert words in refusal(lambda: Rewrite((rule,)).run(step))


def over(factor):
    return lambda x: aten.mul.Tensor(x, factor())


def test_numbers_with_a_test():
    rule = Rule(
        "half",
        pattern=lambda x: aten.mul.Tensor(x, number(test=lambda n: 0 < n < 1, words="in 0 .. 1")),
        replacement=lambda x: aten.neg.default(x),
    )
    for factor, reason in (
        (lambda: 0.5, "applies"),
        (lambda: 1.5, "1.5 is not in 0 .. 1"),
        (lambda: torch.full((8,), 0.25), "applies"),
        (lambda: torch.ones(8), "ones is not in 0 .. 1"),
    ):
        step = trace(over(factor), X)
        assert explain(rule, node_of(step, aten.mul.Tensor)) == reason


def test_a_number_is_a_variable_too():
    rule = Rule(
        "scale",
        pattern=lambda x, n: aten.mul.Tensor(x, number(n)),
        replacement=lambda x, n: aten.neg.default(x),
        check=lambda x, n: require(n == 0.25, NoMatch, f"{n} is not a quarter"),
    )
    step = trace(lambda x: x * torch.full((8,), 0.5), X)
    assert explain(rule, node_of(step, aten.mul.Tensor)) == "0.5 is not a quarter"
    step = trace(lambda x: x * x, X)
    assert explain(rule, node_of(step, aten.mul.Tensor)) == "x is not a number"


def test_constants_with_a_test():
    rule = Rule(
        "to-half",
        pattern=lambda x, dtype: aten._to_copy.default(
            x, dtype=constant(dtype, lambda d: d.itemsize == 2, "a short dtype")
        ),
        replacement=lambda x, dtype: aten._to_copy.default(aten.neg.default(x), dtype=dtype),
    )
    step = trace(lambda x: x.double(), X)
    node = node_of(step, aten._to_copy.default)
    assert explain(rule, node) == "torch.float64 is not a short dtype"
    step = trace(lambda x: x.half(), X)
    assert explain(rule, node_of(step, aten._to_copy.default)) == "applies"


ANY_CAT = Rule(
    "cat-of-negs",
    pattern=lambda xs, dim: aten.cat.default(list_of(lambda x: aten.neg.default(x), xs), dim),
    replacement=lambda xs, dim: aten.neg.default(aten.cat.default(xs, dim)),
    check=lambda xs, dim: require(len(xs) > 1, NoMatch, f"{len(xs)} parts"),
)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_lists_of_any_length(count):
    makers = [torch.exp, torch.sin, torch.cos, torch.abs, torch.relu][:count]
    program = lambda x: torch.cat([-each(x) for each in makers], 1)  # noqa: E731
    step = trace(program, X)
    reason = "applies" if count > 1 else "1 parts"
    assert explain(ANY_CAT, node_of(step, aten.cat.default)) == reason
    assert Rewrite((ANY_CAT,)).run(step) == (count > 1)
    assert len(step.graph.find_nodes(op="call_function", target=aten.neg.default)) == 1
    check_numbers(step, program, (X,))


def test_each_of_a_list_must_look_like_it():
    step = trace(lambda x: torch.cat([-x, x.exp()], 1), X)
    assert explain(ANY_CAT, node_of(step, aten.cat.default)) == "exp is not neg"


def test_what_has_an_effect_keeps_its_place():
    @torch.library.custom_op("rewrite_tests::printed", mutates_args=())
    def printed(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @printed.register_fake
    def _(x):
        return torch.empty_like(x)

    rule = Rule(
        "moves",
        pattern=lambda x: aten.neg.default(torch.ops.rewrite_tests.printed.default(x)),
        replacement=lambda x: torch.ops.rewrite_tests.printed.default(aten.neg.default(x)),
    )
    step = trace(lambda x: printed(x).neg(), X)
    words = "printed has an effect, and keeps its place"
    assert explain(rule, node_of(step, aten.neg.default)) == words


NEW_ALIAS = {
    "a-view-of-an-input": (lambda b, x: b.call(aten.alias.default, x), lambda x: x.neg()),
    "a-view-of-a-result": (
        lambda b, x: b.call(aten.alias.default, x),
        lambda x: ((y := x.exp()), y.neg()),
    ),
    "a-view-of-a-view": (
        lambda b, x: b.call(aten.t.default, b.call(aten.t.default, x)),
        lambda x: ((y := x.exp()).view(-1), y.neg().view(-1)),
    ),
}


@pytest.mark.parametrize("name", NEW_ALIAS)
def test_what_is_built_makes_no_new_alias_either(name):
    build, program = NEW_ALIAS[name]
    rule = Rule("alias", lambda x: aten.neg.default(x), lowering(build))
    step = trace(program, X)
    assert "would share the bytes of" in explain(rule, node_of(step, aten.neg.default))
    assert Rewrite((rule,)).run(step) == 0


def test_two_results_do_not_become_one():
    rule = Rule(
        "both",
        pattern=lambda x: (aten.neg.default(x), aten.mul.Tensor(x, -1)),
        replacement=lowering(lambda b, x: [b.call(aten.neg.default, x)] * 2),
    )
    step = trace(lambda x: (x.neg(), x * -1), X)
    words = "two outputs would share bytes that did not"
    assert explain(rule, node_of(step, aten.mul.Tensor)) == words
    step = trace(lambda x: (x.neg().exp(), (x * -1).exp()), X)
    assert explain(rule, node_of(step, aten.mul.Tensor)) == "applies"


def test_returned_values_keep_their_strides():
    rule = Rule(
        "other-strides",
        lambda x: aten.neg.default(x),
        lowering(lambda b, x: b.call(aten.t.default, b.call(aten.neg.default, b.call(
            aten.clone.default, b.call(aten.t.default, x),
            memory_format=torch.contiguous_format)))),
    )  # fmt: skip
    step = trace(lambda x: x.neg(), X)
    assert explain(rule, node_of(step, aten.neg.default)) == "neg is returned with other strides"
    step = trace(lambda x: x.neg().exp(), X)
    assert explain(rule, node_of(step, aten.neg.default)) == "applies"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (lambda x: x, "does not end in an operation"),
        (lambda x, y: (aten.neg.default(x), aten.neg.default(y)), "has no value in common"),
        (lambda x: (n := aten.neg.default(x), n), "returns one value twice"),
        (lambda x: aten.neg.default(x, 2, 3), "does not take what"),
        (lambda x: aten.cat.default(list_of(lambda a: aten.neg.default(a)), x), "marks no value"),
    ],
)
def test_patterns_that_say_nothing_are_refused(pattern, words):
    rule = Rule("wrong", pattern, lambda x: x)
    step = trace(lambda x: x.neg(), X)
    assert words in refusal(lambda: Rewrite((rule,)).run(step))


def test_a_replacement_knows_the_variables_of_the_pattern():
    rule = Rule("wrong", lambda x: aten.neg.default(x), lambda z: aten.exp.default(z))
    step = trace(lambda x: x.neg(), X)
    words = "wrong puts z there, which it does not find"
    assert refusal(lambda: Rewrite((rule,)).run(step)) == words


def test_later_outputs_come_first_and_then_the_order_of_the_rules():
    first = Rule("first", lambda x: aten.neg.default(x), lambda x: aten.mul.Tensor(x, -1))
    second = Rule("second", lambda x: aten.neg.default(x), lambda x: aten.mul.Tensor(x, -1.0))
    step = trace(lambda x: x.neg().exp(), X)
    Rewrite((first, second)).run(step)
    assert node_of(step, aten.mul.Tensor).args[1] == -1
    inner = Rule(
        "inner",
        lambda x: aten.exp.default(aten.neg.default(x)),
        lambda x: aten.reciprocal.default(aten.exp.default(x)),
    )
    step = trace(lambda x: x.neg().exp(), X)
    assert Rewrite((first, inner)).run(step) == 1  # exp is later, though its rule is
    assert node_of(step, aten.reciprocal.default)


def test_rules_that_undo_each_other_are_found_out():
    rules = (
        Rule("in", lambda x: aten.neg.default(aten.abs.default(x)), lambda x: aten.exp.default(x)),
        Rule("out", lambda x: aten.sin.default(aten.exp.default(x)),
             lambda x: aten.sin.default(aten.neg.default(aten.abs.default(x)))),
    )  # fmt: skip
    step = trace(lambda x: x.abs().neg().sin(), X)
    assert "finds no end" in refusal(lambda: Rewrite(rules).run(step))
