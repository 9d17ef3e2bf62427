"""Large products whose rows are not aligned, of matrices that are not ours: in padded pieces."""

from dataclasses import replace

import pytest
import torch

from lower.lowering_help import calls_of, run, trace
from treadle.loop.program import Call, Compute
from treadle.lower import lower, unaligned_products
from treadle.schedule.plan import schedule
from treadle.schedule.workers import PROGRAMS
from treadle.targets.cuda import CUDA
from treadle.util.allocator import PLAIN

BF16 = torch.bfloat16


@pytest.fixture
def eager_pieces(monkeypatch):
    """Products of any size are worth their copies, four rows or columns at a time."""
    monkeypatch.setattr(unaligned_products, "_LEAST", 1)
    monkeypatch.setattr(unaligned_products, "_REUSED", 0)
    monkeypatch.setattr(unaligned_products, "_ROWS", 4)
    monkeypatch.setattr(unaligned_products, "_PIECE", 1)


def for_gpu(step):
    program = lower(step, device="cuda")
    here = {name: replace(each, device="cpu") for name, each in program.buffers.items()}
    return replace(program, buffers=here)


def returned(x, w):
    return [x @ w.t()]


def returned_with_bias(x, w, bias):
    return [torch.addmm(bias, x, w.t())]


def gradients(g, w, x):
    """Of rows and of a weight, by a gradient that comes from outside."""
    return [g @ w, g.t() @ x]


def gradient_at_the_right(g, x):
    return [x.t() @ g]


def numbers(*shape):
    return torch.randn(shape).to(BF16)


CASES = {
    "returned": (returned, lambda t, d, v: (numbers(t, d), numbers(v, d))),
    "bias": (returned_with_bias, lambda t, d, v: (numbers(t, d), numbers(v, d), numbers(v))),
    "one bias": (returned_with_bias, lambda t, d, v: (numbers(t, d), numbers(v, d), numbers(1))),
    "gradients": (gradients, lambda t, d, v: (numbers(t, v), numbers(v, d), numbers(t, d))),
    "at the right": (gradient_at_the_right, lambda t, d, v: (numbers(t, v), numbers(t, d))),
}


@pytest.mark.parametrize("sizes", [(10, 16, 37), (8, 8, 9), (5, 24, 13), (9, 8, 3)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("eager_pieces")
def test_numbers_stay(name, sizes):
    fn, make = CASES[name]
    inputs = make(*sizes)
    step = trace(fn, *inputs)
    program = for_gpu(step)
    plain, pieces = run(lower(step), inputs), run(program, inputs)
    assert (len(calls_of(program)) > len(plain)) is (name != "one bias")
    for mine, theirs in zip(pieces, plain, strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", [name for name in CASES if name != "one bias"])
@pytest.mark.usefixtures("eager_pieces")
def test_products_are_of_whole_units(name):
    fn, make = CASES[name]
    program = lower(trace(fn, *make(16, 16, 37)), device="cuda")
    for call in calls_of(program):
        left, right = call.args[-2:]
        assert all(max(matrix.strides) % 8 == 0 for matrix in (left, right)), call
        assert all(size % 8 == 0 for size in right.shape), call


@pytest.mark.usefixtures("eager_pieces")
def test_one_piece_is_in_memory_at_a_time():
    program = lower(trace(returned, numbers(64, 16), numbers(997, 16)), device="cuda")
    plan = schedule(program, allocator=PLAIN, workers=PROGRAMS)
    piece, weight = 4 * 1000 * 2, 1000 * 16 * 2
    assert plan.arena_bytes < weight + 3 * piece
    assert sum(isinstance(step, Call) for step in plan.steps) == 16


def test_small_products_are_left_alone():
    step = trace(returned, numbers(64, 16), numbers(997, 16))
    assert sum(isinstance(s, Call) for s in lower(step, device="cuda").steps) == 1


@pytest.mark.parametrize("vocabulary", [1000, 4096])
@pytest.mark.usefixtures("eager_pieces")
def test_aligned_products_are_left_alone(vocabulary):
    step = trace(returned, numbers(64, 16), numbers(vocabulary, 16))
    program = lower(step, device="cuda")
    assert not any(isinstance(s, Compute) for s in program.steps)
    assert len(calls_of(program)) == 1


@pytest.mark.usefixtures("eager_pieces")
def test_on_a_cpu_and_in_32_bits_they_are_left_alone():
    halves = trace(returned, numbers(64, 16), numbers(997, 16))
    assert len(calls_of(lower(halves))) == 1
    singles = trace(returned, torch.randn(64, 16), torch.randn(997, 16))
    assert len(calls_of(lower(singles, device="cuda"))) == 1


@pytest.mark.usefixtures("eager_pieces")
def test_without_padding_they_are_left_alone():
    step = trace(returned, numbers(64, 16), numbers(997, 16))
    assert len(calls_of(lower(step, device="cuda", pad=False))) == 1
    assert CUDA.aligned_bytes == 16
