"""The index algebra against enumeration: same value everywhere, bounds that hold, good forms."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.algebra.extents import Size
from treadle.algebra.index import (
    Axis,
    FloorDiv,
    Index,
    Mod,
    Value,
    linear,
    unflatten,
)
from treadle.loop.expr import Load, formula_of, values_of
from treadle.loop.printing import show_index
from treadle.loop.traverse import substitute_index, value_index
from treadle.util.errors import VerifyError

EXTENTS = (2, 3, 4, 6)
POINTS = tuple(itertools.product(*(range(n) for n in EXTENTS)))


def evaluate(index, point):
    """``index`` at axis values, by the definition of each atom."""
    total = index.const
    for atom, coefficient in index.terms:
        match atom:
            case Axis():
                value = point[atom]
            case FloorDiv():
                value = evaluate(atom.index, point) // atom.n
            case Mod():
                value = evaluate(atom.index, point) % atom.n
        total += coefficient * value
    return total


def recipes():
    """Arithmetic as nested tuples: (operator, operands...)."""
    leaf = st.one_of(
        st.tuples(st.just("axis"), st.integers(0, len(EXTENTS) - 1)),
        st.tuples(st.just("const"), st.integers(-9, 9)),
    )

    def grow(inner):
        small = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])
        return st.one_of(
            st.tuples(st.just("add"), inner, inner),
            st.tuples(st.just("sub"), inner, inner),
            st.tuples(st.just("mul"), inner, st.integers(-12, 12)),
            st.tuples(st.just("div"), inner, small),
            st.tuples(st.just("mod"), inner, small),
            st.tuples(st.just("both"), inner, small, st.integers(1, 4)),
        )

    return st.recursive(leaf, grow, max_leaves=7)


def build(recipe, axis):
    """The recipe's value, with ``axis(i)`` an Axis, or a number: Python is the reference."""
    match recipe:
        case ("axis", i):
            return axis(i)
        case ("const", value):
            return value
        case ("add", a, b):
            return build(a, axis) + build(b, axis)
        case ("sub", a, b):
            return build(a, axis) - build(b, axis)
        case ("mul", a, k):
            return build(a, axis) * k
        case ("div", a, n):
            return build(a, axis) // n
        case ("mod", a, n):
            return build(a, axis) % n
        case ("both", a, n, k):
            value = build(a, axis)
            return value // n * (n * k) + value % n * k


@settings(max_examples=400, deadline=None)
@given(recipes())
def test_agrees_with_python(recipe):
    axes = [Axis(n) for n in EXTENTS]
    index = Index.of(build(recipe, axes.__getitem__))
    low, high = index.bounds
    for point in POINTS:
        value = evaluate(index, dict(zip(axes, point, strict=True)))
        assert value == build(recipe, point.__getitem__)
        assert low <= value <= high
    again = Index.of(build(recipe, axes.__getitem__))
    assert again == index
    assert hash(again) == hash(index)


@settings(max_examples=200, deadline=None)
@given(recipes(), recipes(), recipes())
def test_substitution_is_composition(recipe, first, second):
    axes = [Axis(n) for n in EXTENTS]
    index = Index.of(build(recipe, axes.__getitem__))
    inner = [
        Index.of(build(r, axes.__getitem__)) % EXTENTS[i] for i, r in enumerate((first, second))
    ]
    new = substitute_index(index, {axes[0]: inner[0], axes[1]: inner[1], axes[2]: 1})
    for point in POINTS:
        at = dict(zip(axes, point, strict=True))
        put = at | {axes[0]: evaluate(inner[0], at), axes[1]: evaluate(inner[1], at), axes[2]: 1}
        assert evaluate(new, at) == evaluate(index, put)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=4, max_size=4),
    st.integers(-9, 30),
    st.sampled_from([1, 2, 4, 12]),
    st.sampled_from([2, 3, 4, 6, 8, 12, 24]),
)
def test_quotient_and_remainder_rejoin(factors, const, divisor, n):
    axes = [Axis(n) for n in EXTENTS]
    index = linear(axes, factors, const) // divisor
    assert index // n * n + index % n == index


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.data())
def test_a_reshape_and_back_is_nothing(shape, data):
    f = Axis(math.prod(shape))
    coordinates = unflatten(f, shape)
    assert linear(coordinates, _strides(shape)) == Index.of(f)
    axes = [Axis(n) for n in shape]
    assert list(unflatten(linear(axes, _strides(shape)), shape)) == [Index.of(a) for a in axes]
    other = data.draw(st.permutations(shape))
    assert linear(
        unflatten(linear(unflatten(f, other), _strides(other)), shape), _strides(shape)
    ) == (Index.of(f))


