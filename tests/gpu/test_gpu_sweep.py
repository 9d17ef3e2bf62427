"""On a real GPU: every operator with a formula, and functions with their gradients, at awkward
values. The deviations with a reason are those of ``numerics/sweep_deviations.py``."""

import pytest
import torch

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
