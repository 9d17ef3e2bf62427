"""Masks of blocks: attention in batches of one block each, and what keeps its mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, show_plain, trace
from treadle.graph.core.operators import arguments, set_argument
from treadle.graph.rewrite.passes import run_passes
from treadle.lower.elements import Elements
from treadle.passes.attention.proved_masks import ProveAttentionMasks, reports
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.cleanup.dce import RemoveDeadCode
from written_out import CUDNN, CUDNN_BACKWARD, layouts, mask_words, run

aten = torch.ops.aten
PROVE = ProveAttentionMasks(Elements)
CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def operands(rows, *, heads=4, groups=4, head=8, batch=2, dtype=torch.float32, tokens_first=False):
    torch.manual_seed(0)
    counts = (heads, groups, groups, heads)
    found = [torch.randn(batch, n, rows, head).to(dtype) for n in counts]
    if tokens_first:
        found = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in found]
    return found


def blocks(size, *, causal=True):
    def mask(i, j):
        same = i // size == j // size
        return same & (j <= i) if causal else same

    return mask


def attending(mask, *, kernel=CPU, scale=0.3, dropout=0.0, trains=True):
    def program(q, k, v, g):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        zero, never = (torch.full((), each, dtype=q.dtype) for each in (0.0, -math.inf))
        bias = torch.where(mask(i, j), zero, never).expand(q.shape[0], q.shape[1], -1, -1)
        if kernel is CPU:
            y, logs = CPU(q, k, v, dropout, False, attn_mask=bias, scale=scale)
            rest = (y, logs, dropout, False)
            given = {"attn_mask": bias, "scale": scale}
            return (y, *(CPU_BACKWARD(g, q, k, v, *rest, **given) if trains else ()))
        y, logs, cq, ck, mq, mk, seed, offset, _ = CUDNN(
            q, k, v, bias, True, dropout, False, scale=scale
        )
        rest = (y, logs, seed, offset, bias, cq, ck, mq, mk, dropout, False)
        return (y, *(CUDNN_BACKWARD(g, q, k, v, *rest, scale=scale) if trains else ()))

    return program


def step_of(program, inputs):
    step = trace(program, *inputs)
    run_passes(step, [RemoveCommonSubexpressions(), RemoveDeadCode()])
    return step


def call_in(step, target=CPU):
    return next(iter(step.graph.find_nodes(op="call_function", target=target)))


def test_the_graph_before_and_after():
    step = step_of(attending(blocks(4), trains=False), operands(12, tokens_first=True))
    assert PROVE.run(step) == 1
    run_passes(step, [RemoveDeadCode()])
    assert [line.split(" = ")[1] for line in show_plain(step).splitlines() if " = " in line] == [
        "transpose.int(q, 1, 2)",
        "view(transpose, [6, 4, 4, 8])",
        "transpose.int(view, 1, 2)",
        "transpose.int(k, 1, 2)",
        "view(transpose.2, [6, 4, 4, 8])",
        "transpose.int(view.1, 1, 2)",
        "transpose.int(v, 1, 2)",
        "view(transpose.4, [6, 4, 4, 8])",
        "transpose.int(view.2, 1, 2)",
        "_scaled_dot_product_flash_attention_for_cpu(transpose.1, transpose.3, transpose.5,"
        " attn_mask=None, scale=0.3, is_causal=True)",
        "_scaled_dot_product_flash_attention_for_cpu[0]",
        "transpose.int(getitem, 1, 2)",
        "view(transpose.6, [2, 12, 4, 8])",
        "transpose.int(view.3, 1, 2)",
    ]
    assert PROVE.run(step) == 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("trains", [True, False])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    size=st.integers(2, 7), count=st.integers(2, 4), batch=st.integers(1, 3), first=st.booleans()
)
def test_numbers_on_cpus(causal, trains, size, count, batch, first):
    inputs = operands(size * count, batch=batch, tokens_first=first)
    program = attending(blocks(size, causal=causal), trains=trains)
    step = step_of(program, inputs)
    before = layouts(step)
    assert PROVE.run(step) == 1 + trains
    run_passes(step, [RemoveDeadCode()])
    assert layouts(step) == before
    assert aten.where.self not in {node.target for node in step.graph.nodes}
    check_numbers(step, program, inputs, exact=False)
    assert PROVE.run(step) == 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
def test_numbers_of_kernels_for_gpus(heads, groups, first):
    inputs = operands(12, heads=heads, groups=groups, dtype=torch.bfloat16, tokens_first=first)
    step = step_of(attending(blocks(4), kernel=CUDNN), inputs)
    doubled = [each.double() for each in inputs]
    before, wanted = layouts(step), run(step.graph, *doubled)
    assert PROVE.run(step) == 2
    assert layouts(step) == before
    for found, best in zip(run(step.graph, *doubled), wanted, strict=True):
        torch.testing.assert_close(found, best, rtol=1e-12, atol=1e-12)
    given_ = arguments(call_in(step, CUDNN_BACKWARD))
    assert (given_["max_q"], given_["max_k"], given_["is_causal"]) == (4, 4, True)


def windowed(i, j):
    return (i // 6 == j // 6) & (j <= i) & (j > i - 3)


REFUSED = {
    "not whole": (attending(blocks(5)), operands(12), "no whole number of blocks of 5"),
    "a window in each": (attending(windowed), operands(12), "no flag says that"),
    "dropout": (attending(blocks(4), kernel=CUDNN, dropout=0.1), operands(12), "has dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_a_mask_stays(name):
    program, inputs, reason = REFUSED[name]
    step = step_of(program, inputs)
    calls = [node for node in step.graph.nodes if node.target in (CPU, CPU_BACKWARD, CUDNN)]
    assert calls
    assert all(reason in mask_words(step, each, PROVE) for each in calls)
    assert PROVE.run(step) == 0


def test_eager_rounding_keeps_the_mask():
    step = step_of(attending(blocks(4)), operands(12))
    assert "rounds elsewhere" in mask_words(
        step, call_in(step), ProveAttentionMasks(Elements, eager=True)
    )
    assert ProveAttentionMasks(Elements, eager=True).run(step) == 0


def test_gradients_of_another_call_keep_both():
    step = step_of(attending(blocks(4)), operands(12))
    set_argument(call_in(step, CPU_BACKWARD), "scale", 0.5)
    assert "is not the gradient of" in mask_words(step, call_in(step), PROVE)
    assert PROVE.run(step) == 0


def test_reports_say_the_size():
    step = step_of(attending(blocks(4)), operands(12))
    assert {each.becomes for each in reports(step, PROVE)} == {"batches of 4, is_causal"}
    assert {each.mask for each in reports(step, PROVE)} == {"causal, in blocks of 4"}
