"""What the device that is here reaches: measured once, kept, and asked for in every plan."""

import json
from dataclasses import replace

import pytest
import torch

from testing import trace
from treadle.compiler.measured import ceilings as kept
from treadle.compiler.measured.ceilings import ceilings
from treadle.compiler.request import request_of
from treadle.options import from_environment
from treadle.runtime.kernels.build import Build
from treadle.runtime.machine import machine
from treadle.runtime.store.cache import Cache
from treadle.targets import measure
from treadle.targets.cpu import CPU
from treadle.targets.measure import from_words, measured, to_words
from treadle.targets.registry import add_target


def test_ceilings_are_those_of_some_machine():
    model = measured(CPU, torch.device("cpu"))
    assert 1e6 < min(model.flops.values()) <= max(model.flops.values()) < 1e14
    assert 1e7 < model.bandwidth < 1e13
    assert 0.0 <= model.element < 1e-5
    assert (model.reserve, model.blocks) == (CPU.model.reserve, CPU.model.blocks)


@pytest.mark.parametrize("value", [1.0, 1.01, 3e12, 7.9e14, 1e-9])
def test_ceilings_are_rounded_up_by_a_fifth_at_most(value):
    assert value <= measure.rounded_up(value) <= 1.2 * value
    assert measure.rounded_up(measure.rounded_up(value)) == pytest.approx(measure.rounded_up(value))


def test_words_lose_nothing():
    model = measured(CPU, torch.device("cpu"))
    assert from_words(json.loads(json.dumps(to_words(model))), CPU.model) == model


def test_a_machine_is_measured_once(tmp_path, monkeypatch):
    calls = []

    def counted(target, device):
        calls.append(device)
        return measured(target, device)

    monkeypatch.setattr(kept, "measured", counted)
    cache = Cache(tmp_path)
    here = machine(torch.device("cpu"), {}, "")
    first = ceilings(CPU, "cpu", cache, here)
    assert ceilings(CPU, "cpu", Cache(tmp_path), here) == first
    assert len(calls) == 1
    ceilings(CPU, "cpu", cache, replace(here, threads=here.threads + 1))
    assert len(calls) == 2


def a_step():
    return trace(lambda x: x + 1, torch.randn(3))


def test_plans_ask_for_what_was_measured(tmp_path, monkeypatch):
    faster = replace(CPU.model, bandwidth=123e9)
    monkeypatch.setattr(kept, "measured", lambda target, device: faster)
    add_target(replace(CPU, name="far", on_host=False))
    options = replace(from_environment(), measure=True, target="far", cache_dir=tmp_path)
    cache = Cache(tmp_path)

    def requested(**changes):
        chosen = replace(options, **changes)
        return request_of(a_step(), "cpu", chosen, Build.without_compiler(), cache=cache)

    assert requested().target.hardware == faster
    assert "123000000000" in requested().facts["ceilings"]
    assert requested(measure=False).target.hardware == CPU.model
    assert requested(target="").target.hardware == CPU.model, "a CPU has other work"
    assert requested().facts["ceilings"] != requested(measure=False).facts["ceilings"]


def test_without_room_the_described_model_serves(tmp_path, monkeypatch):
    def full(target, device):
        raise torch.OutOfMemoryError("no room")

    here = machine(torch.device("cpu"), {}, "")
    monkeypatch.setattr(kept, "measured", full)
    assert ceilings(CPU, "cpu", Cache(tmp_path), here) == CPU.model
    monkeypatch.undo()
    assert ceilings(CPU, "cpu", Cache(tmp_path), here).flops != CPU.model.flops, "measured later"


def test_another_way_to_compute_is_measured_anew(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(kept, "measured", lambda *given: calls.append(given) or CPU.model)
    for precision in ("highest", "high", "highest"):
        here = machine(torch.device("cpu"), {"float32_matmul_precision": precision}, "")
        ceilings(CPU, "cpu", Cache(tmp_path), here)
    assert len(calls) == 2
