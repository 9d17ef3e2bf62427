"""Every operator with a formula, and functions with their gradients, at awkward values.

Other dtypes, and everything that may be fused with a function: ``python -m numerics.sweep --all``.
"""

import pytest
import torch

from numerics.sweep import functions, inputs_of, operators, runs_eagerly
from numerics.sweep_deviations import unexplained
from numerics.sweep_operators import ON_GPUS, samples_of, swept

KINDS = ("one", "two", "three", "rows", "mild")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_operators_are_eagers(dtype):
    assert unexplained(operators(dtype)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_eagers(dtype):
    assert unexplained(functions(dtype)) == []


def test_what_is_fused_with_a_function_takes_nothing_back():
    """In float32: half precisions are rounded between the two."""
    assert unexplained(functions(torch.float32, neighbours=True, words=("- inf",))) == []


def test_no_operator_is_left_out():
    dtypes = (torch.float32, torch.int64, torch.bool)
    values = {(kind, d): inputs_of(kind, d) for kind in KINDS for d in dtypes}
    left_out = [
        sample.name
        for op in swept()
        for sample in samples_of(op)
        if not any(runs_eagerly(sample.call, values[sample.kind, d]) for d in dtypes)
        and op not in ON_GPUS
    ]
    assert not left_out, "these run in no dtype: what are they to be called with?"
