"""Cheap values whose operands a kernel has at hand: it computes them again, and nobody stores them.

``test_schedule_fuzz.py`` runs random plans with and without.
"""

from dataclasses import replace

import pytest

from schedule.steps import Builder, kernels_of
from treadle.loop.expr import ReduceKind
from treadle.loop.kernel import KernelPlan
from treadle.loop.program import BufferKind, Compute, Program, TensorRef
from treadle.schedule.plan import plan_reads, plan_writes, schedule
from treadle.schedule.workers import PROGRAMS, THREADS, WORKERS, Workers

ROWS, WIDTH = 256, 96
AGAIN = replace(THREADS, computes_again=True)


def backward_of_norm(make, rows=ROWS, *, returns=False):
    """The value of ``make`` feeds a product, and meets what comes out in a sum over rows."""
    b = Builder()
    value = make(b, rows)
    weight, square = b.input(WIDTH), b.input(WIDTH, WIDTH)
    gradient = b.mm(b.pointwise("mul", value, weight), square)
    total = b.reduce(ReduceKind.SUM, b.pointwise("mul", gradient, value), [1], True)
    result = b.pointwise("sub", gradient, b.pointwise("mul", value, total))
    return b.program(result, *([value] if returns else [])), value


def scaled(b: Builder, rows: int) -> TensorRef:
    return b.pointwise("mul", b.input(rows, WIDTH), b.input(rows, 1))


def stores(plan: KernelPlan, value: TensorRef) -> bool:
    return any(value.buffer in plan_writes(each) for each in kernels_of(plan))


def last_kernel(plan: KernelPlan):
    return kernels_of(plan)[-1]


def test_a_value_is_computed_where_its_operands_are_read():
    program, value = backward_of_norm(scaled)
    stored, plan = schedule(program), schedule(program, workers=AGAIN)
    assert stores(stored, value)
    assert not stores(plan, value)
    assert value.buffer in plan_reads(last_kernel(stored))
    assert {"in0", "in1"} <= plan_reads(last_kernel(plan))
    assert len(kernels_of(plan)) == len(kernels_of(stored))
    assert plan.peak_bytes == stored.peak_bytes - ROWS * WIDTH * 4


def test_what_it_is_made_of_is_computed_too():
    def twice(b, rows):
        return b.pointwise("mul", b.pointwise("add", b.input(rows, WIDTH), 1.0), b.input(rows, 1))

    program, value = backward_of_norm(twice)
    plan = schedule(program, workers=AGAIN)
    assert not stores(plan, value)
    assert {"in0", "in1"} <= plan_reads(last_kernel(plan))


def test_kernels_that_sum_columns_compute_it_as_well():
    b = Builder()
    value = scaled(b, ROWS)
    gradient = b.mm(b.pointwise("mul", value, b.input(WIDTH)), b.input(WIDTH, WIDTH))
    total = b.reduce(ReduceKind.SUM, b.pointwise("mul", gradient, value), [0])
    plan = schedule(b.program(total), workers=AGAIN)
    assert not stores(plan, value)
    assert {"in0", "in1"} <= plan_reads(last_kernel(plan))


def test_an_operand_lives_on_in_the_place_of_the_value():
    def of_a_product(b, rows):
        made = b.mm(b.input(rows, WIDTH), b.input(WIDTH, WIDTH))
        return b.pointwise("mul", made, b.input(rows, 1))

    program, value = backward_of_norm(of_a_product)
    stored, plan = schedule(program), schedule(program, workers=AGAIN)
    assert not stores(plan, value)
    assert plan.peak_bytes <= stored.peak_bytes


def expensive(b, rows):
    return b.pointwise("exp", scaled(b, rows))


def of_many_operands(b, rows):
    x, y, z = (b.input(rows, WIDTH) for _ in range(3))
    return b.pointwise("add", b.pointwise("add", x, y), z)


def of_what_changes(b, rows):
    x = b.input(rows, WIDTH)
    value = b.pointwise("mul", x, b.input(rows, 1))
    b.pointwise("add", x, 1.0, into=x)
    return value


