import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, check_pass, node_of, trace
from treadle.compiler.cleaning import CLEAN, rewritten
from treadle.graph.core.node_info import with_info
from treadle.graph.rewrite.rules import explain
from treadle.passes.products.joined_products import JoinProducts
from treadle.passes.products.sums import AccumulateProducts

aten = torch.ops.aten
X, V, W = torch.randn(9, 4), torch.randn(4, 3), torch.randn(4, 5)


def clean(step):
    """Cleaned, with the rewrites of products that are off by default too."""
    return rewritten(step, (*CLEAN, JoinProducts(), AccumulateProducts()))


def test_columns():
    check_pass(
        JoinProducts(),
        lambda x, v, w: torch.cat([x @ v, x @ w], 1),
        (X, V, W),
        exact=False,
        after="""
            x: f32[9, 4]
            v: f32[4, 3]
            w: f32[4, 5]
            cat: f32[4, 8] = cat([v, w], 1)
            mm: f32[9, 8] = mm(x, cat)
            return [mm]
        """,
    )


def test_rows():
    check_pass(
        JoinProducts(),
        lambda x, w: torch.cat([x @ w, x.sin() @ w]),
        (X, torch.randn(4, 11)),
        exact=False,
        after="""
            x: f32[9, 4]
            w: f32[4, 11]
            sin: f32[9, 4] = sin(x)
            cat: f32[18, 4] = cat([x, sin])
            mm: f32[18, 11] = mm(cat, w)
            return [mm]
        """.replace("cat([x, sin])", "cat([x, sin], 0)"),
    )


def test_columns_of_batches():
    def program(x, v, w):
        return torch.cat([x @ v, x @ w], -1).sin()

    inputs = torch.randn(2, 9, 4), V, W
    step = trace(program, *inputs)
    assert JoinProducts().run(step) == 0  # two views of x: equal ones are one in ``cse.py``
    step = clean(step)
    assert not JoinProducts().run(step)
    assert node_of(step, aten.mm.default)
    check_numbers(step, program, inputs, exact=False)


STAYS = {
    "read by another": (lambda x, v, w: torch.cat([(p := x @ v), x @ w], 1) + p.sum(), "used"),
    "no factor": (lambda x, v, w: torch.cat([x @ v, x.sin() @ w], 1), "share no factor"),
    "no product": (lambda x, v, w: torch.cat([x @ v, x], 1), "is used outside|is not mm"),
    "large factors": (
        lambda x, v, w: torch.cat([x[:2] @ v, x[:2] @ w], 1),
        "share no factor|the factors are 32 elements, the result 16",
    ),
    "larger factors": (
        lambda x, v, w: torch.cat([(y := x[:2]) @ v, y @ w], 1),
        "the factors are 32 elements, the result 16",
    ),
    "other dim": (
        lambda x, v, w: torch.cat([(x @ v)[None], (x @ v.sin())[None]], 0),
        "unsqueeze is not mm",
    ),
    "turned": (lambda x, v, w: torch.cat([(x @ v).view(27), (x @ w).view(45)], -1), "moves"),
    "one": (lambda x, v, w: torch.cat([x @ v], 1), "joins one value"),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays_and_says_why(name):
    program, reason = STAYS[name]
    step = trace(program, X, V, W)
    words = explain(JoinProducts(), node_of(step, aten.cat.default))
    assert any(part in words for part in reason.split("|")), words
    assert JoinProducts().run(step) == 0
    check_numbers(step, program, (X, V, W))


def test_regions_stay_apart():
    step = trace(lambda x, v, w: torch.cat([x @ v, x @ w], 1), X, V, W)
    with_info(step.graph.find_nodes(op="call_function", target=aten.mm.default)[0], region=1)
    assert "is in region 1, not None" in explain(JoinProducts(), node_of(step, aten.cat.default))


sizes = st.sampled_from([0, 1, 2, 3, 7, 13])


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.lists(sizes, min_size=1, max_size=4), st.booleans())
def test_any_joined_products(m, k, widths, rows):
    def program(x, y):
        if rows:
            return torch.cat([(x * (at + 1)) @ y for at in range(len(widths))])
        return torch.cat([x @ y[:, :n].sin() for n in widths], 1)

    inputs = torch.randn(m, k), torch.randn(k, 13)
    step = trace(program, *inputs)
    JoinProducts().run(step)
    assert JoinProducts().run(step) == 0
    check_numbers(step, program, inputs, exact=False)
