"""What is called with room is called as ever, and asks the system for no memory at each call."""

import resource

import pytest

from treadle.util.frames.data_stack import call_with_room, with_room

DEPTHS = range(0, 600, 2)
CALLS = 50


def at_depth(depth, function):
    return function() if depth == 0 else at_depth(depth - 1, function)


def loop():
    """Calls that begin a chunk of frames each, at some depth."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        at_depth(1, int)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults():
    """Of one loop at any depth: a new page for each call where a chunk ends there."""
    return max(at_depth(depth, loop) for depth in DEPTHS)


def test_no_loop_asks_for_memory_at_each_of_its_calls():
    with_room(most_faults)()  # what is touched for the first time
    assert call_with_room(most_faults, (), {}) < CALLS // 2


def test_a_call_is_a_call():
    @with_room
    def given(*args, key=0, **others):
        """Its text."""
        return args, key, others

    assert given(1, 2, key=3, more=4) == ((1, 2), 3, {"more": 4})
    assert (given.__name__, given.__doc__) == ("given", "Its text.")


def test_an_error_passes_with_its_traceback():
    def fails():
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user") as found:
        with_room(fails)()
    assert found.traceback[-1].name == "fails"


def test_rooms_within_rooms():
    def deeper(n):
        return 0 if n == 0 else 1 + with_room(deeper)(n - 1)

    assert deeper(100) == 100
