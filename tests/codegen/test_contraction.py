"""Where a product and a sum round once is written in the text; compilers decide nothing."""

import ctypes
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton_kernels as make
import triton_run
from triton_run import Case, buffers_of, rendered, run_cases

import treadle
from treadle.codegen.cpp.prelude import PRELUDE
from treadle.codegen.cpp.text import function_text
from treadle.loop.expr import ReduceKind
from treadle.loop.kernel import Kernel, KernelSchedule, LoopForm
from treadle.runtime.kernels.compilers import compile_cpp, find_cxx, load_functions
from treadle.runtime.store.cache import Cache
from treadle.schedule.workers import PROGRAMS, THREADS

SELECTED = """
extern "C" void f(void* const* p, const int64_t* sizes, int64_t instances) {
const float *b0 = (float*)p[0], *b1 = (float*)p[1], *b2 = (float*)p[2], *b3 = (float*)p[3];
float* b4 = (float*)p[4];
for (int64_t r = 0; r < 32; ++r) {
#pragma omp simd
for (int64_t c = 0; c < 64; ++c) {
const bool x0 = c >= 32;
const float x1 = x0 ? b0[c + 64*r - 32] : 0.0f;
const float x2 = x0 ? b1[c + 32*r - 32] : 0.0f;
const float x3 = x1 + x2;
const bool x4 = c < 32;
const float x5 = x4 ? b2[c + 64*r] : 0.0f;
const float x6 = x4 ? b3[c + 32*r] : 0.0f;
const float x7 = x4 ? x5 * x6 : 0.0f;
b4[c + 64*r] = x0 ? x3 : x7;
}}}
"""


def test_a_sum_that_is_selected_beside_a_product_is_itself(tmp_path):
    """GCC 12 makes other numbers of this where it may contract, and GCC 13 none at all."""
    compiler = find_cxx()
    (library,) = compile_cpp([PRELUDE + SELECTED], Cache(tmp_path), compiler)
    shapes = (32, 64), (32, 32), (32, 64), (32, 32)
    a, b, c, d = (torch.randn(shape) for shape in shapes)
    found = torch.full((32, 64), torch.nan)
    pointers = (ctypes.c_void_p * 5)(*(each.data_ptr() for each in (a, b, c, d, found)))
    load_functions(library, ["f"])["f"](pointers, None, 1)
    assert torch.equal(found, torch.cat([c[:, :32] * d, a[:, :32] + b], 1))


COUPLED = {
    "product": lambda a, b: a * b,
    "sum": lambda a, b: a + b,
    "both": lambda a, b: a * b + a,
    "function": lambda a, b: (a * b).tanh() - b,
}


@pytest.mark.users_flags
@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize(("first", "second"), list(product(COUPLED, repeat=2))[::3])
def test_halves_that_change_places_equal_eager(first, second, width):
    """The layers of a flow, forward and backward: all of it is selects of sums and products."""
    weights = [torch.randn(32, 80, requires_grad=True) for _ in range(3)]
    model = torch.nn.ParameterList(weights)

    def step(x):
        p, q, r = model
        one = COUPLED[first](p[:, :width], x[:, 80 - width :])
        other = COUPLED[second](q[:, width:], x[:, : 80 - width])
        y = torch.cat([other * r[:, width:], one + r[:, :width]], 1)
        y.square().mean().backward()
        return y.detach()

    x = torch.randn(32, 80)
    want = step(x), *(each.grad.clone() for each in model)
    model.zero_grad()
    found = treadle.compile(step, model=model)(x), *(each.grad for each in model)
    torch.testing.assert_close(found, want)


def test_a_product_that_is_used_again_is_rounded_everywhere():
    """Else the difference of a value from itself were what it was rounded by."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1003))])

    def step(x):
        y = model[0] * x
        zero, kept = y - y.detach(), y + 1
        (zero.sqrt() * 0 + kept).sum().backward()
        return zero.detach(), kept.detach(), (y - model[0] * x).detach()

    zero, _, other = treadle.compile(step, model=model)(torch.randn(1003))
    assert not zero.any()
    assert not other.any()


N = 1024


def written_twice(used: str) -> Kernel:
    """A product by its name, of which ``used`` is the user, and as a formula in a sum."""
    k = make.Build(1, N)
    a, b, c = (make.load(name, k.cols) for name in "abc")
    written = make.fn("mul", a, b)
    named = k.define(written)
    k.store("y", k.define(make.fn("sub", written, make.fn(used, named, c))), k.cols)
    return k.kernel("twice")


@pytest.mark.parametrize("used", ["add", "div"])
def test_what_an_operation_gives_is_rounded_for_all_that_read_it(used):
    kernel = written_twice(used)
    tensors = {name: torch.randn(N) for name in "abcy"}
    source, _, buffers = rendered([kernel], buffers_of(tensors))
    ready = THREADS.scheduled(kernel)
    assert "tl.fma" not in source.text
    assert "t_fma" not in function_text("f", ready, buffers, contract=True)


def products_in_passes(rows: int, cols: int) -> Kernel:
    """Sums with one product in two passes along the columns, and after them."""
    k = make.Build(rows, cols)
    row, x = make.load("r", k.rows), make.load("x", k.flat)
    fixed, varying = make.fn("mul", row, row), make.fn("mul", x, make.load("w", k.cols))
    top = k.reduce(ReduceKind.MAX, make.fn("sub", varying, row))
    shifted = k.define(make.fn("add", make.fn("add", varying, top), make.fn("add", fixed, x)))
    total = k.reduce(ReduceKind.SUM, shifted)
    k.store("y", k.define(make.fn("sub", total, varying)))
    k.store("t", k.define(make.fn("add", fixed, total), (k.rows,)), k.rows, (k.rows,))
    return k.kernel("passes")


FORMS = {
    "persistent": KernelSchedule(LoopForm.PERSISTENT, 1, 256, warps=4),
    "looped": KernelSchedule(LoopForm.LOOPED, 1, 64, warps=4),
    "looped, rows in blocks": KernelSchedule(LoopForm.LOOPED, 2, 64, warps=4),
    "split": KernelSchedule(LoopForm.SPLIT, 1, 64, parts=2, warps=4),
}


@pytest.mark.parametrize("form", FORMS)
def test_factors_are_those_of_the_same_pass(form, tmp_path, monkeypatch, interpreted):
    """In each pass of the loops the variables of a product are others, or of another block."""
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_run, "PROGRAMS", replace(PROGRAMS, choose=lambda _: FORMS[form]))
    kernel = products_in_passes(3, 203)
    sizes = {"r": 3, "t": 3, "w": 203, "x": 609, "y": 609}
    tensors = {name: torch.randn(n) for name, n in sizes.items()}
    assert rendered([kernel], buffers_of(tensors))[0].text.count("tl.fma") >= 5
    run_cases([Case(form, [kernel], tensors)], tmp_path, interpreted)
