"""Ctrl-C waits until a call is done, and is not lost."""

import signal
import threading

import pytest

from treadle.runtime.execute.interrupt import Uninterrupted


@pytest.fixture
def told():
    """The signals that the process' own handler was told of."""
    numbers = []
    before = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def test_it_is_delivered_once_after_the_last_line(told):
    with Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert told == []
    assert told == [signal.SIGINT]
    signal.raise_signal(signal.SIGINT)
    assert len(told) == 2


def test_one_within_another(told):
    with Uninterrupted():
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert told == []
    assert told == [signal.SIGINT]


def test_an_error_is_raised_as_it_is(told):
    def fails():
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fails()
    signal.raise_signal(signal.SIGINT)
    assert told == [signal.SIGINT]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_handles_nothing_there_is_nothing_to_hold(told, handler):
    signal.signal(signal.SIGINT, handler)
    with Uninterrupted():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_in_another_thread_nothing_is_held(told):
    handlers = []

    def run():
        with Uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    own = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [own]
