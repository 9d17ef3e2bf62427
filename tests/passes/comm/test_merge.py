import pytest
import torch

from passes.comm.communicating import (
    all_gather,
    all_reduce,
    broadcast,
    check_comm,
    count,
    wait,
)
from testing import trace
from treadle.compat.distributed.collectives import collective_op
from treadle.graph.analysis.alias import analyse
from treadle.graph.core.collectives import collectives_in, is_wait
from treadle.graph.core.node_info import with_info
from treadle.passes.comm.bucketing.merge import MergeEqualCollectives

X = torch.randn(4, 3)
MERGE = MergeEqualCollectives()


def waits(step):
    return sum(map(is_wait, step.graph.nodes))


def test_equal_collectives_and_their_waits_are_one():
    def program(x):
        a, b = all_reduce(x), all_reduce(x)
        u, v, w = wait(a), wait(a), wait(b)
        return u.sin() + v.cos() + w.exp() + wait(u)

    check_comm(
        MERGE,
        program,
        (X,),
        after="""
            x: f32[4, 3]
            all_reduce: f32[4, 3] = all_reduce(x, sum, 0)
            wait_tensor: f32[4, 3] = wait_tensor(all_reduce)
            sin: f32[4, 3] = sin(wait_tensor)
            cos: f32[4, 3] = cos(wait_tensor)
            add: f32[4, 3] = add.Tensor(sin, cos)
            exp: f32[4, 3] = exp(wait_tensor)
            add.1: f32[4, 3] = add.Tensor(add, exp)
            add.2: f32[4, 3] = add.Tensor(add.1, wait_tensor)
            return [add.2]
        """,
    )


def test_those_of_what_was_merged_merge_in_the_same_run():
    def program(x):
        first = wait(all_reduce(wait(broadcast(x)), "max"))
        second = wait(all_reduce(wait(broadcast(x)), "max"))
        return first.view(-1).sin() + second.view(-1).cos()

    step = check_comm(MERGE, program, (X,))
    assert count(step) == waits(step) == 2


def test_where_ranks_send_parts_only_waits_are_merged():
    """A rank that holds nothing of two parameters sends two equal paddings, the others do not."""

    def program(x):
        first, second = all_gather(x), all_gather(x)
        return wait(first).sin() + wait(first).cos() + wait(second)

    step = check_comm(MERGE, program, (X,))
    assert count(step) == waits(step) == 2


def test_several_results_at_once():
    def program(x):
        both = collective_op("all_reduce_coalesced")
        y = x + 1
        (a, b), (c, d) = both([x, y], "sum", "0"), both([x, y], "sum", "0")
        return wait(a) + wait(b) * wait(c) - wait(d)

    step = check_comm(MERGE, program, (X,))
    assert count(step) == 1
    assert waits(step) == 2


OTHERS = {
    "input": lambda x: wait(all_reduce(x)) + wait(all_reduce(x * 2)),
    "kind": lambda x: wait(all_reduce(x)) + wait(broadcast(x)),
    "group": lambda x: wait(all_reduce(x)) + wait(all_reduce(x, group="1")),
    "reduction": lambda x: wait(all_reduce(x)) + wait(all_reduce(x, "max")),
    "root": lambda x: wait(broadcast(x, 0)) + wait(broadcast(x, 1)),
    "parts": lambda x: (
        wait(collective_op("all_to_all_single")(x, [2, 2], [2, 2], "0"))
        + wait(collective_op("all_to_all_single")(x, [1, 3], [3, 1], "0"))[:4]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_in_anything_stays(name):
    step = trace(OTHERS[name], X)
    assert MERGE.run(step) == 0
    assert count(step) == 2


@pytest.mark.parametrize("mark", [{"phase": "backward"}, {"region": 1}])
def test_what_is_communicated_again_in_another_phase_or_region_stays(mark):
    step = trace(lambda x: wait(all_gather(x)) + wait(all_gather(x)), X)
    with_info(collectives_in(step.graph)[1].node, **mark)
    assert MERGE.run(step) == 0


RETURNED = {
    "collectives": lambda x: (wait(all_reduce(x)), wait(all_reduce(x)).view(-1)),
    "waits": lambda x: (wait(r := all_reduce(x)), wait(r)),
    "waits for waits": lambda x: (w := wait(all_reduce(x)), wait(w)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_two_results_stay_two(name):
    step = trace(RETURNED[name], X)
    assert MERGE.run(step) == 0


def test_one_of_two_may_be_returned():
    step = check_comm(MERGE, lambda x: (wait(all_reduce(x)).sin(), wait(all_reduce(x))), (X,))
    assert count(step) == waits(step) == 1


def test_views_of_what_was_merged_share_its_memory():
    """Their values say so: an analysis of memory sees one buffer."""
    step = trace(lambda x: (wait(all_reduce(x)).t().sin(), wait(all_reduce(x)).t().cos()), X)
    MERGE.run(step)
    one, other = step.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)
    assert analyse(step).share(one, other)
