"""The meter against sums done by hand."""

import pytest
import torch
from torch import Tensor, nn

from treadle.runtime.meter import measure_each, measure_peak, replay

KIB = 1024
SLACK = 512


def block(kib: int) -> Tensor:
    return torch.ones(kib * KIB // 4)


def test_allocations_and_frees_inside() -> None:
    given = [block(100)]

    def work() -> Tensor:
        a = block(200)
        b = block(300)
        del a
        c = block(50)
        del b
        return c

    report = measure_peak(work, given)
    assert report.before_bytes == 100 * KIB
    assert abs(report.peak_bytes - 600 * KIB) < SLACK
    assert abs(report.after_bytes - 150 * KIB) < SLACK


def test_views_count_once_and_twice_measured_is_the_same() -> None:
    base = block(64)
    for _ in range(3):
        report = measure_peak(lambda: base * 2, [base, base[3:], base.view(2, -1)])
        assert report.before_bytes == 64 * KIB
        assert abs(report.peak_bytes - 128 * KIB) < SLACK
    assert measure_peak(lambda: None, []).peak_bytes == 0


def test_frees_of_memory_from_before_count() -> None:
    """500 given; it dies before 400 is made: the peak is 100 + 500, not 100 + 500 + 400."""
    held, keep = [block(500)], block(100)

    def work() -> Tensor:
        held.clear()
        return block(400)

    report = measure_peak(work, iter([held[0], keep]))
    assert abs(report.peak_bytes - 600 * KIB) < SLACK
    assert abs(report.after_bytes - 500 * KIB) < SLACK


def test_memory_that_is_not_given_does_not_count() -> None:
    """Also when an earlier measurement saw its allocation, so that its free is reported."""
    held: list[Tensor] = []
    measure_peak(lambda: held.append(block(500)), [])

    def work() -> None:
        held.clear()
        block(100)

    assert abs(measure_peak(work, []).peak_bytes - 100 * KIB) < SLACK


def test_given_memory_of_an_earlier_measurement_is_freed_once() -> None:
    held: list[Tensor] = []
    measure_peak(lambda: held.append(block(500)), [])

    def work() -> None:
        held.clear()
        block(600)

    report = measure_peak(work, iter([held[0]]))
    assert abs(report.peak_bytes - 600 * KIB) < SLACK
    assert abs(report.after_bytes) < SLACK


def test_gradients_of_before_die_in_the_step_and_backward_threads_count() -> None:
    """Two layers of n x n: at the end of backward both gradients live beside the weights."""
    n, rows = 256, 8
    first, second = (nn.Parameter(torch.randn(n, n)) for _ in range(2))
    x = torch.randn(rows, n)

    def step() -> None:
        first.grad = second.grad = None
        ((x @ first).relu() @ second).sum().backward()

    step()
    grads = [p.grad for p in (first, second) if p.grad is not None]
    held = [first, second, x, *grads]
    del grads
    before = sum(t.nbytes for t in held)
    report = measure_peak(step, _drain(held))
    weights, row = n * n * 4, rows * n * 4
    assert report.before_bytes == before == 4 * weights + row
    assert report.peak_bytes <= 4 * weights + row + 6 * row
    assert abs(report.after_bytes - (4 * weights + row)) < SLACK


def _drain(tensors: list[Tensor]):
    while tensors:
        yield tensors.pop()


@pytest.mark.parametrize(
    ("before", "events", "peak", "after"),
    [
        ({}, [(1, 10), (1, -10), (1, 20)], 20, 20),
        ({1: 5}, [(1, 0), (1, -5), (2, 4)], 5, 4),  # the same death reported twice
        ({1: 5}, [(9, -100), (2, 4)], 9, 9),  # a block that was never counted
        ({1: 5}, [(1, 7)], 7, 7),  # the address is given out again: the old block is gone
        ({1: 5, 2: 6}, [], 11, 11),
    ],
)
def test_replay(before, events, peak: int, after: int) -> None:
    report = replay(before, events)
    assert (report.peak_bytes, report.after_bytes) == (peak, after)


def test_what_makes_a_function_counts_to_none() -> None:
    def functions():
        for kib in (100, 300):
            given = block(1000)
            yield lambda kib=kib, given=given: block(kib) + given[0]

    first, second = measure_each(functions(), torch.device("cpu"))
    assert abs(first - 200 * KIB) < SLACK
    assert abs(second - 600 * KIB) < SLACK
