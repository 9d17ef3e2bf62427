"""Generated Triton computes what the loop interpreter computes, in every form a kernel takes."""

import math
import re
from dataclasses import replace

import pytest
import torch
import triton_kernels as make
import triton_run
from torch import Tensor
from triton_cases import (
    NAN,
    adamw_tensors,
    column_sums_case,
    embedding_case,
    layer_norm_case,
    norm_backward_case,
    one_hot_case,
    poison,
    reductions_case,
    softmax_case,
    total_norm_case,
    transpose_case,
)
from triton_run import Case, buffers_of, rendered, run_cases

from float8_numbers import FLOAT8, numbers
from treadle.algebra.index import Index
from treadle.codegen.triton.expr import TritonWriter
from treadle.loop.expr import Position, ReduceKind
from treadle.loop.kernel import Kernel, KernelKind, KernelSchedule, LoopForm
from treadle.loop.nest import running_sums
from treadle.schedule.workers import PROGRAMS
from treadle.util.errors import LoweringError

pytest.importorskip("triton")


def functions_case(names: str, x: Tensor, z: Tensor) -> Case:
    each = tuple(names.split())
    boolean = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"}
    tensors = {"x": x, "z": z}
    for name in each:
        tensors[f"y_{name}"] = poison(x.numel(), torch.bool if name in boolean else x.dtype)
    kernel = make.functions(x.numel(), each, x.dtype)
    return Case(f"functions of {x.dtype}: {names}", [kernel], tensors)


def signed(n: int) -> Tensor:
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 1e-6, -1e-4, 30.0, -30.0, NAN, math.inf, -math.inf]
    )
    return torch.cat([special, 4 * torch.randn(n)])


POWERS = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 2.0, math.inf, -math.inf, NAN])


def function_cases() -> list[Case]:
    x = signed(60)
    z = signed(60).flip(0)
    positive = x.abs() + 1e-3
    whole = torch.randint(-20, 20, (50,))
    divisor = torch.where(whole.flip(0) == 0, 3, whole.flip(0))
    return [
        functions_case(
            "neg abs exp expm1 sin cos tanh erf erfc sigmoid floor ceil round trunc sign", x, z
        ),
        functions_case("log log1p log2 sqrt rsqrt reciprocal isnan isinf", positive, z),
        functions_case("add sub mul div minimum maximum eq ne lt le gt ge", x, z),
        functions_case("floordiv mod fmod", torch.randn(50) * 9, torch.randn(50)),
        functions_case("pow", torch.rand(50) * 4, torch.randn(50) * 3),
        functions_case("pow", torch.randn(50) * 4, torch.randint(-3, 4, (50,)).float()),
        functions_case("pow", *torch.cartesian_prod(POWERS, POWERS).t().contiguous()),
        functions_case("add mul exp tanh maximum lt", x.bfloat16(), z.bfloat16()),
        functions_case("exp div pow sqrt tanh", torch.rand(20).double(), torch.rand(20).double()),
        functions_case("floordiv mod fmod minimum maximum add mul sign abs", whole, divisor),
        functions_case("pow", whole, torch.randint(0, 5, (50,))),
    ]


def whole_numbers_case(n: int) -> Case:
    """What random numbers that are computed from a position are made of."""
    extreme = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    x = torch.cat([torch.randint(-(2**62), 2**62, (n - 5,)), extreme])
    tensors = {"x": x, "key": torch.randint(1, 2**62, (1,)) | 1}
    tensors |= {name: torch.full((n,), -7) for name in ("y_high", "y_swapped")}
    return Case("whole numbers", [make.whole_numbers(n)], tensors | {"y_kept": poison(n)})


