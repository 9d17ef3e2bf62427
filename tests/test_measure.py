"""``Step.measure``: the peak of a step, and of nothing else."""

import pytest
import torch
from torch import nn

import treadle
from treadle import Options


def made(tmp_path, **options):
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    chosen = Options(cache_dir=tmp_path, **options)
    return treadle.compile(train, model=model, optimizer=optimizer, options=chosen)


@pytest.mark.parametrize("options", [{}, {"memory": "1GiB"}, {"codegen": False}])
def test_a_first_run_is_measured_without_what_is_kept_to_undo_it(tmp_path, options):
    step, batch = made(tmp_path, **options), torch.randn(129, 33)
    first = step.measure(batch).peak_bytes
    again = step.measure(batch).peak_bytes
    assert again == step.compiled.measured_peak
    assert abs(first - again) <= 64  # a counter or two
    assert abs(first / step.compiled.artifact.peak_bytes - 1) <= 0.05


def test_measuring_and_profiling_take_update_as_a_call_does(tmp_path):
    step, batch = made(tmp_path), torch.randn(5, 33)
    for run in (step.measure, step.profile, step):
        before = [each.detach().clone() for each in step._step.models[""].parameters()]
        run(batch, update=False)
        after = step._step.models[""].parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_numbers_that_a_step_returns_are_read_without_more_memory(tmp_path):
    def figures(x):
        y = x * 2
        return y, y[0].item(), y.min().item(), int(y.argmax()), y.max().item()

    step = treadle.compile(figures, model=nn.Identity(), options=Options(cache_dir=tmp_path))
    x = torch.randn(1000)
    (y, *numbers), (expected, *others) = step(x), figures(x)
    torch.testing.assert_close(y, expected)
    assert numbers == others
    assert list(map(type, numbers)) == list(map(type, others))
    measured = step.measure(x)
    assert measured.peak_bytes <= measured.after_bytes + 3 * 4 + 8  # the numbers themselves
