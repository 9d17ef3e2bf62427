"""Heads that several queries share, on kernels for GPUs: these stand in the graphs, and what runs
here in their place is attention written out."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from testing import show_plain, trace
from treadle.compiler.cleaning import cleaning_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.rewrite.rules import explain
from treadle.options import Options
from treadle.passes.attention.grouped_heads import KERNELS, GroupHeads
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.memory.cost import flops_of
from written_out import run

aten = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default
BATCH, GROUPS, TIMES, ROWS, HEAD = 2, 2, 3, 5, 8


def as_transformers(x, times=TIMES):
    b, g, t, d = x.shape
    return x[:, :, None].expand(b, g, times, t, d).reshape(b, g * times, t, d)


def interleaved(x, times=TIMES):
    return x.repeat_interleave(times, dim=1)


def flattened(x, times=TIMES):
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def tokens_first(x, times=TIMES):
    b, g, t, d = x.shape
    x = x.transpose(1, 2)
    return x[:, :, :, None].expand(b, t, g, times, d).reshape(b, t, g * times, d).transpose(1, 2)


def cast(x):
    return as_transformers(x.double()).to(x.dtype)


def cast_tokens_first(x):
    return tokens_first(x.double()).to(x.dtype)


SPELLINGS = (as_transformers, interleaved, flattened, tokens_first, cast, cast_tokens_first)


def operands(groups=GROUPS, heads=GROUPS * TIMES, dtype=torch.float32):
    torch.manual_seed(0)
    q, g = (torch.randn(BATCH, heads, ROWS, HEAD, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(BATCH, groups, ROWS, HEAD, dtype=dtype) for _ in range(2))
    return q, k, v, g


def kernel_calls(kernel, q, k, v, g, dropout=0.0):
    """The result, and the gradients of the three operands."""
    if kernel is CUDNN:
        y, logs, *_, seed, offset, _ = kernel(q, k, v, None, True, dropout, True)
        rest = (seed, offset, None, None, None, ROWS, ROWS, dropout, True)
    else:
        y, logs, *_, seed, offset, _ = kernel(q, k, v, dropout, True)
        rest = (None, None, ROWS, ROWS, dropout, True, seed, offset)
    return y, *KERNELS[kernel](g, q, k, v, y, logs, *rest)


def training(kernel, spelling):
    """A program: attention with repeated heads, and the gradients of all three operands."""

    def program(q, k, v, g):
        q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
        wide = spelling(k.sin()), spelling(v.cos())
        y, dq, *grads = kernel_calls(kernel, q.detach(), *(x.detach() for x in wide), g)
        dk, dv = torch.autograd.grad(wide, (k, v), tuple(grads))
        return y, dq, dk, dv

    return program


def step_of(program, inputs=None):
    step = trace(program, *(operands() if inputs is None else inputs))
    run_passes(step, [RemoveNoOps(), RemoveCommonSubexpressions(), RemoveDeadCode()])
    return step


def results(step, inputs):
    return run(step.graph, *inputs)


def call_in(step, target):
    return next(iter(step.graph.find_nodes(op="call_function", target=target)))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_are_shared(kernel, spelling):
    exact = spelling not in (cast, cast_tokens_first)
    inputs = operands(dtype=torch.float64 if exact else torch.float32)
    step = step_of(training(kernel, spelling), inputs)
    expected = results(step, inputs)
    types = [type_of(node) for node in step.returned]
    assert explain(GroupHeads(), call_in(step, kernel)) == "applies"
    assert GroupHeads().run(step) == 1
    run_passes(step, [RemoveDeadCode()])
    for target in (kernel, KERNELS[kernel]):
        given = arguments(call_in(step, target))
        assert {type_of(given[name]).shape[1] for name in ("key", "value")} == {GROUPS}
        assert type_of(given["query"]).shape[1] == GROUPS * TIMES
    left = {node.target for node in step.graph.nodes}
    assert left.isdisjoint({aten.expand.default, aten.clone.default, aten.sum.dim_IntList})
    assert [(each.shape, each.dtype) for each in map(type_of, step.returned)] == [
        (each.shape, each.dtype) for each in types
    ]
    for found, wanted in zip(results(step, inputs), expected, strict=True):
        tolerance = 1e-12 if exact else 2e-6  # single precision, once summed and once rounded first
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert GroupHeads().run(step) == 0


def test_the_graph_before_and_after():
    def program(q, k, v, g):
        return CUDNN(q, as_transformers(k), as_transformers(v), None, True, 0.0, True)[0]

    step = step_of(program)
    GroupHeads().run(step)
    run_passes(step, [RemoveDeadCode()])
    assert "expand" not in show_plain(step)
    assert [line.split(" = ")[1] for line in show_plain(step).splitlines() if " = " in line] == [
        "unsqueeze(k, 2)",
        "unsqueeze(v, 2)",
        "squeeze.dim(unsqueeze, 2)",
        "squeeze.dim(unsqueeze.1, 2)",
        "_scaled_dot_product_cudnn_attention(q, squeeze, squeeze.1, None, True, 0.0, True)",
        "_scaled_dot_product_cudnn_attention[0]",
    ]


def other_reader(q, k, v, g):
    wide = as_transformers(k)
    return *kernel_calls(CUDNN, q, wide, as_transformers(v), g), wide + 1


def unequal(q, k, v, g):
    return kernel_calls(CUDNN, q, as_transformers(k), as_transformers(v[:, :1], 6), g)[0]


def keys_alone(q, k, v, g):
    return kernel_calls(CUDNN, q, as_transformers(k), torch.cat([v, v, v], 1), g)[0]


def gradient_read_whole(q, k, v, g):
    return kernel_calls(CUDNN, q, as_transformers(k), as_transformers(v), g)


def summed_over_heads(q, k, v, g):
    y, dq, dk, dv = kernel_calls(CUDNN, q, as_transformers(k), as_transformers(v), g)
    dk, dv = (each.view(BATCH, GROUPS, TIMES, ROWS, HEAD).sum(1) for each in (dk, dv))
    return y, dq, dk, dv


def summed_wider(q, k, v, g):
    y, dq, *grads = kernel_calls(CUDNN, q, as_transformers(k), as_transformers(v), g)
    shape = BATCH, GROUPS, TIMES, ROWS, HEAD
    return y, dq, *(each.view(shape).sum(2, dtype=torch.float64) for each in grads)


def other_order(q, k, v, g):
    """Heads repeated one after the other: ``h % groups``, not ``h // times``."""

    def wide(x):
        x = x[:, None].expand(BATCH, TIMES, GROUPS, ROWS, HEAD)
        return x.reshape(BATCH, GROUPS * TIMES, ROWS, HEAD)

    return kernel_calls(CUDNN, q, wide(k), wide(v), g)[0]


