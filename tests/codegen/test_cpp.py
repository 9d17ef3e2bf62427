"""C++ kernels: every loop form and scalar function, against PyTorch."""

import math

import pytest
import torch
from mpmath import mp

from schedule.steps import Builder, artifact, at, kernels_of, run_plan
from treadle.algebra.index import Axis, Index, linear
from treadle.codegen.cpp.text import function_text
from treadle.loop.expr import Apply, Const, Load, Position, Reduce, ReduceKind
from treadle.loop.kernel import KernelKind
from treadle.loop.nest import split_columns
from treadle.loop.program import TensorRef
from treadle.loop.traverse import value_index
from treadle.runtime.store.artifact import Launch
from treadle.schedule import schedule

SUM, MAX, MIN = ReduceKind.SUM, ReduceKind.MAX, ReduceKind.MIN
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 88.8, -104.0, 1e-40])


def apply_all(fns, *tensors, dtypes=None):
    """Many pointwise functions of the same tensors, compiled as one unit."""
    b = Builder()
    refs = [b.input(*t.shape, dtype=t.dtype) for t in tensors]
    outs = [b.pointwise(fn, *refs, dtype=(dtypes or {}).get(fn)) for fn in fns]
    return run_plan(schedule(b.program(*outs)), *tensors)


def test_whole_numbers_wrap_and_are_shifted():
    x = torch.cat(
        [torch.randint(-(2**62), 2**62, (1003,)), torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])]
    )
    y = x.flip(0)
    fns = ("mul", "add", "sub", "floordiv")
    b = Builder()
    ref, other = b.input(*x.shape, dtype=x.dtype), b.input(*x.shape, dtype=x.dtype)
    outs = [b.pointwise(fn, ref, other) for fn in fns[:3]]
    for places in (0, 1, 32, 62):
        outs.append(b.pointwise("floordiv", ref, 1 << places))
    found = run_plan(schedule(b.program(*outs)), x, y)
    expected = [x * y, x + y, x - y, *(x >> places for places in (0, 1, 32, 62))]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def inputs(n=4001):
    wide = torch.randn(n) * torch.tensor([1e-3, 1.0, 30.0])[torch.arange(n) % 3]
    return torch.cat([wide, SPECIAL])


UNARY = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log,
    "log1p": torch.log1p, "log2": torch.log2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "erf": torch.erf, "erfc": torch.erfc, "sigmoid": torch.sigmoid, "floor": torch.floor,
    "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "sign": torch.sign,
}  # fmt: skip
DOUBLES = {
    "exp": mp.exp, "expm1": mp.expm1, "log": mp.log, "log1p": mp.log1p,
    "log2": lambda x: mp.log(x, 2), "sin": mp.sin, "cos": mp.cos, "tanh": mp.tanh, "erf": mp.erf,
    "erfc": mp.erfc,
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": torch.floor_divide, "mod": torch.remainder, "fmod": torch.fmod, "pow": torch.pow,
    "minimum": torch.minimum, "maximum": torch.maximum,
}  # fmt: skip
COMPARE = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "same": lambda x, y: (x == y) | (x.isnan() & y.isnan()),
}  # fmt: skip


def doubles(n=300):
    """Of all sizes, and where ranges of the functions end."""
    sizes = torch.tensor([1e-300, 1e-9, 1e-3, 0.3, 1.0, 4.0, 30.0, 700.0, 1e5, 1e10, 1e17])
    x = torch.randn(n, dtype=torch.float64) * sizes.double()[torch.arange(n) % len(sizes)]
    ends = torch.tensor([0.5, 1.0, 0.25, 26.5, 709.78, 745.0, math.sqrt(0.5), 355 / 113 * 5e9])
    return torch.cat([x, ends.double(), -ends.double(), torch.arange(-30, 30) * (math.pi / 2)])


