"""Inputs that stay are looked at together; whatever is different about one is noticed."""

import pytest
import torch
from torch import Tensor

from treadle.guards import watching
from treadle.guards.watching import watch_inputs
from treadle.runtime.execute.executable import Executable
from treadle.runtime.replay.replay_policy import ReplayPolicy
from treadle.runtime.replay.unchanged_inputs import SteadyInputs
from treadle.util.errors import RuntimeFailure

from .test_replay import PLAIN, step


def inputs() -> list[Tensor]:
    return [torch.randn(4), torch.randn(4, 2), torch.randn(3)]


def known(values: list[Tensor]) -> SteadyInputs:
    steady = SteadyInputs(3, frozenset({0}), watch_inputs)
    assert list(steady.others(values)) == [0, 1, 2]
    steady.learn(values, [True, True, True])
    assert list(steady.others(values)) == [0]
    return steady


def test_what_moves_is_looked_at_alone():
    values = inputs()
    steady = known(values)
    assert list(steady.others([torch.randn(9), *values[1:]])) == [0]


def test_a_watch_that_was_asked_for_this_call_is_not_asked_again():
    values = inputs()
    steady, other = known(values), known(values)
    values[1].data = torch.randn(4, 2)
    assert list(steady.others(values, (steady.watched,))) == [0]
    assert list(steady.others(values, (other.watched,))) == [0, 1, 2]
    another = [values[0], values[1].clone(), values[2]]
    assert list(other.others(another, (other.watched,))) == [0, 1, 2]


def test_another_object_is_looked_at_from_then_on():
    values = inputs()
    steady = known(values)
    others = [values[0], values[1].clone(), values[2]]
    assert list(steady.others(others)) == [0, 1, 2]
    steady.learn(others, [True, True, True])
    assert list(steady.others(others)) == [0, 1]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_very_same_tensors_have_to_stand_there(kind, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(watching, "item_comparison", lambda: None)
    values = [torch.randn(2) for _ in range(7)]
    watched = watch_inputs([1, 2, 5], [values[1], values[2], values[5]])
    assert watched is not None
    assert watched.are_in(kind(values))
    for at in range(7):
        others = kind([*values[:at], values[at].detach(), *values[at + 1 :]])
        assert watched.are_in(others) == (at not in (1, 2, 5))
    with pytest.raises(IndexError):
        watched.are_in(kind(values[:5]))


def other_memory(value: Tensor) -> None:
    value.data = torch.randn(4, 2)


def other_strides(value: Tensor) -> None:
    value.data = value.data.as_strided((4, 2), (1, 4))


def other_sizes(value: Tensor) -> None:
    value.data = value.data.view(2, 4)


def other_dtype(value: Tensor) -> None:
    value.data = value.data.view(torch.int32).view(torch.float32).double()


@pytest.mark.parametrize("change", [other_memory, other_strides, other_sizes, other_dtype])
def test_another_layout_or_memory_of_the_same_object_is_noticed(change):
    values = inputs()
    steady = known(values)
    change(values[1])
    assert list(steady.others(values)) == [0, 1, 2]


def made() -> Executable:
    policy = ReplayPolicy(frozenset({0}), frozenset({1}), 0, lambda: None, watch_inputs)
    return Executable(step(), PLAIN, policy=policy)


def test_calls_write_the_tensors_that_they_are_given():
    executable, w = made(), torch.randn(4)
    for number in range(8):
        if number == 4:
            w = w.clone()
        if number == 6:
            w.data = torch.randn(4)
        x, before = torch.randn(4), w.clone()
        found = executable.run([x, w])
        assert torch.equal(found[0], x + before)
        assert torch.equal(w, before + x)
    executable.release()
    x, before = torch.randn(4), w.clone()
    executable.run([x, w])
    assert torch.equal(w, before + x)


def test_a_layout_that_does_not_fit_is_refused():
    executable, w = made(), torch.randn(4)
    for _ in range(4):
        executable.run([torch.randn(4), w])
    w.data = torch.randn(5)
    with pytest.raises(RuntimeFailure, match="TR-401"):
        executable.run([torch.randn(4), w])
    w.data = torch.randn(8)[::2]
    with pytest.raises(RuntimeFailure, match="TR-401"):
        executable.run([torch.randn(4), w])
