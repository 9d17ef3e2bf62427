import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, check_pass, trace
from treadle.graph.core.node_info import with_info
from treadle.graph.core.verify import verify
from treadle.passes.products.batching import BatchProducts

aten = torch.ops.aten
X, U, V = torch.randn(4, 6), torch.randn(6, 3), torch.randn(6, 3)


def count(step, target):
    return len(step.graph.find_nodes(op="call_function", target=target))


def test_projections_of_one_value_are_one_batch():
    check_pass(
        BatchProducts(),
        lambda x, u, v: (x @ u).sin() * (x @ v),
        (X, U, V),
        exact=False,
        after="""
            x: f32[4, 6]
            u: f32[6, 3]
            v: f32[6, 3]
            unsqueeze: f32[1, 4, 6] = unsqueeze(x, 0)
            expand: f32[2, 4, 6] = expand(unsqueeze, [2, -1, -1])
            stack: f32[2, 6, 3] = stack([u, v])
            bmm: f32[2, 4, 3] = bmm(expand, stack)
            select: f32[4, 3] = select.int(bmm, 0, 0)
            sin: f32[4, 3] = sin(select)
            select.1: f32[4, 3] = select.int(bmm, 0, 1)
            mul: f32[4, 3] = mul.Tensor(sin, select.1)
            return [mul]
        """,
    )


STAYS = {
    "one waits": lambda x, u, v: (x @ u @ u.t() @ v).sum() + (x @ u).sum(),
    "other shapes": lambda x, u, v: (x @ u).sin().sum() + (x[:2] @ v).sum(),
    "other dtypes": lambda x, u, v: (x @ u).sin() + (x.double() @ v.double()),
    "other strides": lambda x, u, v: (x @ u).sin() + (x @ v.t().contiguous().t()),
    "returned": lambda x, u, v: (x @ u, (x @ v).t()),
    "by strides": lambda x, u, v: (x @ u).as_strided((2,), (1,)).sin().sum() * (x @ v),
    "a draw between": lambda x, u, v: (x @ u).bernoulli(0.5) + (x @ v),
    "one": lambda x, u, v: (x @ u).sin(),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    step = trace(STAYS[name], X, U, V)
    before = count(step, aten.mm.default)
    if name == "one waits":  # only the two equal products at its ends could be one: they are
        before -= BatchProducts().run(step)
    assert BatchProducts().run(step) == 0
    assert count(step, aten.mm.default) == before
    check_numbers(step, STAYS[name], (X, U, V), exact=False)


def test_distance_and_room():
    def program(x, u, v):
        return (x @ u).sin().cos().exp() * (x @ v)

    assert BatchProducts(distance=3).run(trace(program, X, U, V)) == 0
    assert BatchProducts(distance=4).run(trace(program, X, U, V)) == 2
    assert BatchProducts(room=2 * 6 * 3 * 4 - 1).run(trace(program, X, U, V)) == 0
    assert BatchProducts(room=2 * 6 * 3 * 4).run(trace(program, X, U, V)) == 2


def test_phases_and_regions_stay_apart():
    for mark in ({"phase": "backward"}, {"region": 1}, {"checkpoint": 1}, {"asked": "must_save"}):
        step = trace(lambda x, u, v: (x @ u).sin() * (x @ v), X, U, V)
        with_info(step.graph.find_nodes(op="call_function", target=aten.mm.default)[0], **mark)
        assert BatchProducts().run(step) == 0


def test_two_batches_never_wait_for_each_other():
    """Each of one waits for one of the other, crosswise: one batch alone is possible."""

    def program(a, b):
        first, second = a @ b, a.sin() @ b
        return ((first @ first).sin() @ second) + ((second @ second).sin() @ first)

    inputs = torch.randn(3, 3), torch.randn(3, 3)
    step = trace(program, *inputs)
    assert BatchProducts().run(step) > 0
    verify(step)
    check_numbers(step, program, inputs, exact=False)
    assert BatchProducts().run(step) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 1, 2, 5]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=8),
)
def test_any_products(size, chain):
    def program(x, y):
        values = [x, y]
        for i, j, turned in chain:
            left, right = values[i % len(values)], values[j % len(values)]
            values.append((left @ right).sin() if turned else left @ right)
        return values[-1] + 1, values[len(values) // 2] * 2

    inputs = tuple(torch.randn(size, size, dtype=torch.float64) for _ in range(2))  # they cancel
    step = trace(program, *inputs)
    BatchProducts().run(step)
    verify(step)
    check_numbers(step, program, inputs, exact=False)
    assert BatchProducts().run(step) == 0
