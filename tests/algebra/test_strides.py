"""Strides of plain and of symbolic sizes."""

import pytest
import torch

from treadle.algebra.extents import Size
from treadle.algebra.strides import contiguous_strides, is_contiguous, is_dense, strides_match

T = Size.dim("t", 0, 9, 4)
"""May be 0, so that whether it is larger than 1 has no answer."""


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (0, 0), (1, 5, 1)])
def test_contiguous_strides_are_those_of_pytorch(shape):
    strides = torch.empty(shape).stride()
    assert contiguous_strides(shape) == strides
    assert is_contiguous(shape, strides)
    assert is_dense(shape, strides)


def test_a_symbolic_extent_counts_as_itself():
    assert contiguous_strides((2, T, 3)) == (3 * T, 3, 1)
    assert is_contiguous((2, T, 3), (3 * T, 3, 1))
    assert is_dense((T, 2, 3), (3, 3 * T, 1))


def test_a_dim_of_one_has_no_say():
    assert strides_match((1, 4), (7, 1), (4, 1))
    assert not strides_match((2, 4), (7, 1), (4, 1))
    assert is_contiguous((4, 1, 3), (3, 100, 1))


def test_what_sizes_decide_is_not_taken_for_true():
    assert not strides_match((T, 2), (2, 1), (T, 1))
    assert not is_contiguous((2, 3), (T, 1))


def test_gaps_and_overlaps_are_not_dense():
    assert is_dense((2, 3, 4), (1, 2, 6))
    assert not is_dense((2, 3), (4, 1))
    assert not is_dense((2, 3), (1, 1))
    assert not is_dense((2, 3), (0, 1))
