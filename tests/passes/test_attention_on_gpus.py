"""Attention written out as cuDNN's call: the graphs are those of GPUs, and here attention written
out runs in the place of the call, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import trace
from treadle.compat.fake import FakeTensorMode
from treadle.compiler import cleaning
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.passes import run_passes
from treadle.lower.elements import Elements
from treadle.passes.attention import fuse
from treadle.passes.attention.fuse import FuseAttention, findings
from treadle.passes.attention.kernels import Cudnn
from treadle.passes.attention.proved_masks import ProveAttentionMasks
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.targets.cuda import CUDA, _Cuda
from written_out import CUDNN, CUDNN_BACKWARD, run

aten = torch.ops.aten
PROVE = ProveAttentionMasks(Elements)
ALWAYS = FuseAttention(everywhere=True)
LEAST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _as_on_gpus(monkeypatch):
    monkeypatch.setattr(fuse, "kernel_for", lambda device: Cudnn(CUDA))


def operands(b=2, h=2, t=5, s=7, d=8, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = [(b, h, n, d) for n in (t, s, s, t)]
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def trained(attention):
    """The result of ``attention`` and its gradients."""

    def program(query, key, value, gradient):
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        result = attention(*leaves)
        return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

    return program


def masked(attention):
    """With a mask of the batch, one truth value for each key."""

    def program(query, key, value, gradient, mask):
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        result = attention(*leaves, mask)
        return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

    return program


def cleaned(program, *inputs):
    step = trace(program, *inputs)
    run_passes(step, cleaning.CLEAN)
    return step


def call_in(step, target):
    return next(iter(step.graph.find_nodes(op="call_function", target=target)))


def causal(t, s):
    return torch.ones(t, s, dtype=torch.bool).tril()


def weighed(scores, value):
    """As under autocast: probabilities in f32, products in the operands' dtype."""
    return scores.float().softmax(-1).to(value.dtype) @ value


def plain(query, key, value):
    return weighed(query @ key.mT * 0.4, value)


def filled(query, key, value):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    hidden = ~causal(query.shape[2], key.shape[2])
    return weighed(scores.masked_fill(hidden, -math.inf), value)


def added(query, key, value):
    """A mask of f32 whose least number is -inf in 16 bits."""
    mask = torch.zeros(()).where(causal(query.shape[2], key.shape[2]), LEAST)
    return weighed(query @ key.mT * 0.4 + mask, value)


def biased(query, key, value):
    """Numbers that 16 bits hold."""
    far = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    return weighed(query @ key.mT * 0.4 + far.float() / 4, value)


def repeated(query, key, value):
    key, value = (each[:, :1].expand(-1, query.shape[1], -1, -1) for each in (key, value))
    return plain(query, key, value)


def check_fused(program, inputs, calls=1):
    """The pass fires, finds nothing after, and leaves the function what it is, layouts included."""
    step = cleaned(program, *inputs)
    doubled = [each.double() if each.is_floating_point() else each for each in inputs]
    kinds = [(each.dtype, each.shape) for each in map(type_of, step.returned)]
    run_passes(step, [ALWAYS])
    targets = [node.target for node in step.graph.nodes]
    assert targets.count(CUDNN) == targets.count(CUDNN_BACKWARD) == calls
    assert aten._softmax.default not in targets
    assert [(each.dtype, each.shape) for each in map(type_of, step.returned)] == kinds
    assert ALWAYS.run(step) == 0
    exact = program(*doubled)
    for found, best in zip(run(step.graph, *inputs), exact, strict=True):
        assert torch.equal(found.isnan(), best.isnan())
        worst = (found.double() - best).nan_to_num().abs().max()
        assert worst <= 0.05 * (1 + best.nan_to_num().abs().max())
    return step


