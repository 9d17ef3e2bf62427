"""Products that a program writes as multiplications and sums."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import treadle
from testing import check_numbers, check_pass, node_of, show_plain, trace
from treadle.compat.switches import full_products, rounds_products
from treadle.graph.custom_ops.full_products import FULL_BMM
from treadle.graph.rewrite.rules import explain
from treadle.passes.products.written_out import MULTIPLY_WRITTEN_OUT

aten = torch.ops.aten
(RULE,) = MULTIPLY_WRITTEN_OUT.rules


@pytest.fixture
def rounding():
    """PyTorch may round the factors of products of float32."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def test_a_multiplication_and_a_sum_are_a_product():
    check_pass(
        MULTIPLY_WRITTEN_OUT,
        lambda x, y: (x[:, None] * y).sum(-1, keepdim=True),
        (torch.randn(128, 64), torch.randn(256, 64)),
        exact=False,
        after="""
            x: f32[128, 64]
            y: f32[256, 64]
            unsqueeze: f32[128, 1, 64] = unsqueeze(x, 1)
            select: f32[128, 64] = select.int(unsqueeze, 1, 0)
            view: f32[1, 128, 64] = view(select, [1, 128, 64])
            view.1: f32[1, 256, 64] = view(y, [1, 256, 64])
            transpose: f32[1, 64, 256] = transpose.int(view.1, 1, 2)
            bmm: f32[1, 128, 256] = bmm(view, transpose)
            view.2: f32[128, 256] = view(bmm, [128, 256])
            view.3: f32[128, 256, 1] = view(view.2, [128, 256, 1])
            return [view.3]
        """,
    )


def test_dims_that_both_factors_keep_are_a_batch():
    step = check_pass(
        MULTIPLY_WRITTEN_OUT,
        lambda x, y: (x.unsqueeze(-1).expand(-1, -1, -1, 80) * y[:, :, None]).sum(1),
        (torch.randn(3, 50, 60), torch.randn(3, 50, 80)),
        exact=False,
        after="""
            x: f32[3, 50, 60]
            y: f32[3, 50, 80]
            unsqueeze: f32[3, 50, 60, 1] = unsqueeze(x, -1)
            unsqueeze.1: f32[3, 50, 1, 80] = unsqueeze(y, 2)
            select: f32[3, 50, 60] = select.int(unsqueeze, 3, 0)
            transpose: f32[3, 60, 50] = transpose.int(select, 1, 2)
            select.1: f32[3, 50, 80] = select.int(unsqueeze.1, 2, 0)
            bmm: f32[3, 60, 80] = bmm(transpose, select.1)
            return [bmm]
        """,
    )
    assert step.returned[0].target is aten.bmm.default


@st.composite
def contractions(draw):
    """Two shapes that are multiplied and summed, with dims in any order: of both, of one, of none,
    some of them repeated along a dim."""
    others = draw(st.lists(st.sampled_from("blrsn"), max_size=3))
    kinds = draw(st.permutations(["l", "r", "s", *others]))
    count = len(kinds)
    sizes = [1 if kind == "n" else draw(st.sampled_from((1, 2, 3, 5, 8))) for kind in kinds]
    left = [size if kind in "bls" else 1 for kind, size in zip(kinds, sizes, strict=True)]
    right = [size if kind in "brs" else 1 for kind, size in zip(kinds, sizes, strict=True)]
    dims = [at for at, kind in enumerate(kinds) if kind == "s"]
    dims += [at for at, kind in enumerate(kinds) if kind == "n" and draw(st.booleans())]
    order = draw(st.permutations(range(count)))
    return left, right, sizes, dims, order, draw(st.booleans()), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(contractions(), st.sampled_from((torch.float64, torch.float32)))
def test_any_product_of_matrices_has_its_numbers(case, dtype):
    left, right, sizes, dims, order, keep, repeated = case

    def program(x, y):
        if repeated:
            x = x.expand(sizes)
        return (x.permute(order) * y.permute(order)).sum([order.index(d) for d in dims], keep)

    inputs = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
    step = trace(program, *inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.passes.products.written_out._require_gain", lambda *given: None)
        MULTIPLY_WRITTEN_OUT.run(step)
    groups = {
        tuple(sorted(d for d in range(len(sizes)) if part(d)))
        for part in (
            lambda d: left[d] > 1 and right[d] == 1,
            lambda d: right[d] > 1 and left[d] == 1,
            lambda d: d in dims and sizes[d] > 1,
        )
    }
    expects = len(groups) == 3 and () not in groups
    assert ("bmm" in show_plain(step)) == expects
    check_numbers(step, program, inputs, exact=False)


def _reason(program, *inputs):
    return explain(RULE, node_of(trace(program, *inputs), aten.sum.dim_IntList))


X, Y = torch.randn(128, 1, 64), torch.randn(1, 256, 64)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda x, y: (x * 2.0).sum(-1), "2.0 is a number"),
        (lambda x, y: (x * x).sum(-1), "is no product of matrices"),
        (lambda x, y: (x * y).sum(0), "has dims [0] that no product has"),
        (lambda x, y: (x * y).sum([0, 1, 2]), "has dims [0, 1] that no product has"),
        (lambda x, y: (x[..., :2] * y[..., :2]).sum(-1), "as a formula and"),
        (lambda x, y: (x[:2] * y[:, :2]).sum(-1), "as a formula and"),
        (lambda x, y: (x.long() * y.long()).sum(-1), "of i64[128, 256, 64]"),
        (lambda x, y: (x.double() * y).sum(-1), "sums what was converted to f64[128, 256, 64]"),
        (lambda x, y: (x * y).sum(-1, dtype=torch.bfloat16), "rounds f32[128, 256, 64] to bf16"),
    ],
)
def test_what_is_no_product_stays(program, words):
    assert words in _reason(program, X, Y)


