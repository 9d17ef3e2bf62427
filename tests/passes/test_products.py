import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from testing import check_numbers, check_pass, node_of, trace
from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.compiler.cleaning import CLEAN, rewritten
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import with_info
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.rewrite.rules import explain
from treadle.lower.graph import lower
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.products.joined_products import JoinProducts
from treadle.passes.products.sums import (
    DECOMPOSE_OUTER,
    DECOMPOSE_VECTORS,
    OUTER,
    VECTORS,
    AccumulateProducts,
    AddBiasInProduct,
    SplitBias,
)
from treadle.schedule.plan import schedule

aten = torch.ops.aten
A, B, C, D = torch.randn(4, 6), torch.randn(6, 3), torch.randn(4, 5), torch.randn(5, 3)
ROW = torch.randn(3)


def clean(step):
    """Cleaned, with the rewrites of products that are off by default too."""
    return rewritten(step, (*CLEAN, JoinProducts(), AccumulateProducts()))


def last_add(step):
    return [each for each in step.graph.nodes if each.target is aten.add.Tensor][-1]


# --- sums of products -----------------------------------------------------------------------


def test_a_sum_of_products_is_summed_by_the_last():
    check_pass(
        AccumulateProducts(),
        lambda a, b, c, d: (a @ b + c @ d + a.exp() @ b).relu(),
        (A, B, C, D),
        exact=False,  # each is added before it is rounded
        after="""
            a: f32[4, 6]
            b: f32[6, 3]
            c: f32[4, 5]
            d: f32[5, 3]
            mm: f32[4, 3] = mm(a, b)
            addmm: f32[4, 3] = addmm(mm, c, d)
            exp: f32[4, 6] = exp(a)
            addmm.1: f32[4, 3] = addmm(addmm, exp, b)
            relu: f32[4, 3] = relu(addmm.1)
            return [relu]
        """,
    )


def test_through_equal_views():
    check_pass(
        AccumulateProducts(),
        lambda a, b: ((a @ b).t() + (b @ a).t()).relu(),
        (torch.randn(3, 3), torch.randn(3, 3)),
        exact=False,
        after="""
            a: f32[3, 3]
            b: f32[3, 3]
            mm: f32[3, 3] = mm(a, b)
            addmm: f32[3, 3] = addmm(mm, b, a)
            t: f32[3, 3] = t(addmm)
            relu: f32[3, 3] = relu(t)
            return [relu]
        """,
    )


def test_batches():
    check_pass(
        AccumulateProducts(),
        lambda a, b: torch.bmm(a, b) + torch.bmm(b, a),
        (torch.randn(2, 3, 3), torch.randn(2, 3, 3)),
        exact=False,
        after="""
            a: f32[2, 3, 3]
            b: f32[2, 3, 3]
            bmm: f32[2, 3, 3] = bmm(a, b)
            baddbmm: f32[2, 3, 3] = baddbmm(bmm, b, a)
            return [baddbmm]
        """,
    )