def float8_case(rows: int, dtype: torch.dtype) -> Case:
    x = numbers(dtype)
    cols = len(x) // rows
    given = torch.arange(256, dtype=torch.uint8).repeat(rows * cols // 256 + 1)
    tensors = {"x": x[: rows * cols], "given": given[: rows * cols].view(dtype)}
    tensors |= {"q": torch.full((rows * cols,), 1.0).to(dtype)}
    tensors |= {name: poison(rows * cols) for name in "yz"}
    return Case(f"{dtype}", [make.float8(rows, cols, dtype)], tensors)


def all_cases() -> list[Case]:
    update = adamw_tensors(1500, "0") | adamw_tensors(33, "1") | adamw_tensors(1, "2")
    many = [make.adamw(1500, "0"), make.adamw(33, "1"), make.adamw(1, "2")]
    counting = {"p": torch.randn(2100), "g": torch.randn(2100), "step": torch.tensor([4.0])}
    return [
        softmax_case(3, 50),
        softmax_case(2, 1024),
        softmax_case(2, 17000),
        layer_norm_case(5, 24, torch.float32),
        layer_norm_case(3, 300, torch.bfloat16),
        Case("adamw", many[:1], update),
        Case("adamw, many", many, update),
        Case("counting", [make.counting_update(2100)], counting),
        reductions_case(3, 40, KernelKind.ROWS),
        reductions_case(40, 3, KernelKind.COLUMNS),
        reductions_case(7, 1, KernelKind.ROWS),
        reductions_case(1, 7, KernelKind.COLUMNS),
        column_sums_case(7, 100),
        column_sums_case(130, 70),
        column_sums_case(1100, 5),
        norm_backward_case(1, 2),
        norm_backward_case(3, 1024, torch.bfloat16),
        norm_backward_case(41, 1500),
        norm_backward_case(211, 100, torch.bfloat16),
        norm_backward_case(1030, 6),
        one_hot_case(9, 21),
        one_hot_case(1200, 3),
        embedding_case(6, 20),
        total_norm_case(100),
        total_norm_case(40_000),
        transpose_case(9, 33),
        transpose_case(70, 3),
        whole_numbers_case(1031),
        *(float8_case(7, dtype) for dtype in FLOAT8),
        *function_cases(),
    ]


def test_agrees_with_the_loop_interpreter(tmp_path, interpreted):
    torch.manual_seed(torch.seed() % 1000)
    run_cases(all_cases(), tmp_path, interpreted)


def test_long_rows_run_in_whole_blocks_and_a_rest(tmp_path, monkeypatch, interpreted):
    looped = KernelSchedule(LoopForm.LOOPED, 1, 64, warps=4)
    workers = replace(PROGRAMS, choose=lambda kernel: looped)
    monkeypatch.setattr(triton_run, "PROGRAMS", workers)
    source, _, _ = rendered([make.softmax(3, 203)], buffers_of(softmax_case(3, 203).tensors))
    assert source.text.count("range(0, 192, 64)") == source.text.count("range(192, 203, 64)") == 3
    cases = [softmax_case(3, 203), softmax_case(2, 208), softmax_case(3, 65)]
    run_cases(cases, tmp_path, interpreted)


LOOPS = {
    (0, 1): ["q in range(0, 192, 64)", "q in range(192, 203, 64)"],
    (3, 1): [
        "q in tl.range(0, 192, 64, num_stages=3)",
        "q in tl.range(192, 203, 64, num_stages=3)",
    ],
    (0, 2): ["q in range(0, 128, 128)", "q in range(128, 203, 64)"],
    (0, 3): ["q in range(0, 192, 192)", "q in range(192, 203, 64)"],
    (0, 4): ["q in range(0, 203, 64)"],
}
"""The loops of the first pass over 203 columns, by the steps ahead and by blocks at once."""


@pytest.mark.parametrize(("stages", "unrolled"), LOOPS)
def test_the_largest_and_the_sum_behind_it_are_found_in_one_loop(
    stages, unrolled, tmp_path, monkeypatch, interpreted
):
    def choose(kernel):
        how = KernelSchedule(LoopForm.LOOPED, 1, 64, warps=4, stages=stages)
        return replace(how, running=tuple(running_sums(kernel)), unrolled=unrolled)

    monkeypatch.setattr(triton_run, "PROGRAMS", replace(PROGRAMS, choose=choose))
    cases = []
    for cols in (203, 256):
        x = 3 * torch.randn(7, cols)
        x[1] = torch.linspace(-300, 300, cols)  # a new maximum in every block
        x[2] = x[1].flip(0)
        x[3, :130] = -math.inf  # nothing to add up in the first blocks
        x[4] = -math.inf
        x[5, 70] = math.inf
        x[6, 150] = NAN
        tensors = {"x": x.flatten(), "y": poison(7 * cols)}
        cases.append(Case(f"running sum {cols}", [make.softmax(7, cols)], tensors))
    source, _, _ = rendered(cases[0].kernels, buffers_of(cases[0].tensors))
    loops = re.findall(r"for (.*):", source.text)
    assert [each for each in loops if each.startswith("q")] == LOOPS[stages, unrolled]
    back = f"tl.range(%d, %d, 64, num_stages={stages})" if stages else "range(%d, %d, 64)"
    assert loops[-2:] == [f"p in {back % (192, 203)}", f"p in {back % (0, 192)}"]
    backwards = [line.strip() for line in source.text.splitlines() if "- p" in line]
    assert backwards == ["q = 384 - p", "q = 128 - p"]
    run_cases(cases, tmp_path, interpreted)


@pytest.mark.parametrize("cols", [203, 256])
def test_a_sum_beside_a_running_one(cols, tmp_path, monkeypatch, interpreted):
    """As label smoothing has it: blocks that are read at once are added one after another."""
    k = make.Build(5, cols)
    x = k.define(make.load("x", k.flat))
    top = k.reduce(ReduceKind.MAX, x)
    total = k.reduce(ReduceKind.SUM, k.define(make.fn("exp", make.fn("sub", x, top))))
    whole = k.reduce(ReduceKind.SUM, x)
    value = make.fn("add", make.fn("log", total), make.fn("sub", top, whole))
    k.store("y", k.define(value, (k.rows,)), k.rows, (k.rows,))
    kernel = k.kernel("smoothed")

    def choose(kernel):
        how = KernelSchedule(LoopForm.LOOPED, 1, 64, warps=4, unrolled=2)
        return replace(how, running=tuple(running_sums(kernel)))

    monkeypatch.setattr(triton_run, "PROGRAMS", replace(PROGRAMS, choose=choose))
    tensors = {"x": 3 * torch.randn(5 * cols), "y": poison(5)}
    source, _, _ = rendered([kernel], buffers_of(tensors))
    assert f"for q in range(0, {cols - cols % 128}, 128)" in source.text
    run_cases([Case(f"smoothed {cols}", [kernel], tensors)], tmp_path, interpreted)


def test_threads_go_down_few_rows(tmp_path, monkeypatch, interpreted):
    monkeypatch.setattr("treadle.schedule.programs._FILL", 1)  # as if there were columns for all
    cases = [
        reductions_case(9, 1100, KernelKind.COLUMNS),
        reductions_case(2, 1024, KernelKind.COLUMNS),
        column_sums_case(32, 2049),
    ]
    source, _, _ = rendered(cases[0].kernels, buffers_of(cases[0].tensors))
    assert "in tl.range(0, 9, 1, loop_unroll_factor=9)" in source.text
    run_cases(cases, tmp_path, interpreted)


@pytest.mark.parametrize("wide", [False, True])
def test_a_place_that_is_one_number_is_compared_as_such(wide):
    """Of an axis of one element nothing but its place is left."""
    same = make.fn("eq", make.load("n", 0, torch.int64), Position(Index.of(0)))
    writer = TritonWriter({}, {"n": "b0"}, {}, frozenset(), wide=wide)
    writer.evaluate(same)
    here = "tl.full((), 0, tl.int32)" if wide else "(0)"
    assert writer.lines[-1].endswith(f"= {here} == x1")


def test_same_structure_shares_one_function():
    tensors = adamw_tensors(64, "0") | adamw_tensors(1024, "1")
    kernels = [make.adamw(64, "0"), make.adamw(1024, "1")]
    source, launches, _ = rendered(kernels, buffers_of(tensors))
    (launch,) = launches
    assert source.text.count("def adamw") == 1
    assert launch.sizes == ((64,), (1024,))
    assert len(launch.buffers) == 2
    (name,) = source.functions
    assert source.function(name).count("@triton.jit") == 1
    assert source.function(name).strip().startswith(f"@triton.jit\ndef {name}_0(")
    assert "FUNCTIONS" not in source.function(name)


def test_a_later_user_keeps_launches_apart():
    first, second = make.adamw(64, "0"), make.adamw(64, "1")
    tensors = adamw_tensors(64, "0") | adamw_tensors(64, "1")
    buffers = buffers_of(tensors)
    overlapping = {"g1": 0, "p0": 128}
    _, launches, _ = rendered([first, second], buffers, overlapping)
    assert len(launches) == 2
    _, launches, _ = rendered([first, first], buffers)
    assert len(launches) == 2


def test_text_is_the_same_each_time():
    def text() -> str:
        kernels: list[Kernel] = [make.softmax(7, 20000), make.column_sums(900, 30)]
        names = ["x", "y", "g", "dw", "db"]
        return rendered(kernels, buffers_of({n: torch.zeros(1) for n in names}))[0].text

    assert text() == text()


def test_long_reductions_run_in_parts():
    source, (launch,), _ = rendered(
        [make.total_norm(10**6)], buffers_of({n: torch.zeros(1) for n in ("g", "y", "scale")})
    )
    assert source.text.count("@triton.jit\ndef total_norm") == 2
    assert launch.function in source.functions


def test_refuses_to_read_what_it_wrote():
    k = make.Build(1, 10)
    k.store("y", k.define(make.load("x", k.cols)), k.cols)
    k.store("z", k.define(make.load("y", k.cols)), k.cols)
    with pytest.raises(LoweringError, match="after writing it"):
        rendered([k.kernel("wrong")], buffers_of({n: torch.zeros(10) for n in "xyz"}))