def _strides(shape):
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


@pytest.mark.parametrize("shape", [(3, 5), (4, 4, 6), (2, 8, 3, 5)])
def test_merging_and_splitting_dims_cancel(shape):
    axes = [Axis(n) for n in shape]
    flat = linear(axes, _strides(shape))
    for cut in range(1, len(shape)):
        columns = math.prod(shape[cut:])
        assert flat // columns == linear(axes[:cut], _strides(shape[:cut]))
        assert flat % columns == linear(axes[cut:], _strides(shape[cut:]))


def test_known_forms():
    r, c, f = Axis(6), Axis(5), Axis(120)
    assert (r * 5 + c) // 5 == Index.of(r)
    assert (r * 5 + c) % 5 == Index.of(c)
    assert f // 7 * 7 + f % 7 == Index.of(f)
    assert f // 3 // 5 == f // 15
    assert f % 12 // 4 == f // 4 % 3
    assert f % 12 % 4 == f % 4
    assert (f + 120) % 60 == f % 60
    assert f // 4 % 3 * 4 + f % 4 == f % 12
    assert r - r == Index.of(0)
    assert 4 - (3 - r) == r + 1
    assert (r * 10 + c * 2 + 1) // 10 == Index.of(r)
    assert (5 - r) // 6 == Index.of(0)
    assert -(r * -1) == Index.of(r)
    assert (r + 3) % 4 // 2 * 2 + (r + 3) % 2 == (r + 3) % 4


def test_axes_of_one_value_vanish():
    one, none = Axis(1), Axis(0)
    assert one + 3 == Index.of(3)
    assert Index.of(none).is_const
    assert unflatten(Axis(4), (0, 3)) == (Index.of(0), Index.of(0))
    assert unflatten(Index.of(0), ()) == ()


def test_order_does_not_depend_on_how_it_was_written():
    a, b, c = Axis(3), Axis(4), Axis(5)
    assert a * 20 + b * 5 + c == c + (b * 5 + a * 20)
    assert Axis(3) != Axis(3)
    assert len({a + b, b + a, a + c}) == 2


def test_values_of_formulas():
    i, j, k = Axis(4), Axis(8), Axis(4)
    token = Load("tokens", Index.of(i), torch.int64)
    row = value_index(token, 0, 9)
    offset = row * 8 + j
    assert offset.bounds == (0, 79)
    assert offset.axes == {i, j}
    assert offset // 8 == row
    assert offset == value_index(Load("tokens", Index.of(i), torch.int64), 0, 9) * 8 + j
    assert values_of(offset) == (token,)
    moved = substitute_index(offset, {i: k + 0})
    assert moved.axes == {k, j}
    (atom, _) = next(term for term in moved.terms if isinstance(term[0], Value))
    assert formula_of(atom) == Load("tokens", Index.of(k), torch.int64)


def test_a_value_that_never_reaches_zero_divides_exactly():
    i = Axis(9)
    row = value_index(Load("t", Index.of(0), torch.int64), 4, 7)
    assert (i * 4 + row) // 12 == (i + 1) // 3
    assert (i * 4 + row) % 12 == (i + 1) % 3 * 4 + row - 4


def test_what_sizes_decide_is_left_open_in_an_index():
    """``n`` may be one, and the axis may have one value or none: formulas right for all of them."""
    size = Size.dim("n", 2, 9, 5)
    i, j = Axis(size - 1), Axis(size - 2)
    assert show_index(i + j) == "i + j"
    for _ in range(2):
        assert show_index((i * 3 + 1) // (size - 1)) == "((3*i + 1)//(S_n - 1))"
        assert show_index((i * 3 + 1) % (size - 1)) == "((3*i + 1)%(S_n - 1))"
    assert show_index(Index.of(i) * (size - 2)) == "(S_n - 2)*i"


def test_refusals():
    with pytest.raises(VerifyError, match="division of an index by 0"):
        Axis(3) // 0
    with pytest.raises(VerifyError, match="extent -1"):
        Axis(-1)
    with pytest.raises(VerifyError, match=r"no value lies in 3\.\.2"):
        value_index(Load("t", Index.of(0), torch.int64), 3, 2)
    with pytest.raises(VerifyError, match="truth value"):
        Index.of(True)