def test_functions_of_float64_are_within_six_units_in_the_last_place():
    torch.manual_seed(0)
    x = doubles()
    found = apply_all(DOUBLES, x)
    with mp.workdps(60):
        for (name, exact), mine in zip(DOUBLES.items(), found, strict=True):
            for value, result in zip(x.tolist(), mine.tolist(), strict=True):
                least = {"log": 0.0, "log2": 0.0, "log1p": -1.0}.get(name)
                if least is not None and value <= least:
                    continue
                wanted = exact(mp.mpf(value))
                if abs(wanted) > 1.7976931348623157e308:
                    assert math.isinf(result), (name, value)
                    continue
                error = abs(mp.mpf(result) - wanted)
                assert error <= 6 * math.ulp(float(wanted)), (name, value, result)


def test_a_value_of_float64_does_not_depend_on_where_it_stands():
    torch.manual_seed(0)
    x = doubles()
    whole = apply_all(DOUBLES, x)
    for start in (1, 2, 3, 5):
        rest = apply_all(DOUBLES, x[start : start + 50].clone())
        for name, one, other in zip(DOUBLES, whole, rest, strict=True):
            same = torch.equal(one[start : start + 50].nan_to_num(7), other.nan_to_num(7))
            assert same, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_unary_functions(dtype):
    x = inputs().to(dtype)
    found = apply_all(UNARY, x)
    # our functions are within three units in the last place; half values are rounded once
    rtol = {torch.float32: 5e-7, torch.float64: 1e-14}.get(dtype, 1e-3)
    for (name, fn), mine in zip(UNARY.items(), found, strict=True):
        rough = fn(x.double()).to(dtype)
        tiny = torch.finfo(dtype).smallest_normal * 4
        torch.testing.assert_close(
            mine, rough, rtol=rtol, atol=tiny, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32])
def test_binary_functions(dtype):
    n = 500
    if dtype.is_floating_point:
        x, y = inputs(n).to(dtype), inputs(n).flip(0).to(dtype)
        fns = BINARY
    else:
        x = torch.randint(-9, 9, (n,), dtype=dtype)
        y = torch.randint(1, 5, (n,), dtype=dtype)
        y = torch.where(torch.rand(n) < 0.5, y, -y)
        fns = {k: v for k, v in BINARY.items() if k not in ("div", "pow")}
    for (name, fn), mine in zip(fns.items(), apply_all(fns, x, y), strict=True):
        want = fn(x, y)
        if dtype is torch.bfloat16 and name == "floordiv":  # PyTorch rounds on the way to the floor
            want = fn(x.double(), y.double()).to(dtype)
        rtol = 1e-2 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(
            mine, want, rtol=rtol, atol=1e-37, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_comparisons_and_bits():
    special = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, -math.nan, 1e-30, 3.0])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        x, y = (part.contiguous().double() for part in torch.cartesian_prod(special, special).T)
        if dtype is torch.int64:
            x, y = x.nan_to_num(7.0, 5.0, -5.0), y.nan_to_num(7.0, 5.0, -5.0)
        x, y = x.to(dtype), y.to(dtype)
        found = apply_all(COMPARE, x, y, dtypes=dict.fromkeys(COMPARE, torch.bool))
        for fn, mine in zip(COMPARE.values(), found, strict=True):
            assert torch.equal(mine, fn(x, y)), dtype
    i, j = torch.randint(-99, 99, (2, 50))
    bits = {"bitand": torch.bitwise_and, "bitor": torch.bitwise_or, "bitxor": torch.bitwise_xor}
    for fn, mine in zip(bits.values(), apply_all(bits, i, j), strict=True):
        assert torch.equal(mine, fn(i, j))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.bfloat16, torch.float16,
                                    torch.int64, torch.int32, torch.uint8, torch.bool])  # fmt: skip
def test_casts(source, target):
    x = torch.randint(0, 2 if source is torch.bool else 90, (77,)).to(source)
    b = Builder()
    ref = b.input(77, dtype=source)
    out = b.pointwise("cast", ref, dtype=target)
    assert torch.equal(run_plan(schedule(b.program(out)), x)[0], x.to(target))


