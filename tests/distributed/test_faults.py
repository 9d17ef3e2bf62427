"""Ranks that fail in real processes: the others end soon, say which rank and why, and leave
parameters and optimizer state as they were before the call."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import treadle
from distributed.ranks import say_over, stay_until_over, told
from treadle.util.errors import GroupFailure

EACH = {"TREADLE_BUCKETS": "0"}
"""Every collective by itself, so that a rank can end between two of a step: whoever has sent all of
its own lets the others finish."""


def trained(bad=None):
    """A model, its optimizer and a compiled step; ``bad``: what the batch is given to first."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(x):
        loss = net(x if bad is None else bad(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        step, model=net, optimizer=optimizer, parallel=treadle.DataParallel()
    )
    return net, optimizer, compiled


def batches(count, size=4):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randn(size, 6, generator=generator) for _ in range(count)]


def state(net, optimizer):
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def is_same(one, other):
    leaves = [torch.utils._pytree.tree_leaves(each) for each in (one, other)]
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(*leaves, strict=True)
    )


def failing(step, net, optimizer, *batch):
    """Code, text and seconds of the error of a call, and whether it left everything alone."""
    before = state(net, optimizer)
    began = time.monotonic()
    try:
        step(*batch)
    except GroupFailure as error:
        seconds = time.monotonic() - began
        return error.code, str(error), seconds, is_same(before, state(net, optimizer))
    return None


def failing_and_over(*given):
    """``failing``; a rank that stays until it has happened may go."""
    found = failing(*given)
    say_over()
    return found


def agrees(count):
    net, optimizer, step = trained()
    for x in batches(count):
        step(x)
    return state(net, optimizer)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_do_not_fail_have_the_same(launch, world):
    values = [each.value for each in launch(world, agrees, 3)]
    assert all(is_same(values[0], each) for each in values[1:])


def killed(dies, calls, store):
    """Rank ``dies`` gets SIGKILL in the forward of its call number ``calls``: between capture and
    the end of the step, in which the others wait for its gradients."""
    net, optimizer, step = trained()
    for x in batches(calls - 1):
        step(x)
    (x,) = batches(1)
    if dist.get_rank() == dies:
        _die_in_the_step(step)
    found = failing(step, net, optimizer, x)
    second = failing(step, net, optimizer, x)
    return found, second


