"""Conditions on indices: what is proved of them is true at every place."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from algebra.places import is_true
from treadle.algebra.conditions import (
    Element,
    all_of,
    any_of,
    at_most,
    element,
    equal,
    negated,
    within,
)
from treadle.algebra.extents import Size
from treadle.algebra.index import Axis, Index
from treadle.algebra.proofs import Prover


def holds(condition):
    return Prover().holds(condition)


def impossible(condition):
    return Prover().impossible(condition)


def equivalent(left, right):
    return Prover().equivalent(left, right)


T = Size.dim("t", 1, 6, 3)
SIZES = st.sampled_from([(5, 5), (4, 6), (1, 3), (7, 2), (T, T), (T, 4)])


@st.composite
def indices(draw, i, j):
    total = Index.of(draw(st.integers(-7, 7)))
    for each in (i, j):
        unit = each.as_index
        kind = draw(st.integers(0, 5))
        if kind <= 1:
            unit = unit + draw(st.integers(-3, 3))
            n = draw(st.integers(2, 3))
            unit = unit // n if kind else unit % n
        total = total + unit * draw(st.integers(-2, 2))
    if isinstance(i.extent, Size):
        total = total + T * draw(st.integers(-1, 1))
    return total


@st.composite
def conditions(draw, i, j, depth=3):
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind <= 1:
        return at_most(draw(indices(i, j)))
    if kind == 2:
        return equal(draw(indices(i, j)), draw(indices(i, j)))
    if kind == 3:
        return negated(draw(conditions(i, j, depth - 1)))
    parts = [draw(conditions(i, j, depth - 1)) for _ in range(2)]
    return all_of(*parts) if kind == 4 else any_of(*parts)


def places(i, j):
    """All indices, of all sizes."""
    for t in range(1, 7):
        rows, columns = (t if isinstance(n, Size) else n for n in (i.extent, j.extent))
        for row, column in itertools.product(range(rows), range(columns)):
            yield {"t": t, i: row, j: column}


@given(st.data(), SIZES)
@settings(max_examples=400, deadline=None)
def test_what_is_proved_is_true_everywhere(data, sizes):
    i, j = map(Axis, sizes)
    one, two = data.draw(conditions(i, j)), data.draw(conditions(i, j, 1))
    found = [(is_true(one, at), is_true(two, at)) for at in places(i, j)]
    opposite = negated(one)
    assert all(is_true(opposite, at) is not is_true(one, at) for at in places(i, j))
    if holds(one):
        assert all(first for first, _ in found)
    if impossible(one):
        assert not any(first for first, _ in found)
    if equivalent(one, two):
        assert all(first == second for first, second in found)


def test_proofs_hold_for_all_sizes():
    i, j = Axis(T), Axis(T)
    inside = at_most(j - i)
    last = i - j - T
    assert holds(at_most(last + 1))
    assert not holds(at_most(last + 2))
    assert equivalent(negated(inside), at_most(i - j + 1))
    both = equal(i // 2, j // 2)
    assert holds(any_of(negated(both), at_most(i - j - 1)))
    assert not holds(any_of(negated(both), at_most(i - j)))


def test_quotients_and_remainders_by_sizes():
    i = Axis(T * 4)
    assert holds(within(i % T, 0, T - 1))
    assert holds(within(i // T, 0, 3))
    assert not holds(at_most(i // T - 2))
    assert holds(equal(i // T * T + i % T, i.as_index))


def test_products_of_sizes_and_indices():
    i = Axis(5)
    assert holds(at_most(i * T - 24))
    assert not holds(at_most(i * T - 23))


def test_remainders():
    i, j = Axis(100), Axis(100)
    assert holds(within(i % 8 + j % 8, 0, 14))
    assert not holds(within(i % 8 + j % 8, 0, 13))
    same_rest = equal(i % 8, j % 8)
    assert equivalent(same_rest, equal(i - i // 8 * 8, j - j // 8 * 8))


def test_whole_numbers_between_others():
    i = Axis(100)
    assert impossible(equal(i * 2, Index.of(7)))
    assert impossible(all_of(at_most(3 - i * 2), at_most(i * 3 - 5)))


def test_patience_ends():
    i, j = Axis(9), Axis(9)
    apart = [any_of(at_most(i - j + n), at_most(j - n)) for n in range(9)]
    claim = any_of(*map(negated, apart), all_of(*apart))
    assert holds(claim)
    assert not Prover(patience=30).holds(claim)


def test_an_element_is_the_same_at_the_same_place():
    i, j = (Axis(9).as_index for _ in "ij")
    one, again, other = (element(Element("ids", (at,), "ids"), 0, 7) for at in (i, i, j))
    assert holds(equal(one, again))
    assert not holds(equal(one, other))
    assert holds(at_most(one - 7))