STAYS = {
    "read by another": (
        lambda a, b: (p := a @ b) + b @ a + p.exp(),
        "mm is used outside the match",
    ),
    "returned": (lambda a, b: (p := a @ b, p + b @ a), "mm is used outside the match"),
    "twice": (lambda a, b: (p := a @ b) + p, "adds mm to itself"),
    "no product": (lambda a, b: a + b, "a is not mm or bmm or addmm or baddbmm"),
    "a number": (lambda a, b: a @ b + 1, "1 is not mm or bmm or addmm or baddbmm"),
    "scaled": (lambda a, b: torch.add(a @ b, b @ a, alpha=2), "add has alpha=2"),
    "other views": (lambda a, b: (a @ b).t() + b @ a, "t and mm_1 are other views"),
    "stretched": (lambda a, b: a @ b + b[:1] @ a, "mm is f32[3, 3], mm_1 is f32[1, 3]"),
    "converted": (lambda a, b: a @ b + b.double() @ a.double(), "mm is f32[3, 3], mm_1 is f64"),
    "whole numbers": (lambda a, b: a.long() @ b.long() + b.long() @ a.long(), "is i64[3, 3]"),
    "both add": (
        lambda a, b: torch.addmm(b, a, b) + torch.addmm(a, b, a),
        "addmm_1 adds something already",
    ),
    "the last adds": (lambda a, b: a @ b + torch.addmm(a, b, a), "addmm adds something already"),
    "batch and matrix": (
        lambda a, b: torch.bmm(a[None], b[None]) + (b @ a).view(1, 3, 3),
        "products of two kinds|are other views",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays_and_says_why(name):
    program, reason = STAYS[name]
    inputs = torch.randn(3, 3), torch.randn(3, 3)
    step = trace(program, *inputs)
    adds = [each for each in step.graph.nodes if each.target is aten.add.Tensor]
    words = [explain(AccumulateProducts(), each) for each in adds]
    assert any(part in each for each in words for part in reason.split("|")), words
    assert AccumulateProducts().run(step) == 0
    check_numbers(step, program, inputs)


def test_regions_stay_apart():
    step = trace(lambda a, b, c, d: a @ b + c @ d, A, B, C, D)
    product = next(each for each in step.graph.nodes if each.target is aten.mm.default)
    with_info(product, region=1)
    assert "is in region 1, not None" in explain(AccumulateProducts(), last_add(step))
    with_info(product, region=None, asked="must_save")
    assert "are of several regions" in explain(AccumulateProducts(), last_add(step))
    assert AccumulateProducts().run(step) == 0


def test_the_sum_takes_over_the_buffer_of_the_first():
    inputs = [torch.randn(64, 64) for _ in range(4)]

    def program(a, b, c, d):
        return (a @ b + c @ d).relu()

    before, after = trace(program, *inputs), trace(program, *inputs)
    AccumulateProducts().run(after)
    plans = [schedule(lower(each)) for each in (before, after)]
    assert [each.arena_bytes for each in plans] == [2 * 64 * 64 * 4, 64 * 64 * 4]
    first, second = (step.outputs[0] for step in plans[1].steps if hasattr(step, "outputs"))
    assert plans[1].offsets[first] == plans[1].offsets[second]


def test_a_first_product_that_is_read_later_keeps_its_buffer():
    def program(a, b, c, d):
        p = aten.mm.default(a, b)
        return aten.addmm.default(p, c, d).relu(), p.exp()

    inputs = [torch.randn(64, 64) for _ in range(4)]
    plan = schedule(lower(trace(program, *inputs)))
    first, second = (step.outputs[0] for step in plan.steps if hasattr(step, "outputs"))
    assert plan.offsets[first] != plan.offsets[second]


class Tied(nn.Module):
    """One parameter used three times, and one value read by three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x):
        y = F.linear(x, self.q.weight).tanh()
        y = self.q(y) * self.k(y) + self.v(y)
        return y @ self.q.weight


def train(model, optimizer):
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def captured_and_cleaned(model, optimizer, *inputs):
    captured = capture(
        train(model, optimizer),
        models=named_models(model),
        optimizers=named_optimizers(optimizer),
        args=inputs,
        kwargs={},
    )
    return clean(captured.step)


def test_gradients_of_several_uses_are_summed_by_products():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = captured_and_cleaned(model, optimizer, torch.randn(2, 5, 6), torch.randn(2, 5, 6))
    summed = step.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert len(summed) == 4  # two for q.weight, two for what q, k and v read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_as_near_as_eagers(dtype):
    """bfloat16: rounded once instead of three times."""
    a, b, c, d = (torch.randn(64, 64, dtype=dtype) for _ in range(4))

    def program(a, b, c, d):
        return a @ b + c @ d

    step = trace(program, a, b, c, d)
    assert AccumulateProducts().run(step) == 1
    exact = program(*(each.double() for each in (a, b, c, d)))
    (ours,), eager = run_step(step, (a, b, c, d)), program(a, b, c, d)
    assert (ours - exact).norm() <= 1.05 * (eager - exact).norm()


sizes = st.sampled_from([0, 1, 2, 3, 5, 7])


@settings(max_examples=60, deadline=None)
@given(
    sizes,
    sizes,
    st.lists(sizes, min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_sum_of_products(m, n, inner, turned, dtype):
    factors = [torch.randn(m + n, max(k, 1)).to(dtype)[:, :k] for k in inner]
    views = torch.t if turned else torch.clone

    def whole(*given):
        total = views(given[0][:m] @ given[0].t()[:, m:])
        for f in given[1:]:
            total = total + views(f[:m] @ f.t()[:, m:])
        return total.sin()

    names = "abcd"[: len(factors)]
    scope = {"whole": whole}
    named = eval(f"lambda {', '.join(names)}: whole({', '.join(names)})", scope)
    step = trace(named, *factors)
    AccumulateProducts().run(step)
    assert AccumulateProducts().run(step) == 0
    (found,), exact = run_step(step, factors), whole(*(f.double() for f in factors))
    eps = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= 64 * eps * (1 + sum(inner))).all()


# --- a bias ---------------------------------------------------------------------------------


def test_a_bias_whose_sum_is_stored_anyway():
    check_pass(
        AddBiasInProduct(),
        lambda x, w, b, v: (x @ w + b) @ v,
        (torch.randn(2, 4, 6), B, ROW, torch.randn(3, 2)),
        exact=False,
        after="""
            x: f32[2, 4, 6]
            w: f32[6, 3]
            b: f32[3]
            v: f32[3, 2]
            view: f32[8, 6] = view(x, [8, 6])
            addmm: f32[8, 3] = addmm(b, view, w)
            view.1: f32[2, 4, 3] = view(addmm, [2, 4, 3])
            view.2: f32[8, 3] = view(view.1, [8, 3])
            mm: f32[8, 2] = mm(view.2, v)
            _unsafe_view: f32[2, 4, 2] = _unsafe_view(mm, [2, 4, 2])
            return [_unsafe_view]
        """,
    )


BIASES = {
    "a formula reads it": (lambda x, w, b: (x @ w + b).relu(), "relu adds the bias by itself"),
    "one of two": (lambda x, w, b: ((s := x @ w + b), s.relu()), "relu adds the bias by itself"),
    "a column": (lambda x, w, b: x @ w + x[:, :1], "no row of"),
    "wider": (lambda x, w, b: x @ w + b.double(), "no row of"),
    "one number": (lambda x, w, b: x @ w + b[:1], "no row of"),
    "read by another": (lambda x, w, b: ((p := x @ w) + b, p), "mm is used outside the match"),
    "scaled": (lambda x, w, b: torch.add(x @ w, b, alpha=2), "add has alpha=2"),
    "other columns": (lambda x, w, b: (x @ w[:, :2]).view(8)[:3] + b, "is not mm"),
    "turned": (lambda x, w, b: (x[:3] @ w).t() + b, "t moves the columns of mm"),
    "adds already": (lambda x, w, b: torch.addmm(b, x, w) + b, "addmm is not mm"),
    "stretched": (lambda x, w, b: (x[:1] @ w).view(3) + b.view(1, 3), "no row of|is not a product"),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_stays_and_says_why(name):
    program, reason = BIASES[name]
    inputs = A, B, ROW
    step = trace(program, *inputs)
    words = explain(AddBiasInProduct(), last_add(step))
    assert any(part in words for part in reason.split("|")), words
    assert AddBiasInProduct().run(step) == 0
    check_numbers(step, program, inputs)


def test_a_bias_of_another_region_stays():
    step = trace(lambda x, w, b: x @ w + b, A, B, ROW)
    with_info(node_of(step, aten.mm.default), region=1)
    assert "is in region 1, not None" in explain(AddBiasInProduct(), last_add(step))


def test_a_bias_goes_to_the_formula_that_reads_the_sum():
    check_pass(
        SplitBias(),
        lambda x, w, b: torch.addmm(b, x, w).relu(),
        (A, B, ROW),
        exact=False,
        after="""
            x: f32[4, 6]
            w: f32[6, 3]
            b: f32[3]
            mm: f32[4, 3] = mm(x, w)
            add: f32[4, 3] = add.Tensor(mm, b)
            relu: f32[4, 3] = relu(add)
            return [relu]
        """,
    )


UNSPLIT = {
    "a call reads it": (lambda x, w, b: torch.addmm(b, x, w) @ w.t(), "mm reads what is stored"),
    "returned": (lambda x, w, b: torch.addmm(b, x, w), "output reads what is stored"),
    "scaled": (lambda x, w, b: torch.addmm(b, x, w, alpha=2).relu(), "addmm has alpha=2, not 1"),
    "narrow": (
        lambda x, w, b: torch.addmm(b.bfloat16(), x.bfloat16(), w.bfloat16()).relu(),
        "and rounded once",
    ),
    "of a product": (
        lambda x, w, b: torch.addmm(aten.mm.default(x, w), x, w).relu(),
        "addmm adds to a product",
    ),
}


@pytest.mark.parametrize("name", UNSPLIT)
def test_a_product_keeps_its_bias_and_says_why(name):
    program, reason = UNSPLIT[name]
    step = trace(program, A, B, ROW)
    assert reason in explain(SplitBias(), node_of(step, aten.addmm.default))
    assert SplitBias().run(step) == 0


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes, st.booleans())
def test_any_bias(m, k, n, stored):
    def program(x, w, b):
        s = x @ w + b
        return s @ w.t() if stored else s.sin()

    inputs = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    step = trace(program, *inputs)
    for each in (AddBiasInProduct(), SplitBias()):
        each.run(step)
        assert each.run(step) == 0
        check_numbers(step, program, inputs, exact=False)


# --- no work for a library ------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,)])
def test_an_outer_product_is_a_formula(batch):
    x, y = torch.randn(*batch, 4, 1), torch.randn(*batch, 1, 3)
    step = trace(lambda x, y: torch.matmul(x, y).exp(), x, y)
    assert DECOMPOSE_OUTER.run(step) == 1
    assert node_of(step, aten.mul.Tensor)
    check_numbers(step, lambda x, y: torch.matmul(x, y).exp(), (x, y))
    assert DECOMPOSE_OUTER.run(step) == 0


def test_what_is_no_outer_product_stays():
    step = trace(lambda x, y: x @ y, A, B)
    assert explain(OUTER[0], node_of(step, aten.mm.default)) == "sums 6 products"
    whole = trace(lambda x, y: x @ y, torch.ones(2, 1).long(), torch.ones(1, 2).long())
    words = explain(OUTER[0], node_of(whole, aten.mm.default))
    assert words == "i64[2, 1] is not floating point"
    turned = torch.randn(3, 2, 1).transpose(0, 1)
    step = trace(lambda x, y: aten.bmm.default(x, y), turned, torch.randn(2, 1, 3))
    assert "is not laid out in rows" in explain(OUTER[0], node_of(step, aten.bmm.default))


OF_MATRICES = [rule for rule in VECTORS if rule.name in ("column-of-dots", "row-of-dots")]


@pytest.mark.parametrize("rule", OF_MATRICES, ids=lambda rule: rule.name)
def test_what_is_no_product_with_a_vector_stays(rule):
    def reason(x, y):
        step = trace(lambda x, y: x @ y, x, y)
        return explain(rule, node_of(step, aten.mm.default))

    assert reason(A, B) in ("f32[6, 3] is not a column", "f32[4, 6] is not a row")
    half = reason(torch.ones(1, 3).bfloat16(), torch.ones(3, 1).bfloat16())
    assert half == "bf16[1, 3] is summed in wider numbers"


def test_a_layer_with_one_result_is_a_sum():
    check_pass(
        DECOMPOSE_VECTORS,
        lambda x, w, b: torch.addmm(b, x, w),
        (A, B[:, :1].clone(), ROW[:1].clone()),
        exact=False,
        after="""
            x: f32[4, 6]
            w: f32[6, 1]
            b: f32[1]
            t: f32[1, 6] = t(w)
            mul: f32[4, 6] = mul.Tensor(x, t)
            sum: f32[4, 1] = sum.dim_IntList(mul, [1], True)
            add: f32[4, 1] = add.Tensor(sum, b)
            return [add]
        """,
    )
    step = trace(lambda x, w, b: torch.addmm(b, x, w, alpha=2), A, B[:, :1], ROW[:1])
    assert DECOMPOSE_VECTORS.run(step) == 0


@pytest.mark.parametrize("rule", VECTORS, ids=lambda rule: rule.name)
def test_half_precisions_stay_products(rule):
    x, y, b = (torch.ones(s).bfloat16() for s in ((1, 3), (3, 1), (1,)))
    program = {
        "vector-of-dots": lambda x, y, b: torch.mv(x, y[:, 0]),
        "column-of-dots-and-bias": lambda x, y, b: torch.addmm(b, x, y),
    }.get(rule.name, lambda x, y, b: x @ y)
    step = trace(program, x, y, b)
    product = step.returned[0]
    assert explain(rule, product) == "bf16[1, 3] is summed in wider numbers"
    assert DECOMPOSE_VECTORS.run(step) == 0


def test_a_layer_with_several_results_stays():
    step = trace(lambda x, w, b: torch.addmm(b, x, w), A, B, ROW)
    (rule,) = (rule for rule in VECTORS if rule.name == "column-of-dots-and-bias")
    assert explain(rule, step.returned[0]) == "f32[6, 3] is not a column"


def test_a_product_with_a_vector_is_a_sum():
    check_pass(
        DECOMPOSE_VECTORS,
        lambda x, y: torch.mv(x, y),
        (A, B[:, 0].clone()),
        exact=False,
        after="""
            x: f32[4, 6]
            y: f32[6]
            mul: f32[4, 6] = mul.Tensor(x, y)
            sum: f32[4] = sum.dim_IntList(mul, [1])
            return [sum]
        """,
    )


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, sizes, st.sampled_from([torch.float32, torch.float64]))
def test_any_small_product(m, k, n, dtype):
    x, y = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    step = trace(lambda x, y: (x @ y).sin(), x, y)
    for each in (DECOMPOSE_OUTER, DECOMPOSE_VECTORS):
        each.run(step)
        assert each.run(step) == 0
    check_numbers(step, lambda x, y: (x @ y).sin(), (x, y), exact=False)


@pytest.mark.parametrize("batch", [1, 7])
def test_all_of_them_in_a_step_train_as_eager_does(batch):
    import treadle

    model = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 6), Tied())
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    step = treadle.compile(train(model, ours), model=model, optimizer=ours)
    eager = train(twin, theirs)
    for _ in range(3):
        x, y = torch.randn(batch, 6), torch.randn(batch, 6)
        torch.testing.assert_close(step(x, y), eager(x, y))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_it_reads_a_step_without_no_ops():
    """``t(t(p))`` of a gradient is the gradient: ``noops.py``."""
    step = trace(lambda a, b, c, d: (a @ b).t().t() + (c @ d), A, B, C, D)
    run_passes(step, (RemoveNoOps(), RemoveDeadCode(), AccumulateProducts()))
    assert node_of(step, aten.addmm.default)
