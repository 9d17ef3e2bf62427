"""With the garbage collector off, as long training runs have it: no cycle holds a tensor of
treadle's after the call, so that peaks are those promised. The batches of compiles may be held."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from sized_models import autocast_training

BATCHES = []


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.cells(x)[0])


def plain():
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 8))


def trained(model, dtype=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, autocast_training(model, optimizer, F.mse_loss, dtype)


def compiled(model, dtype=None, **options):
    optimizer, step = trained(model, dtype)
    return treadle.compile(step, model=model, optimizer=optimizer, **options)


def batch(*shape):
    BATCHES.extend(torch.randn(*shape) for _ in range(2))
    return BATCHES[-2:]


def one_size(**options):
    step = compiled(plain(), **options)
    for _ in range(4):
        step(*batch(5, 8))
    return step


def many_sizes():
    step = compiled(plain())
    for rows in (5, 3, 7, 1, 3):
        step(*batch(rows, 8))
    return step


def recurrent():
    step = compiled(Recurrent())
    for _ in range(3):
        step(*batch(3, 4, 8))
    return step


def autocast():
    step = compiled(plain(), torch.bfloat16)
    for _ in range(3):
        step(*batch(3, 8))
    return step


def backend():
    model = plain()
    optimizer, _ = trained(model)
    forward = torch.compile(model, backend="treadle")
    for _ in range(3):
        forward(batch(3, 8)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return forward


@pytest.mark.parametrize(
    "make",
    [one_size, lambda: one_size(memory=0.5), many_sizes, recurrent, autocast, backend],
    ids=["plain", "budget", "sizes", "recurrent", "autocast", "backend"],
)
def test_no_cycle_holds_memory(make):
    gc.collect()
    gc.disable()
    try:
        step = make()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        held = [each for each in gc.garbage if type(each) in (torch.Tensor, nn.Parameter)]
        large = [each for each in held if each.device.type == "cpu" and each.numel() > 1]
        large = [each for each in large if all(each is not batch for batch in BATCHES)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        BATCHES.clear()
    assert not large, [(tuple(each.shape), each.dtype) for each in large]
    del step
