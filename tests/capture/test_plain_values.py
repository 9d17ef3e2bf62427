"""Plain values: which are the same, and what is none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.capture.python_state.plain_values import is_plain, is_same_value, plain_fact

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(),
    st.binary(), st.builds(slice, st.integers(), st.integers()),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), ..., np.float32(1)]),
)  # fmt: skip


@given(VALUES, VALUES)
def test_the_same_are_those_of_one_type_that_print_the_same(one, other):
    expected = type(one) is type(other) and repr(one) == repr(other)
    assert is_same_value(one, other) is expected


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (0.0, -0.0), (1, 1.0), (np.float32(1), np.float64(1)), ("a", b"a")],
)
def test_equal_values_that_are_not_the_same(one, other):
    assert not is_same_value(one, other)


def test_not_a_number_is_itself():
    assert is_same_value(math.nan, float("nan"))
    assert plain_fact(math.nan) == plain_fact(float("nan"))


@pytest.mark.parametrize("value", [[], {}, (), set(), object(), torch.zeros(2), np.zeros(2), int])
def test_what_holds_other_values_is_none(value):
    assert not is_plain(value)
    assert not is_same_value(value, value)


def test_a_subclass_of_a_number_may_hold_more():
    class Count(int):
        pass

    assert not is_plain(Count(1))
