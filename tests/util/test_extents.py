"""Sizes as formulas: the sample's arithmetic, the formula's at other sizes, no lost questions."""

import math
import pickle

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from treadle.util.errors import VerifyError
from treadle.util.extents import (
    Domain,
    Size,
    at,
    ceil_div,
    common_divisor,
    dims_in,
    divides,
    largest,
    rank,
    same,
    sample_of,
    split_off,
    surely_less,
    with_dims,
)
from treadle.util.formulas import from_data, to_data

B = Size.dim("b", 1, 64, 7)
T = Size.dim("t", 2, 1024, 97)
SIZES = st.fixed_dictionaries({"b": st.integers(1, 64), "t": st.integers(2, 1024)})
OPERATIONS = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "max": max,
    "min": min,
    "ceil": ceil_div,
}
programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5)), max_size=6
)


def run(program, b, t):
    """A few numbers computed from two sizes; ``None`` where an operation has no answer."""
    values = [b, t, 1, 3, 64, 192]
    for name, left, right in program:
        x, y = values[-1 - left], values[right]
        divides_safely = surely_less(0, y) and surely_less(-1, x)
        if name in ("//", "%", "ceil") and not divides_safely:
            return None
        values.append(OPERATIONS[name](x, y))
    return values


@settings(max_examples=300, deadline=None)
@given(programs, SIZES)
def test_formulas_give_at_every_size_what_plain_numbers_give(program, sizes):
    domain = Domain()
    with domain.noting():
        values = run(program, B, T)
    assume(values is not None)
    plain = run(program, sizes["b"], sizes["t"])
    if not domain.contains(sizes):
        return  # those sizes answer a question otherwise
    assert plain is not None
    assert [at(each, sizes) for each in values] == plain


@settings(max_examples=200, deadline=None)
@given(programs)
def test_the_sample_is_what_the_sample_gives(program):
    with Domain().noting():
        values = run(program, B, T)
    assume(values is not None)
    assert [sample_of(each) for each in values] == run(program, 7, 97)


@settings(max_examples=200, deadline=None)
@given(programs, SIZES)
def test_bounds_and_proofs_hold_at_every_size(program, sizes):
    domain = Domain()
    with domain.noting():
        values = run(program, B, T)
    assume(values is not None and domain.contains(sizes))
    for x in values:
        assert at(x, sizes) <= largest(x)
        for y in values:
            if surely_less(x, y):
                assert at(x, sizes) < at(y, sizes)
            if same(x, y):
                assert at(x, sizes) == at(y, sizes)
            assert (rank(x) == rank(y)) is same(x, y)


@settings(max_examples=200, deadline=None)
@given(programs, SIZES)
def test_formulas_survive_data_and_pickle_and_move_to_other_dims(program, sizes):
    with Domain().noting():
        values = run(program, B, T)
    assume(values is not None)
    others = {"b": Size.dim("b", 1, 64, 9), "t": Size.dim("t", 2, 1024, 101)}
    for each in values:
        if isinstance(each, Size):
            assert from_data(to_data(each.formula)) == each.formula
            assert same(pickle.loads(pickle.dumps(each)), each)
            assert at(with_dims(each, others), sizes) == at(each, sizes)


def test_what_is_the_same_for_all_sizes_is_answered_and_not_asked():
    domain = Domain()
    n = B * T * 64
    with domain.noting():
        assert n // 64 == B * T
        assert n // T == 64 * B
        assert n % (T * 64) == 0
        assert (n - 1) // (T * 64) == B - 1
        assert (n - 1) % (T * 64) == T * 64 - 1
        assert max(T - 1, 0) == T - 1
        assert T * T >= T
        assert T < 2000
        assert n
        assert math.prod((B, T, 64)) == n
        assert sum([B, B, T]) == 2 * B + T
        assert {T: "t"}[T] == "t"
    assert not domain.questions


def test_what_depends_is_answered_for_the_sample_and_noted():
    domain = Domain()
    with domain.noting():
        assert T != 64
        assert T > B
        assert not T < 50
    assert domain.contains({"b": 1, "t": 65})
    assert not domain.contains({"b": 1, "t": 64})
    assert not domain.contains({"b": 60, "t": 55})
    assert not domain.contains({"b": 1, "t": 49})


def test_a_question_without_a_domain_is_an_error():
    with pytest.raises(VerifyError, match="no answer for all sizes"):
        _ = T == 64


def test_a_number_taken_out_pins_the_size():
    domain = Domain()
    with domain.noting():
        assert type(int(T)) is int
    assert domain.contains({"b": 3, "t": 97})
    assert not domain.contains({"b": 3, "t": 98})


@pytest.mark.parametrize("lose", [float, lambda n: n / 2, lambda n: 1 / n, lambda n: n << 1,
                                  lambda n: n & 3, lambda n: f"{n:d}"])  # fmt: skip
def test_what_would_lose_the_formula_is_an_error(lose):
    with pytest.raises(VerifyError):
        lose(T)


def test_divisors_and_pieces():
    assert divides(64, 64 * T)
    assert divides(T, 64 * T * B)
    assert not divides(64, T)
    assert split_off(64 * T + 3, T) == (64, 3)
    assert same(common_divisor(64 * T, 48 * T), 16 * T)
    assert common_divisor(64 * T, 48) == 16
    assert common_divisor(12, 18) == 6
    assert [str(each) for each in dims_in([3, T * B, B])] == ["S_b", "S_t"]
    assert f"{4 * B * T + 3}" == "(4 * S_b * S_t + 3)"


def test_division_by_what_may_be_zero_is_refused():
    with pytest.raises(VerifyError, match="may not be positive"):
        _ = 5 // (B - 1)
