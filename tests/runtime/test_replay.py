"""Replays of recorded launches, with a recorder that runs them again instead of a GPU."""

import pytest
import torch
from torch import Tensor

import treadle.graph.custom_ops.table  # noqa: F401  (the runtime has it imported for such calls)
from runtime.recorders import Again
from treadle.graph.custom_ops.incoming import INCOMING_GRADIENT
from treadle.guards.watching import watch_inputs
from treadle.runtime.execute.executable import Executable
from treadle.runtime.execute.joint_calls import JointCalls
from treadle.runtime.kernels.build import Build
from treadle.runtime.replay.recording_plan import why_not
from treadle.runtime.replay.replay_policy import ReplayPolicy
from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep, Storage, View

PLAIN = Build.without_compiler()


def spec(name: str, place: Storage, shape=(4,), dtype=torch.float32, offset=0, device=""):
    return BufferSpec(name, dtype, shape, (1,) * len(shape), place, offset, device=device)


def whole(s: BufferSpec) -> View:
    return View(s.name, s.dtype, s.shape, s.strides)


X, W = spec("x", Storage.INPUT), spec("w", Storage.INPUT)
Y, Z = spec("y", Storage.CALL), spec("z", Storage.ARENA)


def step() -> Artifact:
    """``w += x`` in place;  returns ``x + w`` from a call, and ``x * w`` from the arena."""
    steps = (
        CallStep("aten.add.Tensor", (whole(X), whole(W)), {}, ("y",)),
        CallStep("aten.mul.Tensor", (whole(X), whole(W)), {}, ("z",), out="aten.mul.out"),
        CallStep("aten.add.Tensor", (whole(W), whole(X)), {}, ("w",), out="aten.add.out"),
    )
    buffers = {each.name: each for each in (X, W, Y, Z)}
    results = (whole(Y), whole(Z))
    return Artifact("cpu", (), buffers, steps, (), ("x", "w"), results, 64, 64)


def made(
    recorder: Again, *, written=frozenset({1}), room=1 << 20, watch=None, **options
) -> Executable:
    policy = ReplayPolicy(frozenset({0}), written, room, lambda: None, watch)
    return Executable(step(), PLAIN, policy=policy, recorder=recorder, **options)


WATCHED = pytest.mark.parametrize("watch", [None, watch_inputs], ids=["asked", "watched"])


@WATCHED
def test_later_calls_are_replayed_with_moving_batches_and_fresh_results(watch):
    recorder, w = Again(), torch.randn(4)
    recorder.state = (w,)
    executable = made(recorder, watch=watch)
    results = []
    for number in range(8):
        x, before = torch.randn(4), w.clone()
        found = executable.run([x, w])
        for mine, right in zip((*found, w), (x + before, x * before, before + x), strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=0)
        assert executable.replay is not None
        assert executable.replay.is_recorded == (number >= 3)
        results.append((found, [each.clone() for each in found]))
    assert (recorder.recordings, recorder.replays) == (1, 4)
    for found, kept in results:  # no later call changed them
        assert all(torch.equal(mine, old) for mine, old in zip(found, kept, strict=True))
    assert executable.replay.note.endswith("replayed as one CUDA graph")


@WATCHED
@pytest.mark.parametrize("by", ["another tensor", "its data"])
def test_a_parameter_that_moved_is_launched_as_usual_and_recorded_again(watch, by):
    recorder, w = Again(), torch.randn(4)
    executable = made(recorder, watch=watch)
    for number in range(10):
        if number == 6 and by == "its data":
            kept = w.data  # so that its memory is not given to the new one
            w.data = w.clone()
            assert w.data_ptr() != kept.data_ptr()
        elif number == 6:
            w = w.clone()
        recorder.state = (w,)
        x, before = torch.randn(4), w.clone()
        found = executable.run([x, w])
        assert torch.equal(found[0], x + before)
        assert torch.equal(w, before + x)
    assert recorder.recordings == 2
    assert recorder.replays == 2 + 2


@WATCHED
def test_what_moves_on_and_on_is_not_recorded_for_ever(watch):
    recorder = Again()
    executable = made(recorder, watch=watch)
    kept = []
    for _ in range(30):
        w = torch.randn(4)
        kept.append(w)  # so that no address comes again
        recorder.state = (w,)
        x, before = torch.randn(4), w.clone()
        assert torch.equal(executable.run([x, w])[0], x + before)
    assert recorder.recordings <= 4
    assert executable.replay is not None
    assert "move from call to call" in executable.replay.note


def test_what_comes_first_is_recorded_with_the_rest():
    recorder, w = Again(), torch.randn(4)
    recorder.state = (w,)
    seen: list[tuple[int, Tensor]] = []

    def first(inputs):
        seen.append((inputs[0].data_ptr(), inputs[0].clone()))
        assert torch.equal(inputs[1], w)

    executable = made(recorder, first=first)
    given = []
    for number in range(8):
        given.append(torch.randn(4))
        executable.run([given[-1], w])
        if number == 3:  # runs, and is recorded
            assert torch.equal(seen.pop()[1], given[-1])
    assert [torch.equal(x, each) for x, (_, each) in zip(given, seen, strict=True)] == [True] * 8
    places = {place for place, _ in seen[3:]}
    assert len(places) == 1, "replays look at the place that the batch is copied to"


