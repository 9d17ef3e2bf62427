"""A round of a ``scan`` has several slices, which changes no number, no gradient and no refusal."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treadle
from contract.test_scans import (
    BACKWARD,
    FORWARD,
    LOOPS,
    Net,
    Own,
    compared,
    nothing_to_learn,
    ops_of,
    recurrent,
    rows_by_number,
    train_with,
)
from treadle.capture.control_flow import scans
from treadle.capture.control_flow.bodies import MOST_COPIES
from treadle.capture.control_flow.scans import FEW, OPERATIONS
from treadle.util.errors import CaptureError


@pytest.fixture
def short_rounds(monkeypatch):
    """Bodies of the length of these tests' are loops of a few slices a round."""
    monkeypatch.setattr(scans, "OPERATIONS", 40)


@given(count=st.integers(1, 10_000), most=st.integers(0, 16))
def test_few_slices_remain(count, most):
    size = scans._slices_of_round(count, most)
    assert most // 2 < size <= max(most, 1)
    assert all(count % size <= count % other for other in range(most // 2 + 1, most + 1))


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("loss", LOOPS, ids=lambda each: each.__name__)
def test_several_slices_a_round_are_python_s_for(loss, tmp_path):
    step = compared(loss, (37, 37), tmp_path, strict=loss is not rows_by_number)
    assert "loop_value" not in step.graph("captured")


@pytest.mark.parametrize("count", [FEW + 1, 97, MOST_COPIES + 1, 1009])
@pytest.mark.parametrize("loss", [recurrent, nothing_to_learn], ids=lambda each: each.__name__)
def test_any_number_of_slices(loss, count, tmp_path):
    step = compared(loss, (count, count), tmp_path, strict=True)
    assert FORWARD in ops_of(step) or count < MOST_COPIES


def long_body(model, x, ways):
    def body(c, r):
        for _ in range(OPERATIONS // 8):
            c = (c * model.scale + r).sin().cos() * 0.5
        return c, c * 1

    return ways.scan(body, model.scale * 1, model.first(x))[1].square().mean()


def test_a_long_body_is_a_round_of_its_own(tmp_path):
    step = compared(long_body, (21,), tmp_path, strict=True)
    assert {FORWARD, BACKWARD} <= ops_of(step)
    lines = step.graph("captured").splitlines()
    (forward,) = (line for line in lines if "treadle.scan(" in line)
    assert forward.count("= cos(") < OPERATIONS // 8 * 4  # of one slice, forward and backward


def test_the_graph_does_not_grow_with_the_slices(tmp_path):
    lines = []
    for count in (320, 640):  # multiples of the slices of a round
        step = train_with(Net(), recurrent, Own, tmp_path)
        step(torch.randn(count, 4))
        lines.append(len(step.graph("captured").splitlines()))
    assert lines[0] == lines[1]


def draws(model, x, ways):
    return ways.scan(lambda c, r: (c * 0.5 + torch.randn(4), c * r), model.scale, x)[1].mean()


def leaves_a_value(model, x, ways):
    def body(c, r):
        model.last = c.sum()
        return c * model.scale + r, c * 1

    rows = ways.scan(body, model.scale * 1, model.first(x))[1]
    return rows.mean() + model.last


def test_random_numbers_are_copied(tmp_path):
    step = train_with(Net(), draws, Own, tmp_path)
    step(torch.randn(150, 4))
    assert not ops_of(step) & {FORWARD, BACKWARD}


@pytest.mark.parametrize("loss", [draws, leaves_a_value], ids=lambda each: each.__name__)
def test_more_than_a_computation_is_refused(loss, tmp_path):
    step = train_with(Net(), loss, Own, tmp_path)
    with pytest.raises(CaptureError) as refused:
        step(torch.randn(300, 4))
    assert refused.value.code == "TR-151"


def test_the_peak_is_promised(tmp_path):
    model = Net()
    for memory in (None, 0.8):
        twin = copy.deepcopy(model)
        step = train_with(twin, recurrent, Own, tmp_path, memory=memory, strict=True)
        x = torch.randn(331, 4)
        step(x)
        assert step.measure(x).peak_bytes <= step.compiled.artifact.peak_bytes


def test_a_declared_number_has_one_slice_a_round(tmp_path):
    shapes = treadle.dynamic({"x": ("n", None)}, n=(2, 400))
    step = compared(recurrent, (19, 400, 257), tmp_path, shapes=shapes, strict=True)
    assert step.recompiles == ["compiled for n in 2..400"]
