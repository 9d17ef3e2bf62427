"""Generated Triton at infinities, NaN, zeros of either sign, the least and the largest numbers."""

import math

import pytest
import torch
import triton_kernels as make
from torch import Tensor
from triton_run import Case, job_of, results_of

from numerics.sweep_values import ones, pairs
from treadle.loop.expr import Const

pytest.importorskip("triton")
FLOATS = (torch.float32, torch.float64)
WHOLE = (torch.int64, torch.int32)
ONE = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
}


def case_of(names: list[str], x: Tensor, z: Tensor) -> Case:
    results = {f"y_{name}": torch.full_like(x, 77) for name in names}
    kernel = make.functions(len(x), tuple(names), x.dtype)
    return Case(str(x.dtype), [kernel], {"x": x, "z": z, **results})


def assert_same(name: str, found: Tensor, expected: Tensor, *given: Tensor, rtol: float) -> None:
    """Zeros have their signs, NaN and infinities their places."""
    same = (found == expected) & (found.signbit() == expected.signbit())
    same |= found.isnan() & expected.isnan()
    near = (found - expected).abs() <= rtol * expected.abs()
    bad = ~same & ~(near & (expected != 0) & expected.isfinite())
    where = [(*(x[i].item() for x in given), found[i].item(), expected[i].item())
             for i in bad.nonzero().flatten()[:3]]  # fmt: skip
    assert not where, f"{name} of {found.dtype}: {where}"


def remainder_of(a: float, b: float) -> float:
    """The exact one; PyTorch's for vectors on CPUs is NaN for large ratios."""
    return math.nan if not math.isfinite(a) or math.isnan(b) or b == 0 else math.fmod(a, b)


def remainders_of(x: Tensor, y: Tensor) -> Tensor:
    exact = map(remainder_of, x.double().tolist(), y.double().tolist())
    return torch.tensor(list(exact), dtype=torch.float64).to(x.dtype)


def test_functions_of_one_number(tmp_path, interpreted):
    cases = [case_of(list(ONE), ones(dtype), ones(dtype)) for dtype in FLOATS]
    results = results_of([job_of(case) for case in cases], tmp_path, interpreted)
    for case, found in zip(cases, results, strict=True):
        x = case.tensors["x"]
        rtol = 1e-6 if x.dtype is torch.float32 else 1e-14
        for name, function in ONE.items():
            assert_same(name, found[f"y_{name}"], function(x), x, rtol=rtol)


def spread(dtype: torch.dtype, most: int) -> tuple[Tensor, Tensor]:
    """The awkward pairs, and numbers of every size."""
    x, y = pairs(dtype)
    scale = 10.0 ** (most * (2 * torch.rand(300, dtype=dtype) - 1))
    x = torch.cat([x, scale * torch.randn(300, dtype=dtype)])
    return x, torch.cat([y, torch.randn(300, dtype=dtype)])


def test_remainders_are_exact(tmp_path, interpreted):
    given = [spread(torch.float32, 30), spread(torch.float64, 280)]
    cases = [case_of(["fmod", "mod", "floordiv", "pow"], x, y) for x, y in given]
    results = results_of([job_of(case) for case in cases], tmp_path, interpreted)
    for case, found in zip(cases, results, strict=True):
        x, y = case.tensors["x"], case.tensors["z"]
        rest = remainders_of(x, y)
        assert_same("fmod", found["y_fmod"], rest, x, y, rtol=0.0)
        below = (rest != 0) & ((rest < 0) != (y < 0))
        assert_same("mod", found["y_mod"], torch.where(below, rest + y, rest), x, y, rtol=0.0)
        few = len(pairs(x.dtype)[0])
        x, y, pow_, down = (t[:few] for t in (x, y, found["y_pow"], found["y_floordiv"]))
        assert_same("pow", pow_, torch.pow(x, y), x, y, rtol=1e-6)
        assert_same("floordiv", down, torch.floor_divide(x, y), x, y, rtol=1e-6)


def test_whole_numbers_to_any_power(tmp_path, interpreted):
    """Of negative powers those of 1 and -1 are whole, and eager rounds the others to zero."""
    some = torch.tensor([0, 1, -1, 2, -2, 3, 7, -7, 100, 63, 64, 65, -100])
    grid = [t.contiguous() for t in torch.cartesian_prod(some, some).t()]
    cases = [case_of(["pow"], *(t.to(dtype) for t in grid)) for dtype in WHOLE]
    results = results_of([job_of(case) for case in cases], tmp_path, interpreted)
    for case, found in zip(cases, results, strict=True):
        x, y = case.tensors["x"], case.tensors["z"]
        sign = 1 - 2 * (y & 1)
        negative = torch.where(x == 1, 1, torch.where(x == -1, sign, 0)).to(x.dtype)
        expected = torch.where(y < 0, negative, torch.pow(x, y.abs()))
        assert torch.equal(found["y_pow"], expected)


def test_a_constant_keeps_its_sign(tmp_path, interpreted):
    k = make.Build(1, 8)
    zero = Const(-0.0, torch.float32)
    k.store("y", k.define(make.fn("minimum", zero, make.load("x", k.cols))), k.cols)
    case = Case("-0.0", [k.kernel("bound")], {"x": torch.ones(8), "y": torch.ones(8)})
    (found,) = results_of([job_of(case)], tmp_path, interpreted)
    assert found["y"].signbit().all()
    assert (found["y"] == 0).all()
