"""Nested arguments: their leaves in order, and one map that keeps names and makes tuples."""

from hypothesis import given
from hypothesis import strategies as st

from treadle.util.nested import leaves, map_leaves

plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


def test_lists_become_tuples_and_names_stay():
    assert map_leaves(repr, (1, [True, {"a": None}])) == ("1", ("True", {"a": "None"}))


def test_leaves_in_order():
    assert leaves((1, [2, (3,)]), {"a": 4, "b": [5]}) == [1, 2, 3, 4, 5]


@given(nested)
def test_the_map_meets_every_leaf_once(value):
    seen = []
    map_leaves(seen.append, value)
    assert seen == leaves(value)


@given(nested)
def test_a_second_map_of_nothing_changes_nothing(value):
    once = map_leaves(lambda leaf: leaf, value)
    assert map_leaves(lambda leaf: leaf, once) == once
