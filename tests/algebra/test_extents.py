"""Sizes as formulas: the sample's arithmetic, the formula's at other sizes, guards in the open."""

import json
import math
import operator
import pickle

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from treadle.algebra.dims import SizeExpression, name_of
from treadle.algebra.extents import (
    Size,
    at,
    ceil_div,
    common_divisor,
    dims_in,
    divides,
    largest,
    same,
    sample_of,
    size_key,
    size_of,
    split_off,
    surely_less,
    with_dims,
)
from treadle.algebra.guards import GuardSet
from treadle.algebra.polynomial import from_data, to_data
from treadle.util.errors import VerifyError

B = Size.dim("b", 1, 64, 7)
T = Size.dim("t", 2, 1024, 97)
SIZES = st.fixed_dictionaries({"b": st.integers(1, 64), "t": st.integers(2, 1024)})
OPERATIONS = {
    "+": lambda x, y, _: x + y,
    "-": lambda x, y, _: x - y,
    "*": lambda x, y, _: x * y,
    "//": lambda x, y, _: x // y,
    "%": lambda x, y, _: x % y,
    "max": lambda x, y, guards: guards.larger_of(x, y),
    "min": lambda x, y, guards: guards.smaller_of(x, y),
    "ceil": lambda x, y, _: ceil_div(x, y),
}
programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5)), max_size=6
)


def run(program, b, t, guards):
    """A few numbers computed from two sizes; ``None`` where an operation has no answer."""
    values = [b, t, 1, 3, 64, 192]
    for name, left, right in program:
        x, y = values[-1 - left], values[right]
        divides_safely = surely_less(0, y) and surely_less(-1, x)
        if name in ("//", "%", "ceil") and not divides_safely:
            return None
        values.append(OPERATIONS[name](x, y, guards))
    return values


@settings(max_examples=300, deadline=None)
@given(programs, SIZES)
def test_formulas_give_at_every_size_what_plain_numbers_give(program, sizes):
    guards = GuardSet()
    values = run(program, B, T, guards)
    assume(values is not None)
    plain = run(program, sizes["b"], sizes["t"], GuardSet())
    if not guards.holds(sizes):
        return  # a guard does not hold for those sizes
    assert plain is not None
    assert [at(each, sizes) for each in values] == plain


@settings(max_examples=200, deadline=None)
@given(programs)
def test_the_sample_is_what_the_sample_gives(program):
    values = run(program, B, T, GuardSet())
    assume(values is not None)
    assert [sample_of(each) for each in values] == run(program, 7, 97, GuardSet())


@settings(max_examples=200, deadline=None)
@given(programs, SIZES)
def test_bounds_and_proofs_hold_at_every_size(program, sizes):
    guards = GuardSet()
    values = run(program, B, T, guards)
    assume(values is not None and guards.holds(sizes))
    for x in values:
        assert at(x, sizes) <= largest(x)
        for y in values:
            if surely_less(x, y):
                assert at(x, sizes) < at(y, sizes)
            if same(x, y):
                assert at(x, sizes) == at(y, sizes)
            assert (size_key(x) == size_key(y)) is same(x, y)


@settings(max_examples=200, deadline=None)
@given(programs, SIZES)
def test_formulas_survive_data_and_pickle_and_move_to_other_dims(program, sizes):
    values = run(program, B, T, GuardSet())
    assume(values is not None)
    others = {"b": Size.dim("b", 1, 64, 9), "t": Size.dim("t", 2, 1024, 101)}
    for each in values:
        if isinstance(each, Size):
            assert from_data(to_data(each.formula)) == each.formula
            assert same(pickle.loads(pickle.dumps(each)), each)
            assert at(with_dims(each, others), sizes) == at(each, sizes)


def test_what_is_the_same_for_all_sizes_is_answered():
    n = B * T * 64
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
    guards = GuardSet()
    assert guards.less(T, 2000)
    assert guards.equal(n // 64, B * T)
    assert not guards.guards


def test_what_depends_is_the_samples_answer_and_a_guard():
    guards = GuardSet()
    assert not guards.equal(T, 64)
    assert guards.less(B, T)
    assert not guards.less(T, 50)
    assert guards.holds({"b": 1, "t": 65})
    assert not guards.holds({"b": 1, "t": 64})
    assert not guards.holds({"b": 60, "t": 55})
    assert not guards.holds({"b": 1, "t": 49})
    larger = GuardSet()
    assert same(larger.larger_of(T, 50), T)
    assert larger.smaller_of(B, T) is B
    assert larger.holds({"b": 50, "t": 50})
    assert not larger.holds({"b": 1, "t": 49})
    assert not larger.holds({"b": 60, "t": 55})


@pytest.mark.parametrize(
    "compare",
    [
        lambda: T == 64, lambda: T != 64, lambda: T < 64, lambda: T >= B, lambda: bool(T - 2),
        lambda: int(T), lambda: (T, 8) == (64, 8), lambda: 64 in (B, T), lambda: max(T, 64),
    ],
)  # fmt: skip
def test_what_depends_is_an_error_without_guards(compare):
    with pytest.raises(VerifyError, match="no answer for all sizes"):
        compare()
    assert not same(T, 64)
    assert not surely_less(T, 64)


def test_each_set_of_guards_has_all_that_were_asked_for_with_it():
    """A memo of what was computed before, in another compile, must not lose a guard."""
    for _ in range(2):
        guards = GuardSet()
        assert not guards.equal(T - 1, 1)
        assert not guards.holds({"b": 1, "t": 2})


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


def part_of(size, factor):
    """``int(factor * size)`` as a dim."""
    (dim,) = size.formula.dims
    scaled = SizeExpression(name_of(operator.mul), (factor, dim))
    return SizeExpression(name_of(int), (scaled,)).dim()


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 4.0), st.integers(1, 64))
def test_a_computed_dim_is_what_python_computes(factor, b):
    dim = part_of(B, factor)
    size = size_of(dim)
    assert at(size, {"b": b}) == int(factor * b)
    assert (dim.low, dim.high) == (int(factor), int(factor * 64))
    assert dim.sample == int(factor * 7)
    assert from_data(json.loads(json.dumps(to_data(size.formula)))) == size.formula
    assert size.formula.roots == B.formula.dims
    assert pickle.loads(pickle.dumps(size)).formula.at({"b": b}) == int(factor * b)


def test_what_holds_of_a_computed_dim_and_its_root_is_known():
    part = size_of(part_of(B, 0.7))
    assert surely_less(part, B)
    assert not surely_less(0, part)  # int(0.7 * 1)
    guards = GuardSet()
    assert guards.less(part, B)
    assert guards.less(0, part)
    assert [str(guard) for guard in guards.guards] == [f"{-1 * part} < 0"]
    assert guards.holds({"b": 2})
    assert not guards.holds({"b": 1})


def test_what_is_no_size_is_no_dim():
    (dim,) = B.formula.dims
    minus = SizeExpression(name_of(operator.sub), (dim, 3))
    half = SizeExpression(name_of(operator.mul), (0.5, dim))
    assert minus.dim() is None  # negative for some
    assert half.dim() is None  # no whole number
    assert SizeExpression(name_of(math.log), (minus,)).dim() is None  # an error for some
    assert name_of(len) is None
