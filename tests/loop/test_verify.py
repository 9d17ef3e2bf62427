"""Every rule of the loop IR has something that breaks it."""

from dataclasses import replace

import pytest
import torch

from treadle.algebra.index import Axis, Index
from treadle.loop.expr import Apply, Array, Const, Load, Local, Position, Reduce, ReduceKind
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.nest import after_rows
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Origin, Program, TensorRef
from treadle.loop.traverse import value_index
from treadle.loop.verify import verify_array, verify_kernel, verify_program
from treadle.util.errors import VerifyError

F32, I64 = torch.float32, torch.int64
HERE = Origin(("n",))
P, Q, K = Axis(4), Axis(6), Axis(6)
X = Buffer("x", F32, (4, 6), (6, 1), BufferKind.INPUT)
TOKENS = Buffer("tokens", I64, (4,), (1,), BufferKind.INPUT)
Y = Buffer("y", F32, (4, 6), (6, 1), BufferKind.TEMPORARY)
BUFFERS = {each.name: each for each in (X, TOKENS, Y)}
READ = Load("x", P * 6 + Q, F32)
ROW = Reduce(ReduceKind.SUM, (K,), Load("x", P * 6 + K, F32))
ROW_INDEX = value_index(Load("tokens", Index.of(P), I64), 0, 3)


@pytest.mark.parametrize(
    "array",
    [
        Array((P, Q), READ),
        Array((P, Q), Apply("sub", (READ, ROW), F32)),
        Array((P, Q), Load("x", ROW_INDEX * 6 + Q, F32)),
        Array(
            (P,),
            Load("x", P * 6 - 1, F32, Apply("ge", (Position(P - 1), Const(0, I64)), torch.bool)),
        ),
        Array((Q,), Load("x", Q * 2 - Q // 2, F32)),  # the range alone would say -2
        Array((Axis(0), Q), Load("x", Q + 24, F32)),
    ],
)
def test_accepts(array):
    verify_array(array, BUFFERS)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Array((P, P), READ), "bound twice"),
        (Array((P,), READ), "not bound"),
        (Array((P, K), Apply("sub", (READ, ROW), F32)), "binds an axis of the array"),
        (Array((P,), Reduce(ReduceKind.MAX, (K,), ROW)), "binds again"),
        (Array((P,), Reduce(ReduceKind.SUM, (K, K), READ)), "repeats an axis"),
        (Array((), Reduce(ReduceKind.ARGMAX, (P, Q), READ)), "over one axis"),
        (Array((), Reduce(ReduceKind.ANY, (P, Q), READ)), "any of torch.float32"),
        (Array((P,), Load("z", Index.of(P), F32)), "no buffer is named z"),
        (Array((P, Q), Load("x", P * 6 + Q + 1, F32)), r"x\[1..24\] reaches outside its 24"),
        (Array((P, Q), Load("x", P * 6 + Q - 1, F32)), r"x\[-1..22\] reaches outside"),
        (
            Array(
                (Q,), Load("x", value_index(READ_I := Load("tokens", Q % 4, I64), 0, 4) * 6, F32)
            ),
            "24",
        ),
        (Array((P, Q), Load("x", P + Q, F32, READ)), "mask of x is not a bool"),
        (Array((P, Q), Apply("where", (READ, READ, READ), F32)), "where of something"),
        (
            Array((P,), Load("x", value_index(Load("x", Index.of(P), F32), 0, 3), F32)),
            "holds a value",
        ),
        (Array((P,), Local("a", F32)), "outside a kernel"),
    ],
)
def test_refuses_an_array(array, reason):
    with pytest.raises(VerifyError, match=reason) as caught:
        verify_array(array, BUFFERS)
    assert "\nin\n[" in caught.value.message


def program(*steps, results=(None,)):
    return Program(BUFFERS, steps, ("x", "tokens"), results)


OUT = TensorRef("y", F32, (4, 6), (6, 1))
FILL = Compute(OUT, Array((P, Q), READ), HERE)
IN = TensorRef("x", F32, (4, 6), (6, 1))