def drops_out(q, k, v, g):
    return kernel_calls(CUDNN, q, as_transformers(k), as_transformers(v), g, dropout=0.1)[0]


REFUSALS = {
    other_reader: "is read by others as well",
    unequal: "repeated in different ways",
    keys_alone: "is not made by repeating each head",
    gradient_read_whole: "no one reader",
    summed_over_heads: "is not summed over what shares a head",
    summed_wider: "is not summed over what shares a head",
    other_order: "is not made by repeating each head",
    drops_out: "has dropout",
}


@pytest.mark.parametrize("program", REFUSALS)
def test_what_is_left_alone(program):
    step = step_of(program)
    before = show_plain(step)
    assert REFUSALS[program] in explain(GroupHeads(), call_in(step, CUDNN))
    assert GroupHeads().run(step) == 0
    assert show_plain(step) == before


def test_other_kernels_are_left_alone():
    efficient = aten._scaled_dot_product_efficient_attention.default

    def program(q, k, v, g):
        return efficient(q, as_transformers(k), as_transformers(v), None, True)[0]

    step = step_of(program)
    assert "calls no kernel that shares heads" in explain(GroupHeads(), call_in(step, efficient))
    assert GroupHeads().run(step) == 0


def test_eager_rounding_leaves_heads_repeated():
    assert GroupHeads() in cleaning_of(Options())
    assert GroupHeads() not in cleaning_of(Options(numerics="eager"))


FLOPS = (CUDNN, FLASH, aten._scaled_dot_product_efficient_attention.default)


@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_heads_cost_what_repeated_ones_do(kernel):
    step = step_of(training(kernel, as_transformers))
    calls = [call_in(step, each) for each in (kernel, KERNELS[kernel])]
    before = [flops_of(each) for each in calls]
    scores = BATCH * GROUPS * TIMES * ROWS * ROWS * HEAD
    assert before == [4 * scores, 10 * scores]
    GroupHeads().run(step)
    assert [flops_of(each) for each in calls] == before


@pytest.mark.parametrize("kernel", FLOPS)
def test_attention_is_counted_as_pytorch_counts_it(kernel):
    def program(q, k, v):
        return kernel(q, k, v, *(() if kernel is FLASH else (None, True)))[0]

    q, k, v, _ = operands(groups=6)
    v = v[..., :4]
    step = step_of(program, (q, k, v))
    formula = flop_registry[kernel.overloadpacket]
    assert flops_of(call_in(step, kernel)) == formula(q, k, v, out_val=None)
