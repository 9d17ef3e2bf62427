"""On a real GPU: activations on the host between their uses, beside the step's own work."""

import gc

import pytest
import torch

import treadle
from residual_net import residual_step
from treadle.options import Options
from treadle.passes.memory import offload

OFFLOAD = treadle.Planner(offload=True)
CUBLAS = 8 << 20
"""Bytes that eager's products made cuBLAS allocate in this process, beside what a step needs."""


def compiled(width, layers, options):
    step, net, optimizer = residual_step(width, layers, "cuda")
    return treadle.compile(step, model=net, optimizer=optimizer, options=options), net


def smallest_without(width, layers, rows, cache):
    """The peak of the smallest plan that keeps its values on the device."""
    step, _ = compiled(width, layers, Options(memory=0.0, cache_dir=cache))
    least = step.prepare(torch.randn(rows, width, device="cuda")).artifact.peak_bytes
    del step
    gc.collect()
    return least


def trains_as_eager(step, net, width, layers, rows):
    """With batches of so many ``rows``; the last of them."""
    expected, twin, _ = residual_step(width, layers, "cuda")
    for count in rows:
        x = torch.randn(count, width, device="cuda")
        torch.testing.assert_close(step(x), expected(x), rtol=1e-4, atol=1e-5)
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
    return x


def copies(step, x):
    steps = step.prepare(x).artifact.steps
    return sum(getattr(each, "op", "") == "treadle.to_host.default" for each in steps)


@pytest.mark.parametrize("rows", [32768, 32771])
def test_less_memory_than_any_plan_that_only_computes_again(rows, tmp_path):
    least = smallest_without(1024, 8, rows, tmp_path)
    options = Options(memory=int(0.95 * least), planner=OFFLOAD, cache_dir=tmp_path)
    step, net = compiled(1024, 8, options)
    x = trains_as_eager(step, net, 1024, 8, [rows] * 4)
    assert copies(step, x) > 1
    gc.collect()
    assert step.measure(x).peak_bytes <= 0.95 * least + CUBLAS


def test_copies_in_a_recording(tmp_path, monkeypatch):
    """A step whose kernels are so short that it is recorded: the copies are part of that."""
    monkeypatch.setattr(offload, "_LEAST", 1 << 12)
    least = smallest_without(128, 24, 512, tmp_path)
    options = Options(memory=int(0.97 * least), planner=OFFLOAD, cache_dir=tmp_path)
    step, net = compiled(128, 24, options)
    x = trains_as_eager(step, net, 128, 24, [512] * 12)
    assert copies(step, x)
    assert step.summary().variants[0].is_recorded


def test_two_shapes_share_the_block_on_the_host(tmp_path):
    least = smallest_without(1024, 8, 32768, tmp_path)
    options = Options(memory=int(0.95 * least), planner=OFFLOAD, dynamic=False, cache_dir=tmp_path)
    step, net = compiled(1024, 8, options)
    trains_as_eager(step, net, 1024, 8, (16384, 32768, 24576, 32768, 16384))
