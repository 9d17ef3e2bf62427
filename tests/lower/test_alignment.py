"""Aligned rows for products on a GPU: which buffers move, and that the numbers stay."""

from dataclasses import replace

import pytest
import torch

from lower.lowering_help import run, trace
from treadle.loop.program import Call, TensorRef
from treadle.lower import lower
from treadle.lower.alignment import aligned_strides

BF16 = torch.bfloat16


def head(x, w):
    """The output layer of a language model, its loss and the products of its backward."""
    logits = (x @ w.t()).view(2, -1, w.shape[0])
    slope = torch.softmax(logits.float(), -1).to(x.dtype).view(-1, w.shape[0])
    return [slope @ w, slope.t() @ x, logits.float().logsumexp(-1)]


def given(vocabulary: int, dtype=BF16):
    x, w = torch.randn(6, 72), torch.randn(vocabulary, 72) * 0.2
    return x.to(dtype), w.to(dtype)


def for_gpu(step):
    """The program for a GPU, with its buffers here, where the interpreter can fill them."""
    program = lower(step, device="cuda")
    here = {name: replace(each, device="cpu") for name, each in program.buffers.items()}
    return replace(program, buffers=here)


@pytest.mark.parametrize("vocabulary", [257, 101, 64, 65])
def test_numbers_stay(vocabulary):
    inputs = given(vocabulary)
    step = trace(head, *inputs)
    plain, aligned = run(lower(step), inputs), run(for_gpu(step), inputs)
    for mine, theirs in zip(aligned, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_every_long_matrix_of_a_product_starts_its_rows_at_16_bytes():
    step = trace(head, *given(257))
    program = lower(step, device="cuda")
    refs = [a for s in program.steps if isinstance(s, Call) for a in s.args]
    rows = [max(r.strides) for r in refs if isinstance(r, TensorRef) and 257 in r.shape]
    assert rows.count(264) == 2  # the slope, twice; the weight is the user's
    (logits,) = [b for b in program.buffers.values() if b.shape == (6, 257) and b.name == "mm"]
    assert logits.strides == (264, 1)


def test_other_buffers_keep_eagers_layout():
    short = lower(trace(head, *given(37)), device="cuda")
    wide = lower(trace(head, *given(257, torch.float32)), device="cuda")
    assert not any(264 in b.strides or 260 in b.strides for b in wide.buffers.values())
    assert not any(40 in b.strides for b in short.buffers.values())


def test_results_keep_eagers_layout():
    def returns(x, w):
        y = (x @ w.t()).view(2, 3, -1)
        return [y, y * 2]

    x, w = given(257)
    (first, second) = run(for_gpu(trace(returns, x, w)), (x, w))
    assert first.is_contiguous()
    assert second.is_contiguous()


def test_strides():
    assert aligned_strides((5, 50257), BF16) == (50264, 1)
    assert aligned_strides((2, 5, 9), torch.float16) == (80, 16, 1)
    assert aligned_strides((3, 8), BF16) == (8, 1)
