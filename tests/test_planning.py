"""``treadle.plan``: predictions without running, without memory, for hardware that is not there."""

import copy
import itertools
import tracemalloc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import treadle
from treadle.compiler import memory
from treadle.options import Options


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.a, self.norm = nn.Linear(16, width), nn.LayerNorm(width)
        self.b, self.out = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        h = F.gelu(self.norm(self.a(x)))
        return self.out(F.dropout(F.gelu(self.b(h)), 0.1, self.training))


def make(cast=None, **sizes):
    model = Net(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())  # held by the user's own code

    def step(x, y):
        with torch.autocast(cast or "cpu", torch.bfloat16, enabled=cast is not None):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer


def batch(n=256):
    return torch.randn(n, 16), torch.randint(3, (n,))


def planned(made, given, **options):
    step, model, optimizer = made
    return treadle.plan(step, *given, model=model, optimizer=optimizer, **options)


def test_the_plan_of_a_step_is_what_compile_makes_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    made, given = make(), batch()
    result = planned(made, given)
    step = treadle.compile(made[0], model=made[1], optimizer=made[2])
    assert step.prepare(*given).artifact.peak_bytes == result.peak_bytes
    assert result.fits
    assert result.limit is None
    assert result.device == "cpu"
    assert result.step_ms > 0


def test_a_step_that_has_been_trained_can_be_planned():
    made, given = make(), batch()
    made[0](*given)
    assert planned(made, given).peak_bytes == planned(make(), given).peak_bytes


@pytest.fixture(scope="module")
def points():
    return planned(make(width=256), batch(2048)).frontier()


def test_the_frontier_goes_from_fast_to_small(points):
    assert len(points) > 1
    for fast, small in itertools.pairwise(points):
        assert fast.peak_bytes > small.peak_bytes
        assert fast.step_ms <= small.step_ms


def test_a_budget_chooses_the_fastest_plan_within_it(points):
    made, given = make(width=256), batch(2048)
    for point in points:
        result = planned(made, given, memory=point.peak_bytes)
        assert (result.fits, result.peak_bytes) == (True, point.peak_bytes)
    result = planned(made, given, memory="1KiB")
    assert not result.fits
    assert result.peak_bytes == points[-1].peak_bytes
    assert result.table().startswith("does not fit 1.00 KiB on cpu")


@pytest.mark.parametrize(("device", "workers"), [("h200", "programs"), ("cpu", "threads")])
def test_hardware_that_is_not_there_is_planned_with_its_own_kernels(monkeypatch, device, workers):
    monkeypatch.setenv("TREADLE_TARGET", "cpu")
    seen = set()

    def watched(step, target, known=None):
        seen.add(target.record.workers)
        return exact(step, target, known)

    exact = memory.planned
    monkeypatch.setattr(memory, "planned", watched)
    planned(make(), batch(), device=device)
    assert seen == {workers}


def test_planning_changes_nothing():
    made, given = make(), batch()
    _, model, optimizer = made
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    planned(made, given, memory="1GiB")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    made[0](*given)  # and eager still works


def on_meta(**sizes):
    with torch.device("meta"):
        return make(**sizes), batch()


def on_fake(**sizes):
    with FakeTensorMode():
        return make(**sizes), batch()


def fake_model_real_batch(**sizes):
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = make(**sizes)
    return made, batch()


def fake_elsewhere(**sizes):
    """Fake tensors that say they are on another device than the one that is planned for."""
    with FakeTensorMode(), torch.device("meta"):
        return make(**sizes), batch()


@pytest.fixture(scope="module")
def real():
    """The plan of a model that has memory."""
    return planned(make(), batch(), device="h200")


@pytest.mark.parametrize("build", [on_meta, on_fake, fake_model_real_batch, fake_elsewhere])
def test_a_model_without_memory_plans_the_same(build, real):
    made, given = build()
    assert planned(made, given, device="h200").points == real.points


def test_a_model_that_does_not_fit_this_machine_can_be_planned():
    made, given = on_meta(width=1 << 17)  # 64 GiB of parameters alone
    tracemalloc.start()
    result = planned(made, given, device="h100")
    assert tracemalloc.get_traced_memory()[1] < 1 << 30
    tracemalloc.stop()
    assert result.peak_bytes > 3 * (4 << 34)
    assert not result.fits
    assert result.limit == 79 << 30


@pytest.mark.parametrize("device", ["cpu", "h200", "H100", "a100", "rtx4090"])
def test_hardware_is_a_description(device):
    result = planned(make(), batch(), device=device)
    assert result.device == device.lower()
    assert result.table().splitlines()[0].startswith("fits")


def test_faster_hardware_is_faster():
    made, given = make(width=512), batch(4096)
    times = [planned(made, given, device=name).step_ms for name in ("cpu", "rtx4090", "a100")]
    assert times[0] > 10 * times[1] > 10 * times[2] / 2
    assert planned(made, given, device="h200").step_ms < times[2]


def test_autocast_of_a_gpu_is_planned_as_such():
    """On a machine without one, too: half the bytes for what autocast halves."""
    cast = planned(make(cast="cuda", width=256), batch(4096), device="a100")
    plain = planned(make(width=256), batch(4096), device="a100")
    assert cast.peak_bytes < 0.8 * plain.peak_bytes
    assert torch.autocast("cpu", torch.bfloat16).device == "cpu"  # as it was


def test_unknown_hardware_is_refused():
    with pytest.raises(treadle.PlanError, match="TR-204") as caught:
        planned(make(), batch(), device="abacus")
    assert caught.value.remedy == "use one of cpu, h200, h100, a100, rtx4090"


def test_a_function_without_an_optimizer_can_be_planned():
    model = nn.Linear(8, 3)
    found = treadle.plan(lambda x: model(x).sum(), torch.randn(4, 8), model=model)
    assert found.fits
    assert "< 0.001 ms" in found.table()


@pytest.mark.parametrize("build", [on_meta, on_fake])
def test_what_has_no_values_cannot_be_trained(build, tmp_path):
    (step, model, optimizer), _ = build()
    options = Options(cache_dir=tmp_path)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    with pytest.raises(treadle.CaptureError, match="TR-111") as caught:
        compiled(*batch())
    assert "treadle.plan" in caught.value.remedy
