"""The answer that does not raise, of questions in every form, without a tensor in sight."""

import sys
from sys import exit as leave

import pytest

from treadle.util.frames.branch_analysis import answer_without_error


def stop(frame):
    return frame.f_code.co_filename != __file__


class Asked(Exception):
    """Carries the answer out of the question."""


class Question:
    def __bool__(self):
        raise Asked(answer_without_error(sys._getframe(1), stop))

    def any(self):
        return self

    __lt__ = __gt__ = lambda self, other: self


def answer(function):
    with pytest.raises(Asked) as caught:
        function(Question())
    return caught.value.args[0]


def plain(t):
    if t:
        raise ValueError


def negated(t):
    if not t.any():
        raise ValueError


def compared(t):
    if t < 0:
        raise ValueError(f"{t} is below {0}")


def asserted(t):
    assert t, "message"
    return t


def joined(t, on=True):
    if on and (t or t.any()):
        raise ValueError


def later(t, on=True):
    if t and on:
        raise ValueError


def called(t):
    if not bool(t):
        raise ValueError


def stored(t):
    ok = bool(t)
    print(ok)
    if ok:
        return t
    raise ValueError


def helper(t):
    return bool(t)


def through(t):
    if helper(t):
        raise ValueError


class Held:
    def __init__(self, t):
        self.t = t

    @property
    def bad(self):
        return not self.t


def by_property(t):
    if Held(t).bad:
        raise ValueError


def within(t):
    with open(__file__) as file:
        for _ in file:
            if t:
                raise ValueError


def at_last(t):
    try:
        if t:
            raise ValueError
    finally:
        print(t)


def changed_error(t):
    try:
        assert t
    except AssertionError as error:
        raise TypeError("no") from error


def message(t):
    if t:
        names = [str(each) for each in range(3)]
        text = "a" if len(names) > 2 else "b"
        raise ValueError(text + ", ".join(names))


def listed(t):
    if any([t, t]):
        raise ValueError


def exits(t):
    if not t:
        print(f"{t} is not, stopping")
        sys.exit(1)
    return t


def exits_by_builtin(t):
    if t:
        exit()


def exits_by_another_name(t):
    if t:
        leave(2)


def caught_exit(t):
    try:
        if t:
            sys.exit(1)
    except SystemExit:
        t = None
    return t


def exits_elsewhere(t):
    if t:
        stop.exit(1)


def one_sided(t):
    if t:
        raise ValueError
    raise TypeError


def branch(t):
    if t:
        t = None
    return t


def caught_here(t):
    try:
        assert t
    except AssertionError:
        t = None
    return t


def maybe(t):
    if t:
        if stop is None:
            raise ValueError
        t = None
    return t


def kept(t):
    return [t for _ in range(2) if t]


def passed_on(t):
    return bool(t)


def counted(t):
    return sum(1 for _ in range(2) if t)


def in_a_call(t):
    if sorted([t, t], key=bool):
        raise ValueError


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (plain, False), (negated, True), (compared, False), (asserted, True), (joined, False),
        (later, False), (called, True), (stored, True), (through, False), (by_property, True),
        (within, False), (at_last, False), (changed_error, True), (message, False),
        (listed, False), (exits, True), (exits_by_builtin, False), (exits_by_another_name, False),
        (caught_exit, None), (exits_elsewhere, None), (one_sided, None), (branch, None),
        (caught_here, None), (maybe, None),
        (kept, None), (passed_on, None), (counted, None), (in_a_call, None),
    ],
    ids=lambda each: each.__name__ if callable(each) else str(each),
)  # fmt: skip
def test_the_answer_that_goes_on(function, found):
    assert answer(function) is found


def test_jumps_that_need_a_prefix():
    lines = "\n".join(f"        a{at} = b{at} = {at}" for at in range(200))
    source = f"def long(t):\n    if t:\n{lines}\n        raise ValueError\n    return t\n"
    assert answer(made(source)) is False


def made(source):
    """The function ``long`` of a text."""
    found = {}
    exec(compile(source, __file__, "exec"), found)
    return found["long"]


def test_a_long_function_is_followed_to_its_end():
    """One with more branches than Python has frames."""
    lines = "\n".join(f"    if a == {at}:\n        a = b" for at in range(1000))
    source = f"def long(t, a=0, b=1):\n    if t:\n        raise ValueError\n{lines}\n"
    assert answer(made(source)) is False
