"""What is in flight while a call runs."""

import torch

from treadle.runtime.execute.in_flight import Transfers


class Work:
    def __init__(self, needs_others=True):
        self.waited, self.needs_others = 0, needs_others

    def wait(self):
        self.waited += 1


def in_flight(count):
    found = Transfers()
    works = [Work() for _ in range(count)]
    kept = [torch.empty(3) for _ in works]
    for out, work in zip(kept, works, strict=True):
        found.add(out, work)
    return found, works, kept


def test_a_call_that_ends_early_waits_for_all():
    found, works, _ = in_flight(3)
    found.finish()
    assert [each.waited for each in works] == [1, 1, 1]
    found.finish()
    assert [each.waited for each in works] == [1, 1, 1]


def test_one_is_waited_for_once():
    found, works, kept = in_flight(2)
    assert found.wait(kept[1])
    assert not found.wait(kept[1])
    assert [each.waited for each in works] == [0, 1]
    found.finish()
    assert [each.waited for each in works] == [1, 1]


def test_nobody_waits_after_a_failure():
    found, works, _ = in_flight(2)
    found.abandon()
    found.finish()
    assert [each.waited for each in works] == [0, 0]


def test_after_a_failure_what_ends_by_itself_is_waited_for():
    """A copy would write into memory that a later call has filled."""
    found, works, kept = in_flight(2)
    copying, out = Work(needs_others=False), torch.empty(3)
    found.add(out, copying)
    found.abandon()
    assert [each.waited for each in (*works, copying)] == [0, 0, 1]
    assert not found.wait(out)
    assert not found.wait(kept[0])
