"""Max pooling beside eager, for values at which comparisons differ, and what it becomes on CPUs."""

import math

import pytest
import torch
from torch.nn import functional as F

import treadle

CASES = {
    "3, 2, 1": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "2": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "3, 1, 1, dilated": lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2, return_indices=True),
    "ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
    "(4, 3), (3, 1), (2, 1)": lambda x: F.max_pool2d(
        x, (4, 3), (3, 1), (2, 1), return_indices=True
    ),
    "rows": lambda x: F.max_pool1d(x.flatten(1, 2), 5, 3, 2, return_indices=True),
    "volume": lambda x: F.max_pool3d(x, 2, 1, 1, return_indices=True),
}
MODEL = torch.nn.Linear(2, 2)
"""Steps need one, and these do not use it."""
SPECIAL = [0.0, -0.0, 1.0, 1.0, math.inf, -math.inf, -1.0]


def images(shape, dtype, share):
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
    x = torch.where(torch.rand(shape) < share, special, torch.randn(shape)).to(dtype)
    x.view(-1)[torch.randint(x.numel(), ())] = math.nan  # of several, eager takes the last
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 17, 24), (1, 5, 48, 48), (3, 2, 7, 53)])
@pytest.mark.parametrize("name", CASES)
def test_max_pooling_equals_eager(name, shape, dtype):
    pool = CASES[name]

    def run(x, weights):
        x = x.detach().requires_grad_()
        found, places = pool(x)
        (found * weights).sum().backward()
        return found.detach(), places, x.grad

    def step(x, weights):
        return run(x, weights)

    torch.manual_seed(3)
    # eager rounds each addition to bfloat16
    tolerance = {"rtol": 0.05, "atol": 0.1} if dtype is torch.bfloat16 else {}
    compiled = treadle.compile(step, model=MODEL)
    for share in (0.0, 0.05, 0.7):
        x = images(shape, dtype, share)
        weights = torch.randn_like(pool(x)[0])
        for mine, want in zip(compiled(x, weights), run(x, weights), strict=True):
            given = tolerance if want.dtype is dtype else {}
            torch.testing.assert_close(mine, want, equal_nan=True, **given)


def sources(step):
    return "".join(source.text for source in step.compiled.artifact.all_sources)


def test_windows_are_taken_by_lanes_of_rows():
    def step(x):
        x = x.detach().requires_grad_()
        F.max_pool2d(x, 3, 2, 1).square().sum().backward()
        return x.grad

    compiled = treadle.compile(step, model=MODEL)
    compiled(torch.randn(4, 8, 48, 48))
    text = sources(compiled)
    assert "lane0[" in text
    assert "c < 9" not in text
    assert "c < 4;" not in text


def test_rows_that_lie_side_by_side_stay_loops():
    compiled = treadle.compile(lambda x: x.softmax(-1), model=MODEL)
    compiled(torch.randn(4000, 8))
    assert "lane0[" not in sources(compiled)
    assert "c < 8" in sources(compiled)
