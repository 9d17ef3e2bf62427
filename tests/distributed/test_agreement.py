"""Ranks that would run different steps: an error on each of them, before any collective."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import say_over, stay_until_over, told
from treadle.runtime.ranks.peers import peers_of
from treadle.runtime.ranks.votes import VariantText
from treadle.util.errors import GroupFailure

CPU = torch.device("cpu")


def text(*lines):
    return VariantText(lines, tuple(f"train.py:{at}" for at in range(len(lines))))


ONE = text("x: f32[4, 8]", "mm: f32[4, 2] = mm(x, w)", "return [mm]")
OTHER = text("x: f32[4, 8]", "mm: f32[4, 3] = mm(x, w)", "return [mm]")


def call(variant, size=3):
    """A call of a step with one collective."""
    peers = peers_of(dist.group.WORLD, CPU)
    peers.begin(variant)
    x = torch.full((size,), float(dist.get_rank()))
    awaited = peers.started("all_reduce")
    peers.wait(dist.all_reduce(x, async_op=True), awaited)
    return x[0].item()


def error_of(action, *given):
    began = time.monotonic()
    try:
        action(*given)
    except GroupFailure as error:
        return error.code, str(error), time.monotonic() - began
    return None


def same(late):
    if dist.get_rank() == 0:
        time.sleep(late)  # one that compiles while the other finds it in its cache
    return [call(ONE) for _ in range(5)]


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_equal_steps_go_on(launch, store):
    for each in launch(4, same, 1.0, store=store):
        assert each.value == [6.0] * 5


def differs_at_first(odd):
    return error_of(call, OTHER if dist.get_rank() in odd else ONE)


@pytest.mark.parametrize(("world", "odd"), [(2, [1]), (2, [0]), (4, [2]), (4, [0, 3])])
def test_a_different_step_is_an_error_on_every_rank(launch, world, odd):
    ranks = launch(world, differs_at_first, odd)
    codes, texts, seconds = zip(*[each.value for each in ranks], strict=True)
    assert set(codes) == {"TR-502"}, told(ranks)
    assert len(set(texts)) == 1
    assert max(seconds) < 10
    common = 0 if world == 2 or 0 not in odd else 1
    (message,) = set(texts)
    assert "the first line that differs is number 2" in message
    if (world, odd) == (4, [2]):
        assert "rank 2 would run another step than ranks 0, 1, 3" in message
        assert "rank 0: mm: f32[4, 2] = mm(x, w)   at train.py:1" in message
        assert "rank 2: mm: f32[4, 3] = mm(x, w)   at train.py:1" in message
    elif (world, odd) == (4, [0, 3]):
        assert "ranks 1, 2 would run another step than ranks 0, 3" in message
    else:
        assert f"rank {1 - common} would run another step than rank {common}" in message


def switches_alone(rank):
    """One rank has another batch in the third call; the others run what they know."""
    found = [call(ONE), call(ONE)]
    return found, error_of(call, OTHER if dist.get_rank() == rank else ONE)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_switch_of_one_rank_is_an_error_on_every_rank(launch, rank, store):
    """The others already wait in a collective, which must not be paired with anything."""
    ranks = launch(4, switches_alone, rank, store=store)
    for each in ranks:
        found, error = each.value
        assert found == [6.0, 6.0]
        assert error is not None, told(ranks)
        code, message, seconds = error
        assert code == "TR-502"
        assert f"rank {rank} would run another step" in message
        assert seconds < 10


def both_known_then_mixed():
    found = [call(ONE), call(OTHER), call(ONE), call(OTHER)]
    return found, error_of(call, ONE if dist.get_rank() else OTHER)


def test_variants_that_all_ranks_know_do_not_mix(launch):
    for each in launch(2, both_known_then_mixed):
        found, error = each.value
        assert found == [1.0] * 4
        assert error is not None
        assert error[0] == "TR-502"


def compiled_again():
    """An equal step that one rank makes anew is no other step, also when only it asks."""
    call(ONE)
    if dist.get_rank() == 1:
        peers = peers_of(dist.group.WORLD, CPU)
        peers._agreed = VariantText((), ())  # as for a rank that has forgotten it
    return [call(ONE), call(ONE)]


def test_one_that_asks_alone_is_answered(launch):
    for each in launch(4, compiled_again):
        assert each.value == [6.0, 6.0]


def switches_often(times):
    began = time.monotonic()
    for at in range(times):
        call(OTHER if at % 2 else ONE)
    alternating = (time.monotonic() - began) / times
    began = time.monotonic()
    for _ in range(times):
        call(OTHER)
    return alternating, (time.monotonic() - began) / times, _keys()


def _keys():
    store = peers_of(dist.group.WORLD, CPU).store.keys
    dist.barrier()
    found = [
        key
        for at in range(200)
        for key in (f"vote/{at}/verdict", f"vote/{at}/given", f"vote/{at}/of/1")
        if store.check([key])
    ]
    dist.barrier()  # the store ends with rank 0
    return found


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_what_votes_leave_in_the_store_does_not_grow(launch, store):
    for each in launch(2, switches_often, 40, store=store):
        alternating, steady, keys = each.value
        print(store, f"{alternating * 1e6:.0f} us a switch, {steady * 1e6:.0f} us without")
        assert len(keys) == 3


def a_second_failure_is_the_first():
    first = error_of(call, OTHER if dist.get_rank() else ONE)
    return first, error_of(call, ONE)


def test_after_a_fault_the_group_does_not_go_on(launch):
    for each in launch(2, a_second_failure_is_the_first):
        first, second = each.value
        assert first[0] == "TR-502"
        assert second[0] == "TR-506"
        assert "would run another step" in second[1]


def subgroups():
    """Two groups of two: each agrees by itself."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    peers = peers_of(mine, CPU)
    odd = dist.get_rank() == 3
    found = error_of(peers.begin, OTHER if odd else ONE)
    return found, peers.store.ranks


