"""Masks that are windows: the calls that take their bounds, and those that keep the mask."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import show_plain, trace
from treadle.graph.core.operators import arguments, set_argument
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.passes import run_passes
from treadle.lower.elements import Elements
from treadle.passes.attention import windows
from treadle.passes.attention.proved_masks import ProveAttentionMasks, reports
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.memory.cost import flops_of
from treadle.targets.cuda import CUDA, _Cuda
from written_out import (
    CUDNN,
    CUDNN_BACKWARD,
    EFFICIENT,
    EFFICIENT_BACKWARD,
    WINDOWS,
    WINDOWS_BACKWARD,
    layouts,
    mask_words,
    run,
)

aten = torch.ops.aten
PROVE = ProveAttentionMasks(Elements)
HALF = torch.bfloat16


def operands(rows, *, heads=4, groups=4, head=8, dtype=HALF, columns=None):
    torch.manual_seed(0)
    counts = [(heads, rows), (groups, columns or rows), (groups, columns or rows), (heads, rows)]
    return tuple(torch.randn(2, h, n, head).to(dtype) for h, n in counts)


def attending(mask, *, kernel=CUDNN, scale=0.3, trains=True, dropout=0.0):
    """Attention with a mask of positions, and its gradients, as kernels for GPUs."""

    def program(q, k, v, g):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        zero, never = (torch.full((), each, dtype=q.dtype) for each in (0.0, -math.inf))
        bias = torch.where(mask(i, j), zero, never).expand(2, q.shape[1], -1, -1)
        if kernel is CUDNN:
            y, logs, cq, ck, mq, mk, seed, offset, _ = CUDNN(
                q, k, v, bias, True, dropout, False, scale=scale
            )
            gradients = CUDNN_BACKWARD(
                g, q, k, v, y, logs, seed, offset, bias, cq, ck, mq, mk, dropout, False, scale=scale
            )
        else:
            y, logs, seed, offset = EFFICIENT(q, k, v, bias, True, dropout, False, scale=scale)
            wanted = [True, True, True, False]
            gradients = EFFICIENT_BACKWARD(
                g, q, k, v, bias, y, logs, seed, offset, dropout, wanted, False, scale=scale
            )[:3]
        return (y, *gradients) if trains else (y,)

    return program


def step_of(program, inputs):
    step = trace(program, *inputs)
    run_passes(step, [RemoveCommonSubexpressions(), RemoveDeadCode()])
    return step


def call_in(step, target):
    return next(iter(step.graph.find_nodes(op="call_function", target=target)))


def before(behind, ahead=0):
    return lambda i, j: (j <= i + ahead) & (j >= i - behind)


def test_the_graph_before_and_after():
    step = step_of(attending(before(3)), operands(16))
    assert PROVE.run(step) == 2
    run_passes(step, [RemoveDeadCode()])
    assert [line.split(" = ")[1] for line in show_plain(step).splitlines() if " = " in line] == [
        "transpose.int(q, 1, 2)",
        "transpose.int(k, 1, 2)",
        "transpose.int(v, 1, 2)",
        "_flash_attention_forward(transpose, transpose.1, transpose.2, None, None, 16, 16, 0.0,"
        " False, False, scale=0.3, window_size_left=3, window_size_right=0)",
        "_flash_attention_forward[0]",
        "_flash_attention_forward[1]",
        "_flash_attention_forward[2]",
        "_flash_attention_forward[3]",
        "transpose.int(getitem, 1, 2)",
        "transpose.int(g, 1, 2)",
        "_flash_attention_backward(transpose.4, transpose, transpose.1, transpose.2, getitem,"
        " getitem.1, None, None, 16, 16, 0.0, False, getitem.2, getitem.3, scale=0.3,"
        " window_size_left=3, window_size_right=0)",
        "_flash_attention_backward[0]",
        "_flash_attention_backward[1]",
        "_flash_attention_backward[2]",
        "transpose.int(getitem.4, 1, 2)",
        "transpose.int(getitem.5, 1, 2)",
        "transpose.int(getitem.6, 1, 2)",
    ]
    assert PROVE.run(step) == 0


@pytest.mark.parametrize("kernel", [CUDNN, EFFICIENT])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(2, 40),
    behind=st.integers(0, 45),
    ahead=st.integers(0, 3),
    tokens_first=st.booleans(),
)
def test_numbers(kernel, trains, heads, groups, rows, behind, ahead, tokens_first):
    groups = heads if kernel is EFFICIENT else groups  # which shares none
    inputs = operands(rows, heads=heads, groups=groups)
    if tokens_first:
        inputs = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in inputs]
    program = attending(before(behind, ahead), kernel=kernel, trains=trains)
    step = step_of(program, inputs)
    doubled = [each.double() for each in inputs]
    types = layouts(step)
    wanted = run(step.graph, *doubled)
    count = 1 + trains
    assert PROVE.run(step) == count
    run_passes(step, [RemoveDeadCode()])
    assert layouts(step) == types
    for found, best in zip(run(step.graph, *doubled), wanted, strict=True):
        torch.testing.assert_close(found, best, rtol=1e-12, atol=1e-12)
    assert PROVE.run(step) == 0
    left = {node.target for node in step.graph.nodes}
    assert aten.where.self not in left
    narrow = behind < rows - 1 or ahead < rows - 1
    causal = behind >= rows - 1 and ahead == 0
    assert (WINDOWS in left) == (narrow and not causal)


def test_layouts_that_the_kernel_is_given():
    """Tokens first in memory, as models lay heads out: no copy is made."""
    inputs = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in operands(16)]
    step = step_of(attending(before(3)), inputs)
    PROVE.run(step)
    call = call_in(step, WINDOWS)
    for name in ("query", "key", "value"):
        assert type_of(arguments(call)[name]).is_contiguous


REFUSED = {
    "single precision": (attending(before(3)), operands(9, dtype=torch.float32), "for 16 bits"),
    "odd heads": (attending(before(3)), operands(9, head=12), "12 wide"),
    "wide heads": (attending(before(3)), operands(9, head=264), "264 wide"),
    "own position": (
        attending(lambda i, j: (j < i) & (j > i - 4)),
        operands(9),
        "leaves out a query's own position",
    ),
    "other keys": (attending(before(3)), operands(9, columns=12), "another number of keys"),
    "dropout": (attending(before(3), dropout=0.1), operands(9), "has dropout"),
    "prefix": (attending(lambda i, j: (j <= i) | (j < 3)), operands(9), "no kernel to call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_a_mask_stays(name):
    program, inputs, reason = REFUSED[name]
    step = step_of(program, inputs)
    for target in (CUDNN, CUDNN_BACKWARD):
        assert reason in mask_words(step, call_in(step, target), PROVE)
    assert PROVE.run(step) == 0


def test_eager_rounding_keeps_the_mask():
    step = step_of(attending(before(3)), operands(9))
    assert ProveAttentionMasks(Elements, eager=True).run(step) == 0


def test_what_else_is_read_of_a_call_keeps_it():
    def program(q, k, v, g):
        i = torch.arange(9)
        bias = torch.where(before(3)(i[:, None], i[None]), 0.0, -torch.inf)
        found = CUDNN(q, k, v, bias.to(q.dtype).expand(2, 4, 9, 9), True, 0.0, False)
        return found[0], found[1]

    step = step_of(program, operands(9))
    assert "is read by others" in mask_words(step, call_in(step, CUDNN), PROVE)
    assert PROVE.run(step) == 0


def test_gradients_of_another_call_keep_both():
    step = step_of(attending(before(3)), operands(9))
    set_argument(call_in(step, CUDNN_BACKWARD), "scale", 0.5)
    for target in (CUDNN, CUDNN_BACKWARD):
        assert "is not the gradient of" in mask_words(step, call_in(step, target), PROVE)
    assert PROVE.run(step) == 0


def test_devices_without_the_kernel(monkeypatch):
    class Old(_Cuda):
        def capability(self, device):
            return 7, 5

    monkeypatch.setattr(windows, "target_for", lambda device: replace(CUDA, driver=Old()))
    step = step_of(attending(before(3)), operands(9))
    assert "compute capability (7, 5)" in mask_words(step, call_in(step, CUDNN), PROVE)


def test_reports_say_both_bounds():
    step = step_of(attending(before(3, 1)), operands(9))
    assert [each.becomes for each in reports(step, PROVE)] == [
        "a window of 3 before and 1 after"
    ] * 2
    assert {each.mask for each in reports(step, PROVE)} == {"window of 3 behind and 1 ahead"}


def test_a_window_costs_what_it_lets_through():
    step = step_of(attending(before(3)), operands(64))
    whole = [flops_of(call_in(step, each)) for each in (CUDNN, CUDNN_BACKWARD)]
    PROVE.run(step)
    narrow = [flops_of(call_in(step, each)) for each in (WINDOWS, WINDOWS_BACKWARD)]
    assert narrow == [each * 4 / 64 for each in whole]
