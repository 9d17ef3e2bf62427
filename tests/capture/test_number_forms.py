"""Forms of functions of numbers: where they say that they hold, Python gives the same."""

import itertools
import math
import operator

import numpy as np
import pytest
import torch

from treadle.capture.symbolic.number_forms import graph_form, is_apart, is_close

_VALUES = (
    0.0, -0.0, 1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.125, 0.575, 2.675, 1.005, 1e-300, 3e200, -7.25,
    1e19, math.inf, -math.inf, math.nan,
)  # fmt: skip
_OF_ONE = (
    math.exp, math.log, math.log1p, math.log2, math.log10, math.sqrt, math.sin, math.tanh,
    math.floor, math.ceil, math.trunc, int, round, math.isnan, math.isfinite, math.fabs, abs,
    operator.neg, np.sqrt, np.isnan, np.exp,
)  # fmt: skip
_OF_TWO = (
    operator.add, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    math.pow, math.fmod, operator.lt, np.minimum,
)  # fmt: skip


def agrees(function, *values):
    form = graph_form(function, values)
    made = [torch.tensor(each, dtype=torch.float64) for each in values]
    found = form.compute(*made)
    if form.holds is not None and not form.holds(found, *made):
        return True
    with np.errstate(all="ignore"):
        want = function(*values)
    if form.is_exact:
        return found.item() == want or (math.isnan(want) and math.isnan(found.item()))
    return math.isclose(found.item(), want, rel_tol=1e-14)


@pytest.mark.parametrize("function", _OF_ONE, ids=lambda f: f.__name__)
def test_of_one_number(function):
    assert [each for each in _VALUES if not agrees(function, each)] == []


@pytest.mark.parametrize("function", _OF_TWO, ids=lambda f: f.__name__)
def test_of_two_numbers(function):
    form = graph_form(function, (1.0, 2.0))
    pairs = [
        pair
        for pair in itertools.product(_VALUES, _VALUES)
        if form.holds is not None or function is not operator.truediv or pair[1] != 0
    ]
    assert [pair for pair in pairs if pair[1] != 0 and not agrees(function, *pair)] == []


@pytest.mark.parametrize("digits", [0, 1, 2, 4])
def test_rounding(digits):
    values = [*_VALUES, *(at / 1000 for at in range(2000))]
    assert [each for each in values if not agrees(round, each, digits)] == []


def test_rounding_holds_mostly():
    form = graph_form(round, (0.0, 2))
    values = torch.arange(1000, dtype=torch.float64) / 1000
    assert form.holds(form.compute(values), values).sum() == 900  # all but halves


@pytest.mark.parametrize("other", [0.5, 2.0, 10.0, 1.0])
def test_functions_of_two(other):
    values = [each for each in _VALUES if each > 0]
    assert [each for each in values if not agrees(math.log, each, other)] == []
    assert [each for each in _VALUES if not agrees(math.hypot, each, other)] == []


@pytest.mark.parametrize("tolerances", [(1e-9, 0.0), (0.3, 0.0), (0.0, 0.5), (0.0, 0.0)])
def test_closeness(tolerances):
    form = graph_form(is_close, (1.0, 1.0, *tolerances))
    numbers = [*_VALUES, 1.0, 1.0 + 1e-10, 1.25, -1.0]
    for one, other in itertools.product(numbers, numbers):
        want = is_close(one, other, *tolerances)
        given = [torch.tensor(each, dtype=torch.float64) for each in (one, other, *tolerances)]
        assert bool(form.compute(*given)) is want, (one, other)


def test_what_is_whole():
    form = graph_form(float.is_integer, (1.0,))
    for each in (*_VALUES, 3.0, -2.0, 2.5):
        assert bool(form.compute(torch.tensor(each, dtype=torch.float64))) is each.is_integer()


def test_what_has_no_form():
    assert graph_form(operator.pow, (2, 3)) is None  # 2 ** -3 is a float
    assert graph_form(round, (2.0, -1)) is None


def test_last_bits_do_not_compare():
    one = torch.tensor(1.0, dtype=torch.float64)
    assert not is_apart(one, torch.nextafter(one, one + 1))
    assert is_apart(one, one + 1e-9)
    assert is_apart(one, one * math.nan)
    assert is_apart(one / 0, one)
