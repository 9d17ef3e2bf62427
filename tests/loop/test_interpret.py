"""The interpreter against PyTorch, bitwise, on random inputs and awkward shapes."""

import math

import pytest
import torch

from treadle.algebra.index import Axis, Index, linear, unflatten
from treadle.loop.expr import (
    SAME,
    Apply,
    Array,
    Const,
    Load,
    Local,
    Position,
    Reduce,
    ReduceKind,
)
from treadle.loop.interpret import FUNCTIONS, interpret_array, interpret_kernel, interpret_program
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.program import (
    Buffer,
    BufferKind,
    Call,
    Compute,
    Origin,
    Program,
    TensorRef,
)
from treadle.loop.traverse import value_index
from treadle.util.errors import VerifyError

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
HERE = Origin(("n",))


def strides_of(shape):
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def read(name, axes, shape, dtype=F32, mask=None):
    return Load(name, linear(axes, strides_of(shape)), dtype, mask)


def bitwise(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def buffer(name, tensor, kind=BufferKind.INPUT):
    return Buffer(name, tensor.dtype, tuple(tensor.shape), tensor.stride(), kind)


UNARY = ["neg", "abs", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal"]
UNARY += ["sin", "cos", "tanh", "erf", "erfc", "sigmoid", "floor", "ceil", "round", "trunc", "sign"]
BINARY = ["add", "sub", "mul", "div", "floordiv", "mod", "pow", "minimum", "maximum", "fmod"]
BITS = ["bitand", "bitor", "bitxor", "bitnot"]


def test_every_function_has_a_meaning():
    assert set(UNARY + BINARY + BITS) == SAME
    assert FUNCTIONS.keys() > SAME


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
@pytest.mark.parametrize("fn", UNARY + BINARY)
def test_functions_compute_in_their_dtype(fn, dtype):
    torch_name = {"mod": "remainder", "floordiv": "floor_divide"}.get(fn, fn)
    x, y = (torch.randn(3, 7) * 3).to(dtype), (torch.randn(3, 7) * 3).to(dtype)
    x[0, :4] = torch.tensor([0.5, -2.5, math.nan, -0.0], dtype=dtype)
    y[1, 2] = math.nan
    axes = (Axis(3), Axis(7))
    operands = (read("x", axes, (3, 7), dtype), read("y", axes, (3, 7), dtype))
    operands = operands if fn in BINARY else operands[:1]
    result = interpret_array(
        Array(axes, Apply(fn, operands, dtype)), {"x": x.flatten(), "y": y.flatten()}
    )
    bitwise(result, getattr(torch, torch_name)(*((x, y) if fn in BINARY else (x,))))


def test_whole_numbers_divide_as_in_python():
    i = Axis(41)
    x = Apply("sub", (Position(Index.of(i)), Const(20, I64)), I64)
    for n in (3, -3, 7):
        for fn, python in (("floordiv", int.__floordiv__), ("mod", int.__mod__)):
            result = interpret_array(Array((i,), Apply(fn, (x, Const(n, I64)), I64)), {})
            assert result.tolist() == [python(v - 20, n) for v in range(41)]


def test_division_by_a_masked_zero_is_no_error():
    i = Axis(3)
    x = Position(Index.of(i))
    safe = Apply("ne", (x, Const(0, I64)), torch.bool)
    body = Apply("where", (safe, Apply("floordiv", (Const(6, I64), x), I64), Const(-1, I64)), I64)
    assert interpret_array(Array((i,), body), {}).tolist() == [-1, 6, 3]


def test_a_transposed_view_broadcast_against_a_row():
    x, row = torch.randn(5, 3), torch.randn(5)
    i, j = Axis(3), Axis(5)
    body = Apply("add", (Load("x", j * 3 + i, F32), Load("row", Index.of(j), F32)), F32)
    result = interpret_array(Array((i, j), body), {"x": x.flatten(), "row": row})
    bitwise(result, x.T + row)


@pytest.mark.parametrize("shape", [(1, 1), (4, 6), (0, 3), (3, 0), (1, 9)])
def test_a_reshape(shape):
    x = torch.randn(shape)
    i, j = Axis(shape[1]), Axis(shape[0])
    body = Load(
        "x", linear(unflatten(linear((i, j), (shape[0], 1)), shape), strides_of(shape)), F32
    )
    bitwise(interpret_array(Array((i, j), body), {"x": x.flatten()}), x.reshape(shape[1], shape[0]))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "any"])
def test_reductions(kind, dims):
    shape = (3, 5, 2)
    x = torch.randn(shape)
    axes = tuple(Axis(n) for n in shape)
    kept = tuple(axis for d, axis in enumerate(axes) if d not in dims)
    body, values = read("x", axes, shape), x
    if kind == "any":
        body, values = Apply("gt", (body, Const(1.0, F32)), torch.bool), x > 1
    reduce = Reduce(ReduceKind(kind), tuple(axes[d] for d in dims), body)
    expected = values
    if kind == "prod":
        for d in reversed(dims):
            expected = expected.prod(d)
        torch.testing.assert_close(
            interpret_array(Array(kept, reduce), {"x": x.flatten()}), expected
        )
        return
    expected = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "any": torch.any}[kind](
        values, dims
    )
    result = interpret_array(Array(kept, reduce), {"x": x.flatten()})
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)  # order of a sum may differ


