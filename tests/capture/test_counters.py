"""Step counters are found again wherever they go, and whoever writes to them."""

import copy

import pytest
import torch
from torch import nn

from treadle.capture.optimizers import counters
from treadle.capture.optimizers.counters import SharedCounters


def stepped(kind=torch.optim.AdamW, count=3):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    optimizer = kind(parameters, lr=0.1)
    for each in parameters:
        each.grad = torch.ones(2)
    optimizer.step()
    return optimizer, parameters


def load(optimizer, parameters):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def put(optimizer, parameters):
    optimizer.state[parameters[1]]["step"] = torch.tensor(1.0)


def move(optimizer, parameters):
    optimizer.state[parameters[1]]["step"].data = torch.tensor(5.0)


@pytest.mark.parametrize("change", [load, put, move])
def test_other_tensors_are_looked_for(change):
    optimizer, parameters = stepped()
    known = SharedCounters.of(optimizer, parameters, ("step",))
    assert known is not None
    assert known.hold()
    change(optimizer, parameters)
    assert not known.hold()


@pytest.mark.parametrize("way", ["compiled", "gathered"])
def test_numbers_are_read_at_every_call_and_written_in_place(way, monkeypatch):
    if way == "gathered":
        monkeypatch.setattr(counters, "comparison_of_floats", lambda: None)
    optimizer, parameters = stepped()
    known = SharedCounters.of(optimizer, parameters, ("step",))
    assert known is not None
    assert known.agree()
    optimizer.state[parameters[2]]["step"].data.fill_(7)
    assert known.hold()
    assert not known.agree()
    known.write({"step": 9.0})
    assert [float(optimizer.state[each]["step"]) for each in parameters] == [9.0] * 3
    assert known.agree()
    optimizer.state[parameters[0]]["step"].numpy()[...] = 2
    assert not known.agree()
    known.write({"step": float("nan")})
    assert not known.agree()


def test_what_is_no_number_of_four_bytes_on_the_host_is_left_alone():
    optimizer, parameters = stepped()
    optimizer.state[parameters[1]]["step"] = torch.tensor(1.0, dtype=torch.float64)
    assert SharedCounters.of(optimizer, parameters, ("step",)) is None
    optimizer.state[parameters[1]]["step"] = 1.0
    assert SharedCounters.of(optimizer, parameters, ("step",)) is None
    del optimizer.state[parameters[1]]
    assert SharedCounters.of(optimizer, parameters, ("step",)) is None


def test_without_counters_only_the_places_count():
    optimizer, parameters = stepped(torch.optim.SGD)
    known = SharedCounters.of(optimizer, parameters, ())
    assert known is not None
    assert known.hold()
    assert known.agree()
    optimizer.state[parameters[0]]["momentum_buffer"] = torch.ones(2)
    assert not known.hold()
