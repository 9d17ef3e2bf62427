"""Curves of measured times, and measurements as words."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.targets.links import (
    Curve,
    GroupMeasurement,
    Link,
    measurement_from_words,
    measurement_to_words,
)

POINTS = st.dictionaries(
    st.integers(1, 1 << 30), st.floats(1e-7, 10.0), min_size=1, max_size=8
).map(lambda found: Curve.through(found.items()))


def test_between_points_a_line_of_logarithms():
    curve = Curve(((1000, 1e-3), (4000, 4e-3), (16000, 4e-3)))
    assert curve.seconds(2000) == pytest.approx(2e-3, rel=1e-12)
    assert curve.seconds(8000) == pytest.approx(4e-3, rel=1e-12)
    steep = Curve(((100, 1e-4), (10000, 1e-2)))
    assert steep.seconds(1000) == pytest.approx(math.sqrt(1e-4 * 1e-2), rel=1e-12)


def test_outside_the_points():
    curve = Curve(((1000, 1e-3), (4000, 2e-3)))
    assert curve.seconds(0) == curve.seconds(1) == 1e-3
    assert curve.seconds(40000) == pytest.approx(2e-2, rel=1e-12)


def test_a_point_that_took_longer_than_a_larger_one_is_lowered():
    assert Curve.through([(4, 2.0), (1, 3.0), (2, 1.0)]).points == ((1, 1.0), (2, 1.0), (4, 2.0))


@given(POINTS, st.integers(0, 1 << 31), st.integers(0, 1 << 31))
def test_more_bytes_never_take_less(curve, one, other):
    fewer, more = sorted((one, other))
    assert curve.seconds(fewer) <= curve.seconds(more) * (1 + 1e-12)


@given(POINTS)
def test_it_goes_through_its_points(curve):
    for nbytes, seconds in curve.points:
        assert curve.seconds(nbytes) == pytest.approx(seconds, rel=1e-9)
    assert 0.0 <= curve.latency <= curve.points[0][1]


def test_latency_is_what_no_bytes_take():
    exact = [(nbytes, 3e-5 + nbytes / 2e9) for nbytes in (4096, 65536, 1 << 20)]
    assert Curve.through(exact).latency == pytest.approx(3e-5, rel=1e-9)


@pytest.mark.parametrize(
    "points",
    [(), ((0, 1.0),), ((1, 0.0),), ((2, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0)), ((1, 1.0),) * 2],
)
def test_what_is_no_curve(points):
    with pytest.raises(ValueError, match=r"curve|bytes"):
        Curve(points)


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1.0, 1.0), (0.0, 0.0), (0.0, math.nan)])
def test_what_is_no_link(latency, bandwidth):
    with pytest.raises(ValueError, match="no link"):
        Link("x", latency, bandwidth)


@given(POINTS, POINTS)
def test_words_say_it_all(one, other):
    curves = {"all_reduce": one, "all_gather_into_tensor": other}
    found = GroupMeasurement("gloo", 4, 2, curves, 0.25)
    assert measurement_from_words(json.loads(json.dumps(measurement_to_words(found)))) == found


@pytest.mark.parametrize("hidden", [-0.1, 1.1, float("nan")])
def test_what_is_hidden_is_a_share(hidden):
    with pytest.raises(ValueError, match="not a share"):
        GroupMeasurement("gloo", 2, 1, {}, hidden)


@pytest.mark.parametrize(
    "words", [{}, {"curves": 1}, {"curves": {}, "ranks": "x", "hosts": 1, "backend": "gloo"}]
)
def test_other_words_are_refused(words):
    with pytest.raises((ValueError, KeyError, TypeError)):
        measurement_from_words(words)
