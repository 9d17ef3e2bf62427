"""Other schedules for one kernel: each gives the same numbers, and the fastest is remembered."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.compiler import tune
from treadle.loop.kernel import KernelSchedule, LoopForm
from treadle.options import from_environment

pytestmark = pytest.mark.users_flags  # kernels run often, and faster than they compile

ROWS, WIDTH = 1031, 517


class Norms(nn.Module):
    """A norm over rows, its gradient over columns, and something expensive that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(torch.tanh(self.norm(x)), -1).pow(2).mean()


def trained(tmp_path, seconds, **options):
    """The parameters after a step, and the schedules that were tried."""
    tried: list[KernelSchedule] = []

    def measured(self, kernel):
        tried.append(kernel.scheduled)
        return seconds(kernel, real(self, kernel))

    real = tune.Tuner._seconds
    with pytest.MonkeyPatch.context() as patch:
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


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """What several tests look at: ``"plain"``, and ``"last"``, where the last schedule that is
    tried is the fastest; and the folder of the cache that knows it."""

    @functools.cache  # not a fixture's value: flags of compilers are set for each test
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "plain":
            return *trained(folder, as_measured), folder
        return *trained(folder, the_last_is_fastest(), tune=True), folder

    return made


def check_tuned(expected, found, tried, compiled):
    assert any(how.kept for how in tried)
    assert any(how.form is LoopForm.LOOPED and not how.kept for how in tried)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert "tune" in compiled.compiled.seconds


def test_another_schedule_gives_the_same_numbers(once, tmp_path):
    expected, none, *_ = once("plain")
    assert not none
    check_tuned(expected, *trained(tmp_path, as_measured, tune=True))


def test_the_last_schedule_gives_the_same_numbers(once):
    expected, *_ = once("plain")
    *found, _ = once("last")
    check_tuned(expected, *found)


def test_what_was_found_is_remembered_on_this_machine(once):
    first, tried, one, folder = once("last")
    again, none, two = trained(folder, as_measured, tune=True, memory=1.0)
    assert tried
    assert not two.compiled.from_cache
    assert not none
    assert two.graph("sources") == one.graph("sources")
    assert all(map(torch.equal, first, again))


def test_small_kernels_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "_WORTH", 1 << 40)
    _, tried, _ = trained(tmp_path, as_measured, tune=True)
    assert not tried