def test_a_reduction_inside_a_formula_and_over_what_it_does_not_read():
    x = torch.randn(4, 6)
    i, j, k, m = Axis(4), Axis(6), Axis(6), Axis(3)
    row = Reduce(ReduceKind.MAX, (k,), read("x", (i, k), (4, 6)))
    body = Apply("sub", (read("x", (i, j), (4, 6)), row), F32)
    three = Reduce(ReduceKind.SUM, (m,), body)
    result = interpret_array(Array((i, j), three), {"x": x.flatten()})
    torch.testing.assert_close(result, 3 * (x - x.amax(1, keepdim=True)))


def test_extremes_let_nan_win_and_the_first_of_equals():
    x = torch.tensor([[1.0, 3.0, 3.0, -1.0, -1.0], [0.0, math.nan, 5.0, math.nan, 1.0]])
    i, k = Axis(2), Axis(5)
    body = read("x", (i, k), (2, 5))

    def run(kind):
        return interpret_array(Array((i,), Reduce(kind, (k,), body)), {"x": x.flatten()})

    assert run(ReduceKind.ARGMAX).tolist() == [1, 1]
    assert run(ReduceKind.ARGMIN).tolist() == [3, 1]
    assert run(ReduceKind.MAX).isnan().tolist() == [False, True]
    assert run(ReduceKind.MIN).isnan().tolist() == [False, True]


def test_empty_sums_are_zero_and_read_nothing():
    x = torch.randn(3, 4)
    i, k = Axis(4), Axis(0)
    body = Load("x", (k + 3) * 4 + i, F32)  # x[3:3].sum(0)
    result = interpret_array(Array((i,), Reduce(ReduceKind.SUM, (k,), body)), {"x": x.flatten()})
    bitwise(result, torch.zeros(4))


@pytest.mark.parametrize("pad", [1, 3])
def test_padding_reads_nothing_outside(pad):
    x = torch.randn(5)
    i = Axis(5 + 2 * pad)
    at = Position(i - pad)
    inside = Apply(
        "and",
        (
            Apply("ge", (at, Const(0, I64)), torch.bool),
            Apply("lt", (at, Const(5, I64)), torch.bool),
        ),
        torch.bool,
    )
    result = interpret_array(Array((i,), Load("x", i - pad, F32, inside)), {"x": x})
    bitwise(result, torch.nn.functional.pad(x, (pad, pad)))
    with pytest.raises(VerifyError, match=r"x\[-\d..\d\] reaches outside its 5 elements"):
        interpret_array(Array((i,), Load("x", i - pad, F32)), {"x": x})


def test_a_mask_that_is_false_everywhere_never_reads_even_an_empty_buffer():
    i = Axis(3)
    body = Load("x", i + 100, F32, Const(False, torch.bool))
    bitwise(interpret_array(Array((i,), body), {"x": torch.randn(2)}), torch.zeros(3))
    bitwise(interpret_array(Array((i,), body), {"x": torch.randn(0)}), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_embedding(dtype):
    weight, tokens = torch.randn(11, 4), torch.randint(0, 11, (2, 3), dtype=dtype)
    b, t, d = Axis(2), Axis(3), Axis(4)
    row = value_index(read("tokens", (b, t), (2, 3), dtype), 0, 10)
    result = interpret_array(
        Array((b, t, d), Load("weight", row * 4 + d, F32)),
        {"weight": weight.flatten(), "tokens": tokens.flatten()},
    )
    bitwise(result, weight[tokens.long()])


def test_low_precision_rounds_after_each_function_unless_a_cast_widens():
    x = torch.randn(64).to(BF16)
    i = Axis(64)
    load = Load("x", Index.of(i), BF16)
    narrow = Apply("mul", (Apply("exp", (load,), BF16), load), BF16)
    bitwise(interpret_array(Array((i,), narrow), {"x": x}), x.exp() * x)
    wide = Apply("cast", (load,), F32)
    body = Apply("cast", (Apply("mul", (Apply("exp", (wide,), F32), wide), F32),), BF16)
    bitwise(interpret_array(Array((i,), body), {"x": x}), (x.float().exp() * x.float()).to(BF16))


def test_deep_shared_formulas_cost_linear_time():
    i = Axis(3)
    body = Load("x", Index.of(i), F32)
    expected = x = torch.rand(3) / 4
    for _ in range(1500):
        body = Apply("mul", (Apply("add", (body, body), F32), Const(0.5, F32)), F32)
    bitwise(interpret_array(Array((i,), body), {"x": x}), expected)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 5), (1, 8), (0, 4), (4, 0)])
