"""What a compiled step tells in numbers: summary, trace, advice; for the backend as well."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import treadle
from treadle import Options


def made(tmp_path, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    chosen = Options(cache_dir=tmp_path / "cache", **options)
    return treadle.compile(train, model=model, optimizer=optimizer, options=chosen)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    step, batch = made(tmp_path_factory.mktemp("measured")), torch.randn(129, 33)
    step(batch)
    step.profile(batch)
    step.measure(batch)
    return step


def test_a_summary_is_numbers(measured):
    found, compiled = measured.summary(), measured.compiled
    assert json.loads(json.dumps(dataclasses.asdict(found)))["name"] == "train"
    assert found.peak_predicted_bytes == compiled.artifact.peak_bytes
    assert found.peak_measured_bytes == compiled.measured_peak
    assert found.seconds == pytest.approx(sum(compiled.kernel_seconds))
    assert found.launches + found.library_calls + found.fallbacks == len(compiled.artifact.steps)
    assert found.compile_seconds == pytest.approx(sum(found.stages.values()))
    assert found.advice
    assert {each.name for each in found.phases} == {"forward", "backward", "optimizer"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.launches = 0


def test_explain_answers_why(measured):
    text = measured.explain()
    assert text.startswith("next\n")
    for words in (
        "estimate",
        "alive at the peak",
        "optimizer state",
        "loss = model(x)",
        "of the step",
    ):
        assert words in text
    assert "optimizer.step()" in text


def check_trace(path):
    data = json.loads(path.read_text())
    spans = [each for each in data["traceEvents"] if each["ph"] == "X"]
    for each in spans:
        assert {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} == set(each)
        assert each["dur"] >= 0
    tracks = {tid: [each for each in spans if each["tid"] == tid] for tid in (1, 2)}
    for track in tracks.values():
        ends = [each["ts"] + each["dur"] for each in track]
        starts = [each["ts"] for each in track]
        assert all(s >= e - 0.01 for s, e in zip(starts[1:], ends, strict=False))
    counters = [each for each in data["traceEvents"] if each["ph"] == "C"]
    assert all(isinstance(v, int) for each in counters for v in each["args"].values())
    return data, tracks, counters


def test_a_trace_has_kernels_phases_and_memory(measured, tmp_path):
    path = measured.trace(tmp_path / "new" / "trace.json")
    data, tracks, counters = check_trace(path)
    steps = measured.compiled.artifact.steps
    assert len(tracks[2]) == len(steps)
    assert len(counters) == len(steps) + 1
    total = 1e6 * sum(measured.compiled.kernel_seconds)
    assert sum(each["dur"] for each in tracks[2]) == pytest.approx(total, rel=1e-3)
    assert sum(each["dur"] for each in tracks[1]) == pytest.approx(total, rel=1e-3)
    assert {each["name"] for each in tracks[1]} == {"forward", "backward", "optimizer"}
    assert data["otherData"]["times"] == "measured one by one"
    line = measured.compiled.log.notes.timeline
    alive = max(sum(each["args"].values()) for each in counters)
    assert alive <= measured.compiled.artifact.peak_bytes
    assert sum(line.inputs) < alive


def test_what_was_not_measured_is_said(tmp_path):
    step = made(tmp_path)
    with pytest.raises(treadle.TreadleError, match="TR-003"):
        step.summary()
    step.prepare(torch.randn(9, 33))
    assert step.summary().seconds is None
    assert step.summary().peak_measured_bytes is None
    assert "not measured" in step.explain()
    data, _, _ = check_trace(step.trace(tmp_path / "trace.json"))
    assert "estimates" in data["otherData"]["times"]
    with pytest.raises(treadle.TreadleError, match="TR-004"):
        step.trace(tmp_path)


def test_what_cannot_be_faster_than_eager_is_said_first(tmp_path):
    step = made(tmp_path, codegen=False)
    step(torch.randn(9, 33))
    assert "at most as fast as eager" in step.summary().advice[0]


def test_fallbacks_are_said_with_their_line(tmp_path):
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = (model(x) * torch.special.bessel_j0(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    options = Options(cache_dir=tmp_path / "cache")
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    step(torch.randn(6, 6))
    (first, *_) = step.summary().advice
    assert "fallbacks take" in first
    assert "bessel_j0" in first
    assert "torch.special.bessel_j0(x)" in first