def test_a_multiplication_that_others_read_stays():
    def program(x, y):
        product = x * y
        return product.sum(-1), product

    assert MULTIPLY_WRITTEN_OUT.run(trace(program, X, Y)) == 0


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_a_sum_in_a_wider_dtype_multiplies_in_it(dtype, wide):
    def program(x, y):
        return (x * y).sum(-1, dtype=wide)

    inputs = X.to(dtype), Y.to(dtype)
    step = trace(program, *inputs)
    assert MULTIPLY_WRITTEN_OUT.run(step) == 1
    assert node_of(step, aten.bmm.default)
    check_numbers(step, lambda x, y: program(x.to(wide), y.to(wide)), inputs, exact=False)


def test_halves_are_multiplied_without_rounding():
    x, y = X.bfloat16(), Y.bfloat16()
    step = trace(lambda x, y: (x * y).sum(-1), x, y)
    assert MULTIPLY_WRITTEN_OUT.run(step) == 1
    check_numbers(
        step, lambda x, y: (x.float() * y.float()).sum(-1).bfloat16(), (x, y), exact=False
    )


def test_no_digits_are_lost_where_products_may_round(rounding):
    step = trace(lambda x, y: (x * y).sum(-1), X, Y)
    assert MULTIPLY_WRITTEN_OUT.run(step) == 1
    assert node_of(step, FULL_BMM.op)
    assert rounds_products()
    with full_products():
        assert not rounds_products()
    assert rounds_products()
    assert torch.get_float32_matmul_precision() == "high"


class _Scan(nn.Module):
    """State space duality in chunks, written out (Dao and Gu, 2024, listing 1)."""

    def __init__(self, heads: int, width: int, state: int, chunk: int) -> None:
        super().__init__()
        self.shape, self.chunk = (heads, width, state), chunk
        self.into = nn.Linear(heads * width, heads * (width + 2 * state + 1))

    def forward(self, x):
        heads, width, state = self.shape
        x, b, c, decay = self.into(x).split(
            [heads * width, heads * state, heads * state, heads], dim=-1
        )
        chunks = (x.shape[0], -1, self.chunk, heads)
        x, b, c = (
            each.reshape(*chunks, size) for each, size in ((x, width), (b, state), (c, state))
        )
        steps = nn.functional.softplus(decay).reshape(chunks).permute(0, 3, 1, 2).cumsum(-1)
        later = torch.ones(self.chunk, self.chunk, dtype=torch.bool).tril()
        between = (steps[..., :, None] - steps[..., None, :]).masked_fill(~later, math.inf)
        weights = torch.exp(-between).permute(0, 2, 3, 4, 1)
        scores = (c[:, :, :, None] * b[:, :, None]).sum(-1) * weights
        inside = (scores[..., None] * x[:, :, None]).sum(3)
        rest = torch.exp(steps - steps[..., -1:]).permute(0, 2, 3, 1)[..., None]
        states = ((b * rest)[..., None, :] * x[..., None]).sum(2)
        outside = (c[..., None, :] * states[:, :, None]).sum(-1)
        return (inside + outside).flatten(3).flatten(1, 2)


@pytest.mark.parametrize("numerics", ["default", "eager"])
def test_a_scan_written_out_trains_as_in_eager(numerics):
    torch.manual_seed(0)
    model = _Scan(heads=4, width=24, state=16, chunk=32)
    exact = copy.deepcopy(model).double()

    def training(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    plain, optimizer = training(model)
    step = treadle.compile(plain, model=model, optimizer=optimizer, numerics=numerics)
    reference, _ = training(exact)
    for _ in range(3):
        x = torch.randn(2, 96, 96)
        torch.testing.assert_close(step(x).double(), reference(x.double()), rtol=2e-5, atol=0)
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)
    assert step.graph("clean").count("= bmm(") == (0 if numerics == "eager" else 12)