def of_a_sum(b, rows):
    total = b.reduce(ReduceKind.SUM, b.input(rows, WIDTH, 7), [2])
    return b.pointwise("mul", total, 2.0)


@pytest.mark.parametrize("make", [expensive, of_many_operands, of_what_changes])
def test_other_values_are_stored(make):
    program, value = backward_of_norm(make)
    plan = schedule(program, workers=AGAIN)
    assert stores(plan, value)
    assert value.buffer in plan_reads(last_kernel(plan))


def test_a_sum_is_not_computed_again():
    program, _ = backward_of_norm(of_a_sum)
    plan = schedule(program, workers=AGAIN)
    kernels = kernels_of(plan)
    assert sum("in0" in plan_reads(each) for each in kernels) == 1
    assert plan.peak_bytes <= schedule(program).peak_bytes


def test_a_result_is_stored():
    program, value = backward_of_norm(scaled, returns=True)
    assert stores(schedule(program, workers=AGAIN), value)


def test_a_small_value_is_stored():
    program, value = backward_of_norm(scaled, rows=32)
    assert stores(schedule(program, workers=AGAIN), value)


def in_a_chunk(program: Program) -> Program:
    """Its steps as those of a chunk of rows: what they read is gone after it."""
    steps = tuple(
        replace(each, origin=replace(each.origin, chunk=1)) if isinstance(each, Compute) else each
        for each in program.steps
    )
    return replace(program, steps=steps)


def test_a_value_of_a_chunk_is_stored():
    program, value = backward_of_norm(scaled)
    assert stores(schedule(in_a_chunk(program), workers=AGAIN), value)


@pytest.mark.parametrize("workers", WORKERS.values())
def test_who_computes_again(workers: Workers):
    program, value = backward_of_norm(scaled)
    assert stores(schedule(program, workers=workers), value) == (workers is not PROGRAMS)


@pytest.mark.parametrize("columns", [WIDTH, 2], ids=["wide", "narrow"])
def test_numbers_of_a_row_are_stored_in_the_place_of_the_row(columns):
    """The largest and the logarithm of the sum, beside which a row of a log-softmax is cheap."""
    b = Builder()
    x = b.input(1 << 14, columns)
    top = b.reduce(ReduceKind.MAX, x, [1], True)
    powers = b.pointwise("exp", b.pointwise("sub", x, top))
    log = b.pointwise("log", b.reduce(ReduceKind.SUM, powers, [1], True))
    value = b.pointwise("sub", b.pointwise("sub", x, top), log)
    loss = b.mm(b.input(1, 1 << 14), b.reduce(ReduceKind.SUM, value, [1], True))
    slope = b.pointwise("exp", b.pointwise("mul", value, loss))
    plan = schedule(b.program(loss, slope), workers=AGAIN)
    assert stores(plan, value) is (columns == 2)  # where they are no smaller than the row
    stored = {name for kernel in kernels_of(plan) for name in plan_writes(kernel)}
    assert {top.buffer, log.buffer} <= stored or columns == 2


@pytest.mark.parametrize("late", [False, True], ids=["before", "while it is read"])
def test_an_operand_may_be_filled_in_parts(late):
    """As long as nobody reads it before it is whole."""
    b = Builder()
    half = ROWS // 2
    parts = [b.mm(b.input(half, WIDTH), b.input(WIDTH, WIDTH)) for _ in range(2)]
    whole = b.buffer((ROWS, WIDTH), BufferKind.TEMPORARY)

    def fill(number):
        target = replace(whole, shape=(half, WIDTH), offset=number * half * WIDTH)
        b.pointwise("mul", parts[number], 2.0, into=target)

    fill(0)
    if not late:
        fill(1)
    first = replace(whole, shape=(half, WIDTH))
    early = b.pointwise("add", first, 1.0)
    if late:
        fill(1)
    value = b.pointwise("mul", whole, b.input(ROWS, 1))
    gradient = b.mm(b.pointwise("mul", value, b.input(WIDTH)), b.input(WIDTH, WIDTH))
    result = b.pointwise("sub", gradient, b.pointwise("mul", value, gradient))
    plan = schedule(b.program(whole, early, result), workers=AGAIN)
    assert stores(plan, value) is late
