"""Other schedules for one kernel: each gives the same numbers, and the fastest is remembered."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.compiler import tune
from treadle.loop.kernel import KernelSchedule, LoopForm
from treadle.options import from_environment

ROWS, WIDTH = 1031, 517


class Norms(nn.Module):
    """A norm over rows, its gradient over columns, and something expensive that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(torch.tanh(self.norm(x)), -1).pow(2).mean()


def trained(tmp_path, seconds, monkeypatch, **options):
    """The parameters after a step, and the schedules that were tried."""
    tried: list[KernelSchedule] = []

    def measured(self, kernel):
        tried.append(kernel.scheduled)
        return seconds(kernel, real(self, kernel))

    real = tune.Tuner._seconds
    with monkeypatch.context() as patch:
        patch.setattr(tune.Tuner, "_seconds", measured)
        torch.manual_seed(0)
        model = Norms()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        chosen = replace(from_environment(), cache_dir=tmp_path, **options)
        compiled = treadle.compile(step, model=model, optimizer=optimizer, options=chosen)
        compiled(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)))
    return [each.detach().clone() for each in model.parameters()], tried, compiled


def as_measured(kernel, seconds):
    return seconds


def the_last_is_fastest():
    count = iter(range(1, 1000))
    return lambda kernel, seconds: 1.0 / next(count)


@pytest.mark.parametrize("seconds", [as_measured, the_last_is_fastest()], ids=["real", "last"])
def test_another_schedule_gives_the_same_numbers(seconds, tmp_path, monkeypatch):
    expected, none, _ = trained(tmp_path / "plain", as_measured, monkeypatch)
    found, tried, compiled = trained(tmp_path, seconds, monkeypatch, tune=True)
    assert not none
    assert any(how.kept for how in tried)
    assert any(how.form is LoopForm.LOOPED and not how.kept for how in tried)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert "tune" in compiled.compiled.seconds


def test_what_was_found_is_remembered_on_this_machine(tmp_path, monkeypatch):
    first, tried, one = trained(tmp_path, the_last_is_fastest(), monkeypatch, tune=True)
    again, none, two = trained(tmp_path, as_measured, monkeypatch, tune=True, memory=1.0)
    assert tried
    assert not two.compiled.from_cache
    assert not none
    assert two.graph("sources") == one.graph("sources")
    assert all(map(torch.equal, first, again))


def test_small_kernels_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "_WORTH", 1 << 40)
    _, tried, _ = trained(tmp_path, as_measured, monkeypatch, tune=True)
    assert not tried
