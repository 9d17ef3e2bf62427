"""Numbers of float8 are moved and converted in generated code, to eager's bits."""

import pytest
import torch
from torch import nn

import treadle
from float8_numbers import FLOAT8, numbers, same_bits


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_conversions_are_eagers(dtype, source):
    x = numbers(dtype).to(source)
    run = lambda x: (x.to(dtype), x.to(dtype).to(source), x.to(dtype).t().clone())  # noqa: E731
    step = treadle.compile(run, model=nn.Linear(1, 1), strict=True)
    for ours, eagers in zip(step(x.view(1, -1)), run(x.view(1, -1)), strict=True):
        same_bits(ours, eagers)


@pytest.mark.parametrize(
    "target", [torch.bool, torch.int32, torch.float8_e5m2, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_float8_argument_is_read(dtype, target):
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    if target is torch.int32:
        x = x[x.float().isfinite()]
    run = lambda x: x.to(target)  # noqa: E731
    step = treadle.compile(run, model=nn.Linear(1, 1), strict=True)
    same_bits(step(x), run(x))