@pytest.mark.parametrize(
    ("recorder", "options", "why"),
    [
        (Again(share=0.1), {}, "launching took 100.00 of 1000.00 ms"),
        (Again(failing=True), {}, "operation not permitted"),
        (Again(), {"room": 3}, "do not fit beside the plan"),
        (Again(), {"written": frozenset({0, 1})}, "an argument is written to"),
    ],
)
def test_says_why_a_step_is_launched_as_usual(recorder, options, why):
    w = torch.randn(4)
    executable = made(recorder, **options)
    for _ in range(6):
        x, before = torch.randn(4), w.clone()
        assert torch.equal(executable.run([x, w])[0], x + before)
    assert executable.replay is not None
    assert not executable.replay.is_recorded
    assert executable.replay.note.startswith("not recorded: ")
    assert why in executable.replay.note
    assert "\n" not in executable.replay.note


@pytest.mark.parametrize(
    ("shares", "recorded_at"), [((0.9,), 4), ((0.1, 0.9), 6), ((0.1, 0.1, 0.9), 10)]
)
def test_one_slow_call_does_not_decide_against_a_recording(shares, recorded_at):
    """Another process that uses the GPU makes one call slow, and launching a small part of it."""
    recorder, w = Again(shares), torch.randn(4)
    recorder.state = (w,)
    executable = made(recorder)
    for number in range(1, 14):
        executable.run([torch.randn(4), w])
        assert executable.replay is not None
        assert executable.replay.is_recorded == (number >= recorded_at)


def test_three_calls_decide_against_a_recording():
    recorder, w = Again((0.1, 0.1, 0.1, 0.9)), torch.randn(4)
    executable = made(recorder)
    for _ in range(20):
        executable.run([torch.randn(4), w])
    assert recorder.shares == [0.9], "no other call is timed"
    assert recorder.recordings == 0


def test_a_profiled_call_is_launched_step_by_step():
    recorder, w = Again(), torch.randn(4)
    recorder.state = (w,)
    executable = made(recorder)
    for _ in range(5):
        executable.run([torch.randn(4), w])
    seconds = [0.0] * 3
    x, before = torch.randn(4), w.clone()
    assert torch.equal(executable.run([x, w], seconds)[0], x + before)
    assert all(seconds)
    executable.release()
    assert executable.replay is not None
    assert not executable.replay.is_recorded
    assert torch.equal(executable.run([x, w])[1], x * (before + x))


MASK = View("m", torch.bool, (4,), (1,))
HOST = spec("h", Storage.CALL, device="cpu")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (CallStep("aten.nonzero.default", (whole(X),), {}, ("y",)), "may wait"),
        (CallStep("aten.index_put.default", (whole(X), (MASK,), whole(W)), {}, ("y",)), "may wait"),
        (CallStep("aten._to_copy.default", (whole(Y),), {"device": "cpu"}, ("h",)), "on the host"),
        (CallStep("aten.mm.default", (whole(X), whole(W)), {}, ("y",)), ""),
        (CallStep("treadle.cudnn_rnn.default", (whole(X), whole(W)), {}, ("y",)), ""),
        (CallStep("aten._fft_r2c.default", (whole(X), [0], 0, True), {}, ("y",)), ""),
        (CallStep("treadle.ctc_loss.default", (whole(X), whole(W)), {}, ("y",)), "may wait"),
    ],
)
def test_only_what_cannot_wait_for_the_host_is_recorded(call, why):
    buffers = {each.name: each for each in (X, W, Y, HOST)}
    artifact = Artifact("cuda:0", (), buffers, (call,), (), ("x", "w"), (), 0, 0)
    found = why_not(artifact, call, frozenset())
    assert why in found
    assert bool(found) == bool(why)


# Calls that stop in the middle.

D, DX = spec("d", Storage.CALL), spec("dx", Storage.CALL)


def joint() -> Artifact:
    """``y = x * w`` and ``z = x + w``; then ``dx = d * z`` of the incoming gradient ``d``."""
    y, z = whole(Y), whole(Z)
    steps = (
        CallStep("aten.mul.Tensor", (whole(X), whole(W)), {}, ("y",)),
        CallStep("aten.add.Tensor", (whole(X), whole(W)), {}, ("z",), out="aten.add.out"),
        CallStep(str(INCOMING_GRADIENT.op), ([y], 0, [4], [1], torch.float32), {}, ("d",)),
        CallStep("aten.mul.Tensor", (whole(D), z), {}, ("dx",)),
    )
    buffers = {each.name: each for each in (X, W, Y, Z, D, DX)}
    return Artifact("cpu", (), buffers, steps, (), ("x", "w"), (y, whole(DX)), 64, 64)


