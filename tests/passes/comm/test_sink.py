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
from treadle.compat.distributed.collectives import collective_op
from treadle.graph.core.signature import Role
from treadle.passes.comm.overlap.sink import SinkWaits

X, Y = torch.randn(4, 3), torch.randn(4, 3)
SINK = SinkWaits()


def test_a_wait_stands_ahead_of_what_reads_elements():
    def program(x, y):
        w = wait(all_reduce(x))
        v = w.view(-1)
        a = y.sin()
        b = a.view(-1).cos()
        return v + b, w.t() * 2

    check_comm(
        SINK,
        program,
        (X, Y),
        after="""
            x: f32[4, 3]
            y: f32[4, 3]
            all_reduce: f32[4, 3] = all_reduce(x, sum, 0)
            sin: f32[4, 3] = sin(y)
            view: f32[12] = view(sin, [-1])
            cos: f32[12] = cos(view)
            wait_tensor: f32[4, 3] = wait_tensor(all_reduce)
            view.1: f32[12] = view(wait_tensor, [-1])
            add: f32[12] = add.Tensor(view.1, cos)
            t: f32[3, 4] = t(wait_tensor)
            mul: f32[3, 4] = mul.Tensor(t, 2)
            return [add, mul]
        """,
    )


def test_pieces_and_their_pieces_are_views():
    def program(x, y):
        a, b = torch.split(wait(all_reduce(x)), 2)
        c = y.sin()
        return a.t() + 1, b, c

    step = check_comm(SINK, program, (X, Y))
    assert names(step) == [
        "all_reduce", "sin", "wait_tensor", "split", "getitem", "t", "add", "getitem_1",
    ]  # fmt: skip


def test_what_is_returned_is_waited_for_at_the_end():
    def program(x, y):
        return wait(all_reduce(x)), wait(all_reduce(y)).t(), y.sin()

    step = check_comm(SINK, program, (X, Y))
    assert names(step) == ["all_reduce", "all_reduce_1", "sin", "wait_tensor", "wait_tensor_1", "t"]


def test_another_collective_is_a_reader():
    def program(x, y):
        w = wait(all_reduce(x))
        a = y.sin()
        return wait(all_reduce(w)) + a

    step = check_comm(SINK, program, (X, Y))
    assert names(step) == [
        "all_reduce", "sin", "wait_tensor", "all_reduce_1", "wait_tensor_1", "add",
    ]  # fmt: skip


def test_none_passes_a_users_operator():
    def program(x, y):
        w = wait(all_reduce(x))
        a = y.sin()
        return w + user_operator(a).cos()

    step = check_comm(SINK, program, (X, Y))
    assert names(step) == ["all_reduce", "sin", "wait_tensor", "mine", "cos", "add"]


def test_draws_are_passed():
    step = check_comm(SINK, lambda x, y: wait(all_reduce(x)) + torch.rand_like(y), (X, Y))
    assert names(step) == ["all_reduce", "rand_like", "wait_tensor", "add"]


def test_a_wait_that_nobody_reads_stays():
    def program(x, y):
        wait(all_reduce(x))
        return y.sin()

    assert SINK.run(trace(program, X, Y)) == 0


ONE = X.numel() * 4


def three(x, y):
    u = wait(all_reduce(x))
    v = wait(all_reduce(y))
    w = wait(all_reduce(x, "max"))
    return u + v + w


@pytest.mark.parametrize(
    ("bound", "order"),
    [
        (3 * ONE, "all_reduce all_reduce_1 all_reduce_2 wait_tensor wait_tensor_1 add"),
        (2 * ONE, "all_reduce all_reduce_1 wait_tensor all_reduce_2 wait_tensor_1 add"),
        (ONE, "all_reduce wait_tensor all_reduce_1 wait_tensor_1 all_reduce_2 add"),
    ],
)
def test_no_more_is_under_way_than_is_allowed(bound, order):
    step = check_comm(SinkWaits(bound), three, (X, Y))
    assert " ".join(names(step)).startswith(order)


def test_what_is_too_much_by_itself_stays():
    assert SinkWaits(ONE - 1).run(trace(three, X, Y)) == 0


def test_with_several_results_the_last_wait_counts():
    """Its bytes are under way until all of it is waited for."""

    def program(x, y):
        a, b = collective_op("all_reduce_coalesced")([x, y], "sum", "0")
        u, v = wait(a), wait(b)
        other = wait(all_reduce(y, "max"))
        return other, u.sin(), v.cos()

    order = names(check_comm(SinkWaits(3 * ONE), program, (X, Y)))
    assert order.index("sin") == order.index("wait_tensor") + 1
    order = names(check_comm(SinkWaits(2 * ONE), program, (X, Y)))
    assert order.index("wait_tensor_1") < order.index("all_reduce")


def test_a_reduce_scatter_is_waited_for_where_the_next_of_its_group_has_started():
    """What it sends has its bytes until then, and is more than what it gives."""

    def program(x, y):
        first = wait(reduce_scatter(x))
        second = wait(reduce_scatter(y))
        other = wait(reduce_scatter(x, "1"))
        a = y.sin()
        third = wait(reduce_scatter(x.cos()))
        return first + second + third, other, a

    step = check_comm(SINK, program, (X, Y))
    assert names(step) == [
        "reduce_scatter_tensor", "reduce_scatter_tensor_1", "wait_tensor",
        "reduce_scatter_tensor_2", "sin", "cos", "reduce_scatter_tensor_3", "wait_tensor_1",
        "add", "wait_tensor_3", "add_1", "wait_tensor_2",
    ]  # fmt: skip


def test_a_wait_for_a_reduce_scatter_that_stands_late_goes_back():
    """As captured where an optimizer steps; none passes a user's operator."""

    def program(x, y):
        starts = reduce_scatter(x), reduce_scatter(y), reduce_scatter(x.cos())
        a = y.sin()
        first, second, third = (wait(each) for each in starts)
        return first * second * third * a.mean()

    step = check_comm(SINK, program, (X, Y))
    assert names(step)[:7] == [
        "reduce_scatter_tensor", "reduce_scatter_tensor_1", "wait_tensor", "cos",
        "reduce_scatter_tensor_2", "wait_tensor_1", "sin",
    ]  # fmt: skip

    def fenced(x, y):
        starts = reduce_scatter(x), reduce_scatter(y)
        a = user_operator(x)
        return wait(starts[0]).sin() * wait(starts[1]), a

    assert SINK.run(trace(fenced, X, Y)) == 0


def updated(x, w, v):
    """Two parameters, each updated with a sum of its own."""
    g = wait(all_reduce(x * 2))
    h = wait(all_reduce(x * 3))
    w_new = w - g
    v_new = v - h
    return x.sin(), w_new, v_new


def test_none_passes_the_first_update():
    """Nothing is written before the last wait: what stands between two of them hides nothing."""
    roles = {"w": Role.PARAMETER, "v": Role.PARAMETER}
    step = trace(updated, X, X, X, writes={1: 1, 2: 2}, roles=roles)
    check_comm(SINK, updated, (X, X, X), given=step)
    assert names(step) == [
        "mul", "all_reduce", "mul_1", "all_reduce_1", "wait_tensor", "wait_tensor_1", "sub",
        "sub_1", "sin",
    ]  # fmt: skip
