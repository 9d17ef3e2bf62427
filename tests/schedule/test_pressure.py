"""Fewer kernels are not paid for with memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import treadle
from schedule.steps import Builder
from treadle.loop.expr import ReduceKind
from treadle.loop.kernel import Kernel
from treadle.runtime.meter import measure_peak
from treadle.schedule import pressure, schedule
from treadle.schedule.workers import PROGRAMS, THREADS


def rounds(count: int, rows: int):
    """``count`` times a product, a function of it, its sum over the rows; and the sum of those."""
    b = Builder()
    weight, total = b.input(64, 64), None
    for _ in range(count):
        hidden = b.pointwise("tanh", b.mm(b.input(rows, 64), weight))
        back = b.pointwise("mul", b.mm(hidden, weight), hidden)
        found = b.reduce(ReduceKind.SUM, back, [0])
        total = found if total is None else b.pointwise("add", total, found)
    return b.program(total)


@pytest.mark.parametrize("workers", [THREADS, PROGRAMS])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_large_rounds_do_not_wait_for_each_other(count, workers):
    one, several = (schedule(rounds(n, 4096), workers=workers) for n in (1, count))
    inputs = (count - 1) * 4096 * 64 * 4
    assert several.peak_bytes - one.peak_bytes < inputs + pressure.LITTLE


def test_small_rounds_are_one_kernel():
    kernels = [each for each in schedule(rounds(4, 16)).steps if isinstance(each, Kernel)]
    assert len(kernels) == 5  # four before the second product, one of all the rest


def _trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x, y):
        total = x.new_zeros(())  # what adds to it may wait, but nothing for it
        for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(part), labels) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return model, optimizer, step


def test_gradients_that_accumulate_take_eagers_memory():
    x, y = torch.randn(8192, 256), torch.randint(3, (8192,))
    model, optimizer, step = _trained()
    step(x, y)
    held = [x, y, *model.parameters()]
    held += [each for state in optimizer.state.values() for each in state.values()]
    eager = measure_peak(lambda: step(x, y), held).peak_bytes
    model, optimizer, step = _trained()
    ours = treadle.compile(step, model=model, optimizer=optimizer)
    ours(x, y)
    assert ours.measure(x, y).peak_bytes <= eager + pressure.LITTLE
