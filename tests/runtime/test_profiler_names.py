"""Profiles of PyTorch's profiler name generated kernels; without one nothing is named."""

import pytest
import torch
from torch import nn

import treadle
from treadle import Options, Regions
from treadle.loop.origins import OriginSummary, profile_name
from treadle.loop.program import Origin
from treadle.runtime.kernels.launch_table import LaunchTable


class Sum(nn.Module):
    def forward(self, x):
        return x.square().sum()


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), Sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def make(**options):
        return treadle.compile(
            train, model=model, optimizer=optimizer, options=Options(cache_dir=tmp_path, **options)
        )

    return make


def names_of(call, *args):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(*args)
    return [event.name for event in profile.events()]


def test_each_launch_has_a_range_with_operations_and_module(trained):
    step = trained()
    x = torch.randn(4, 6)
    step(x)
    names = [name for name in names_of(step, x) if name.startswith("treadle_")]
    launches = sum(phase.launches for phase in step.summary().phases)
    assert len(names) == launches
    assert any("native_layer_norm" in name for name in names)
    assert any(" *: " in name for name in names)  # of layers 1 and 2
    assert any(" optimizer: " in name for name in names)
    assert names == [name for name in names_of(step, x) if name.startswith("treadle_")]


def test_numbers_are_those_without_a_profiler(trained):
    step = trained()
    other = trained()
    x = torch.randn(4, 6)
    before = step(x)
    with torch.profiler.profile():
        other(x)
    assert torch.isfinite(before)
    assert step.verify([(x,), (x,)]) is None


def test_without_a_profiler_launches_run_as_one(trained):
    step = trained()
    compiled = step.prepare(torch.randn(4, 6))
    step(torch.randn(4, 6))
    actions = compiled.executable.frame.actions
    alone = actions.program(0, len(actions.flat)).actions
    assert any(isinstance(action, LaunchTable) for action in alone)
    names_of(step, torch.randn(4, 6))
    assert actions.program(0, len(actions.flat)).actions is alone


def test_handles_of_regions_are_around_the_names(trained):
    step = trained(regions=Regions(show=lambda text: "the region"))
    x = torch.randn(4, 6)
    step(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(x)
    launches = [event for event in profile.events() if event.name.startswith("treadle_")]
    assert launches
    assert {event.cpu_parent.name for event in launches if event.cpu_parent} == {"the region"}


def test_a_saved_step_names_its_kernels(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), Sum())

    def forward(x):
        return model(x)

    x = torch.randn(4, 6)
    step = treadle.compile(forward, model=model, options=Options(cache_dir=tmp_path))
    step(x)
    step.save(tmp_path / "step.treadle")
    again = treadle.load(tmp_path / "step.treadle", forward, model=model)
    again(x)
    ours = [[name for name in names_of(s, x) if name.startswith("treadle_")] for s in (step, again)]
    assert ours[0]
    assert ours[0] == ours[1]


def test_each_round_of_a_loop_names_its_kernels(tmp_path):
    model = nn.Linear(5, 5)

    def grown(x):
        (h,) = torch.while_loop(
            lambda h: h.sum() < 100, lambda h: ((h * 2).sin() + h.exp(),), (model(x),)
        )
        return h.sum()

    step = treadle.compile(grown, model=model, options=Options(cache_dir=tmp_path))
    x = torch.rand(5)
    step(x)
    names = names_of(step, x)
    assert "treadle.while_loop.default" in names
    assert any("sin" in name and name.startswith("treadle_") for name in names)


def origin(node, operation, phase="forward", module="", where=""):
    return Origin((node,), where, module, phase, None, operation)


def test_a_summary_counts_each_node_once():
    origins = [
        origin("mul", "mul.Tensor", module="blocks.0"),
        origin("mul", "mul.Tensor", module="blocks.0"),
        origin("mul_1", "mul.Tensor", "backward", "blocks.1", "there"),
        origin("add", "", "backward", "blocks.1", "there"),
        origin("exp", "exp", "backward", "blocks.1", "there"),
    ]
    found = OriginSummary.of(origins)
    assert found == OriginSummary(
        ("mul.Tensor", "mul.Tensor", "add", "exp"), "backward", "blocks.1", "there"
    )


def test_the_name_of_a_launch_lists_its_layers():
    def kernel(layer):
        return [origin("m", "mul.Tensor", module=layer), origin("n", "mul.Tensor", module=layer)]

    same = [kernel(f"blocks.{at}.mlp") for at in range(3)]
    assert profile_name("f", same) == "f forward blocks.*.mlp: mul.Tensor ×2"
    different = [kernel(name) for name in "abcd"]
    assert profile_name("f", different) == "f forward a, b, c, ...: mul.Tensor ×2"
    assert profile_name("f", []) == "f"
