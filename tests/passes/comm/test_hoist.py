import pytest
import torch

from passes.comm.communicating import (
    all_reduce,
    check_comm,
    names,
    reduce_scatter,
    user_operator,
    wait,
)
from testing import trace
from treadle.graph.core.collectives import collectives_in
from treadle.passes.comm.overlap.hoist import HoistCollectives

X, Y = torch.randn(4, 3), torch.randn(4, 3)
HOIST = HoistCollectives()


def test_a_collective_starts_when_its_input_is_ready():
    def program(x, y):
        s = x * 0.5
        a = y.sin()
        b = a.cos()
        return wait(all_reduce(s)) + b

    check_comm(
        HOIST,
        program,
        (X, Y),
        after="""
            x: f32[4, 3]
            y: f32[4, 3]
            mul: f32[4, 3] = mul.Tensor(x, 0.5)
            all_reduce: f32[4, 3] = all_reduce(mul, sum, 0)
            sin: f32[4, 3] = sin(y)
            cos: f32[4, 3] = cos(sin)
            wait_tensor: f32[4, 3] = wait_tensor(all_reduce)
            add: f32[4, 3] = add.Tensor(wait_tensor, cos)
            return [add]
        """,
    )


def test_views_of_the_input_go_with_it_and_inputs_are_ready_at_once():
    def program(x, y):
        a = y.sin()
        return wait(all_reduce(x.view(-1))).sum() + a

    step = check_comm(HOIST, program, (X, Y))
    assert names(step)[:2] == ["view", "all_reduce"]


def test_the_first_that_is_ready_starts_first_and_equal_ones_keep_their_order():
    def program(x, y):
        a = x.sin()
        b = a.t() @ a
        late = all_reduce(b)
        early = all_reduce(a)
        same = all_reduce(a, "max")
        return wait(late), wait(early) + wait(same)

    step = check_comm(HOIST, program, (X, Y))
    assert names(step)[:6] == ["sin", "all_reduce_1", "all_reduce_2", "t", "mm", "all_reduce"]


def test_one_that_reads_the_result_of_another_stands_behind_its_wait():
    def program(x, y):
        first = wait(all_reduce(x))
        a = y.sin()
        return wait(reduce_scatter(first)), a

    step = check_comm(HOIST, program, (X, Y))
    assert names(step) == [
        "all_reduce", "wait_tensor", "reduce_scatter_tensor", "sin", "wait_tensor_1",
    ]  # fmt: skip


def test_none_passes_a_users_operator():
    def program(x, y):
        s = x * 2
        a = user_operator(y)
        b = a.sin()
        return wait(all_reduce(s)) + b

    step = check_comm(HOIST, program, (X, Y))
    assert names(step) == ["mul", "mine", "all_reduce", "sin", "wait_tensor", "add"]


@pytest.fixture
def unknown():
    """An operator of PyTorch's collectives that no version has."""
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", torch.clone, "CompositeExplicitAutograd")
    yield torch.ops._c10d_functional.unknown
    del library  # and with it the operator


def test_none_passes_communication_that_is_not_known(unknown):
    def program(x, y):
        s = x * 2
        a = unknown(y.clone())
        b = s.sin()
        return wait(all_reduce(s)) + b, a

    step = trace(program, X, Y)
    HOIST.run(step)
    order = names(step)
    assert order.index("all_reduce") == order.index("unknown") + 1


def test_draws_are_passed():
    """A collective draws nothing and a draw sends nothing."""

    def program(x, y):
        s = x * 2
        a = torch.rand_like(y)
        return wait(all_reduce(s)) + a

    step = check_comm(HOIST, program, (X, Y))
    assert names(step)[:3] == ["mul", "all_reduce", "rand_like"]


ONE = X.numel() * 4


def three(x, y):
    a, b, c = x * 2, x * 3, x * 4
    first = wait(all_reduce(a))
    d = first.sin()
    second = wait(all_reduce(b))
    e = second.sin() + d
    third = wait(all_reduce(c))
    return third.sin() + e


@pytest.mark.parametrize(
    ("bound", "begin"),
    [
        (3 * ONE, "mul all_reduce mul_1 all_reduce_1 mul_2 all_reduce_2 wait_tensor sin"),
        (2 * ONE, "mul all_reduce mul_1 all_reduce_1 mul_2 wait_tensor all_reduce_2 sin"),
        (ONE, "mul all_reduce mul_1 mul_2 wait_tensor all_reduce_1 sin wait_tensor_1"),
    ],
)
def test_no_more_is_under_way_than_is_allowed(bound, begin):
    step = check_comm(HoistCollectives(bound), three, (X, Y))
    assert " ".join(names(step)).startswith(begin)


def test_what_is_too_much_by_itself_stays():
    step = trace(three, X, Y)
    assert HoistCollectives(ONE - 1).run(step) == 0


def test_the_input_lives_no_longer():
    step = trace(three, X, Y)
    starts = [each.node for each in collectives_in(step.graph)]
    before = [list(step.graph.nodes).index(node) for node in starts]
    assert HOIST.run(step) == 3
    after = [list(step.graph.nodes).index(node) for node in starts]
    assert all(new <= old for new, old in zip(after, before, strict=True))
