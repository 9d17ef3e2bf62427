"""On a real GPU: activations on the host between their uses, beside the step's own work."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.options import Options

OFFLOAD = treadle.Planner(offload=True)
CUBLAS = 8 << 20
"""Bytes that eager's products made cuBLAS allocate in this process, beside what a step needs."""


class Net(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return x.square().mean()


def step_of(width, layers, options):
    torch.manual_seed(0)
    net = Net(width, layers).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train(x):
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if options is None:
        return train, net
    return treadle.compile(train, model=net, optimizer=optimizer, options=options), net


def copies(step, x):
    steps = step.prepare(x).artifact.steps
    return sum(getattr(each, "op", "") == "treadle.to_host.default" for each in steps)


def smallest_without(width, layers, x, cache):
    step, _ = step_of(width, layers, Options(memory=0.0, cache_dir=cache))
    least = step.prepare(x).artifact.peak_bytes
    del step
    gc.collect()
    return least


@pytest.mark.parametrize("rows", [32768, 32771])
def test_less_memory_than_any_plan_that_only_computes_again(rows, tmp_path):
    width, layers = 1024, 8
    x = torch.randn(rows, width, device="cuda")
    least = smallest_without(width, layers, x, tmp_path)
    options = Options(memory=int(0.95 * least), planner=OFFLOAD, cache_dir=tmp_path)
    step, net = step_of(width, layers, options)
    expected, twin = step_of(width, layers, None)
    for _ in range(4):
        x = torch.randn(rows, width, device="cuda")
        torch.testing.assert_close(step(x), expected(x), rtol=1e-4, atol=1e-5)
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
    assert copies(step, x) > 1
    del expected, twin, mine, other
    gc.collect()
    assert step.measure(x).peak_bytes <= 0.95 * least + CUBLAS


def test_copies_in_a_recording(tmp_path, monkeypatch):
    """A step whose kernels are so short that it is recorded: the copies are part of that."""
    from treadle.passes.memory import offload

    monkeypatch.setattr(offload, "_LEAST", 1 << 12)
    width, layers, rows = 128, 24, 512
    x = torch.randn(rows, width, device="cuda")
    least = smallest_without(width, layers, x, tmp_path)
    options = Options(memory=int(0.97 * least), planner=OFFLOAD, cache_dir=tmp_path)
    step, net = step_of(width, layers, options)
    expected, twin = step_of(width, layers, None)
    for _ in range(12):
        x = torch.randn(rows, width, device="cuda")
        torch.testing.assert_close(step(x), expected(x), rtol=1e-4, atol=1e-5)
    assert copies(step, x)
    assert step.summary().variants[0].is_recorded
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_two_shapes_share_the_block_on_the_host(tmp_path):
    width, layers = 1024, 8
    x = torch.randn(32768, width, device="cuda")
    least = smallest_without(width, layers, x, tmp_path)
    options = Options(memory=int(0.95 * least), planner=OFFLOAD, dynamic=False, cache_dir=tmp_path)
    step, net = step_of(width, layers, options)
    expected, twin = step_of(width, layers, None)
    for rows in (16384, 32768, 24576, 32768, 16384):
        x = torch.randn(rows, width, device="cuda")
        torch.testing.assert_close(step(x), expected(x), rtol=1e-4, atol=1e-5)
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
