"""Rows and columns of the same values: one kernel reduces them both ways.

``test_schedule_fuzz.py`` runs random plans, ``codegen/test_triton.py`` the generated kernels.
"""

from dataclasses import replace

import pytest
import torch

from schedule.steps import Builder, kernels_of
from schedule.test_schedule_fuzz import check
from treadle.loop.expr import ReduceKind
from treadle.loop.kernel import KernelKind, KernelPlan, LoopForm
from treadle.loop.program import Compute, Program
from treadle.loop.verify import verify_kernel
from treadle.schedule import programs
from treadle.schedule.plan import plan_reads, plan_writes, schedule
from treadle.schedule.workers import PROGRAMS, THREADS

ROWS, WIDTH = 96, 40
SUM = ReduceKind.SUM
SWEEPING = replace(PROGRAMS, sweeps=lambda rows, cols, sums: sums <= 3)
APART = replace(PROGRAMS, sweeps=THREADS.sweeps)


def norm_backward(b: Builder, rows: int = ROWS, width: int = WIDTH):
    """``x``, ``dy``; the gradient of the rows, and the products that make that of the weight."""
    x, dy, r = b.input(rows, width), b.input(rows, width), b.input(rows, 1)
    normed = b.pointwise("mul", x, r)
    scaled = b.pointwise("mul", dy, b.input(width))
    mean = b.reduce(SUM, b.pointwise("mul", scaled, normed), [1], True)
    dx = b.pointwise("mul", b.pointwise("sub", scaled, b.pointwise("mul", normed, mean)), r)
    return dx, b.pointwise("mul", dy, normed), dy


def kinds(plan: KernelPlan) -> list[KernelKind]:
    return [each.kind for each in kernels_of(plan)]


def verified(program: Program, seed: int = 0) -> KernelPlan:
    """The plan of kernels that may reduce both ways, whose numbers are the program's."""
    plan = schedule(program, workers=SWEEPING)
    for kernel in kernels_of(plan):
        verify_kernel(kernel, plan.buffers)
    check(program, plan, seed)
    return plan


def test_a_norm_and_the_gradient_of_its_weight_are_one_kernel():
    b = Builder()
    dx, product, dy = norm_backward(b)
    dw, db = b.reduce(SUM, product, [0]), b.reduce(SUM, dy, [0])
    program = b.program(dx, dw, db)
    plan = verified(program)
    assert kinds(plan) == [KernelKind.BOTH]
    (kernel,) = kernels_of(plan)
    assert kernel.scheduled.form is LoopForm.SWEPT
    assert len(kernel.scratch) == 2
    assert len(kinds(schedule(program, workers=APART))) == 2
    assert set(kinds(schedule(program, workers=THREADS))) == {KernelKind.ROWS, KernelKind.COLUMNS}


def test_what_is_made_of_the_columns_is_in_it():
    b = Builder()
    dx, product, _ = norm_backward(b)
    dw = b.reduce(SUM, product, [0])
    step = b.pointwise("tanh", b.pointwise("mul", dw, 0.1))
    plan = verified(b.program(dx, step))
    assert kinds(plan) == [KernelKind.BOTH]


def test_the_copies_of_products_behind_it_are_stored_by_it():
    b = Builder()
    dx, product, dy = norm_backward(b)
    dw = b.reduce(SUM, product, [0])
    square = b.mm(b.pointwise("add", dy, 1.0), b.input(WIDTH, WIDTH))
    plan = verified(b.program(dx, dw, square))
    assert kinds(plan) == [KernelKind.BOTH]
    (kernel,) = kernels_of(plan)
    assert len(plan_writes(kernel)) == 3 + len(kernel.scratch)


def test_it_reads_what_two_kernels_read_once():
    b = Builder()
    dx, product, _ = norm_backward(b)
    program = b.program(dx, b.reduce(SUM, product, [0]))
    reads = [name for each in kernels_of(verified(program)) for name in plan_reads(each)]
    apart = schedule(program, workers=APART)
    twice = [name for each in kernels_of(apart) for name in plan_reads(each)]
    assert len(reads) == len(set(reads)) < len(twice)


# --- when not -------------------------------------------------------------------------------


def a_row_needs_the_columns(b: Builder):
    dx, product, _ = norm_backward(b)
    return b.pointwise("mul", dx, b.reduce(SUM, product, [0]))


def a_sum_over_columns_of_it(b: Builder):
    dx, product, _ = norm_backward(b)
    mean = b.reduce(SUM, product, [0])
    centred = b.pointwise("sub", product, mean)
    return dx, b.reduce(SUM, b.pointwise("mul", centred, centred), [0])


