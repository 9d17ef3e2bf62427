"""Launches that follow each other run as one call, in order, and as they would alone."""

import ctypes
from collections.abc import Sequence

import pytest
import torch

from treadle.runtime.execute.actions import Actions
from treadle.runtime.kernels.c_library import load_c
from treadle.runtime.kernels.launch_table import (
    LaunchRunner,
    LaunchTable,
    NativeLaunch,
    launch_runner,
)
from treadle.runtime.store.artifact import Artifact, Launch
from treadle.util.errors import RuntimeFailure

SOURCE = """
void note(void *const *pointers, const long long *sizes, long long instances) {
  for (long long i = 0; i < instances; i++) {
    long long *log = (long long *)pointers[i];
    log[++log[0]] = sizes[i];
  }
}
"""


@pytest.fixture
def runner(tmp_path) -> LaunchRunner:
    found = launch_runner(str(tmp_path))
    if found is None:
        pytest.skip("there is no C compiler")
    return found


class Log:
    """What launches were given, in the order in which they ran."""

    def __init__(self, directory: str) -> None:
        self._note = load_c(SOURCE, ("note",), directory, keeps_lock=False)["note"]
        self._note.restype = None
        self._note.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self.numbers = (ctypes.c_int64 * 100)()

    def launch(self, *sizes: int) -> NativeLaunch:
        address = ctypes.addressof(self.numbers)
        pointers = (ctypes.c_void_p * len(sizes))(*[address] * len(sizes))
        return NativeLaunch(self._note, pointers, (ctypes.c_int64 * len(sizes))(*sizes), len(sizes))

    def note(self, number: int) -> None:
        self.launch(number)()

    def taken(self) -> list[int]:
        found = list(self.numbers[1 : 1 + self.numbers[0]])
        self.numbers[0] = 0
        return found


@pytest.fixture
def log(tmp_path) -> Log:
    return Log(str(tmp_path))


def test_they_run_in_order_on_what_their_arrays_hold_at_the_time(runner, log):
    launches = [log.launch(1, 2), log.launch(), log.launch(3)]
    together = runner.together(launches)
    together()
    assert log.taken() == [1, 2, 3]
    other = (ctypes.c_int64 * 9)()
    launches[0].pointers[1] = ctypes.addressof(other)
    together()
    assert log.taken() == [1, 3]
    assert list(other[:2]) == [1, 2]


def actions_of(steps: Sequence[object], runner: LaunchRunner | None) -> Actions:
    artifact = Artifact(
        "cpu", (), {}, tuple(Launch(f"step{at}", (), ()) for at in range(len(steps))), (), (), (),
        arena_bytes=0, peak_bytes=0,
    )  # fmt: skip
    actions = Actions(artifact, () if runner is None else (runner,))
    for at, step in enumerate(steps):
        actions.add(at, [step])
    return actions


def test_what_stands_between_launches_runs_between_them(runner, log):
    steps = [log.launch(0), log.launch(1), lambda: log.note(2), log.launch(3), lambda: log.note(4)]
    for which in (runner, None):
        actions = actions_of(steps, which)
        for first, end in [(0, None), (1, None), (0, 1), (1, 4), (3, 3)]:
            actions.run(first=first, end=end)
            assert log.taken() == list(range(first, 5 if end is None else end))
        seconds = [0.0] * 5
        actions.run(seconds)
        assert log.taken() == [0, 1, 2, 3, 4]
        assert all(seconds)
        actions.run_steps([3, 0])
        assert log.taken() == [3, 0]


def test_only_launches_that_follow_each_other_are_one(runner, log):
    steps = [log.launch(0), log.launch(1), lambda: None, log.launch(2), log.launch(3)]
    actions = actions_of(steps, runner)
    program = actions.program(0, 5)
    joined = [isinstance(action, LaunchTable) for action in program.actions]
    kinds = list(zip(program.positions, joined, strict=True))
    assert kinds == [(0, True), (2, False), (3, True)]
    assert len(actions.program(1, 4).actions) == 3
    actions.name_steps(["", "a name", "", "", ""])
    assert len(actions.program(0, 5).actions) == 3
    with torch.profiler.profile() as profile:
        assert actions.program(0, 5).positions == [0, 1, 2, 3, 4]
        actions.run()
    assert log.taken() == [0, 1, 2, 3]
    names = [event.name for event in profile.events()]
    assert [name for name in names if name == "a name" or "step" in name] == [
        *("step0", "a name", "step1", "step2", "step3", "step4")
    ]


def test_an_error_names_the_step_that_failed(runner, log):
    def fails() -> None:
        raise ValueError("no")

    actions = actions_of([log.launch(0), log.launch(1), fails, log.launch(3)], runner)
    with pytest.raises(RuntimeFailure, match="step2 failed"):
        actions.run()
    assert log.taken() == [0, 1]


def test_without_a_compiler_each_launch_runs_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch_runner(str(tmp_path / "cache")) is None
