"""Room for products on a GPU: which buffers get it, what is in it, and that numbers stay."""

from dataclasses import replace

import pytest
import torch

from lower.lowering_help import calls_of, run, trace
from schedule.test_schedule_fuzz import run_in_arena
from treadle.loop.program import Call, TensorRef
from treadle.lower import lower, padding
from treadle.lower.context import margins
from treadle.lower.padding import aligned_strides
from treadle.schedule.plan import schedule

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
    return replace(program, buffers=here, device="cpu")


@pytest.fixture
def padded(monkeypatch):
    """Products of any size are worth their padding."""
    monkeypatch.setattr(padding, "_WORK", 1)


@pytest.mark.parametrize("vocabulary", [257, 101, 64, 65])
def test_numbers_stay_with_aligned_rows(vocabulary):
    inputs = given(vocabulary)
    step = trace(head, *inputs)
    plain, aligned = run(lower(step), inputs), run(for_gpu(step), inputs)
    for mine, theirs in zip(aligned, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [
    (6, 72, 257), (6, 71, 101), (8, 72, 64), (10, 65, 65), (7, 7, 7), (2, 1, 3),
])  # fmt: skip
@pytest.mark.usefixtures("padded")
def test_numbers_stay_with_padding(tokens, width, vocabulary):
    def layers(x, table, v):
        w = table.to(BF16)  # a copy of ours, as under autocast
        logits = (x.to(BF16) @ w.t()).sin()
        slope = torch.softmax(logits.float(), -1).to(BF16)
        return [(slope @ w) * 2, (slope.t() @ x.to(BF16)).float(), logits @ v]

    inputs = (
        torch.randn(tokens, width),
        torch.randn(vocabulary, width),
        torch.randn(vocabulary, 5).to(BF16),
    )
    step = trace(layers, *inputs)
    program = for_gpu(step)
    plain, larger = run(lower(step), inputs), run(program, inputs)
    for mine, theirs in zip(larger, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
    sizes = [a.shape for call in calls_of(program) for a in call.args if len(a.shape) == 2]
    assert sizes[:4]
    assert all(n % 8 == 0 for shape in sizes[:-2] for n in shape), sizes
    planned = schedule(program)
    found = run_in_arena(planned, dict(zip(program.inputs, inputs, strict=True)))
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_margins_cover_what_is_outside_once():
    for shape, extents in [
        ((5, 7), (8, 8)),
        ((3, 4, 5), (3, 6, 8)),
        ((8, 8), (8, 8)),
        ((2,), (9,)),
    ]:
        count = torch.zeros(extents)
        count[tuple(slice(n) for n in shape)] += 1
        for start, size in margins(shape, extents):
            count[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))] += 1
        assert (count == 1).all()


def test_small_products_are_not_worth_their_padding():
    program = lower(trace(head, *given(257)), device="cuda")
    refs = [a for call in calls_of(program) for a in call.args if isinstance(a, TensorRef)]
    assert not any(264 in ref.shape for ref in refs)


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
