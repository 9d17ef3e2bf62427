"""The helper that runs all ranks: what it computes, and what it finds wrong."""

import pytest
import torch

from passes.comm.lockstep import LockstepError, run_ranks
from testing import trace
from treadle.compat.distributed.collectives import collective_op

BOTH = {"0": [[0, 1]]}
wait = collective_op("wait_tensor")
all_reduce = collective_op("all_reduce")


def run(program, *inputs, groups=BOTH):
    return run_ranks(trace(program, *inputs[0]), inputs, groups)


def per_rank(*shape, count=2):
    return [(torch.randn(shape),) for _ in range(count)]


@pytest.mark.parametrize(
    ("reduction", "eager"),
    [
        ("sum", lambda x, y: x + y),
        ("avg", lambda x, y: (x + y) / 2),
        ("min", torch.minimum),
        ("max", torch.maximum),
        ("product", lambda x, y: x * y),
    ],
)
def test_reductions(reduction, eager):
    (x,), (y,) = given = per_rank(3)
    found = run(lambda x: wait(all_reduce(x, reduction, "0")), *given)
    for (result,) in found.outputs:
        torch.testing.assert_close(result, eager(x, y), rtol=0, atol=0)


def test_the_other_kinds():
    def program(x):
        scattered = wait(collective_op("reduce_scatter_tensor")(x, "sum", 2, "0"))
        gathered = wait(collective_op("all_gather_into_tensor")(x, 2, "0"))
        sent = wait(collective_op("broadcast")(x, 1, "0"))
        parts = wait(collective_op("all_to_all_single")(x, [2, 2], [2, 2], "0"))
        return scattered, gathered, sent, parts

    (x,), (y,) = given = per_rank(4, 3)
    first, second = run(program, *given).outputs
    wanted = (x + y)[:2], torch.cat([x, y]), y, torch.cat([x[:2], y[:2]])
    for new, old in zip(first, wanted, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    wanted = (x + y)[2:], torch.cat([x, y]), y, torch.cat([x[2:], y[2:]])
    for new, old in zip(second, wanted, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_several_at_once_and_groups_of_one_name():
    def program(x):
        both = collective_op("all_reduce_coalesced")([x, x * 2], "sum", "tp")
        return wait(both[0]), wait(both[1])

    given = per_rank(3, count=4)
    found = run(program, *given, groups={"tp": [[0, 1], [2, 3]]})
    for pair in ((0, 1), (2, 3)):
        total = given[pair[0]][0] + given[pair[1]][0]
        for rank in pair:
            torch.testing.assert_close(found.outputs[rank], [total, total * 2])


def test_what_was_started_is_told():
    found = run(lambda x: wait(all_reduce(x, "sum", "0")), *per_rank(3))
    assert found.started == [["all_reduce f32[3] on 0"]] * 2


def test_each_rank_draws_numbers_of_its_own():
    given = per_rank(3)
    first, second = run(lambda x: torch.rand_like(x), *given).outputs
    assert not torch.equal(first[0], second[0])
    again = run(lambda x: torch.rand_like(x), *given).outputs
    assert torch.equal(again[0][0], first[0])


def wrong(*programs, groups=BOTH):
    given = per_rank(4)
    with pytest.raises(LockstepError) as error:
        run_ranks([trace(each, *given[0]) for each in programs], given, groups)
    return str(error.value)


def test_what_does_not_fit():
    def plain(x):
        return wait(all_reduce(x, "sum", "0"))

    def other(x):
        return wait(all_reduce(x[:2], "sum", "0"))

    def silent(x):
        return x + 1

    def crossed(*names):
        def program(x):
            for name in names:
                x = wait(all_reduce(x, "sum", name))
            return x

        return program

    def unread(x):
        return all_reduce(x, "sum", "0") + 1

    def unwaited(x):
        all_reduce(x, "sum", "0")
        return x + 1

    words = "rank 0 starts all_reduce f32[4] on 0, rank 1 starts all_reduce f32[2] on 0"
    assert wrong(plain, other) == words
    assert wrong(plain, silent) == "nobody goes on: rank 0 waits for x"
    assert wrong(unwaited, silent) == "not all ranks start all_reduce f32[4] on 0"
    two = {"0": [[0, 1]], "1": [[0, 1]]}
    assert "nobody goes on" in wrong(crossed("0", "1"), crossed("1", "0"), groups=two)
    assert wrong(unread, unread) == "all_reduce is read before it is waited for"
    assert wrong(plain, plain, groups={"2": [[0, 1]]}) == "rank 0 is in no group called 0"