def test_groups_agree_by_themselves(launch):
    values = [each.value for each in launch(4, subgroups)]
    assert [found for found, _ in values[:2]] == [None, None]
    assert [ranks for _, ranks in values] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    for found, _ in values[2:]:
        assert found[0] == "TR-502"
        assert "rank 3 would run another step than rank 2" in found[1]


def made_anew(place):
    call(ONE)
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{place}/again", rank=rank, world_size=2)
    return call(OTHER)


def test_a_group_that_is_made_anew_begins_anew(launch, tmp_path):
    for each in launch(2, made_anew, str(tmp_path)):
        assert each.value == 1.0


def one_never_comes():
    if dist.get_rank() == 2:
        stay_until_over(0, 1, 3, seconds=8)
        return None
    found = error_of(call, ONE)
    say_over()
    return found


def test_a_rank_that_never_votes_is_named_when_time_is_out(launch):
    values = [each.value for each in launch(4, one_never_comes, group_timeout=2)]
    for rank in (0, 1, 3):
        code, message, seconds = values[rank]
        assert code == "TR-504"
        assert "did not arrive: rank 2, which has not started a call" in message
        assert seconds < 8


def dies_before_it_votes():
    call(ONE)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(call, OTHER)


def test_a_rank_that_ends_while_others_vote_is_named_soon(launch):
    ranks = launch(4, dies_before_it_votes, check=False, patience=15)
    assert ranks[2].code == -signal.SIGKILL
    for rank in (0, 1, 3):
        code, message, seconds = ranks[rank].value or pytest.fail(told(ranks))
        assert code == "TR-503", message
        assert "rank 2 has ended" in message
        assert "call 2 could not begin" in message
        assert seconds < 10


def waits_for_a_stopped_rank():
    """A rank that exists and does nothing, as in a debugger, is not said to have ended."""
    call(ONE)
    numbers = [None, None]
    dist.all_gather_object(numbers, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = error_of(call, ONE)
    os.kill(numbers[1], signal.SIGKILL)
    return found


def test_a_rank_that_is_stopped_has_not_ended(launch):
    ranks = launch(
        2, waits_for_a_stopped_rank, check=False, timeout=12, patience=8, group_timeout=4
    )
    code, message, _ = ranks[0].value or pytest.fail(told(ranks))
    assert code == "TR-504"
    assert "did not arrive: rank 1, which is alive" in message


class _EndsLater:
    """A collective that is over after a while, though the store is gone."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds

    def wait(self, limit=None):
        time.sleep(max(0.0, min(limit.total_seconds(), self._end - time.monotonic())))
        if not self.is_completed():
            raise RuntimeError("not yet")
        return True

    def is_completed(self):
        return time.monotonic() >= self._end


def outlives_the_store(seconds):
    call(ONE)
    peers = peers_of(dist.group.WORLD, CPU)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    return error_of(peers.wait, _EndsLater(seconds), peers.started("the last"))


@pytest.mark.parametrize(("seconds", "code"), [(2.0, None), (60.0, "TR-503")])
def test_the_last_collective_may_end_after_the_process_with_the_store(launch, seconds, code):
    ranks = launch(2, outlives_the_store, seconds, check=False, store="tcp", patience=20)
    assert ranks[1].code == 0, told(ranks)
    found = ranks[1].value
    assert (found and found[0]) == code
    assert code is None or (found[2] < 10 and "rank 0" in found[1])
