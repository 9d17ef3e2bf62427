"""Which calls a fault of another rank ends: the one it was found in, and none before it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from treadle.runtime.ranks import group_store
from treadle.runtime.ranks import peers as module
from treadle.runtime.ranks.peers import Peers
from treadle.runtime.ranks.votes import VariantText, Votes
from treadle.util.errors import GroupFailure

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")

CPU = torch.device("cpu")
SILENT = VariantText((), ())  # what all have agreed on from the start
ONE = VariantText(("return []",), ("",))
SHORT = 0.2  # seconds for a grace that is waited for


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def ranks(group):
    """Two ranks, each as it sees the other, in this process and with one store."""
    found = Peers(group, CPU), Peers(group, CPU)
    for rank, each in enumerate(found):
        each.store.rank, each.store.ranks = rank, (0, 1)
    return found


def set_grace(monkeypatch, seconds):
    for each in (module, group_store):
        monkeypatch.setattr(each, "GRACE", seconds)


class Work:
    """A collective that has not ended the first ``count`` times it is asked; ``then``: the error
    by which it ends."""

    def __init__(self, count, then=None):
        self.asked = 0
        self._count = count
        self._then = then

    def wait(self, limit=None):
        self.asked += 1
        if not self.is_completed():
            time.sleep(limit.total_seconds())
            raise RuntimeError("not yet")
        if self._then is not None:
            raise self._then
        return True

    def is_completed(self):
        return self.asked > self._count


NEVER = 10**9


class GoneStore:
    """A store that answers ``count`` more times."""

    def __init__(self, store, count):
        self._store = store
        self._left = count

    def check(self, keys):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("connection closed")
        return self._store.check(keys)

    def get(self, key):
        return self._store.get(key)

    def add(self, key, count):
        self.check([key])
        return self._store.add(key, count)


def in_call(peers, number):
    """Begin calls up to this one, none of which asks anybody."""
    while peers.call < number:
        peers.begin(SILENT)


def fails_in(peers, number):
    in_call(peers, number)
    peers.raised(AssertionError("not finite"))


def error_of(action, *given):
    """Code, text and seconds."""
    began = time.monotonic()
    with pytest.raises(GroupFailure) as caught:
        action(*given)
    return caught.value.code, caught.value.message, time.monotonic() - began


FAILED = "rank 1 failed in call {}: AssertionError: not finite"


def waits_until_the_fault_of(call, peers):
    """The seconds that a collective takes which does not end by itself."""
    code, message, seconds = error_of(peers.wait, Work(NEVER), peers.started("all_reduce"))
    assert (code, message) == ("TR-505", FAILED.format(call))
    return seconds


def test_a_fault_of_a_later_call_does_not_end_a_wait_that_ends(ranks):
    one, other = ranks
    in_call(one, 3)
    awaited = one.started("all_reduce")
    fails_in(other, 4)
    work = Work(4)
    one.wait(work, awaited)
    assert work.asked == 5
    in_call(one, 4)
    seconds = waits_until_the_fault_of(4, one)
    assert seconds < 1


def test_a_fault_of_a_later_call_ends_a_wait_that_does_not_end(ranks, monkeypatch):
    set_grace(monkeypatch, SHORT)
    one, other = ranks
    in_call(one, 3)
    fails_in(other, 4)
    seconds = waits_until_the_fault_of(4, one)
    assert SHORT < seconds < SHORT + 2


def heard(peers):
    return peers.store.keys.add("heard", 0)


def test_each_rank_says_once_that_it_knows_of_a_fault(ranks):
    one, other = ranks
    in_call(one, 4)
    fails_in(other, 4)
    assert heard(one) == 1
    error_of(one.wait, Work(NEVER), one.started("all_reduce"))
    assert heard(one) == 2
    for each in ranks:
        each.raised(RuntimeError("something else"))
        assert error_of(each.begin, SILENT)[0] == "TR-506"
    assert heard(one) == 2


def test_who_holds_the_store_stays_until_the_others_know(ranks, monkeypatch):
    """However it heard itself: without its store another rank would only know that it is gone."""
    set_grace(monkeypatch, 5 * SHORT)
    one, other = ranks
    third = Peers(dist.group.WORLD, CPU)
    third.store.rank = 2
    for each in (*ranks, third):
        each.store.ranks = (0, 1, 2)
        in_call(each, 4)
    one.store.is_held_here = True
    other.raised(AssertionError("not finite"))

    def hears_later():
        time.sleep(SHORT)
        third.wait(Work(NEVER), third.started("all_reduce"))

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(hears_later)
        code, _, seconds = error_of(one.wait, Work(NEVER), one.started("all_reduce"))
        assert isinstance(pending.exception(), GroupFailure)
    assert code == "TR-505"
    assert SHORT / 2 < seconds < 4 * SHORT


def test_each_wait_has_the_grace_anew(ranks, monkeypatch):
    set_grace(monkeypatch, SHORT)
    one, other = ranks
    in_call(one, 3)
    fails_in(other, 4)
    one.wait(Work(2), one.started("all_reduce"))
    time.sleep(SHORT + 0.05)  # in which this rank computes
    one.wait(Work(2), one.started("all_reduce"))


@pytest.mark.parametrize("failed", [2, 3])
def test_a_fault_of_no_later_call_ends_a_wait_at_once(ranks, failed):
    one, other = ranks
    in_call(one, 3)
    fails_in(other, failed)
    work = Work(NEVER)
    code, message, _ = error_of(one.wait, work, one.started("all_reduce"))
    assert (code, message) == ("TR-505", FAILED.format(failed))
    assert work.asked == 1


def test_a_collective_of_the_call_before_is_waited_for_by_this_one(ranks):
    one, other = ranks
    in_call(one, 3)
    carried = one.started("all_reduce")
    in_call(one, 4)
    fails_in(other, 4)
    work = Work(NEVER)
    assert error_of(one.wait, work, carried)[:2] == ("TR-505", FAILED.format(4))
    assert work.asked == 1


def test_a_connection_that_is_lost_is_explained_by_a_fault_of_a_later_call(ranks):
    one, other = ranks
    in_call(one, 3)
    fails_in(other, 4)
    work = Work(2, then=RuntimeError("connection closed"))
    code, message, seconds = error_of(one.wait, work, one.started("all_reduce"))
    assert (code, message) == ("TR-505", FAILED.format(4))
    assert seconds < 1


def test_a_fault_that_was_seen_outlives_the_store(ranks):
    """The rank that found it held the store, and has ended since."""
    one, other = ranks
    in_call(one, 3)
    fails_in(other, 4)
    one.wait(Work(2), one.started("all_reduce"))
    in_call(one, 4)
    one.store.keys = GoneStore(one.store.keys, 0)
    seconds = waits_until_the_fault_of(4, one)
    assert seconds < 1


def test_a_store_that_goes_in_the_grace_does_not_hide_the_fault(ranks, monkeypatch):
    set_grace(monkeypatch, SHORT)
    one, other = ranks
    in_call(one, 3)
    fails_in(other, 4)
    one.store.keys = GoneStore(one.store.keys, 2)
    seconds = waits_until_the_fault_of(4, one)
    assert SHORT < seconds < 2 * SHORT + 2


def test_a_death_is_a_fault_of_the_call_in_which_it_was_found(ranks, monkeypatch):
    """The rank that found it waited in call 4 for a collective of call 3, of which it has done
    its part: another one is still in call 3."""
    one, other = ranks
    in_call(other, 3)
    carried = other.started("all_reduce")
    in_call(other, 4)
    monkeypatch.setattr(other.store, "ended", lambda ranks: {5: "rank 5 has ended"})
    monkeypatch.setattr(module, "_SEEN_WAITING", 0.0)
    assert error_of(other.wait, Work(NEVER), carried)[0] == "TR-503"
    monkeypatch.undo()
    in_call(one, 3)
    one.wait(Work(4), one.started("all_reduce"))
    in_call(one, 4)
    code, message, _ = error_of(one.wait, Work(NEVER), one.started("all_reduce"))
    assert code == "TR-503"
    assert message == "rank 5 has ended: all_reduce, collective 1 of call 3 cannot end"


@pytest.mark.parametrize(("ended", "call"), [(False, 3), (True, 4)])
def test_an_error_between_two_calls_is_one_of_the_next(ranks, ended, call):
    one, other = ranks
    for each in ranks:
        in_call(each, 3)
    if ended:
        other.end()
    other.raised(AssertionError("not finite"))
    if ended:
        one.wait(Work(4), one.started("all_reduce"))
        in_call(one, 4)
    assert error_of(one.wait, Work(NEVER), one.started("all_reduce"))[1] == FAILED.format(call)


def test_an_error_before_any_call_is_one_of_the_first(ranks):
    one, other = ranks
    other.raised(AssertionError("not finite"))
    in_call(one, 1)
    assert error_of(one.wait, Work(NEVER), one.started("all_reduce"))[1] == FAILED.format(1)


# Votes: of call 3, in which the other rank has voted and failed in ``failed``.


def votes_in_3(ranks, monkeypatch, failed, decided_after):
    """What the vote of this rank comes to. Between its looks at the verdict and at faults the
    other rank votes, and fails; it sees the verdict after ``decided_after`` more looks."""
    one, other = ranks
    in_call(one, 2)
    is_decided, asked = Votes.is_decided, []

    def later(votes):
        asked.append(votes)
        if len(asked) == 1:
            Votes(other.store.keys, 3, (0, 1)).give(1, ONE, None)
            fails_in(other, failed)
        return len(asked) > decided_after and is_decided(votes)

    monkeypatch.setattr(Votes, "is_decided", later)
    one.begin(ONE)
    return len(asked)


def test_a_fault_of_a_later_call_does_not_end_a_vote_that_ends(ranks, monkeypatch):
    assert votes_in_3(ranks, monkeypatch, failed=4, decided_after=4) == 5
    one, _ = ranks
    in_call(one, 3)
    one.wait(Work(2), one.started("all_reduce"))
    one.begin(ONE)
    assert error_of(one.wait, Work(NEVER), one.started("all_reduce"))[1] == FAILED.format(4)


def test_a_fault_of_a_later_call_ends_a_vote_that_does_not_end(ranks, monkeypatch):
    set_grace(monkeypatch, SHORT)
    code, message, seconds = error_of(votes_in_3, ranks, monkeypatch, 4, NEVER)
    assert (code, message) == ("TR-505", FAILED.format(4))
    assert SHORT < seconds < SHORT + 2


@pytest.mark.parametrize("failed", [2, 3])
def test_a_fault_of_no_later_call_ends_a_vote_at_once(ranks, monkeypatch, failed):
    code, message, seconds = error_of(votes_in_3, ranks, monkeypatch, failed, NEVER)
    assert (code, message) == ("TR-505", FAILED.format(failed))
    assert seconds < 1


def test_a_vote_that_a_wait_answers_is_of_the_call_that_asked(ranks, monkeypatch):
    """A rank that waits in call 4 and answers a vote of call 3 hears of a fault of call 4: the
    vote goes on, and the wait ends."""
    one, other = ranks
    in_call(one, 4)
    one.store.keys.set("asked", "3")
    Votes(other.store.keys, 3, (0, 1)).give(1, SILENT, None)
    is_decided, asked = Votes.is_decided, []

    def later(votes):
        asked.append(votes)
        if len(asked) == 1:
            fails_in(other, 4)
        return len(asked) > 3 and is_decided(votes)

    monkeypatch.setattr(Votes, "is_decided", later)
    assert error_of(one.wait, Work(NEVER), one.started("all_reduce"))[1] == FAILED.format(4)
    assert len(asked) == 4


def test_a_vote_that_cannot_be_decided_is_a_fault_of_its_call(ranks, monkeypatch):
    """Found by a rank that has begun a later call: the others in that vote do not wait longer."""
    one, other = ranks
    in_call(other, 4)
    other.store.keys.set("asked", "3")
    monkeypatch.setattr(other.store, "ended", lambda ranks: {0: "rank 0 has ended"})
    monkeypatch.setattr(module, "_SEEN_WAITING", 0.0)
    code, message, _ = error_of(other.wait, Work(NEVER), other.started("all_reduce"))
    assert (code, message) == ("TR-503", "rank 0 has ended: call 3 could not begin")
    monkeypatch.setattr(Votes, "is_decided", lambda votes: False)
    in_call(one, 2)
    one.wait(Work(2), one.started("all_reduce"))
    _, same, seconds = error_of(one.begin, ONE)
    assert same == message
    assert seconds < 1
