"""The loop IR as text."""

import textwrap

import torch

from treadle.algebra.index import Axis, Index
from treadle.loop.expr import Apply, Array, Const, Load, Local, Position, Reduce, ReduceKind
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.printing import dtype_name, show, show_index, show_kernel, show_program
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Origin, Program, TensorRef
from treadle.loop.traverse import value_index

F32 = torch.float32
HERE = Origin(("n",), where="train.py:7: loss = f(x)")


def text(block):
    return textwrap.dedent(block).strip()


def softmax():
    i, j, k, m = Axis(4), Axis(8), Axis(8), Axis(8)

    def shifted(axis):
        top = Reduce(ReduceKind.MAX, (k,), Load("x", i * 8 + k, F32))
        return Apply("exp", (Apply("sub", (Load("x", i * 8 + axis, F32), top), F32),), F32)

    return Array((i, j), Apply("div", (shifted(j), Reduce(ReduceKind.SUM, (m,), shifted(m))), F32))


def test_an_array():
    assert show(softmax()) == text("""
        [i<4, j<8] -> f32
          exp(x[8*i + j] - (max{k<8} x[8*i + k])) / (sum{l<8} exp(x[8*i + l] - (max{k<8} x[8*i + k])))
    """)  # noqa: E501


def test_shared_nodes_get_a_line():
    i = Axis(4)
    x = Apply("exp", (Load("x", Index.of(i), F32),), F32)
    body = Apply("mul", (x, Apply("add", (x, Const(1.0, F32)), F32)), F32)
    assert show(Array((i,), body)) == text("""
        [i<4] -> f32
          %0 = exp(x[i])
          %0 * (%0 + 1.0)
    """)


def test_masks_positions_values_and_casts():
    i, j = Axis(4), Axis(9)
    row = value_index(Load("tokens", Index.of(i), torch.int64), 0, 9)
    mask = Apply("ge", (Position(j - 3), Const(0, torch.int64)), torch.bool)
    load = Load("w", row * 6 + j - 3, torch.bfloat16, mask)
    assert show(Array((i, j), Apply("cast", (load,), F32))) == text("""
        [i<4, j<9] -> f32
          f32(w[6*value(tokens[i]) + j - 3 if <j - 3> >= 0])
    """)


def test_an_index():
    i, j = Axis(30), Axis(7)
    assert show_index(i // 4 * 8 + (i * 3 + j) % 5 - 2) == "8*(i//4) + ((3*i + j)%5) - 2"
    assert show_index(-j + 6) == "-i + 6"
    assert show_index(Index.of(0)) == "0"


def test_many_axes_have_many_names():
    axes = tuple(Axis(2) for _ in range(60))
    line = show(Array(axes, Const(0.0, F32))).splitlines()[0]
    names = [part.split("<")[0] for part in line[1:].split("]")[0].split(", ")]
    assert len(set(names)) == 60


def test_a_kernel():
    r, c = Axis(4), Axis(8)
    kernel = Kernel(
        "k0",
        KernelKind.ROWS,
        r,
        c,
        (
            Definition("a", Load("x", r * 8 + c, F32), (r, c)),
            Definition("m", Reduce(ReduceKind.MAX, (c,), Local("a", F32)), (r,)),
            Store("y", Index.of(r), Local("m", F32), (r,)),
        ),
        (HERE,),
    )
    assert show_kernel(kernel) == text("""
        rows kernel k0: for i<4, j<8
          %a (i, j) = x[8*i + j]
          %m (i) = max{j<8} %a
          y[i] = %m
    """)


def test_a_program():
    i = Axis(4)
    ref = TensorRef("y", F32, (4,), (1,))
    program = Program(
        buffers={
            "x": Buffer("x", F32, (4, 4), (1, 4), BufferKind.INPUT),
            "y": Buffer("y", F32, (4,), (1,), BufferKind.TEMPORARY, "cuda:0"),
            "z": Buffer("z", F32, (2, 2), (2, 1), BufferKind.TEMPORARY),
        },
        steps=(
            Compute(ref, Array((i,), Load("x", i * 5, F32)), HERE),
            Call(
                "aten.mm.default",
                (TensorRef("y", F32, (2, 2), (1, 2), 1), 2, (F32, None)),
                {"alpha": 0.5},
                ("z", None),
                HERE,
                reason="TR-301 no lowering",
            ),
        ),
        inputs=("x",),
        results=(ref, None),
    )
    assert show_program(program).strip() == text("""
        input x: f32[4, 4] strides (1, 4)
        temporary y: f32[4] on cuda:0
        temporary z: f32[2, 2]

        y: f32[4]  # train.py:7: loss = f(x) <-
          [i<4] -> f32
            x[5*i]

        z, _ = aten.mm.default((y: f32[2, 2] strides (1, 2) at 1), 2, [f32, None], alpha=0.5)  # TR-301 no lowering

        return (y: f32[4]), None
    """)  # noqa: E501


def test_dtype_names():
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
    assert [dtype_name(each) for each in dtypes] == ["bf16", "f8_e4m3fn", "i64", "u8", "bool"]
