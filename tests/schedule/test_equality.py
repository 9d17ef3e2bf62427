"""Kernels that are one function of other buffers, found before any text exists."""

import pytest
import torch

from schedule.steps import Builder, at, kernels_of
from treadle.loop.expr import Apply, Const, ReduceKind
from treadle.loop.kernel import LoopForm
from treadle.schedule import schedule
from treadle.schedule.equality import kernel_key
from treadle.schedule.workers import PROGRAMS, THREADS

F32 = torch.float32


def key(make, workers=THREADS):
    """The key of the one kernel of a program."""
    b = Builder()
    plan = schedule(b.program(make(b)), workers=workers)
    (kernel,) = kernels_of(plan)
    return kernel_key(kernel, plan.buffers)


def scaled(n=100, fn="mul", factor=2.0, dtype=F32, spare=0):
    """``y = x * 2``; ``spare``: inputs before it, so that names differ."""

    def make(b):
        for _ in range(spare):
            b.input(3)
        return b.pointwise(fn, b.input(n, dtype=dtype), factor)

    return make


def summed(rows, cols, dim, kind=ReduceKind.SUM, spare=0):
    def make(b):
        for _ in range(spare):
            b.input(3)
        return b.reduce(kind, b.input(rows, cols), [dim])

    return make


@pytest.mark.parametrize("workers", [THREADS, PROGRAMS], ids=["threads", "programs"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (scaled(), scaled(spare=2)),
        (scaled(100), scaled(7)),
        (summed(9, 31, 1), summed(9, 31, 1, spare=1)),
    ],
    ids=["names", "the extent of a flat one", "names of a sum"],
)
def test_equal(left, right, workers):
    assert key(left, workers) == key(right, workers)


@pytest.mark.parametrize("workers", [THREADS, PROGRAMS], ids=["threads", "programs"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (scaled(fn="mul"), scaled(fn="add")),
        (scaled(factor=2.0), scaled(factor=3.0)),
        (scaled(factor=0.0), scaled(factor=-0.0)),
        (scaled(factor=float("inf")), scaled(factor=float("nan"))),
        (scaled(dtype=F32), scaled(dtype=torch.float64)),
        (summed(9, 31, 1), summed(9, 32, 1)),
        (summed(9, 31, 1), summed(9, 31, 0)),
        (summed(9, 31, 1), summed(9, 31, 1, ReduceKind.MAX)),
    ],
)
def test_different(left, right, workers):
    assert key(left, workers) != key(right, workers)


def test_one_buffer_twice_is_not_two_buffers():
    def once(b):
        x = b.input(100)
        return b.pointwise("add", x, x)

    assert key(once) != key(lambda b: b.pointwise("add", b.input(100), b.input(100)))


def test_equal_formulas_are_equal_however_they_share_nodes():
    def made(shared):
        def make(b):
            x = b.input(100)

            def body(i):
                first = Apply("exp", (at(x, i),), F32)
                second = first if shared else Apply("exp", (at(x, i),), F32)
                return Apply("add", (first, Apply("mul", (second, Const(2.0, F32)), F32)), F32)

            return b.compute((100,), body)

        return make

    assert key(made(True)) == key(made(False))


@pytest.mark.parametrize(("workers", "count"), [(THREADS, 1), (PROGRAMS, 1)])
def test_partial_sums_are_in_the_plan(workers, count):
    b = Builder()
    out = b.reduce(ReduceKind.SUM, b.input(40_000, 8), [0])
    plan = schedule(b.program(out), workers=workers)
    (kernel,) = kernels_of(plan)
    assert kernel.scheduled.form is LoopForm.SPLIT
    assert len(kernel.scratch) == count
    wanted = workers.scratch_of(kernel, kernel.scheduled)
    for name, each in zip(kernel.scratch, wanted, strict=True):
        assert plan.offsets[name] + each.count * each.dtype.itemsize <= plan.arena_bytes
        assert plan.buffers[name].elements == each.count == kernel.scheduled.parts * 8
    assert plan.arena_bytes > 0
