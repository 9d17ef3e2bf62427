"""Rows of a few columns, written out, mean what their loops mean."""

import dataclasses
import math

import pytest
import torch

from codegen import triton_kernels as make
from treadle.loop.expr import Apply, Const, Position, Reduce, ReduceKind
from treadle.loop.interpret import interpret_kernel
from treadle.loop.kernel import Definition, KernelKind
from treadle.loop.nest import reductions_of
from treadle.loop.unroll import can_unroll, unrolled
from treadle.loop.verify import verify_kernel

ROWS = 37
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)


def window(k, cols, dtype):
    """``x[2 * r + c - 1]``, and zero outside."""
    place = k.rows * 2 + k.cols - 1
    inside = make.fn("ge", Position(place), Const(0, torch.int64))
    return k.define(make.load("x", place, dtype, inside))


def kernel_of(kind, cols, dtype):
    """A window's reduction, what is made of it, and an element of each column beside it."""
    k = make.Build(ROWS, cols)
    x = window(k, cols, dtype)
    found = k.reduce(kind, x)
    k.store("found", found, k.rows, (k.rows,))
    if found.dtype is torch.int64:
        third = make.fn("floordiv", found, Const(3, torch.int64))
        k.store("third", k.define(third, (k.rows,)), k.rows, (k.rows,))
        rest = make.fn("mod", third, Const(2, torch.int64))
        k.store("rest", k.define(rest, (k.rows,)), k.rows, (k.rows,))
    k.store("beside", k.define(make.fn("add", x, x)), k.rows * cols + k.cols)
    return k.kernel("windows")


def formulas(kernel):
    return [item.expr for item in kernel.body if isinstance(item, Definition)]


def values(dtype, count):
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, (count,), dtype=dtype)
    special = torch.tensor([0.0, -0.0, 1.0, 1.0, math.inf, -math.inf, math.nan, -2.0])
    x = torch.where(
        torch.rand(count) < 0.5, special[torch.randint(8, (count,))], torch.randn(count)
    )
    return x.to(dtype)


def buffers_of(kernel, cols, dtype, x):
    (kind,) = (item.kind for item in reductions_of(kernel))
    found = torch.int64 if kind in (ReduceKind.ARGMAX, ReduceKind.ARGMIN) else dtype
    made = {"x": x, "found": torch.full((ROWS,), 9, dtype=found)}
    made |= {name: torch.full((ROWS,), 9, dtype=torch.int64) for name in ("third", "rest")}
    return made | {"beside": torch.full((ROWS * cols,), 9, dtype=dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in ReduceKind if kind is not ReduceKind.ANY])
@pytest.mark.parametrize("cols", [1, 2, 3, 5, 9, 16])
def test_columns_written_out_give_the_same_values(kind, cols, dtype):
    torch.manual_seed(cols)
    kernel = kernel_of(kind, cols, dtype)
    assert can_unroll(kernel)
    after = unrolled(kernel)
    verify_kernel(after)
    assert not reductions_of(after)
    for _ in range(5):
        x = values(dtype, 2 * ROWS + cols)
        expected, mine = (buffers_of(kernel, cols, dtype, x) for _ in range(2))
        interpret_kernel(kernel, expected)
        interpret_kernel(after, mine)
        for name, want in expected.items():
            torch.testing.assert_close(mine[name], want, equal_nan=True, msg=name)


def test_any_of_truths():
    k = make.Build(ROWS, 3)
    x = k.define(make.load("x", k.flat, torch.bool))
    k.store("y", k.reduce(ReduceKind.ANY, x), k.rows, (k.rows,))
    kernel = k.kernel("any")
    x = torch.rand(ROWS * 3) < 0.3
    expected, mine = ({"x": x, "y": torch.zeros(ROWS, dtype=torch.bool)} for _ in range(2))
    interpret_kernel(kernel, expected)
    interpret_kernel(unrolled(kernel), mine)
    assert torch.equal(mine["y"], expected["y"])


def test_places_are_divided_without_divisions():
    after = unrolled(kernel_of(ReduceKind.ARGMAX, 9, torch.float32))
    used = {expr.fn for expr in formulas(after) if isinstance(expr, Apply)}
    assert not used & {"floordiv", "mod"}


def test_updates_come_last():
    k = make.Build(ROWS, 3)
    total = k.reduce(ReduceKind.SUM, k.define(make.load("x", k.flat)))
    k.store(
        "bias",
        k.define(make.fn("add", make.load("bias", k.rows), total), (k.rows,)),
        k.rows,
        (k.rows,),
    )
    k.store("y", k.define(make.load("bias", k.rows)))
    kernel = k.kernel("update")
    x, bias = torch.randn(ROWS * 3), torch.randn(ROWS)
    mine = {"x": x, "bias": bias.clone(), "y": torch.zeros(ROWS * 3)}
    after = unrolled(kernel)
    assert after.body[-1].buffer == "bias"
    interpret_kernel(after, mine)
    torch.testing.assert_close(mine["y"], bias.repeat_interleave(3))
    torch.testing.assert_close(mine["bias"], bias + x.view(-1, 3).sum(1))


@pytest.mark.parametrize("kind", [ReduceKind.SUM, ReduceKind.PROD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_would_round_each_time_stay_loops(kind, dtype):
    assert not can_unroll(kernel_of(kind, 4, dtype))


def test_columns_kernels_stay_loops():
    kernel = kernel_of(ReduceKind.MAX, 4, torch.float32)
    assert not can_unroll(dataclasses.replace(kernel, kind=KernelKind.COLUMNS))


def test_a_second_time_changes_nothing():
    kernel = kernel_of(ReduceKind.MAX, 4, torch.float32)
    assert any(isinstance(expr, Reduce) for expr in formulas(kernel))
    again = unrolled(kernel)
    assert unrolled(dataclasses.replace(again, cols=kernel.cols)).body == again.body
