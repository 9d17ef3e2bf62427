"""What a run enters is noted, and none of it is kept."""

import gc
import sys
import weakref

import pytest
import torch

import treadle
from treadle.capture.python_state.code.frames import ExecutionRecord, FrameRecorder


class Silent:
    """Whoever hears of frames, and does nothing."""

    def enters(self, frame):
        return False

    def looks(self, frame, found, owner):
        pass

    def calls(self, frame, function):
        pass

    def follow(self):
        pass


def recorder():
    return FrameRecorder(ExecutionRecord(), lambda frame: None, Silent(), Silent())


class Value:
    pass


def values(count):
    yield from range(count)


def used_up():
    return list(values(3))


def left_early():
    return next(values(3))


def failed():
    with pytest.raises(ZeroDivisionError):
        tuple(1 / each for each in values(3))


def closed():
    found = values(3)
    next(found)
    found.close()


@pytest.mark.parametrize("use", [used_up, left_early, failed, closed])
def test_values_of_a_generators_callers_end_with_their_callers(use):
    def caller(value):
        use()
        return weakref.ref(value)

    gc.disable()
    try:
        with recorder():
            found = caller(Value())
            assert found() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("tracing", [False, True])
def test_only_a_generator_that_was_there_before_is_resumed(tracing):
    old, later = values(3), values(3)
    next(old)
    before = sys.gettrace()
    if tracing:
        sys.settrace(lambda *_: None)
    try:
        with recorder() as new:
            used_up(), left_early(), closed(), list(later)
        with recorder() as advanced:
            used_up(), next(old)
        with recorder() as again:
            next(old)
    finally:
        sys.settrace(before)
    assert new.executed.resumed == ""
    assert (advanced.executed.resumed, again.executed.resumed) == ("values", "values")


@torch.library.custom_op("treadle_frames_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, grad: grad * 2)


@doubled.register_fake
def shape_of_doubled(x):
    return torch.empty_like(x)


def test_frames_within_an_operation_count_where_they_may_be_the_users(monkeypatch):
    """PyTorch's own read the environment in some versions: another variable was another start."""
    entered = set()
    note = ExecutionRecord.note

    def noted(record, code, space, owner):
        entered.add(code.co_name)
        note(record, code, space, owner)

    monkeypatch.setattr(ExecutionRecord, "note", noted)

    model = torch.nn.Linear(3, 3)

    def step(x):
        with torch.profiler.record_function("range"):
            y = model(x)
        (doubled(y) if doubles else y).sum().backward()

    doubles = False
    treadle.compile(step, model=model)(torch.ones(2, 3))
    assert "forward" in entered
    assert "is_available" not in entered  # of GPUs, asked by fake tensors
    doubles = True
    treadle.compile(step, model=model)(torch.ones(2, 3))
    assert "shape_of_doubled" in entered


MONITORING = getattr(sys, "monitoring", None)


def inner():
    return 1


def outer():
    return inner()


@pytest.mark.skipif(MONITORING is None, reason="no-monitoring: CPython 3.11 has the hook alone")
def test_tools_give_their_numbers_back_and_the_hook_serves_where_none_is_left():
    free = [tool for tool in range(6) if MONITORING.get_tool(tool) is None]
    for tool in free:
        MONITORING.use_tool_id(tool, "another")
    try:
        with recorder() as heard:
            outer()
            assert sys.getprofile() is not None
        assert sys.getprofile() is None
        names = {code.co_name for code in heard.executed.codes.values()}
        assert {"outer", "inner"} <= names
    finally:
        for tool in free:
            MONITORING.free_tool_id(tool)
    with recorder() as heard:
        outer()
        assert len([tool for tool in range(6) if MONITORING.get_tool(tool) is None]) < len(free)
    assert [tool for tool in range(6) if MONITORING.get_tool(tool) is None] == free
    assert {"outer", "inner"} <= {code.co_name for code in heard.executed.codes.values()}