@pytest.mark.parametrize("attention", [plain, filled, added, biased, repeated])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 3),
    h=st.integers(1, 3),
    t=st.integers(2, 9),
    s=st.integers(2, 9),
    d=st.sampled_from([8, 16]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_any_spelling_of_any_size_becomes_a_call(attention, b, h, t, s, d, dtype):
    step = check_fused(trained(attention), operands(b, h, t, s, d, dtype))
    bias = arguments(call_in(step, CUDNN))["attn_bias"]
    assert (bias is None) == (attention in (plain, repeated))
    assert bias is None or type_of(bias).dtype == dtype


def test_without_a_gradient():
    step = cleaned(lambda q, k, v: plain(q, k, v), *operands()[:3])
    assert ALWAYS.run(step) == 1
    (found,) = run(step.graph, *operands()[:3])
    torch.testing.assert_close(found, plain(*operands()[:3]), rtol=0.02, atol=0.02)


def test_a_single_query():
    inputs = operands(t=1)[:3]
    (finding,) = findings(cleaned(lambda q, k, v: plain(q, k, v), *inputs), everywhere=True)
    assert finding.refused == "1 x 7 scores: cuDNN's kernel needs more than one of each"


@pytest.mark.parametrize("attention", [filled, added])
def test_a_causal_mask_is_the_flag_then(attention):
    inputs = operands(t=6, s=6)
    step = check_fused(trained(attention), inputs)
    run_passes(step, [PROVE, RemoveDeadCode()])
    for target in (CUDNN, CUDNN_BACKWARD):
        given = arguments(call_in(step, target))
        assert given["attn_bias"] is None
        assert given["is_causal"] is True
    for found, best in zip(run(step.graph, *inputs), trained(attention)(*inputs), strict=True):
        torch.testing.assert_close(found, best, rtol=0.05, atol=0.05)


def by_input(query, key, value, mask):
    scores = query @ key.mT * 0.4
    return weighed(scores.masked_fill(~mask, -math.inf), value)


def by_input_finite(query, key, value, mask):
    scores = (query @ key.mT * 0.4).float()
    return weighed(scores.masked_fill(~mask, LEAST), value)


@pytest.mark.parametrize("attention", [by_input, by_input_finite])
@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (2, 1, 5, 7), (1, 1, 5, 7)], ids=str)
@pytest.mark.parametrize("dead", [False, True])
def test_rows_that_are_masked_whole_are_eagers(attention, shape, dead):
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    if dead:
        mask[0, :, -1] = False
    check_fused(masked(attention), (*operands(), mask))


REFUSED = {
    "single precision": (plain, operands(dtype=torch.float32), "cuDNN's kernel is for 16 bits"),
    "odd heads": (plain, operands(d=12), "heads are 12 wide"),
    "wide heads": (plain, operands(d=136), "heads are 136 wide"),
    "rounded bias": (
        lambda q, k, v: weighed(q @ k.mT * 0.4 + torch.arange(7.0) / 3, v),
        operands(),
        "would round the mask",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_it_leaves_an_attention_alone(name):
    attention, inputs, reason = REFUSED[name]
    step = cleaned(trained(attention), *inputs)
    (finding,) = findings(step, everywhere=True)
    assert reason in finding.refused
    assert ALWAYS.run(step) == 0


def test_devices_without_the_kernel(monkeypatch):
    class Old(_Cuda):
        def capability(self, device):
            return 7, 5

    old = replace(CUDA, driver=Old())
    monkeypatch.setattr(fuse, "kernel_for", lambda device: Cudnn(old))
    (finding,) = findings(cleaned(trained(plain), *operands()), everywhere=True)
    assert finding.refused == "cuDNN has no kernel for devices of compute capability (7, 5)"


def test_only_where_it_was_measured_to_lose_nothing():
    with FakeTensorMode():
        few, many = (operands(16, 12, n, n, 64) for n in (252, 256))
        steps = [cleaned(trained(plain), *each) for each in (few, many)]
    refused = [found.refused for step in steps for found in findings(step)]
    assert refused == ["192 x 252 x 252 scores: the call was measured to be slower", ""]
