"""``GatherAgain``: parameters that are whole only while they are read."""

import pytest
import torch

from passes.comm.communicating import (
    GROUPS,
    all_gather,
    calls,
    check_ranks,
    names,
    user_operator,
    wait,
)
from passes.comm.lockstep import run_ranks
from testing import show_plain, trace
from treadle.graph.core.collectives import collective_of, is_wait
from treadle.graph.core.node_info import info, with_info
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.comm import communication_passes
from treadle.passes.comm.sharding.gather_again import GatherAgain

X = torch.randn(4, 4)
PARTS = tuple(torch.randn(2, 4) for _ in range(3))
AGAIN = GatherAgain()


def layers(x, a, b, c):
    """Three layers forward and backward, each of whose weights is gathered in front of it."""
    u = wait(all_gather(a))
    h1 = x @ u
    v = wait(all_gather(b))
    h2 = h1 @ v
    w = wait(all_gather(c))
    h3 = h2 @ w
    g3 = h3.sin()
    gc = h2.t() @ g3
    g2 = g3 @ w.t()
    gb = h1.t() @ g2
    g1 = g2 @ v.t()
    ga = x.t() @ g1
    return ga, gb, gc, g1 @ u.t()


def marked(step, *, first_of_backward="sin"):
    """``step`` with its gathers as those of groups 0, 1, 2; backward from the node of that name."""
    late, groups, group_of = False, 0, {}
    for node in step.graph.nodes:
        late |= node.name == first_of_backward
        with_info(node, phase="backward" if late else "forward")
        if collective_of(node) is not None:
            group_of[node] = groups
            groups += 1
        elif is_wait(node):
            group_of[node] = group_of[node.args[0]]
        if node in group_of:
            with_info(node, gathered=group_of[node])
    return step


def test_each_group_is_gathered_while_the_one_before_is_read():
    step = marked(trace(layers, X, *PARTS))
    given = step.copy()
    assert AGAIN.run(step) == 4
    assert [each for each in names(step) if not each.startswith(("t", "view"))] == [
        "all_gather_into_tensor", "wait_tensor", "all_gather_into_tensor_1", "mm",
        "wait_tensor_1", "all_gather_into_tensor_2", "mm_1", "wait_tensor_2", "mm_2",
        "sin", "mm_3", "all_gather_into_tensor_3", "mm_4", "mm_5",
        "wait_tensor_3", "all_gather_into_tensor_4", "mm_6", "mm_7", "wait_tensor_4", "mm_8",
    ]  # fmt: skip
    check_ranks(given, step, (X, *PARTS))
    assert AGAIN.run(step) == 0


def test_the_passes_behind_it_keep_it_there():
    step = marked(trace(layers, X, *PARTS))
    given = step.copy()
    run_passes(step, (AGAIN, *communication_passes(1 << 20, 1 << 20)))
    order = names(step)
    assert order.index("all_gather_into_tensor_3") > order.index("mm_2")
    assert order.index("all_gather_into_tensor_4") > order.index("mm_4")
    check_ranks(given, step, (X, *PARTS))


def test_what_is_made_of_a_gathered_value_alone_is_made_again():
    """A cast and a view that the forward made, and the backward reads."""

    def program(x, a, b):
        u = wait(all_gather(a)).double().t()
        h1 = x.double() @ u
        v = wait(all_gather(b)).double()
        h2 = h1 @ v
        g = h2.sin()
        return (g @ v.t()) @ u.t()

    step = marked(trace(program, X, *PARTS[:2]))
    given = step.copy()
    assert AGAIN.run(step) == 2
    late = [each for each in step.graph.nodes if info(each).phase == "backward"]
    assert sum(str(each.target) == "aten._to_copy.default" for each in late) == 1
    check_ranks(given, step, (X, *PARTS[:2]))


def test_nothing_to_do_where_nothing_is_dropped():
    step = trace(layers, X, *PARTS)
    text = show_plain(step)
    assert AGAIN.run(step) == 0
    assert show_plain(step) == text


def test_what_the_caller_gets_is_kept():
    def program(x, a, b):
        u = wait(all_gather(a))
        h1 = x @ u
        v = wait(all_gather(b))
        g = (h1 @ v).sin()
        return (g @ v.t()) @ u.t(), u

    step = marked(trace(program, X, *PARTS[:2]))
    AGAIN.run(step)
    assert calls(step).count("all_gather_into_tensor") == 2


def test_a_rank_that_is_alone_gathers_nothing():
    def program(x, a):
        u = a.clone()
        return (x @ u).sin() @ u.t()

    step = trace(program, X, torch.randn(4, 4))
    for node in step.graph.nodes:
        late = node.name in ("sin", "t", "mm_1")
        phase, gathered = ("backward", None) if late else ("forward", 0)
        with_info(node, phase=phase, gathered=gathered if node.name == "clone" else None)
    assert AGAIN.run(step) == 0


def test_none_passes_a_users_operator():
    def program(x, a, b):
        u = wait(all_gather(a))
        h1 = user_operator(x @ u)
        v = wait(all_gather(b))
        g = (h1 @ v).sin()
        f = user_operator(g @ v.t())
        return f @ u.t()

    step = marked(trace(program, X, *PARTS[:2]))
    given = step.copy()
    assert AGAIN.run(step) == 1
    order = names(step)
    assert order.index("all_gather_into_tensor_1") == order.index("mine") + 1
    assert order.index("all_gather_into_tensor_2") == order.index("mine_1") + 1
    check_ranks(given, step, (X, *PARTS[:2]))


@pytest.mark.parametrize("times", [2, 3])
def test_several_forwards_and_backwards(times):
    """Between them another group is read, so that it is gathered for each."""

    def program(x, a, b, c):
        u, v, w = (wait(all_gather(each)) for each in (a, b, c))
        for _ in range(times):
            g = (((x @ u) @ v) @ w).sin()
            x = ((g @ w.t()) @ v.t()) @ u.t()
        return x

    step = trace(program, X, *PARTS)
    phase, groups, group_of = "forward", 0, {}
    for node in step.graph.nodes:
        phase = "backward" if node.name.startswith("sin") else phase
        if collective_of(node) is not None:
            group_of[node] = groups
            groups += 1
        elif is_wait(node):
            group_of[node] = group_of[node.args[0]]
        elif group_of.keys() & set(node.all_input_nodes) and node.name.startswith("mm"):
            reads_first = any(group_of.get(each) == 0 for each in node.all_input_nodes)
            phase = "forward" if reads_first else phase
        with_info(node, phase=phase, gathered=group_of.get(node))
    given = step.copy()
    AGAIN.run(step)
    check_ranks(given, step, (X, *PARTS))
    run = run_ranks(step, [(X, *PARTS)] * 2, GROUPS)
    assert len(run.started[0]) == 3 + times * 2 + (times - 1) * 2


def test_what_nobody_reads_any_more_is_not_sent():
    """The second parameter of a group is read by the backward alone."""

    def program(x, a, b, c):
        u, o = wait(all_gather(a)), wait(all_gather(b))
        h1 = x @ u
        v = wait(all_gather(c))
        g = (h1 @ v).sin()
        return ((g @ v.t()) @ u.t()) @ o

    step = marked(trace(program, X, *PARTS))
    for node in step.graph.nodes:
        if info(node).gathered == 1:
            with_info(node, gathered=0)
    given = step.copy()
    AGAIN.run(step)
    assert all(node.users for node in step.graph.nodes if node.op == "call_function")
    assert calls(step).count("all_gather_into_tensor") == 2 + 2
    check_ranks(given, step, (X, *PARTS))
    assert AGAIN.run(step) == 0
