"""Random programs: the plan, run in its arena, gives what the program gives."""

import os
import random
from dataclasses import replace

import pytest
import torch

from schedule.steps import Builder, at, strided
from treadle.loop.expr import ReduceKind
from treadle.loop.interpret import interpret_kernel, interpret_program
from treadle.loop.kernel import Kernel, KernelKind, KernelPlan
from treadle.loop.program import BufferKind, Program, TensorRef
from treadle.loop.verify import verify_kernel
from treadle.schedule import schedule
from treadle.schedule.plan import plan_reads, plan_writes
from treadle.schedule.recompute import kernel_recompute
from treadle.schedule.workers import PROGRAMS, THREADS

SHAPE = (3, 4, 5)
SEEDS = range(int(os.environ.get("TREADLE_SEEDS", "72")))
"""Of the programs: 60, or more."""


def random_program(seed: int) -> Program:
    """Pointwise work, broadcasts, reductions, transposes, products and write-backs, mixed."""
    pick = random.Random(seed)
    b = Builder()
    full = [b.input(*SHAPE) for _ in range(2)]
    rows, columns = [b.input(3, 4, 1)], [b.input(5)]
    square = b.input(5, 5)
    for _ in range(pick.randint(8, 30)):
        kind = pick.randrange(10)
        x, y = pick.choice(full), pick.choice(full)
        if kind < 3:
            full.append(b.pointwise(pick.choice(("add", "mul", "sub")), x, y))
        elif kind == 3:
            full.append(b.pointwise("mul", x, pick.choice((*rows, *columns))))
        elif kind == 4:
            rows.append(b.reduce(ReduceKind.SUM, x, [2], True))
        elif kind == 5:
            columns.append(b.reduce(pick.choice(list(ReduceKind)[:1]), x, [0, 1]))
        elif kind == 6:
            rows.append(b.pointwise("tanh", pick.choice(rows)))
        elif kind == 7:
            target = pick.choice(full[:2])
            b.pointwise("sub", target, pick.choice(full), into=target)
        elif kind == 8:
            group = pick.choice((rows, columns))
            b.pointwise("sub", group[0], pick.choice(group), into=group[0])
        else:
            flat = TensorRef(x.buffer, x.dtype, (12, 5), (5, 1))
            product = b.mm(flat, square)
            full.append(TensorRef(product.buffer, product.dtype, SHAPE, (20, 5, 1)))
    swapped = pick.choice(full)
    view = TensorRef(swapped.buffer, swapped.dtype, (5, 4, 3), (1, 5, 20))
    full.append(b.compute((3, 5, 4), lambda i, j, k: at(view, j, k, i)))
    results = [pick.choice(full[2:] or full), rows[-1], columns[-1]]
    return b.program(*(r for r in results if b.buffers[r.buffer].kind is BufferKind.TEMPORARY))


def run_in_arena(plan: KernelPlan, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    arena = torch.full((plan.arena_bytes,), 255, dtype=torch.uint8)
    storage: dict[str, torch.Tensor] = {}
    for name, buffer in plan.buffers.items():
        if buffer.kind is BufferKind.INPUT:
            storage[name] = tensors[name].view(-1)
        elif name in plan.offsets:
            begin = plan.offsets[name]
            storage[name] = arena[begin : begin + buffer.nbytes].view(buffer.dtype)
        else:
            storage[name] = torch.full((buffer.elements,), torch.nan, dtype=buffer.dtype)
    for step in plan.steps:
        if isinstance(step, Kernel):
            interpret_kernel(step, storage)
        else:
            a, b = (strided(storage[r.buffer], r) for r in step.args)
            storage[step.outputs[0]].copy_((a @ b).flatten())
    return [strided(storage[r.buffer], r) for r in plan.results]


def check(program: Program, plan: KernelPlan, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = {name: torch.randn(program.buffers[name].shape) * 0.3 for name in program.inputs}
    reference = {name: t.clone() for name, t in inputs.items()}
    found = run_in_arena(plan, inputs)
    expected = interpret_program(program, reference)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for name in program.inputs:
        torch.testing.assert_close(inputs[name], reference[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_keep_the_numbers(seed, fuse):
    program = random_program(seed)
    check(program, schedule(program, fuse=fuse), seed)


def moved(plan: KernelPlan) -> int:
    """Bytes that kernels read and write, each buffer once."""
    kernels = [each for each in plan.steps if isinstance(each, Kernel)]
    names = [name for each in kernels for name in (*plan_reads(each), *plan_writes(each))]
    return sum(plan.buffers[name].nbytes for name in names)


@pytest.mark.parametrize("seed", SEEDS)
def test_values_that_are_computed_again(seed, monkeypatch):
    monkeypatch.setattr(kernel_recompute, "_LEAST", 0)
    program = random_program(seed)
    stored = schedule(program)
    plan = schedule(program, workers=replace(THREADS, computes_again=True))
    check(program, plan, seed)
    assert moved(plan) <= moved(stored)
    check(program, schedule(program, workers=PROGRAMS), seed)


def test_some_are_computed_again(monkeypatch):
    monkeypatch.setattr(kernel_recompute, "_LEAST", 0)
    again = replace(THREADS, computes_again=True)
    programs = [random_program(seed) for seed in SEEDS]
    less = [moved(schedule(each, workers=again)) < moved(schedule(each)) for each in programs]
    assert sum(less) >= 10


def always(rows: int, cols: int, sums: int) -> bool:
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_that_reduce_both_ways(seed):
    program = random_program(seed)
    plan = schedule(program, workers=replace(PROGRAMS, sweeps=always))
    check(program, plan, seed)
    for each in plan.steps:
        if isinstance(each, Kernel):
            verify_kernel(each, plan.buffers)
    assert plan.peak_bytes <= 1.5 * schedule(program, workers=PROGRAMS).peak_bytes


def test_some_reduce_both_ways():
    programs = [random_program(seed) for seed in SEEDS]
    plans = [schedule(each, workers=replace(PROGRAMS, sweeps=always)) for each in programs]
    kinds = [each.kind for plan in plans for each in plan.steps if isinstance(each, Kernel)]
    assert kinds.count(KernelKind.BOTH) >= 20