def _die_in_the_step(step):
    """The process ends where the step starts its first collective."""
    from treadle.runtime.ranks import collectives

    def end(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    collectives.IN_FLIGHT.add = end


@pytest.mark.parametrize(
    ("calls", "world", "dies", "store"),
    [
        (1, 2, 1, "file"),
        (3, 2, 0, "file"),
        (1, 4, 2, "file"),
        (3, 4, 2, "tcp"),
        (3, 2, 1, "tcp"),
        (1, 4, 0, "tcp"),
    ],
)
def test_a_killed_rank_is_named_and_nothing_is_half_done(launch, world, dies, store, calls):
    # Nobody destroys the group: Gloo then waits for what is in flight between those that are left.
    ranks = launch(
        world, killed, dies, calls, store,
        store=store, check=False, patience=25, closes=False, environment=EACH,
    )  # fmt: skip
    assert ranks[dies].code == -signal.SIGKILL, told(ranks)
    for each in ranks:
        if each.rank == dies:
            continue
        assert each.code == 0, told(ranks)
        (code, text, seconds, unchanged), second = each.value
        assert code == "TR-503", told(ranks)
        assert f"rank {dies}" in text
        assert "has ended" in text
        assert seconds < 15
        assert unchanged
        assert second[0] == "TR-506"
        assert second[3]


def ends_by_itself():
    """As a script does: nothing catches the error, the interpreter ends."""
    _, _, step = trained()
    for x in batches(2):
        step(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(batches(1)[0])


def test_the_others_exit_by_themselves(launch):
    ranks = launch(4, ends_by_itself, check=False, patience=29, closes=True)
    assert ranks[1].code == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert ranks[rank].code == 1, told(ranks)
        assert "[TR-503] rank 1 has ended" in ranks[rank].output


def saved_and_killed(place, dies_at, count):
    """Trains from the last checkpoint in ``place``; with ``dies_at``, rank 1 is killed in that
    call, as if the machine was taken away."""
    net, optimizer, step = trained()
    path = f"{place}/checkpoint"
    first = 0
    if os.path.exists(path):
        held = torch.load(path)
        net.load_state_dict(held["net"])
        optimizer.load_state_dict(held["optimizer"])
        first = held["calls"]
    for at, x in enumerate(batches(count)):
        if at < first:
            continue
        if at == dies_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(x)
        if dist.get_rank() == 0 and at % 2:
            held = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "calls": at + 1}
            torch.save(held, path + ".new")
            os.replace(path + ".new", path)
    return state(net, optimizer)


def test_training_goes_on_bitwise_from_the_last_checkpoint(launch, tmp_path):
    (tmp_path / "whole").mkdir()
    whole = launch(2, saved_and_killed, str(tmp_path / "whole"), None, 6, environment=EACH)[0].value
    place = str(tmp_path)
    cut = launch(2, saved_and_killed, place, 3, 6, check=False, patience=25, environment=EACH)
    assert [each.code for each in cut] == [1, -signal.SIGKILL], told(cut)
    assert "[TR-503] rank 1 has ended" in cut[0].output
    assert torch.load(tmp_path / "checkpoint")["calls"] == 2
    for each in launch(2, saved_and_killed, place, None, 6, environment=EACH):
        assert is_same(each.value, whole)


def raises_outside():
    """The script of one rank ends by an error of its own between two calls."""
    net, optimizer, step = trained()
    for x in batches(2):
        step(x)
    if dist.get_rank() == 2:
        raise ValueError("no more files")
    return failing(step, net, optimizer, batches(1)[0])


def test_an_error_in_the_script_of_one_rank_is_told_to_the_others(launch):
    ranks = launch(4, raises_outside, check=False, patience=25)
    for rank in (0, 1, 3):
        code, text, seconds, unchanged = ranks[rank].value
        assert code == "TR-503", told(ranks)
        assert "rank 2" in text
        assert seconds < 15
        assert unchanged


def not_finite(x):
    """The batch, which has to be finite: a check of the user's inside of the step."""
    assert torch.isfinite(x).all(), "not finite"
    return x


def raises_inside():
    net, optimizer, step = trained(bad=not_finite)
    for x in batches(2):
        step(x)
    (x,) = batches(1)
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
        before = state(net, optimizer)
        with pytest.raises(AssertionError, match="not finite"):
            step(x)
        # Its process goes on: nothing but what it said ends the others.
        stay_until_over(0, seconds=6)
        return None, is_same(before, state(net, optimizer))
    return failing_and_over(step, net, optimizer, x)


def test_an_error_in_the_middle_of_the_step_of_one_rank_is_told_to_the_others(launch):
    ranks = launch(2, raises_inside, check=False, patience=25)
    code, text, seconds, unchanged = ranks[0].value or pytest.fail(told(ranks))
    assert code == "TR-505", told(ranks)
    assert "rank 1 failed in call 4: AssertionError: not finite" in text
    assert seconds < 3
    assert unchanged
    assert ranks[1].value == (None, True)


def raises_at_an_index(asserted):
    """An index that is out of range is found before a call begins among the ranks."""
    torch.manual_seed(0)
    net = nn.Embedding(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        if asserted:
            assert (x < 8).all(), "no such word"
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = treadle.compile(step, model=net, optimizer=optimizer, parallel=treadle.DataParallel())
    x = torch.arange(8)
    for _ in range(2):
        step(x)
    if dist.get_rank() == 1:
        kind, text = (AssertionError, "no such word") if asserted else (IndexError, "TR-407")
        with pytest.raises(kind, match=text):
            step(x + 1)
        stay_until_over(0, seconds=6)
        return None
    return failing_and_over(step, net, optimizer, x)


@pytest.mark.parametrize(
    ("asserted", "told_of"),
    [(True, "AssertionError: no such word"), (False, "an index in argument x is out of range")],
)
def test_an_error_before_the_first_collective_is_one_of_the_call_that_it_ends(
    launch, asserted, told_of
):
    ranks = launch(2, raises_at_an_index, asserted, check=False, patience=25)
    code, text, seconds, unchanged = ranks[0].value or pytest.fail(told(ranks))
    assert code == "TR-505", told(ranks)
    assert "rank 1 failed in call 4: " in text
    assert told_of in text
    assert seconds < 3
    assert unchanged


def comes_late(seconds):
    net, optimizer, step = trained()
    for x in batches(2):
        step(x)
    if dist.get_rank() == 2:
        stay_until_over(0, 1, 3, seconds=seconds)
        return None
    return failing_and_over(step, net, optimizer, batches(1)[0])


def test_a_rank_that_does_not_come_is_named_when_the_time_is_out(launch):
    ranks = launch(4, comes_late, 9.0, check=False, patience=15, group_timeout=3)
    for rank in (0, 1, 3):
        code, text, seconds, unchanged = ranks[rank].value or pytest.fail(told(ranks))
        assert code == "TR-504", told(ranks)
        assert "all_reduce of" in text
        assert "of call 4 did not finish within 3 s; did not arrive: rank 2, which is alive" in text
        assert "test_faults.py" in text
        assert seconds < 9
        assert unchanged


def other_sizes(at_first):
    net, optimizer, step = trained()
    if not at_first:
        for x in batches(2):
            step(x)
    odd = dist.get_rank() == 1
    return failing(step, net, optimizer, batches(1, size=5 if odd else 4)[0])


@pytest.mark.parametrize("at_first", [True, False])
def test_a_batch_of_another_size_on_one_rank_is_an_error_on_all(launch, at_first):
    ranks = launch(4, other_sizes, at_first)
    for each in ranks:
        code, text, seconds, unchanged = each.value or pytest.fail(told(ranks))
        assert code == "TR-502", told(ranks)
        assert "rank 1 would run another step than ranks 0, 2, 3" in text
        assert "f32[4, 6]  # batch argument x" in text
        assert "f32[5, 6]  # batch argument x" in text
        assert seconds < 20
        assert unchanged


def other_branch():
    """A branch on the rank inside the step."""
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        y = net(x)
        loss = (y.square() if dist.get_rank() else y.abs()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        step, model=net, optimizer=optimizer, parallel=treadle.DataParallel()
    )
    return failing(compiled, net, optimizer, batches(1)[0])


def test_the_first_node_that_differs_is_named_with_its_line(launch):
    for each in launch(2, other_branch):
        code, text, _, unchanged = each.value
        assert code == "TR-502"
        assert "abs" in text
        assert "loss = (y.square() if dist.get_rank() else y.abs()).mean()" in text
        assert unchanged


def from_a_cache(place):
    """Only one rank finds the step in its cache, and both have another batch than before."""
    os.environ["TREADLE_CACHE_DIR"] = f"{place}/{dist.get_rank()}"
    _, _, step = trained()
    step(batches(1)[0])
    return step.compiled.from_cache


def test_ranks_agree_when_some_hit_a_cache(launch, tmp_path):
    first = [each.value for each in launch(2, from_a_cache, str(tmp_path))]
    assert first == [False, False]
    for path in sorted((tmp_path / "1").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert [each.value for each in launch(2, from_a_cache, str(tmp_path))] == [True, False]


def other_models():
    torch.manual_seed(0)
    net = nn.Linear(6, 3 + dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        net(x).sum().backward()
        optimizer.step()

    compiled = treadle.compile(
        step, model=net, optimizer=optimizer, parallel=treadle.DataParallel()
    )
    return failing(compiled, net, optimizer, batches(1)[0])


def test_models_of_other_sizes_are_an_error_before_anything_is_sent(launch):
    for each in launch(2, other_models):
        code, text, _, unchanged = each.value
        assert code == "TR-502"
        assert "rank 0: weight: f32[3, 6]" in text
        assert "rank 1: weight: f32[4, 6]" in text
        assert unchanged


def writes_early(size):
    """At which waits something was written that the step should not have touched yet."""
    from treadle.runtime.ranks import collectives

    sizes = [(size, size + 20), (size + 20, size + 40), (size + 40, size)]
    net = nn.Sequential(*[nn.Linear(*each) for each in sizes])
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        step, model=net, optimizer=optimizer, parallel=treadle.DataParallel()
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(4, size, generator=generator)
    compiled(x)
    wait, found = collectives.IN_FLIGHT.wait, []

    def looked(out):
        waited = wait(out)
        found.append(is_same(before, _values(net, optimizer)))
        return waited

    before = _values(net, optimizer)
    collectives.IN_FLIGHT.wait = looked
    compiled(x)
    return found, is_same(before, _values(net, optimizer))


def _values(net, optimizer):
    held = [*net.parameters(), *[v for s in optimizer.state.values() for v in s.values()]]
    return [each.detach().clone() for each in held]


@pytest.mark.parametrize("size", [4, 320])  # the second is large enough to be updated early
def test_nothing_is_written_before_the_last_wait(launch, size):
    for each in launch(2, writes_early, size, environment=EACH):
        at_waits, at_end = each.value
        assert at_waits == [True] * 6
        assert not at_end


def sizes_that_differ(calls):
    """Batches of other sizes on each rank, and in each call, of a step that declares them."""
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        step, model=net, optimizer=optimizer, parallel=treadle.DataParallel(),
        shapes=treadle.dynamic({"x": {0: "batch"}}, batch=(2, 64)),
    )  # fmt: skip
    for at in range(calls):
        (x,) = batches(1, size=4 + 3 * dist.get_rank() + 5 * at)
        compiled(x)
    return state(net, optimizer), compiled.recompiles


def test_sizes_that_are_declared_may_differ(launch):
    (one, why), (other, _) = [each.value for each in launch(2, sizes_that_differ, 3)]
    assert is_same(one, other)
    assert len(why) == 1
