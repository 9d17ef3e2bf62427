"""Whether a process exists, as another one sees it."""

import os
import signal
import socket
import time
from dataclasses import replace

import pytest

from treadle.runtime.ranks.liveness import Liveness, ProcessAddress, listening

WAITS = """
import time
from treadle.runtime.ranks.liveness import listening
print(listening("").text(), flush=True)
time.sleep(seconds)
"""
FORKS = """
import os, time
from treadle.runtime.ranks.liveness import listening
print(listening("").text(), flush=True)
child = os.fork()
if child:
    print(child, flush=True)
    os._exit(0)
time.sleep(60)
"""


def lines_of(place, count):
    """What a process has printed, once it is that many lines."""
    output = place / "output"
    while not output.exists() or len(output.read_text().splitlines()) < count:
        time.sleep(0.005)
    return output.read_text().splitlines()


def test_this_process_is_there():
    here = listening("")
    assert here.process == os.getpid()
    assert here.look() is Liveness.THERE
    assert str(here) == f"process {os.getpid()} on {socket.gethostname()}"
    assert listening("") is here


def test_many_look_at_one_that_never_answers():
    assert {listening("").look() for _ in range(20)} == {Liveness.THERE}


@pytest.mark.parametrize("kill", [True, False])
def test_another_has_ended_however_it_did(forks, kill):
    started = forks.start(WAITS.replace("seconds", "60" if kill else "0.5"))
    number, place = started
    there = ProcessAddress.parse(lines_of(place, 1)[0])
    assert there.process == number
    assert there.look() is Liveness.THERE
    if kill:
        os.kill(number, signal.SIGKILL)
    forks.finish(started)
    assert there.look() is Liveness.ENDED


def test_a_child_that_outlives_a_process_is_not_that_process(forks):
    started = forks.start(FORKS)
    address, child = lines_of(started[1], 2)
    forks.finish(started)
    try:
        assert ProcessAddress.parse(address).look() is Liveness.ENDED
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_text_comes_back():
    here = listening("")
    assert ProcessAddress.parse(here.text()) == here


def test_the_loopback_of_another_host_is_not_asked():
    elsewhere = replace(listening(""), host="elsewhere")
    assert elsewhere.look() is Liveness.UNKNOWN
