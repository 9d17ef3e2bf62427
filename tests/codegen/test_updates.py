"""Kernels that reduce, and then update in place a parameter of each row or column."""

import ctypes
from dataclasses import replace

import pytest
import torch
from triton_run import Case, compare, job_of, results_of

from schedule.steps import Builder, kernels_of, run_plan
from treadle.loop.expr import ReduceKind
from treadle.loop.interpret import interpret_program
from treadle.loop.kernel import KernelKind, LoopForm
from treadle.loop.nest import loaded, stored, updates
from treadle.loop.program import Program
from treadle.schedule import schedule
from treadle.schedule.workers import PROGRAMS

ROWS = [(40, 300), (5, 70_000), (3, 1), (1, 40_000), (2000, 33), (1, 7)]
COLUMNS = [(300, 40), (5000, 24), (3, 700), (20_000, 1), (2, 5)]


def updated(shape: tuple[int, int], dim: int, *, used: bool = False) -> Program:
    """The gradient of ``p`` is a sum over ``x``; ``p`` and its decaying average are updated, and
    the value that ``p`` had is a result. ``used``: each element needs the new value, too."""
    b = Builder()
    kept = [1, 1]
    kept[1 - dim] = shape[1 - dim]
    x, p, average = b.input(*shape), b.input(*kept), b.input(*kept)
    grad = b.reduce(ReduceKind.SUM, b.pointwise("tanh", x), [dim], True)
    before = b.pointwise("mul", p, 2.0)
    b.pointwise("mul", average, 0.5, into=average)
    mean = b.pointwise("add", average, grad)
    new = b.pointwise("sub", p, b.pointwise("mul", mean, 0.125), into=p)
    results = [before, mean]
    if used:
        results.append(b.pointwise("mul", b.pointwise("tanh", x), new))
    return b.program(*results)


def inputs_of(program: Program) -> list[torch.Tensor]:
    return [torch.randn(program.buffers[name].shape) for name in program.inputs]


@pytest.fixture
def threads(request):
    """So many threads share the generated loops of this test."""
    library = ctypes.CDLL("libgomp.so.1")
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(request.param)
    yield request.param
    library.omp_set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("used", [False, True])
def test_on_threads(used, threads):
    """``before`` is stored beside the new value and must be made of the old one; an average that
    several parts of the rows halved would be too small."""
    forms = set()
    for shape, dim in [*((s, 1) for s in ROWS), *((s, 0) for s in COLUMNS)]:
        program = updated(shape, dim, used=used)
        given = inputs_of(program)
        expected = [t.clone() for t in given]
        plan = schedule(program)
        results = interpret_program(program, dict(zip(program.inputs, expected, strict=True)))
        found = run_plan(plan, *given)
        for mine, theirs in zip([*found, *given], [*results, *expected], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-4, msg=f"{shape} {dim}")
        forms |= {(each.kind, each.scheduled.form) for each in kernels_of(plan) if updates(each)}
    if not used:
        kinds = (KernelKind.ROWS, KernelKind.COLUMNS)
        assert forms == {(k, f) for k in kinds for f in (LoopForm.LOOPED, LoopForm.SPLIT)}


def case_of(program: Program, workers) -> Case:
    plan = schedule(program, workers=workers)
    used = {name for each in kernels_of(plan) for name in (*loaded(each.body), *stored(each.body))}
    elements = {name: plan.buffers[name].shape for name in sorted(used)}
    tensors = {name: torch.full((torch.Size(n).numel(),), 77.0) for name, n in elements.items()}
    given = dict(zip(program.inputs, inputs_of(program), strict=True))
    tensors |= {name: tensor.flatten() for name, tensor in given.items()}
    return Case(str(elements), [replace(k, schedule=None, scratch=()) for k in kernels_of(plan)],
                tensors)  # fmt: skip


def check(cases: list[Case], folder, interpreted) -> None:
    """Sums of thousands of numbers, in another order than the interpreter's."""
    results = results_of([job_of(case) for case in cases], folder, interpreted)
    compare(cases, results, atol=2e-4)


def always(rows: int, cols: int, sums: int) -> bool:
    return True


@pytest.mark.parametrize("used", [False, True])
def test_on_programs(used, tmp_path, interpreted):
    programs = [updated(shape, 1, used=used) for shape in [*ROWS[:1], *ROWS[2:4], (3, 20_000)]]
    programs += [updated(shape, 0, used=used) for shape in COLUMNS]
    cases = [case_of(each, PROGRAMS) for each in programs]
    check(cases, tmp_path, interpreted)
    late = [len(updates(kernel)) for case in cases for kernel in case.kernels]
    assert sum(late) == 2 * len(programs[1:]) if not used else sum(late) > 0  # not of (3, 1)


def both_ways(rows: int, cols: int) -> Program:
    """Like the backward pass of a norm, with updates of columns and of rows."""
    b = Builder()
    x, dy, count = b.input(rows, cols), b.input(rows, cols), b.input(rows, 1)
    weight, bias, momentum = (b.input(cols) for _ in range(3))
    scaled = b.pointwise("mul", dy, weight)
    dot = b.reduce(ReduceKind.SUM, b.pointwise("mul", scaled, x), [1], True)
    dx = b.pointwise("sub", scaled, b.pointwise("mul", x, dot))
    dw = b.reduce(ReduceKind.SUM, b.pointwise("mul", dy, x), [0])
    b.pointwise("add", count, dot, into=count)
    b.pointwise("mul", momentum, 0.5, into=momentum)
    b.pointwise("sub", bias, b.pointwise("mul", dw, 0.125), into=bias)
    return b.program(dx)


def test_kernels_of_both(tmp_path, interpreted):
    sizes = [(64, 48), (33, 7), (200, 1)]
    cases = [case_of(both_ways(*n), replace(PROGRAMS, sweeps=always)) for n in sizes]
    kinds = [kernel.kind for case in cases for kernel in case.kernels if updates(kernel)]
    assert KernelKind.BOTH in kinds
    check(cases, tmp_path, interpreted)
