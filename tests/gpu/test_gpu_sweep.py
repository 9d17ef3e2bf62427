"""On a real GPU: every operator with a formula, and functions with their gradients, at awkward
values. The deviations with a reason are those of ``numerics/sweep_deviations.py``."""

import pytest
import torch

import treadle
from numerics.sweep import functions, operators
from numerics.sweep_deviations import unexplained
from numerics.sweep_values import FLOATS


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_operators_are_eagers(dtype):
    assert unexplained(operators(dtype, "cuda"), "cuda") == []


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_eagers(dtype):
    assert unexplained(functions(dtype, "cuda"), "cuda") == []


def test_what_is_fused_with_a_function_takes_nothing_back():
    assert unexplained(functions(torch.float32, "cuda", neighbours=True), "cuda") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_that_is_used_again_is_rounded_everywhere(dtype):
    """Else the difference of a value from itself were what it was rounded by."""
    weight = torch.nn.Parameter(torch.randn(1003, device="cuda", dtype=dtype))
    model = torch.nn.ParameterList([weight])

    def step(x):
        y = model[0] * x
        zero, kept = y - y.detach(), y + 1
        (zero.sqrt() * 0 + kept).sum().backward()
        return zero.detach(), kept.detach(), (y - model[0] * x).detach()

    given = torch.randn(1003, device="cuda", dtype=dtype)
    zero, _, other = treadle.compile(step, model=model)(given)
    assert not zero.any()
    assert not other.any()
