"""The smallest peak over retention intervals: never above a plan's, and reached by some."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import treadle
from contract.contract_help import training
from passes.memory.traced_steps import perceptron, traced, transformer
from treadle.passes.memory.bound import PeakBound
from treadle.passes.memory.classify import classify
from treadle.passes.memory.rematerialise import extra_seconds, recompute
from treadle.passes.memory.simulate import timeline
from treadle.passes.memory.solvers import exact
from treadle.passes.memory.solvers.exact import retention_optimum
from treadle.targets.cpu import CPU_MODEL

WIDTH, ROWS = 16, 128
RECTANGLE = 4 * WIDTH * ROWS


def chain(layers: int):
    """Products alone."""

    def loss(*inputs):
        x = inputs[-1]
        for weight in inputs[:-1]:
            x = x @ weight
        return x.square().mean()

    parameters = [torch.randn(WIDTH, WIDTH) for _ in range(layers)]
    return traced(loss, parameters, [torch.randn(ROWS, WIDTH)])


def plan_of(bound: PeakBound, saved) -> tuple[float, int]:
    """Seconds and simulated peak of what keeps a set."""
    order = recompute(bound.facts, saved)
    seconds = bound.fused.once + extra_seconds(order, bound.fused.again)
    return seconds, timeline(order).peak_bytes


def checked(bound: PeakBound, saved) -> None:
    seconds, peak = plan_of(bound, saved)
    found = retention_optimum(bound, seconds)
    assert found is not None
    assert found.bound_bytes <= peak


STEPS = {
    "chain": lambda: chain(5),
    "stack": lambda: traced(*perceptron(layers=4, width=16, rows=64)),
    "attention": lambda: traced(*transformer(1, 16, 2, 2, 12)),
}


def drawn(bound: PeakBound, seed: int) -> set[int]:
    """Some of the values that can be kept."""
    draw = random.Random(seed)
    places, share = sorted(classify(bound.facts).candidates), draw.random()
    return {i for i in places if draw.random() < share}


@pytest.mark.parametrize("name", ["chain", "stack"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_set_of_kept_values_is_below(name, seed):
    bound = PeakBound.of(STEPS[name](), CPU_MODEL)
    checked(bound, drawn(bound, seed))


def test_no_set_of_an_attention_is_below():
    """One alone: each takes HiGHS seconds."""
    bound = PeakBound.of(STEPS["attention"](), CPU_MODEL)
    checked(bound, drawn(bound, seed=3))


def test_of_all_sets_of_a_chain_the_best_is_one_activation_above():
    """Between two calls the gradient of the loss is made, which no call counts."""
    bound = PeakBound.of(chain(6), CPU_MODEL)
    places = sorted(classify(bound.facts).candidates)
    sets = itertools.chain.from_iterable(
        itertools.combinations(places, n) for n in range(len(places) + 1)
    )
    plans = [plan_of(bound, saved) for saved in sets]
    times = sorted({seconds for seconds, _ in plans})
    for seconds in times[:: max(len(times) // 6, 1)]:
        best = min(peak for other, peak in plans if other <= seconds * (1 + 1e-9))
        found = retention_optimum(bound, seconds)
        assert found.is_optimal
        assert found.bound_bytes <= best <= found.bound_bytes + 1.3 * RECTANGLE
        assert found.bound_bytes >= bound.within(seconds)


def test_what_it_keeps_is_a_plan_of_that_time():
    bound = PeakBound.of(chain(6), CPU_MODEL)
    for share in (1.0, 1.08, 1.2):
        allowed = bound.fused.once * share
        found = retention_optimum(bound, allowed)
        seconds, peak = plan_of(bound, found.saved)
        assert peak >= found.bound_bytes
        assert seconds <= allowed * (1 + 1e-6)


def test_more_time_never_raises_it():
    bound = PeakBound.of(STEPS["stack"](), CPU_MODEL)
    times = [bound.fused.once * (1 + share / 10) for share in range(6)]
    found = [retention_optimum(bound, seconds).bound_bytes for seconds in times]
    assert all(b <= a * (1 + 2e-3) for a, b in itertools.pairwise(found))
    assert found[-1] < found[0]


def planned(**options):
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = training(lambda x: model(x).square().mean(), optimizer)
    return treadle.plan(train, torch.randn(512, 32), model=model, optimizer=optimizer, **options)


def test_a_plan_prints_it_beside_the_bound():
    found = planned(exact=True)
    for point in found.frontier():
        assert point.bound_bytes <= point.optimum_bytes <= point.peak_bytes
    assert any(point.bound_bytes < point.optimum_bytes for point in found.frontier())
    assert "optimum" in found.table()
    plain = planned()
    assert all(point.optimum_bytes is None for point in plain.frontier())
    assert "optimum" not in plain.table()


def test_a_large_step_is_refused(monkeypatch):
    monkeypatch.setattr(exact, "MOST_VARIABLES", 100)
    with pytest.raises(treadle.PlanError, match="too large for an exact answer") as refused:
        planned(exact=True)
    assert refused.value.code == "TR-208"


def test_the_command_line_prints_it(tmp_path, capsys):
    from treadle.tools.cli import main

    script = tmp_path / "job.py"
    script.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(8, 8, bias=False)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    def step(x):\n"
        "        loss = model(model(x)).square().mean()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        return loss.detach()\n"
        "    return step, model, optimizer, (torch.randn(64, 8),)\n"
    )
    out = tmp_path / "plan.json"
    main(["plan", f"{script}:make", "--exact", "--json", str(out)])
    assert "optimum" in capsys.readouterr().out
    assert json.loads(out.read_text())["points"][0]["optimum_bytes"] > 0