def calls_of(recorder: Again, room: int = 1 << 20) -> JointCalls:
    policy = ReplayPolicy(frozenset({0}), frozenset(), room, lambda: None)
    return JointCalls(Executable(joint(), PLAIN, policy=policy, recorder=recorder), 1)


def check_call(calls: JointCalls, w: Tensor, backwards: int = 1) -> None:
    x, d = torch.randn(4), torch.randn(4)
    (y,), call = calls.forward([x, w])
    assert torch.equal(y, x * w)
    for left in reversed(range(backwards)):
        (dx,) = call.backward([d], again=left > 0)
        assert torch.equal(dx, d * (x + w))
    call.close()


def test_both_halves_are_replayed():
    recorder, w = Again(), torch.randn(4)
    calls = calls_of(recorder)
    for _ in range(9):
        check_call(calls, w)
    assert recorder.recordings == 2
    assert recorder.replays == 2 * 6  # the call that is recorded as well
    assert calls.note.endswith("replayed as two CUDA graphs")


@pytest.mark.parametrize("at", range(1, 8))
def test_a_forward_whose_backward_never_comes(at):
    recorder, w = Again(), torch.randn(4)
    calls = calls_of(recorder)
    for number in range(9):
        check_call(calls, w, backwards=0 if number == at else 1)
    assert calls.note.endswith("replayed as two CUDA graphs")


@pytest.mark.parametrize("at", range(1, 8))
def test_a_backward_that_comes_three_times(at):
    recorder, w = Again(), torch.randn(4)
    calls = calls_of(recorder)
    for number in range(9):
        check_call(calls, w, backwards=3 if number == at else 1)


def test_what_moved_is_launched_as_usual_before_it_is_recorded_again():
    """A launch prepares what the next recording needs: tables of addresses."""
    recorder, w = Again(), torch.randn(4)
    calls = calls_of(recorder)
    for _ in range(6):
        check_call(calls, w)
    other = w.clone()
    recordings, replays = recorder.recordings, recorder.replays
    check_call(calls, other)
    assert (recorder.recordings, recorder.replays) == (recordings, replays)
    assert calls.note.endswith("to be recorded again")
    check_call(calls, other)
    assert recorder.recordings == recordings + 2
    assert calls.note.endswith("replayed as two CUDA graphs")


def test_a_gradient_is_let_go_of_when_it_has_been_read():
    calls, w = calls_of(Again()), torch.randn(4)
    _, call = calls.forward([torch.randn(4), w])
    gradients = [torch.randn(4)]
    call.backward(gradients)
    assert gradients[0].numel() == 0


def test_a_collection_may_end_a_call_while_another_one_begins():
    """Autograd's graphs go with a collection where they are in a cycle, at any allocation."""
    calls, w = calls_of(Again()), torch.randn(4)
    _, other = calls.forward([torch.randn(4), w])

    class Ends(list):
        def pop(self):
            other.close()
            return super().pop()

    calls._free = Ends(calls._free)
    (y,), call = calls.forward([torch.ones(4), w])
    assert torch.equal(y, w)
    call.close()


def test_calls_that_are_open_at_once():
    recorder, w = Again(), torch.randn(4)
    calls = calls_of(recorder)
    for _ in range(6):
        batches = [torch.randn(4) for _ in range(3)]
        opened = [calls.forward([x, w]) for x in batches]
        for x, ((y,), call) in reversed(list(zip(batches, opened, strict=True))):
            assert torch.equal(y, x * w)
            assert torch.equal(call.backward([x])[0], x * (x + w))


def test_halves_that_cannot_be_recorded_run_as_usual():
    for recorder, room, why in (
        (Again(failing=True), 1 << 20, "operation not permitted"),
        (Again(share=0.1), 1 << 20, "launching took 200.00 of 2000.00 ms"),
        (Again(), 0, "do not fit beside the plan"),
    ):
        w = torch.randn(4)
        calls = calls_of(recorder, room)
        for _ in range(8):
            check_call(calls, w)
        assert recorder.recordings == 0
        assert why in calls.note


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_memory_that_is_given_back_decides_nothing(at, share):
    """A step that launching does not bind is not recorded because its memory went before it was
    timed; nor is one that is off said to be recorded again."""
    recorder, w = Again(share), torch.randn(4)
    recorder.state = (w,)
    executable = made(recorder)
    for number in range(9):
        x, before = torch.randn(4), w.clone()
        if number == at:
            executable.release()
        found = executable.run([x, w])
        torch.testing.assert_close(found[0], x + before, rtol=0, atol=0)
    assert executable.replay is not None
    assert executable.replay.is_recorded is (share == 1.0)
    executable.release()
    assert ("again" in executable.replay.note) is (share == 1.0)


def test_arenas_of_calls_that_are_over_are_given_back():
    recorder, w = Again(), torch.randn(4)
    calls = calls_of(recorder)
    for number in range(12):
        check_call(calls, w)
        if number % 6 == 5:
            assert calls.note.endswith("replayed as two CUDA graphs")
            calls.release()
            assert calls.note.endswith("to be recorded again")
