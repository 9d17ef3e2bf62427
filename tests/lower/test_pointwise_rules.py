"""Pointwise operations against eager: dtypes, broadcasting, awkward shapes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lower.lowering_help import check, run, run_as_on_gpus, trace
from treadle.lower import lower

aten = torch.ops.aten
SHAPES = [(), (0,), (1,), (7,), (3, 1, 5), (2, 3, 11)]
UNARY = [
    torch.neg, torch.abs, torch.exp, torch.expm1, torch.sin, torch.cos, torch.tanh, torch.erf,
    torch.sigmoid, torch.floor, torch.ceil, torch.trunc, torch.sign, torch.erfc, torch.square,
    torch.relu, F.silu, F.mish, F.logsigmoid, F.hardswish, F.hardsigmoid, F.leaky_relu, F.elu,
    F.softplus, F.hardtanh, F.gelu, lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp(min=0.1), lambda x: x.clamp(max=0.1),
    lambda x: x + 2, lambda x: 2 - x, lambda x: x * 0.3, lambda x: x / 3, lambda x: 3 / (x + 9),
    lambda x: x ** 2, lambda x: x ** 3, lambda x: (x * x) ** 0.5, lambda x: 2.0 ** x,
    lambda x: torch.isnan(x), lambda x: torch.isinf(x / 0), lambda x: torch.isfinite(x),
    lambda x: x.to(torch.float64), lambda x: x.half(), lambda x: x.bfloat16().float(),
    lambda x: x > 0, lambda x: x == x, lambda x: torch.where(x > 0, x, 0.0), torch.clone,
    lambda x: torch.masked_fill(x, x > 0, -math.inf), lambda x: x.logical_not(),
    lambda x: torch.remainder(x, 0.3), lambda x: torch.fmod(x, 0.3),
    lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    lambda x: torch.zeros_like(x) + torch.full_like(x, 2.5), lambda x: x.new_ones(x.shape),
]  # fmt: skip
POSITIVE = [torch.log, torch.log1p, torch.log2, torch.sqrt, torch.rsqrt, torch.reciprocal]


@pytest.mark.parametrize("shape", SHAPES)
def test_one_operand(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)

    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        return [fn(x) for fn in UNARY] + [fn(x.abs() + 0.5) for fn in POSITIVE]

    check(everything, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    check(lambda x: [fn(x) for fn in UNARY[:-6]], x)


BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.eq, torch.ne,
    torch.lt, torch.le, torch.gt, torch.ge, lambda x, y: torch.add(x, y, alpha=3),
    lambda x, y: torch.sub(x, y, alpha=2), lambda x, y: torch.rsub(x, y, alpha=2),
    lambda x, y: torch.where(x > y, x, y),
]  # fmt: skip


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.int64, torch.float32),
        (torch.int64, torch.int32),
        (torch.float16, torch.int64),
    ],
)
@pytest.mark.parametrize("shapes", [((3, 5), (5,)), ((3, 1), (1, 4)), ((3, 5), ()), ((), ())])
def test_two_operands(left: torch.dtype, right: torch.dtype, shapes) -> None:
    x = (torch.randn(shapes[0]) * 4).to(left)
    y = (torch.randn(shapes[1]) * 4).to(right)
    y = torch.where(y == 0, torch.ones_like(y), y)
    if left.itemsize == 2:  # eager on CPU rounds a 0-dim operand to half before it compares
        y = y.to(left).to(right)
    # Eager on CPU rounds alpha * y and 0-dim operands to half precision; on CUDA it does not.
    tolerance = 0.3 if left.itemsize == 2 else None
    check(lambda x, y: [fn(x, y) for fn in BINARY], x, y, rtol=tolerance, atol=tolerance)


def test_whole_numbers_and_truth() -> None:
    x = torch.randint(-9, 9, (4, 5))
    y = torch.randint(1, 9, (5,))
    check(
        lambda x, y: [
            x & y, x | y, x ^ y, ~x, (x > y) & (x < 5), ~(x > y), x // y, x % y, x / y, x * 2 + 1,
            x * 0.5, torch.logical_and(x, y), torch.logical_or(x, y > 3), (x > 0) * (y > 3),
            torch.div(x, y, rounding_mode="trunc"), x.abs(), x.float(), (x > 0).long(), -x,
            x ** 2, torch.fmod(x, y), x.to(torch.bool), torch.exp(x), (x > 0) + 1,
        ],
        x, y,
    )  # fmt: skip


BACKWARD = [
    aten.gelu_backward, lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    aten.silu_backward, aten.sigmoid_backward, aten.tanh_backward,
    lambda g, x: aten.threshold_backward(g, x, 0), lambda g, x: aten.hardtanh_backward(g, x, -1, 1),
    lambda g, x: aten.leaky_relu_backward(g, x, 0.01, False),
    lambda g, x: aten.softplus_backward(g, x, 1, 20),
    lambda g, x: F.mse_loss(g, x), lambda g, x: F.mse_loss(g, x, reduction="sum"),
    lambda g, x: torch.addcmul(g, g, x, value=0.3), lambda g, x: torch.lerp(g, x, 0.3),
    lambda g, x: torch.addcdiv(g, g, x.abs() + 1, value=0.3),
    lambda g, x: torch.lerp(g, x, x.sigmoid()),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_backwards_and_three_operands(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g, x = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    check(lambda g, x: [fn(g, x) for fn in BACKWARD], g, x)


def test_half_precision_gelu_is_exact_in_double() -> None:
    x = torch.randn(101, dtype=torch.float64)
    check(lambda x: F.gelu(x), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64])
def test_infinity_beside_whole_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)

    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        inf = math.inf
        found = [torch.isinf(x), torch.isfinite(x), torch.isnan(x), x == inf, x > -inf, x < 0.5]
        return [*found, x < math.nan, x != math.nan, torch.where(x > 0, inf, 1.0)]

    check(everything, x)


def test_lists() -> None:
    x, y = torch.randn(3), torch.randn(2, 5)

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        both = [x, y]
        out = torch._foreach_add(both, 2.0)
        out += torch._foreach_mul(both, [2.0, 3.0])
        out += torch._foreach_sub(both, both, alpha=0.5)
        out += torch._foreach_sqrt(torch._foreach_abs(both))
        out += torch._foreach_addcdiv(both, both, torch._foreach_exp(both), 0.1)
        out += torch._foreach_addcmul(both, both, both, [0.1, 0.2])
        out += torch._foreach_lerp(both, both, 0.1)
        out += torch._foreach_norm(both)
        out += torch._foreach_mul(both, torch.full((), 3.0))
        return list(out)

    check(fn, x, y)


def test_constants_and_masks_need_no_step() -> None:
    x = torch.randn(2, 6, 6)

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(6)
        mask = rows[:, None] >= rows[None, :]
        return torch.where(mask[None], x, torch.full((), -1.0))

    program = check(fn, x)
    assert len(program.steps) == 1


def test_factors_are_associated_as_the_device_does() -> None:
    """``2 * a`` is infinite, and ``a * 0`` is not: eager's kernels for GPUs multiply by 2 last."""

    def step(x: Tensor, a: Tensor, zero: Tensor, most: Tensor) -> tuple[Tensor, ...]:
        return torch.addcmul(x, a, zero, value=2), torch.addcdiv(x, a, most, value=2)

    given = (*(torch.full((3,), each) for each in (0.0, 3e38, 0.0, math.inf)),)
    on_host = run(lower(trace(step, *given)), given)
    on_gpu = run_as_on_gpus(step, given)
    assert all(out is not None and out.isnan().all() for out in on_host)
    assert all(out is not None and (out == 0).all() for out in on_gpu)
