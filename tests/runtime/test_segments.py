"""Steps of which a part cannot be recorded: where they are cut, and that replays are right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from treadle.runtime.execute.call_frame import CallFrame
from treadle.runtime.execute.executable import Executable
from treadle.runtime.replay.recording_plan import why_not
from treadle.runtime.replay.replay_policy import Launches, ReplayPolicy
from treadle.runtime.replay.segments import split
from treadle.runtime.store.artifact import Artifact, CallStep, Storage
from treadle.util.errors import RuntimeFailure
from treadle.util.expected import NotExpected

from .test_replay import PLAIN, spec, whole

X, W = spec("x", Storage.INPUT), spec("w", Storage.INPUT)
COUNT = spec("count", Storage.INPUT, (), device="cpu")
FIRST = spec("first", Storage.CALL, (), torch.bool, device="cpu")
FACTOR = spec("factor", Storage.CALL, ())
Y, Z, SORTED, OUT = (spec(name, Storage.CALL) for name in ("y", "z", "sorted", "out"))
SEEN = spec("seen", Storage.CALL, (), device="cpu")
TOTAL, HOLDS = spec("total", Storage.CALL, ()), spec("holds", Storage.CALL, (), torch.bool)
ALL = {s.name: s for s in (X, W, COUNT, FIRST, FACTOR, Y, Z, SORTED, OUT, SEEN, TOTAL, HOLDS)}

ADD = CallStep("aten.add.Tensor", (whole(X), whole(W)), {}, ("y",))
FIRST_OF = CallStep("aten.eq.Scalar", (whole(COUNT), 0), {}, ("first",))
TO_DEVICE = CallStep(
    "aten._to_copy.default", (whole(FIRST),), {"dtype": torch.float32}, ("factor",)
)
SCALE = CallStep("aten.mul.Tensor", (whole(Y), whole(FACTOR)), {}, ("z",))
SORT = CallStep("aten.msort.default", (whole(Z),), {}, ("sorted",))
LAST = CallStep("aten.sub.Tensor", (whole(SORTED), whole(Y)), {}, ("out",))
UPDATE = CallStep("aten.add.Tensor", (whole(W), whole(X)), {}, ("w",), out="aten.add.out")
SUM = CallStep("aten.sum.default", (whole(X),), {}, ("total",))
POSITIVE = CallStep("aten.ge.Scalar", (whole(TOTAL), 0), {}, ("holds",))
EXPECT = CallStep("treadle.expect.default", (whole(HOLDS),), {}, ())
SCALED = CallStep("aten.mul.Scalar", (whole(Y), 2), {}, ("out",))
COUNTED = CallStep("aten.add.Scalar", (whole(COUNT), 1), {}, ("count",), out="aten.add.Scalar_out")


def artifact(*steps: CallStep, releases=(), results=(OUT,)) -> Artifact:
    views = tuple(whole(each) for each in results)
    return Artifact("cpu", (), ALL, steps, releases, ("x", "w", "count"), views, 64, 64)


def cut(art: Artifact) -> str:
    """``"1 | r: 0 2"``: the steps of each segment, recorded ones marked."""
    can = [not why_not(art, step, frozenset({1, 2})) for step in art.steps]
    parts = split(art, can)
    return " | ".join("r: " * p.recorded + " ".join(map(str, p.steps)) for p in parts)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((ADD, FIRST_OF, TO_DEVICE, SCALE), "1 2 | r: 0 3"),
        ((ADD, FIRST_OF, TO_DEVICE, SCALE, COUNTED), "1 2 4 | r: 0 3"),  # reads the old number
        ((ADD, COUNTED, FIRST_OF, TO_DEVICE, SCALE), "1 2 3 | r: 0 4"),  # the new one
        ((ADD, FIRST_OF, TO_DEVICE, SCALE, SORT, LAST), "1 2 | r: 0 3 | 4 | r: 5"),
        ((ADD, FIRST_OF, TO_DEVICE, SCALE, SORT), "1 2 | r: 0 3 | 4"),
        ((ADD, UPDATE), "r: 0 1"),
        ((ADD, SUM, POSITIVE, EXPECT, UPDATE, SCALE), "r: 0 1 2 | 3 | r: 4 5"),
        ((ADD, SUM, POSITIVE, EXPECT, COUNTED, UPDATE, SCALE), "r: 0 1 2 | 3 | r: 5 6 | 4"),
    ],
)
def test_what_depends_on_nothing_recorded_comes_first(steps, expected):
    assert cut(artifact(*steps)) == expected


def test_what_gives_a_buffer_back_stays_behind_its_readers():
    steps = (ADD, FIRST_OF, TO_DEVICE, SCALE, SORT, LAST)
    gives = ((), (), (), ("factor",), (), ())
    assert cut(artifact(*steps, releases=gives)) == "1 2 | r: 0 3 | 4 | r: 5"
    early = (FIRST_OF, TO_DEVICE, ADD, SCALE, FIRST_OF)
    assert cut(artifact(*early, releases=((), (), (), ("first",), ()))) == "0 1 | r: 2 3 | 4"


def test_draws_and_unknown_operations_stay_where_they_are():
    draw = CallStep("aten.multinomial.default", (whole(X), 2), {}, ("z",))
    ours = CallStep("treadle.ctc_loss.default", (whole(X), whole(W)), {}, ("z",))
    assert cut(artifact(ADD, draw, UPDATE)) == "r: 0 | 1 | r: 2"
    assert cut(artifact(ADD, ours, UPDATE)) == "r: 0 | 1 | r: 2"


def test_arena_bytes_that_two_buffers_share_keep_their_order():
    one, two = spec("one", Storage.ARENA, offset=0), spec("two", Storage.ARENA, offset=8)
    far = spec("far", Storage.ARENA, offset=64)
    for target, expected in ((two, "r: 0 1 | 2"), (far, "2 | r: 0 1")):
        steps = (
            CallStep("aten.add.Tensor", (whole(X), whole(W)), {}, ("one",), out="aten.add.out"),
            CallStep("aten.mul.Tensor", (whole(one), whole(W)), {}, ("y",)),
            CallStep(
                "aten.add.Tensor", (whole(COUNT), whole(COUNT)), {}, (target.name,),
                out="aten.add.out",
            ),
        )  # fmt: skip
        buffers = ALL | {each.name: each for each in (one, two, far)}
        art = Artifact("cpu", (), buffers, steps, (), ("x", "w", "count"), (), 128, 128)
        assert cut(art) == expected


class Parts:
    """Records parts by keeping what to run; replayed, it takes and makes what stood in the same
    places, as a GPU does. ``failing``: the number of a recording that fails."""

    def __init__(self, state: list[Tensor], failing: int = -1) -> None:
        self.state, self.failing = state, failing
        self.recordings = self.replays = 0
        self.frame: CallFrame

    def start(self) -> None:
        self.recordings = 0

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        run()
        return 1.0, 1.0

    def record(self, run: Launches) -> tuple[dict[str, Tensor], Callable[[], None]]:
        state, before = [each.clone() for each in self.state], self.frame.alive()
        made = run()
        for mine, old in zip(self.state, state, strict=True):
            mine.copy_(old)  # recording does not do the work
        self.recordings += 1
        if self.recordings - 1 == self.failing:
            self.frame.define(dict.fromkeys(made, torch.full((4,), torch.nan)))
            raise RuntimeError("operation not permitted")

        def replay() -> None:
            self.replays += 1
            now = self.frame.alive()
            self.frame.define(before)
            found = run()
            for name, mine in made.items():
                mine.copy_(found[name])
            self.frame.define(made | now)

        return made, replay


LOOK = CallStep("aten.mul.Scalar", (whole(COUNT), 2), {}, ("seen",))
STEPS = (ADD, FIRST_OF, TO_DEVICE, SCALE, SORT, LAST, UPDATE, LOOK, COUNTED)
GIVES = ((), (), ("first",), ("factor",), ("z",), ("sorted", "y"), (), (), ())


def right(x: Tensor, w: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    y = x + w
    out = torch.msort(y * (count == 0).float()) - y
    seen = count * 2
    w.add_(x)
    count.add_(1)
    return out, seen


@pytest.mark.parametrize("failing", [-1, 0, 1])
def test_replays_in_parts_compute_what_the_whole_does(failing):
    w, count = torch.randn(4), torch.zeros(())
    recorder = Parts([w], failing)
    policy = ReplayPolicy(frozenset({0}), frozenset({1, 2}), 1 << 20, lambda: None)
    art = artifact(*STEPS, releases=GIVES, results=(OUT, SEEN))
    executable = Executable(art, PLAIN, policy=policy, recorder=recorder)
    recorder.frame = executable.frame
    kept = []
    for number in range(9):
        if number == 6:
            count.zero_()  # the user's own reset
        x, mine, counted = torch.randn(4), w.clone(), count.clone()
        expected = right(x, mine, counted)
        found = executable.run([x, w, count])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(w, mine)
        assert torch.equal(count, counted)
        assert executable.frame.alive() == {}
        kept += zip(found, expected, strict=True)
    assert executable.replay is not None
    assert all(torch.equal(a, b) for a, b in kept)  # no later call changed them
    if failing >= 0:
        assert not executable.replay.is_recorded
        assert "operation not permitted" in executable.replay.note
        return
    assert executable.replay.is_recorded
    assert executable.replay.note.endswith("replayed as 2 CUDA graphs, 5 operations apart")
    assert recorder.replays == 2 * 6


@pytest.mark.parametrize("failing", [(0,), (2,), (3,), (3, 4), (5, 6)])
def test_a_condition_that_does_not_hold_writes_nothing(failing):
    w, count = torch.randn(4), torch.zeros(())
    recorder = Parts([w])
    policy = ReplayPolicy(frozenset({0}), frozenset({1, 2}), 1 << 20, lambda: None)
    steps = (ADD, SUM, POSITIVE, EXPECT, COUNTED, UPDATE, SCALED)
    art = artifact(*steps, results=(OUT,))
    executable = Executable(art, PLAIN, policy=policy, recorder=recorder)
    recorder.frame = executable.frame
    for number in range(10):
        x, before, counted = torch.rand(4), w.clone(), count.clone()
        if number in failing:
            with pytest.raises(NotExpected):
                executable.run([-x, w, count])
            assert torch.equal(w, before)
            assert torch.equal(count, counted)
        else:
            (found,) = executable.run([x, w, count])
            assert torch.equal(found, (x + before) * 2)
            assert torch.equal(w, before + x)
            assert torch.equal(count, counted + 1)
        assert executable.frame.alive() == {}
    assert executable.replay is not None
    assert executable.replay.is_recorded


def test_an_operation_that_fails_between_recordings_leaves_nothing_bound(monkeypatch):
    w, count = torch.randn(4), torch.zeros(())
    recorder = Parts([w])
    policy = ReplayPolicy(frozenset({0}), frozenset({1, 2}), 1 << 20, lambda: None)
    art = artifact(*STEPS, releases=GIVES, results=(OUT, SEEN))
    executable = Executable(art, PLAIN, policy=policy, recorder=recorder)
    recorder.frame = executable.frame
    for _ in range(5):
        executable.run([torch.randn(4), w, count])
    run_steps = executable.frame.actions.run_steps

    def failing(steps) -> None:
        if 4 in steps:
            raise RuntimeFailure("no memory", code="TR-403")
        run_steps(steps)

    monkeypatch.setattr(executable.frame.actions, "run_steps", failing)
    with pytest.raises(RuntimeFailure, match="no memory"):
        executable.run([torch.randn(4), w, count])
    assert executable.frame.alive() == {}
    monkeypatch.setattr(executable.frame.actions, "run_steps", run_steps)
    x, mine, counted = torch.randn(4), w.clone(), count.clone()
    expected = right(x, mine, counted)
    assert torch.equal(executable.run([x, w, count])[0], expected[0])


def test_too_little_between_the_cuts_is_not_recorded():
    policy = ReplayPolicy(frozenset({0}), frozenset({1, 2}), 1 << 20, lambda: None)
    art = artifact(*STEPS[:6], releases=GIVES[:6])
    executable = Executable(art, PLAIN, policy=policy, recorder=Parts([]))
    assert executable.replay is not None
    assert executable.replay.note == "not recorded: part of the step runs on the host"