def other_values(b: Builder):
    dx, _, _ = norm_backward(b)
    return dx, b.reduce(SUM, b.input(ROWS, WIDTH), [0])


def too_many_sums(b: Builder):
    dx, product, dy = norm_backward(b)
    more = [b.pointwise("mul", dy, factor) for factor in (2.0, 3.0)]
    return dx, *(b.reduce(SUM, each, [0]) for each in (product, dy, *more))


def largest(b: Builder, kind: ReduceKind = ReduceKind.MAX):
    dx, product, _ = norm_backward(b)
    return dx, b.reduce(kind, product, [0])


def a_product_between(b: Builder):
    dx, product, _ = norm_backward(b)
    other = b.mm(b.pointwise("mul", dx, product), b.input(WIDTH, WIDTH))
    return dx, b.reduce(SUM, b.pointwise("mul", other, product), [0])


@pytest.mark.parametrize(
    "make", [a_row_needs_the_columns, a_sum_over_columns_of_it, other_values, too_many_sums]
)
def test_kernels_stay_apart(make):
    b = Builder()
    found = make(b)
    program = b.program(*(found if isinstance(found, tuple) else (found,)))
    plan = verified(program)
    sums = [each for each in kernels_of(plan) if each.kind is KernelKind.BOTH]
    assert len(kernels_of(plan)) > 1
    for each in sums:  # what could be joined was; the rest stands in kernels of its own
        assert len(each.scratch) <= 3


def test_other_values_are_not_joined():
    b = Builder()
    plan = verified(b.program(*other_values(b)))
    assert sorted(kinds(plan)) == [KernelKind.COLUMNS, KernelKind.ROWS]


def test_the_largest_of_a_column_is_joined_as_well():
    b = Builder()
    assert kinds(verified(b.program(*largest(b)))) == [KernelKind.BOTH]


def test_its_place_is_not():
    b = Builder()
    plan = schedule(b.program(*largest(b, ReduceKind.ARGMAX)), workers=SWEEPING)
    assert sorted(kinds(plan)) == [KernelKind.COLUMNS, KernelKind.ROWS]


def test_a_product_between_them_keeps_them_apart():
    b = Builder()
    plan = verified(b.program(*a_product_between(b)))
    assert KernelKind.BOTH not in kinds(plan)


def test_rows_of_one_chunk_are_not_joined_with_those_of_another():
    b = Builder()
    dx, product, _ = norm_backward(b)
    program = b.program(dx, b.reduce(SUM, product, [0]))
    last = program.steps[-1]
    assert isinstance(last, Compute)
    steps = (*program.steps[:-1], replace(last, origin=replace(last.origin, chunk=1)))
    assert KernelKind.BOTH not in kinds(verified(replace(program, steps=steps)))


# --- for whom -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "cols", "sums", "expected"),
    [
        (16384, 1024, 1, True),
        (32768, 2048, 2, True),
        (32768, 2048, 3, False),  # accumulators leave no registers
        (8192, 8192, 1, False),
        (1024, 1024, 1, False),  # a program would have one row
        (131072, 128, 2, True),
        (1 << 20, 16, 1, False),
    ],
)
def test_which_sizes(rows, cols, sums, expected):
    assert programs.sweeps(rows, cols, sums) is expected
    assert not THREADS.sweeps(rows, cols, sums)


def test_programs_have_several_rows_each():
    b = Builder()
    dx, product, _ = norm_backward(b, 8192, 1024)
    plan = schedule(b.program(dx, b.reduce(SUM, product, [0])), workers=PROGRAMS)
    (kernel,) = kernels_of(plan)
    how = kernel.scheduled
    assert (how.form, how.rows, how.cols, how.parts) == (LoopForm.SWEPT, 1, 1024, 1024)
    (scratch,) = kernel.scratch
    assert plan.buffers[scratch].shape == (1024 * 1024,)
    assert plan.buffers[scratch].dtype is torch.float32


def test_other_schedules_are_worth_a_try():
    b = Builder()
    dx, product, _ = norm_backward(b, 8192, 1024)
    (kernel,) = kernels_of(schedule(b.program(dx, b.reduce(SUM, product, [0])), workers=PROGRAMS))
    tried = programs.alternatives(kernel)
    assert {each.form for each in tried} == {LoopForm.SWEPT}
    assert {512, 1024, 2048} <= {each.parts for each in tried}
    assert {each.rows for each in tried} >= {1, 2}
