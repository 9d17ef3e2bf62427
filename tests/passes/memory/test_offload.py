"""Values on the host between two uses: which ones, the graph of the choice, and its numbers."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from passes.memory.traced_steps import (
    by_simulation,
    perceptron,
    random_loss,
    traced,
    transformer,
)
from residual_net import residual_step
from testing import check_numbers, refusal, show_plain, trace
from treadle.compiler.memory import planned as planned_kernels
from treadle.compiler.target import Target
from treadle.graph.analysis.execute import run_step
from treadle.graph.custom_ops.incoming import incoming_gradient
from treadle.graph.rewrite.passes import run_passes
from treadle.loop.program import Call
from treadle.passes import registered
from treadle.passes.memory import offload
from treadle.passes.memory.apply import passes_of, require_same
from treadle.passes.memory.choose import plan_memory
from treadle.passes.memory.offload import OffloadedValue, offloaded_plans
from treadle.passes.memory.order import as_traced, facts_of
from treadle.passes.memory.search import candidates
from treadle.passes.memory.simulate import lifetimes_of, timeline
from treadle.runtime.store.artifact import CallStep
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import H200
from treadle.util.errors import PlanError
from treadle.util.sizes import Budget

OFFLOAD = treadle.Planner(offload=True)
LINK = 1e12
SECOND = 1e-6  # of each operation: a megabyte of the link


@pytest.fixture(autouse=True)
def small_values(monkeypatch):
    monkeypatch.setattr(offload, "_LEAST", 64)


def plans_of(step, link=LINK):
    order = as_traced(facts_of(step))
    return list(offloaded_plans(order, [SECOND] * len(order.origin), link))


def test_a_value_waits_on_the_host():
    def step(x, w):
        a = torch.tanh(x @ w)
        b = torch.sin(a @ w) @ w
        return torch.cos(b @ w) @ w @ a

    inputs = torch.randn(8, 8), torch.randn(8, 8)
    graph = trace(step, *inputs)
    targets = [str(node.target) for node in graph.graph.nodes]
    value, last = targets.index("aten.tanh.default"), len(targets) - 2
    offload.offload(graph, [OffloadedValue(value, value + 3, last - 1, last, (last,))])
    assert show_plain(graph) == OFFLOADED
    check_numbers(graph, step, inputs)


OFFLOADED = """\
x: f32[8, 8]
w: f32[8, 8]
mm: f32[8, 8] = mm(x, w)
tanh: f32[8, 8] = tanh(mm)
treadle: f32[8, 8] = treadle.to_host(tanh)
mm.1: f32[8, 8] = mm(tanh, w)
sin: f32[8, 8] = sin(mm.1)
treadle.1: f32[8, 8] = treadle.arrived(treadle, tanh)
mm.2: f32[8, 8] = mm(sin, w)
mm.3: f32[8, 8] = mm(mm.2, w)
cos: f32[8, 8] = cos(mm.3)
treadle.2: f32[8, 8] = treadle.from_host(treadle.1, cpu)
mm.4: f32[8, 8] = mm(cos, w)
treadle.3: f32[8, 8] = treadle.arrived(treadle.2, treadle.1)
mm.5: f32[8, 8] = mm(mm.4, treadle.3)
return [mm.5]"""


@given(seed=st.integers(0, 10_000), count=st.integers(4, 24))
@settings(max_examples=40, deadline=None)
def test_random_steps_have_the_same_numbers(seed, count):
    torch.manual_seed(seed)
    w, x = torch.randn(6, 6), torch.randn(9, 6)
    step = traced(random_loss(seed, count), [w], [x])
    state = torch.get_rng_state()
    expected = run_step(step, [w, x])
    for plan in plans_of(step)[-1:]:
        made = step.copy()
        assert offload.offload(made, plan.values) == len(plan.values)
        run_passes(made, ())  # which verifies it
        torch.set_rng_state(state)
        for mine, other in zip(run_step(made, [w, x]), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_each_plan_is_smaller_and_none_waits_where_the_link_has_time():
    loss, parameters, batch = perceptron(layers=6, width=32, rows=64)
    order = as_traced(facts_of(traced(loss, parameters, batch)))
    whole = max(lifetimes_of(order).alive())
    seconds = [SECOND] * len(order.origin)
    plans = [plan for plan in offloaded_plans(order, seconds, LINK) if not plan.waiting]
    assert plans
    assert min(plan.peak_bytes for plan in plans) < 0.9 * whole
    for plan in plans:
        assert all(each.left < each.called <= each.needed for each in plan.values)


def test_a_slow_link_makes_compute_wait():
    loss, parameters, batch = perceptron(layers=6, width=32, rows=64)
    order = as_traced(facts_of(traced(loss, parameters, batch)))
    seconds = [SECOND] * len(order.origin)
    fast, slow = (
        min(plan.peak_bytes for plan in offloaded_plans(order, seconds, link) if not plan.waiting)
        for link in (LINK, LINK / 500)
    )
    assert slow > fast
    assert any(plan.waiting > 0 for plan in offloaded_plans(order, seconds, LINK / 500))


def test_nothing_goes_where_there_is_no_time():
    loss, parameters, batch = perceptron(layers=6, width=32, rows=64)
    assert plans_of(traced(loss, parameters, batch), link=1.0) == []


def test_the_passes_of_every_candidate_make_what_is_judged():
    loss, parameters, batch = transformer(layers=2, width=32, heads=2, batch=4, length=16)
    step = traced(loss, parameters, batch)
    device = replace(H200, host_link=1e14)
    found = [each for each in candidates(step, device, OFFLOAD) if each.offloaded]
    assert found
    for each in found:
        made = step.copy()
        run_passes(made, passes_of(step, each))
        require_same(made, each.step)
        assert show_plain(made) == show_plain(each.step)


def planned(planner, memory=None):
    step, net, optimizer = residual_step(1024, 8, "meta")
    options = treadle.Options(planner=planner, memory=memory)
    x = torch.randn(65536, 1024, device="meta")
    return treadle.plan(step, x, model=net, optimizer=optimizer, device="h200", options=options)


def test_budgets_are_met_sooner_with_values_on_the_host(monkeypatch):
    """Exact peaks: of the kernels, with a block of the host beside the arena."""
    monkeypatch.undo()
    plain, away = planned(treadle.Planner()), planned(OFFLOAD)
    least = plain.frontier()[-1].peak_bytes
    assert away.frontier()[-1].peak_bytes < least
    within = planned(OFFLOAD, least)
    assert within.fits
    assert within.peak_bytes <= least
    assert within.step_ms < plain.frontier()[-1].step_ms
    assert all(point.bound_bytes <= point.peak_bytes for point in away.frontier())
    assert (away.peak_bytes, away.step_ms) == (plain.peak_bytes, plain.step_ms)  # no budget


@pytest.mark.parametrize("planner", [treadle.Planner(), OFFLOAD])
def test_what_fits_nowhere_is_told_with_what_is_left_to_try(planner):
    loss, parameters, batch = perceptron(layers=6, width=64, rows=256)
    step = traced(loss, parameters, batch)
    with pytest.raises(PlanError) as refused:
        plan_memory(step, Budget(100), H200, by_simulation, planner)
    assert ("offload=True" in refused.value.remedy) is not planner.offload
    with pytest.raises(PlanError) as refused:
        plan_memory(step, Budget(100), CPU_MODEL, by_simulation, planner)
    assert "offload" not in refused.value.remedy


def test_a_simulated_peak_is_that_of_the_graph_with_copies():
    loss, parameters, batch = perceptron(layers=6, width=64, rows=256)
    step = traced(loss, parameters, batch)
    for plan in plans_of(step):
        made = step.copy()
        offload.offload(made, plan.values)
        found = timeline(as_traced(facts_of(made))).peak_bytes
        assert found == pytest.approx(plan.peak_bytes, rel=0.02)


def test_waits_keep_their_place_among_the_kernels(monkeypatch):
    """They free what they wait for, which the order of kernels would do as soon as it can."""
    monkeypatch.undo()
    loss, parameters, batch = perceptron(layers=8, width=512, rows=2048)
    step = traced(loss, parameters, batch)
    (plan, *_) = plans_of(step)[::-1]
    offload.offload(step, plan.values)
    found = planned_kernels(step, Target("cuda", treadle.Options(), like="h200")).plan
    assert 0 < found.host_bytes <= plan.nbytes
    calls = {at: each for at, each in enumerate(found.steps) if isinstance(each, Call)}
    starts = {
        each.outputs[0]: at for at, each in calls.items() if each.op == "treadle.to_host.default"
    }
    assert len(starts) == len(plan.values)
    waits = {each.refs[0].buffer: at for at, each in calls.items() if each.is_wait}
    assert all(waits[name] > at + 1 for name, at in starts.items())
    on_host = [name for name, each in found.buffers.items() if found.is_elsewhere(each)]
    assert len(on_host) == 2 * len(starts)
    assert all(name in found.offsets for name in on_host)


def test_a_step_on_the_host_has_nowhere_to_put_values(tmp_path):
    step, net, optimizer = residual_step(64, 6)
    options = treadle.Options(memory=0.0, planner=OFFLOAD, cache_dir=tmp_path)
    compiled = treadle.compile(step, model=net, optimizer=optimizer, options=options)
    x = torch.randn(32, 64)
    compiled(x)
    assert "to_host" not in compiled.graph("planned")
    assert compiled.summary().planner == "offload=true"


@dataclass(frozen=True)
class Away(treadle.GraphPass):
    """Puts on the host whatever has the time."""

    def run(self, step: treadle.StepGraph) -> int:
        plans = plans_of(step)
        return offload.offload(step, plans[-1].values) if plans else 0


def test_copies_run_as_steps_of_an_artifact(tmp_path, monkeypatch):
    """On the host, where they are copies there."""
    monkeypatch.setattr(registered, "_passes", [])
    step, net, optimizer = residual_step(64, 6)
    expected, twin, _ = residual_step(64, 6)
    treadle.register_pass(Away(), stage="plan memory")
    options = treadle.Options(cache_dir=tmp_path)
    compiled = treadle.compile(step, model=net, optimizer=optimizer, options=options)
    for _ in range(3):
        x = torch.randn(32, 64)
        torch.testing.assert_close(compiled(x), expected(x))
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    ops = ops_of(compiled.prepare(x))
    assert ops.count("treadle.to_host.default") == ops.count("treadle.from_host.default") > 2
    assert ops.count("treadle.arrived.default") == 2 * ops.count("treadle.to_host.default")


def ops_of(compiled):
    return [each.op for each in compiled.artifact.steps if isinstance(each, CallStep)]


def test_copies_of_many_sizes_and_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(registered, "_passes", [])
    step, net, optimizer = residual_step(64, 6)
    expected, twin, _ = residual_step(64, 6)
    treadle.register_pass(Away(), stage="plan memory")
    options = treadle.Options(cache_dir=tmp_path)
    compiled = treadle.compile(step, model=net, optimizer=optimizer, options=options)
    for rows in (32, 33, 47, 1, 101):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x), expected(x))
    assert "treadle.to_host.default" in ops_of(compiled.prepare(x))
    compiled.save(tmp_path / "step.treadle")
    loaded = treadle.load(tmp_path / "step.treadle", step, model=net, optimizer=optimizer)
    for _ in range(2):
        x = torch.randn(101, 64)
        torch.testing.assert_close(loaded(x), expected(x))
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_step_that_stops_for_gradients_keeps_its_values_on_the_device():
    """As those of the backend: it is recorded in two parts."""
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(256, 64)

    def both(w, x):
        y = torch.tanh(x @ w).sin() @ w
        g = incoming_gradient([y], 0, list(y.shape), list(y.stride()), y.dtype)
        return (y, x.t() @ g)

    step = trace(both, w.detach(), x)
    assert not offload.may_offload(step, H200)
    assert not any(each.offloaded for each in candidates(step, H200, OFFLOAD))
    assert offload.may_offload(trace(lambda w, x: x @ w, w.detach(), x), H200)
    assert not offload.may_offload(trace(lambda w, x: x @ w, w.detach(), x), CPU_MODEL)


@pytest.mark.parametrize("wrong", ["activations", 1, None])
def test_offload_is_a_bool(wrong):
    assert f"offload={wrong!r}" in refusal(lambda: treadle.Planner(offload=wrong))


def test_the_text_of_a_planner_says_it():
    assert treadle.Planner.of(OFFLOAD.text) == OFFLOAD
    assert OFFLOAD.words == "offload=true"
