"""Which sums of exp(x - top) one pass can add up while it finds ``top``."""

import pytest
import torch

from codegen import triton_kernels as make
from treadle.loop.expr import Const, Expr, Local, ReduceKind
from treadle.loop.kernel import KernelKind, LoopForm
from treadle.loop.nest import levels, running_sums
from treadle.schedule.workers import PROGRAMS

SUM, MAX = ReduceKind.SUM, ReduceKind.MAX
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def names(kernel) -> list[str]:
    return sorted(running_sums(kernel))


def kernel_of(shifted, *, kind=KernelKind.ROWS, dtype=F32, top=MAX, total=SUM):
    """A kernel that adds up what ``shifted`` makes of x and of its largest."""
    k = make.Build(2048, 20000, kind)
    x = k.define(make.load("x", k.flat, dtype))
    largest = k.reduce(top, x)
    value: Expr = shifted(k, x, largest)
    outer = k.rows if kind is KernelKind.ROWS else k.cols
    k.store("y", k.reduce(total, value), outer, (outer,))
    return k.kernel("sums")


def shifted(k, x, top):
    return make.fn("exp", make.fn("sub", x, top))


def by_name(k, x, top):
    """The same in three definitions."""
    return k.define(make.fn("exp", k.define(make.fn("sub", x, top))))


@pytest.mark.parametrize("kind", [KernelKind.ROWS, KernelKind.COLUMNS])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("make_value", [shifted, by_name])
def test_softmax(make_value, dtype, kind):
    assert len(names(kernel_of(make_value, dtype=dtype, kind=kind))) == 1


@pytest.mark.parametrize(
    "make_value",
    [
        lambda k, x, top: make.fn("exp", make.fn("sub", top, x)),
        lambda k, x, top: make.fn("sub", x, top),
        lambda k, x, top: make.fn("exp", make.fn("add", x, top)),
        lambda k, x, top: make.fn("exp", make.fn("sub", make.fn("mul", x, make.f32(2.0)), top)),
        lambda k, x, top: make.fn("exp", make.fn("sub", x, Const(1.0, F32))),
        lambda k, x, top: make.fn("mul", shifted(k, x, top), x),
    ],
)
def test_other_sums_wait_for_the_largest(make_value):
    assert names(kernel_of(make_value)) == []


@pytest.mark.parametrize("change", [{"dtype": BF16}, {"top": ReduceKind.MIN}, {"total": MAX}])
def test_other_reductions_do_too(change):
    assert names(kernel_of(shifted, **change)) == []


def test_one_pass_less():
    kernel = make.softmax(2048, 20000)
    (total,) = names(kernel)
    scheduled = PROGRAMS.scheduled(kernel)
    assert scheduled.scheduled.form is LoopForm.LOOPED
    assert scheduled.scheduled.running == (total,)
    how = scheduled.scheduled
    assert (how.rows, how.cols, how.warps, how.unrolled, how.stages) == (1, 4096, 16, 2, 0)
    assert PROGRAMS.choose(make.softmax(2048, 50257)).stages == 4, "rows end within a vector"
    assert levels(kernel).passes == 3
    found = levels(scheduled)
    assert found.passes == 2
    (top,) = found.running.values()
    assert found.of[top] == found.of[total] == 0


def test_who_rounds_each_operation_keeps_three():
    kernel = make.softmax(2048, 20000)
    exact = PROGRAMS.rounding_each()
    how = exact.scheduled(kernel).scheduled
    assert (how.running, how.unrolled) == ((), 1)
    assert not any(each.running for each in exact.alternatives(kernel))
    assert any(each.running for each in PROGRAMS.alternatives(kernel))


def test_short_rows_and_few_rows_do_not():
    for rows, cols in ((2048, 16384), (8, 100_000)):
        assert PROGRAMS.choose(make.softmax(rows, cols)).running == ()


def test_what_is_no_value_of_the_kernel_is_left():
    assert not names(kernel_of(lambda k, x, top: Local(x.name, x.dtype)))
