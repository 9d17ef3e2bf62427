"""Every frame and every call of a C function is heard, in each thread that is listened to, however
Python says it."""

import cProfile
import os
import pstats
import sys
import threading

import pytest

from treadle.capture.python_state.code import frame_events
from treadle.capture.python_state.code.frame_events import FrameEvents

MONITORING = getattr(sys, "monitoring", None)
HOW = ["hook", pytest.param("monitoring", marks=pytest.mark.skipif(
    MONITORING is None, reason="no-monitoring: CPython 3.11 has the hook alone"
))]  # fmt: skip


class Heard:
    """Names of the functions whose frames began, and of those made in C that were called."""

    def __init__(self, how, monkeypatch):
        if how == "hook":
            monkeypatch.setattr(frame_events, "_MONITORING", None)
        self.frames: list[str] = []
        self.calls: list[str] = []
        self.events: FrameEvents = frame_events.frame_events(
            lambda frame: self.frames.append(frame.f_code.co_name),
            lambda frame, function: self.calls.append(getattr(function, "__name__", "")),
            lambda code: code.co_name == "passed_over",
            lambda code: code.co_name in ("silent", "passed_over"),
        )

    def __enter__(self):
        self.events.begin()
        return self

    def __exit__(self, *_):
        self.events.end()


def inner():
    return os.getpid()


def outer():
    return inner()


def silent():
    return os.getppid()


def passed_over():
    return inner(), os.getppid()


def numbers():
    try:
        yield 1
        yield 2
    except ValueError:
        yield 3


@pytest.mark.parametrize("how", HOW)
def test_frames_and_calls(how, monkeypatch):
    with Heard(how, monkeypatch) as heard:
        for _ in range(2):
            outer()
            passed_over()
    outer()
    assert [name for name in heard.frames if name in ("inner", "outer", "passed_over")].count(
        "inner"
    ) == 4
    assert heard.frames.count("outer") == 2
    assert heard.calls.count("getpid") == 4
    assert "getppid" not in heard.calls


@pytest.mark.parametrize("how", HOW)
def test_generators_are_entered_at_each_value_and_by_exceptions(how, monkeypatch):
    with Heard(how, monkeypatch) as heard:
        found = numbers()
        assert [next(found), found.throw(ValueError())] == [1, 3]
    assert heard.frames.count("numbers") == 2


@pytest.mark.parametrize("how", HOW)
def test_a_pause_is_of_its_thread(how, monkeypatch):
    with Heard(how, monkeypatch) as heard:
        assert heard.events.pause()
        assert not heard.events.pause()
        inner()
        thread = threading.Thread(target=outer)
        thread.start()
        thread.join()
        heard.events.resume()
        outer()
    assert heard.frames.count("outer") == 2
    assert heard.frames.count("inner") == 2


@pytest.mark.parametrize("how", HOW)
def test_threads_that_were_there_are_heard_once_they_listen(how, monkeypatch):
    listens, done = threading.Event(), threading.Event()
    asked, answered = threading.Event(), threading.Event()

    def work():
        asked.wait()
        outer()
        answered.set()
        listens.wait()
        heard.events.listen()
        outer()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with Heard(how, monkeypatch) as heard:
        asked.set()
        answered.wait()
        assert "outer" not in heard.frames
        listens.set()
        done.wait()
    thread.join()
    assert heard.frames.count("outer") == 1


@pytest.mark.parametrize("how", HOW)
def test_an_error_of_who_hears_ends_the_run(how, monkeypatch):
    def refuse(frame):
        if frame.f_code.co_name == "inner":
            raise LookupError("refused")

    if how == "hook":
        monkeypatch.setattr(frame_events, "_MONITORING", None)
    events = frame_events.frame_events(refuse, lambda *_: None, lambda _: False, lambda _: False)
    events.begin()
    try:
        with pytest.raises(LookupError, match="refused"):
            outer()
    finally:
        events.end()
    assert outer() == os.getpid()


@pytest.mark.parametrize("how", HOW)
def test_a_profiler_of_the_users_goes_on(how, monkeypatch):
    profiler = cProfile.Profile()
    profiler.enable()
    with Heard(how, monkeypatch) as heard:
        outer()
    inner()
    profiler.disable()
    calls = {name: count for (_, _, name), (count, *_) in pstats.Stats(profiler).stats.items()}
    assert heard.frames.count("outer") == 1
    assert calls["inner"] == (1 if MONITORING is None else 2)  # there it needs the hook itself
