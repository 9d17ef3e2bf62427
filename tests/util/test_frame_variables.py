"""Looking at a frame whose comprehension has a variable that is a cell: it ended the process."""

import sys

from treadle.util.frames.frame_variables import variables


class Asks:
    def __init__(self, found):
        self.found = found

    def __bool__(self):
        self.found.append(dict(variables(sys._getframe(1))))
        return True


def picked(found, values):
    several = sorted(each % 7 for each in values)
    ones = [each for each in several if Asks(found)]
    for each in reversed(ones):
        assert each >= 0
    return [each - sum(one < each for one in ones) for each in several if Asks(found)]


def test_variables_of_frames_with_hidden_cells():
    found = []
    for _ in range(200):
        assert picked(found, range(5)) == [0, 0, 0, 0, 0]
    assert all(each.get("several", each.get(".0")) is not None for each in found)


def test_variables_are_those_of_the_frame():
    kept = 3

    def inner(argument, *rest, option=2):
        found = variables(sys._getframe())
        return {name: found[name] for name in ("argument", "rest", "option", "kept")}, kept

    assert inner(1, 5)[0] == {"argument": 1, "rest": (5,), "option": 2, "kept": 3}
