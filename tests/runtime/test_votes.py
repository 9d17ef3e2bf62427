"""What is said of steps that differ between ranks."""

import pytest
import torch.distributed as dist

from treadle.runtime.ranks.votes import VariantText, Votes, difference

FIRST = ("x: f32[4]", "neg: f32[4] = neg(x)", "return [neg]")


def text(*lines):
    return VariantText(lines, tuple(f"net.py:{at}" if at == 1 else "" for at in range(len(lines))))


def said(*steps):
    """``steps``: of each rank in order."""
    texts = [text(*lines) for lines in steps]
    digests = {rank: each.digest for rank, each in enumerate(texts)}
    return difference(digests, {each.digest: each for each in texts})


def test_the_step_of_most_ranks_is_the_usual_one():
    other = ("x: f32[4]", "abs: f32[4] = abs(x)", "return [abs]")
    error = said(other, FIRST, FIRST)
    assert error.code == "TR-502"
    assert error.where == "net.py:1"
    assert error.message == (
        "rank 0 would run another step than ranks 1, 2; the first line that differs is number 2:\n"
        "    rank 1: neg: f32[4] = neg(x)   at net.py:1\n"
        "    rank 0: abs: f32[4] = abs(x)   at net.py:1"
    )


def test_a_tie_is_for_the_lowest_rank():
    other = ("x: f32[5]", *FIRST[1:])
    assert said(other, FIRST).message.startswith("rank 1 would run another step than rank 0;")


def test_several_that_differ_are_all_named():
    short, wide = FIRST[:2], ("x: f32[8]", *FIRST[1:])
    message = said(FIRST, short, wide, FIRST).message
    assert (
        "rank 1 would run another step than ranks 0, 3; the first line that differs is number 3"
        in message
    )
    assert "rank 1: nothing: its step ends before this line" in message
    assert (
        "rank 2 would run another step than ranks 0, 3; the first line that differs is number 1"
        in message
    )


def test_text_comes_back():
    given = text(*FIRST)
    assert VariantText.parse(given.text()) == given


def test_lines_of_users_are_no_part_of_the_digest():
    assert VariantText(FIRST, ("a", "b", "c")).digest == VariantText(FIRST, ("", "", "")).digest


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
def test_the_last_voter_decides_and_forgets_the_vote_before():
    store = dist.HashStore()
    one, other = text(*FIRST), text("x: f32[1]")
    for call, second, verdict in ((1, one, True), (4, other, False)):
        votes = [Votes(store, call, (0, 5)) for _ in range(2)]
        previous = (1, one.digest) if call > 1 else None
        votes[0].give(0, one, previous)
        assert not votes[0].is_decided()
        assert votes[0].missing() == [5]
        votes[1].give(5, second, previous)
        assert votes[0].is_decided()
        assert votes[0].is_same() is verdict
    assert not store.check(["vote/1/verdict"])
    assert not store.check(["vote/1/of/5"])
