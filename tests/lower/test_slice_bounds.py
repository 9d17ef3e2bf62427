"""Where a slice begins and ends, of a known size and of one that calls decide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.algebra.extents import Size, at, greater, lesser
from treadle.lower.operators.scatter import slice_bounds
from treadle.util.errors import VerifyError

PLACES = st.none() | st.integers(-9, 9) | st.just(2**63 - 1)


@given(PLACES, PLACES, st.integers(0, 8))
def test_of_numbers_it_is_python_s(start, end, size):
    first, last, _ = slice(start, end).indices(size)
    assert slice_bounds(start, end, size) == (first, last)


@given(PLACES, PLACES, st.integers(2, 6))
def test_of_a_size_it_is_python_s_for_every_size_or_an_error(start, end, low):
    size = Size.dim("n", low, 7, 7)
    try:
        found = slice_bounds(start, end, size)
    except VerifyError:
        return
    for n in range(low, 8):
        first, last, _ = slice(start, end).indices(n)
        assert tuple(at(each, {"n": n}) for each in found) == (first, last)


def test_what_ends_are():
    size = Size.dim("n", 2, 7, 5)
    assert slice_bounds(None, -1, size) == (0, size - 1)
    assert slice_bounds(1, None, size) == (1, size)
    assert slice_bounds(-2, 2**63 - 1, size) == (size - 2, size)
    assert slice_bounds(0, 2, size) == (0, 2)
    with pytest.raises(VerifyError, match="depends on sizes"):
        slice_bounds(0, 3, size)


def test_lesser_and_greater_take_what_is_so_for_all_sizes():
    size = Size.dim("n", 2, 7, 5)
    assert lesser(2, size) == 2
    assert lesser(size, 2) == 2
    assert greater(2, size) is size
    assert greater(size, 2) is size
    assert lesser(size, 7) is size
    with pytest.raises(VerifyError):
        lesser(size, 3)