def test_a_rows_kernel(rows, cols):
    x, y, m = torch.randn(rows, cols), torch.empty(rows, cols), torch.empty(rows)
    r, c = Axis(rows), Axis(cols)
    at = r * cols + c
    top, value = Local("top", F32), Local("x", F32)
    kernel = Kernel(
        "softmax",
        KernelKind.ROWS,
        r,
        c,
        (
            Definition("x", Load("x", at, F32), (r, c)),
            Definition("top", Reduce(ReduceKind.MAX, (c,), value), (r,)),
            Definition("e", Apply("exp", (Apply("sub", (value, top), F32),), F32), (r, c)),
            Definition("total", Reduce(ReduceKind.SUM, (c,), Local("e", F32)), (r,)),
            Definition("y", Apply("div", (Local("e", F32), Local("total", F32)), F32), (r, c)),
            Store("y", at, Local("y", F32), (r, c)),
            Store("m", Index.of(r), top, (r,)),
        ),
        (HERE,),
    )
    interpret_kernel(kernel, {"x": x.flatten(), "y": y.view(-1), "m": m})
    if rows and cols:
        torch.testing.assert_close(y, x.softmax(1))
        bitwise(m, x.amax(1))


def test_a_columns_kernel_updates_in_place():
    x, total = torch.randn(6, 4), torch.randn(4)
    r, c = Axis(6), Axis(4)
    expected = total + x.sum(0)
    body = Apply("add", (Load("total", Index.of(c), F32), Local("s", F32)), F32)
    kernel = Kernel(
        "bias",
        KernelKind.COLUMNS,
        r,
        c,
        (
            Definition("s", Reduce(ReduceKind.SUM, (r,), Load("x", r * 4 + c, F32)), (c,)),
            Definition("new", body, (c,)),
            Store("total", Index.of(c), Local("new", F32), (c,)),
        ),
        (HERE,),
    )
    interpret_kernel(kernel, {"x": x.flatten(), "total": total})
    torch.testing.assert_close(total, expected)


def test_a_program_with_calls_constants_views_and_a_write_back():
    x, w = torch.randn(4, 6), torch.randn(3, 6).T
    scale = torch.tensor(0.5)
    before = w.clone()
    i, j, p, q = Axis(4), Axis(3), Axis(6), Axis(3)
    scaled = Apply("mul", (Load("h", i * 3 + j, F32), Load("scale", Index.of(0), F32)), F32)
    product = Buffer("h", F32, (4, 3), (3, 1), BufferKind.TEMPORARY)
    parts = [
        Buffer(n, F32, (4, w_), (w_, 1), BufferKind.TEMPORARY) for n, w_ in (("a", 1), ("b", 2))
    ]
    out = Buffer("out", F32, (4, 3), (1, 4), BufferKind.TEMPORARY)
    ref = TensorRef("w", F32, (6, 3), (1, 6))
    program = Program(
        buffers={
            each.name: each
            for each in (
                buffer("x", x),
                buffer("w", w),
                buffer("scale", scale, BufferKind.CONSTANT),
                product,
                out,
                *parts,
            )
        },
        steps=(
            Call("aten.mm.default", (TensorRef("x", F32, (4, 6), (6, 1)), ref), {}, ("h",), HERE),
            Compute(TensorRef("out", F32, (4, 3), (1, 4)), Array((i, j), scaled), HERE),
            Compute(ref, Array((p, q), Apply("neg", (Load("w", p + q * 6, F32),), F32)), HERE),
            Call(
                "aten.split_with_sizes.default",
                (TensorRef("out", F32, (4, 3), (1, 4)), (1, 2)),
                {"dim": 1},
                (None, "b"),
                HERE,
            ),
        ),
        inputs=("x", "w"),
        results=(TensorRef("out", F32, (4,), (1,), 8), None, TensorRef("b", F32, (4, 2), (2, 1))),
        constants={"scale": scale},
    )
    last, nothing, rest = interpret_program(program, {"x": x, "w": w})
    expected = (x @ before) * 0.5
    bitwise(last, expected[:, 2])
    assert nothing is None
    bitwise(rest, expected[:, 1:])
    bitwise(w, -before)


def test_refusals():
    i = Axis(3)
    with pytest.raises(VerifyError, match="no buffer is named x"):
        interpret_array(Array((i,), Load("x", Index.of(i), F32)), {})
    with pytest.raises(VerifyError, match="is not bound here"):
        interpret_array(Array((), Position(Index.of(i))), {})
    with pytest.raises(VerifyError, match="%a is not defined"):
        interpret_array(Array((i,), Local("a", F32)), {})


@pytest.mark.parametrize("fn", ["minimum", "maximum"])
def test_of_two_zeros_the_second_wins_in_every_layout(fn):
    """The sign of the result must not depend on which operand is a literal or broadcast."""
    zeros = torch.tensor([0.0, -0.0, torch.nan, 1.0])
    function = FUNCTIONS[fn]
    for x in zeros:
        for y in (0.0, -0.0):
            whole = function(x.expand(37).contiguous(), torch.tensor(y).expand(37))
            single = function(x, torch.tensor(y))
            assert torch.equal(whole.signbit(), single.signbit().expand(37))
            if x == y:
                assert single.signbit() == torch.tensor(y).signbit()
            expected = vars(torch)[fn](x, torch.tensor(y))
            torch.testing.assert_close(single, expected, equal_nan=True, rtol=0, atol=0)