def test_accepts_programs():
    verify_program(program(FILL, results=(OUT,)))
    verify_program(program(Call("aten.relu.default", (IN,), {}, ("y",), HERE), results=(OUT,)))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (program(results=(OUT,)), r"\['y'\] are read before"),
        (program(Compute(OUT, Array((P, Q), Load("y", P * 6 + Q, F32)), HERE)), "are read before"),
        (program(Call("aten.relu.default", ([OUT],), {}, ("y",), HERE)), "are read before"),
        (program(Call("aten.relu.default", (IN,), {}, ("q",), HERE)), "fills"),
        (program(replace(FILL, output=replace(OUT, offset=1))), "reaches outside"),
        (program(replace(FILL, output=replace(OUT, shape=(4, 3)))), "gets torch.float32"),
        (program(results=(replace(IN, buffer="q"),)), "no buffer is named q"),
        (replace(program(), inputs=("q",)), "input q is not a buffer"),
    ],
)
def test_refuses_a_program(wrong, reason):
    with pytest.raises(VerifyError, match=reason):
        verify_program(wrong)


A, B = Local("a", F32), Local("b", F32)
LOAD_A = Definition("a", READ, (P, Q))
SUM_B = Definition("b", Reduce(ReduceKind.SUM, (Q,), A), (P,))


def kernel(*body, kind=KernelKind.ROWS):
    return Kernel("k", kind, P, Q, body, (HERE,))


def test_accepts_kernels():
    store = Store("y", P * 6 + Q, A, (P, Q))
    verify_kernel(kernel(LOAD_A, SUM_B, store), BUFFERS)
    column = Definition("b", Reduce(ReduceKind.MAX, (P,), A), (Q,))
    verify_kernel(kernel(LOAD_A, column, kind=KernelKind.COLUMNS), BUFFERS)


COLUMN = Definition("c", Reduce(ReduceKind.SUM, (P,), A), (Q,))
LATE = Local("c", F32)
OF_COLUMN = Definition("d", Apply("neg", (LATE,), F32), (Q,))
TWICE = Definition("e", Apply("add", (A, Local("d", F32)), F32), (P, Q))


def test_accepts_kernels_of_both():
    stores = Store("y", P * 6 + Q, A, (P, Q)), Store("y", Index.of(Q), Local("d", F32), (Q,))
    body = (LOAD_A, SUM_B, COLUMN, OF_COLUMN, *stores)
    verify_kernel(kernel(*body, kind=KernelKind.BOTH), BUFFERS)
    found = after_rows(kernel(*body, kind=KernelKind.BOTH))
    assert found == {"c", "d"}
    assert not after_rows(kernel(LOAD_A, SUM_B))


@pytest.mark.parametrize(
    "last",
    [
        TWICE,
        Definition("e", Reduce(ReduceKind.SUM, (Q,), Local("d", F32)), ()),
        Definition(
            "e", Reduce(ReduceKind.SUM, (P,), Apply("mul", (A, Local("c", F32)), F32)), (Q,)
        ),
    ],
)
def test_a_row_finds_nothing_of_what_is_there_after_the_last(last):
    with pytest.raises(VerifyError, match="which are there after the last row only"):
        verify_kernel(kernel(LOAD_A, COLUMN, OF_COLUMN, last, kind=KernelKind.BOTH), BUFFERS)


BELOW = Apply("neg", (Reduce(ReduceKind.SUM, (Q,), A),), F32)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ((LOAD_A, LOAD_A), "%a is defined twice"),
        ((SUM_B,), "%a is used before"),
        ((LOAD_A, Definition("b", Reduce(ReduceKind.SUM, (P,), A), (Q,))), "something else"),
        ((LOAD_A, Definition("b", BELOW, (P,))), "below its root"),
        ((LOAD_A, replace(SUM_B, axes=(P, Q))), "varies over what it reduces"),
        ((Definition("a", READ, (P,)),), "%a varies over"),
        ((Definition("a", READ, (Q, P)),), "are not the kernel's"),
        ((LOAD_A, Definition("b", Apply("neg", (A,), F32), (P,))), "its use does not"),
        ((LOAD_A, Definition("b", Local("a", I64), (P, Q))), "not torch.int64"),
        ((LOAD_A, Store("y", P * 6 + Q, A, (P,))), "varies over"),
        ((LOAD_A, Store("y", Index.of(Q), A, (P, Q)), Store("y", Index.of(Q), B, (Q,))), "before"),
        ((LOAD_A, Store("q", P * 6 + Q, A, (P, Q))), "no buffer q"),
        ((LOAD_A, Store("y", P * 7 + Q, A, (P, Q))), "reaches outside"),
        ((Definition("a", Load("x", P * 7 + Q, F32), (P, Q)),), "reaches outside"),
    ],
)
def test_refuses_a_kernel(body, reason):
    with pytest.raises(VerifyError, match=reason) as caught:
        verify_kernel(kernel(*body), BUFFERS)
    assert "rows kernel k: for i<4, j<6" in caught.value.message