SHAPES = [((6, 37), [1]), ((5, 300), [0]), ((3, 8, 64), [1]), ((3, 5, 7, 9), [0, 2, 3]),
          ((700, 40), [0]), ((3, 40000), [1]), ((2, 3, 16, 32), [0, 2]), ((130,), [0])]  # fmt: skip


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions(shape, dims, dtype):
    x = (torch.randn(shape) * 3).to(dtype)
    b = Builder()
    ref = b.input(*shape, dtype=dtype)
    outs = [b.reduce(kind, ref, dims) for kind in (SUM, MAX, MIN)]
    total, high, low = run_plan(schedule(b.program(*outs)), x)
    # a sum may cancel: what it is off by goes with the size that such sums have
    size = x.double().square().sum(dims).sqrt().max().item()
    torch.testing.assert_close(
        total,
        x.sum(dims, dtype=dtype),
        rtol=1e-2 if dtype.itemsize == 2 else 2e-5,
        atol=max(1e-4, 2e-6 * size),
    )
    assert torch.equal(high, x.amax(dims))
    assert torch.equal(low, x.amin(dims))


@pytest.mark.parametrize("dim", [0, 1])
def test_positions_and_nan(dim):
    x = torch.randint(0, 4, (9, 31)).float()
    x[4, 7] = math.nan
    b = Builder()
    ref = b.input(9, 31)
    kinds = (ReduceKind.ARGMAX, ReduceKind.ARGMIN, MAX, MIN)
    high, low, top, bottom = run_plan(
        schedule(b.program(*(b.reduce(k, ref, [dim]) for k in kinds))), x
    )
    assert torch.equal(high, _first(x, dim, torch.argmax, x.amax(dim, keepdim=True)))
    assert torch.equal(low, _first(x, dim, torch.argmin, x.amin(dim, keepdim=True)))
    torch.testing.assert_close(top, x.amax(dim), equal_nan=True)
    torch.testing.assert_close(bottom, x.amin(dim), equal_nan=True)


def _first(x, dim, fn, extreme):
    """PyTorch does not promise the first position; the loop IR does."""
    hit = (x == extreme) | (x.isnan() & extreme.isnan())
    return hit.to(torch.int64).argmax(dim) if fn else None


def test_product_and_any():
    x = torch.rand(5, 33) + 0.5
    b = Builder()
    ref = b.input(5, 33)
    out = run_plan(schedule(b.program(b.reduce(ReduceKind.PROD, ref, [1]))), x)
    torch.testing.assert_close(out, [x.prod(1)], rtol=1e-5, atol=0)
    flags = torch.rand(5, 33) < 0.02
    b = Builder()
    ref = b.input(5, 33, dtype=torch.bool)
    assert torch.equal(
        run_plan(schedule(b.program(b.reduce(ReduceKind.ANY, ref, [1]))), flags)[0], flags.any(1)
    )


def test_gather_position_and_mask():
    b = Builder()
    table, ids = b.input(11, 6), b.input(7, dtype=torch.int64)

    def row(i, j):
        where = value_index(at(ids, i), 0, 10)
        return Load(table.buffer, where * 6 + Index.of(j), table.dtype)

    gathered = b.compute((7, 6), row)

    def padded(i, j):
        position = Position(Index.of(j))
        inside = Apply("lt", (position, Const(6, torch.int64)), torch.bool)
        return Load(gathered.buffer, i * 6 + Index.of(j), gathered.dtype, inside)

    out = b.compute((7, 8), padded)
    t, i = torch.randn(11, 6), torch.randint(11, (7,))
    want = torch.nn.functional.pad(t[i], (0, 2))
    torch.testing.assert_close(run_plan(schedule(b.program(out)), t, i), [want])


def test_transposed_reads_are_tiled():
    b = Builder()
    x, y = b.input(75, 41), b.input(41, 75)
    t = TensorRef(x.buffer, x.dtype, (41, 75), (1, 41))
    out = b.compute((41, 75), lambda i, j: Apply("add", (at(t, i, j), at(y, i, j)), x.dtype))
    plan = schedule(b.program(out))
    assert "tile0[" in function_text("f", kernels_of(plan)[0], plan.buffers, contract=True)
    xs = [torch.randn(75, 41), torch.randn(41, 75)]
    torch.testing.assert_close(run_plan(plan, *xs), [xs[0].t() + xs[1]])


def test_columns_are_split_where_it_saves_divisions():
    b = Builder()
    plan = schedule(b.program(b.reduce(SUM, b.input(4, 16, 32), [1])))
    (kernel,) = kernels_of(plan)
    assert kernel.kind is KernelKind.COLUMNS
    assert kernel.scheduled.width == 32
    split = split_columns(kernel, 32)
    assert (split.outer.extent, split.inner.extent) == (4, 32)


def test_equal_updates_are_one_launch():
    b = Builder()
    for n in (10, 3000, 40):
        p, g = b.input(n), b.input(n)
        b.pointwise("sub", p, b.pointwise("mul", g, 0.1), into=p)
    plan = schedule(b.program())
    (launch,) = artifact(plan).steps
    assert isinstance(launch, Launch)
    assert launch.sizes == ((10,), (3000,), (40,))
    xs = [torch.randn(n) for n in (10, 10, 3000, 3000, 40, 40)]
    want = [x - 0.1 * g for x, g in zip(xs[::2], xs[1::2], strict=True)]
    run_plan(plan, *xs)
    torch.testing.assert_close(xs[::2], want)


def test_the_text_is_deterministic_and_names_no_buffer():
    def texts():
        b = Builder()
        x = b.input(9, 33)
        e = b.pointwise("exp", b.pointwise("sub", x, b.reduce(MAX, x, [1], True)))
        out = b.pointwise("div", e, b.reduce(SUM, e, [1], True))
        plan = schedule(b.program(out))
        return [source.text for source in artifact(plan).sources]

    assert texts() == texts()
    assert "in0" not in texts()[0].split('extern "C"')[1]


def test_half_sums_are_rounded_once():
    x = torch.rand(3, 5000).to(torch.bfloat16)
    b = Builder()
    out = run_plan(schedule(b.program(b.reduce(SUM, b.input(3, 5000, dtype=x.dtype), [1]))), x)[0]
    torch.testing.assert_close(out, x.float().sum(1).to(x.dtype), rtol=1e-2, atol=0)


def test_negative_strides_of_index_round_down():
    b = Builder()
    x = b.input(12)
    axis_shift = b.compute(
        (12,), lambda i: at(TensorRef(x.buffer, x.dtype, (12,), (1,)), (Index.of(i) - 5) % 12)
    )
    t = torch.randn(12)
    torch.testing.assert_close(run_plan(schedule(b.program(axis_shift)), t), [t.roll(5)])


def test_reduce_of_a_product_of_two_layouts():
    b = Builder()
    x, y = b.input(6, 8), b.input(8, 6)

    def body(i):
        k = Axis(8)
        other = Load(y.buffer, linear((k, i), (6, 1)), y.dtype)
        return Reduce(SUM, (k,), Apply("mul", (at(x, i, k), other), x.dtype))

    out = b.compute((6,), body)
    xs = [torch.randn(6, 8), torch.randn(8, 6)]
    torch.testing.assert_close(
        run_plan(schedule(b.program(out)), *xs), [(xs[0] * xs[1].t()).sum(1)]
    )


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e3, 1e9, 1e30])
def test_angles_of_any_size(size):
    """Single precision is computed in double: half a unit in the last place, wherever it is."""
    x = torch.cat([torch.randn(4003) * size, SPECIAL])
    for name, mine in zip(("sin", "cos"), apply_all(("sin", "cos"), x), strict=True):
        exact = UNARY[name](x.double())
        assert torch.equal(mine.isnan(), exact.isnan())
        near = exact.float().abs()
        unit = (torch.nextafter(near, torch.tensor(math.inf)) - near).double()
        apart = (mine.double() - exact).abs()
        assert (apart <= 0.51 * unit)[~exact.isnan()].all()
    zeros = apply_all(("sin",), torch.tensor([0.0, -0.0]))[0]
    assert zeros.signbit().tolist() == [False, True]
