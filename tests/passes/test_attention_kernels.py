"""The flash kernel's calls as cuDNN's: graphs of GPUs, and attention written out in their place."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import show_plain, trace
from treadle.compiler.cleaning import cleaning_of
from treadle.graph.core.operators import arguments, set_argument
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.rewrite.rules import explain
from treadle.options import Options
from treadle.passes.attention import chosen_kernels as attention_kernels
from treadle.passes.attention.chosen_kernels import CallFastestAttention
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.targets.cpu import CPU
from treadle.targets.cuda import CUDA, _Cuda
from written_out import CUDNN, CUDNN_BACKWARD, FLASH, FLASH_BACKWARD, layouts, run


@pytest.fixture(autouse=True)
def _as_on_gpus(monkeypatch):
    monkeypatch.setattr(attention_kernels, "target_for", lambda device: CUDA)


def operands(b=2, h=4, groups=4, t=6, s=6, d=8, dtype=torch.bfloat16, tokens_first=False):
    torch.manual_seed(0)
    shapes = [(b, n, m, d) for n, m in ((h, t), (groups, s), (groups, s), (h, t))]
    found = [torch.randn(shape).to(dtype) for shape in shapes]
    if tokens_first:
        found = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in found]
    return found


def attending(*, causal=True, scale=None, dropout=0.0, trains=True):
    def program(q, k, v, g):
        y, logs, cq, ck, mq, mk, seed, offset, _ = FLASH(q, k, v, dropout, causal, scale=scale)
        if not trains:
            return (y,)
        gradients = FLASH_BACKWARD(
            g, q, k, v, y, logs, cq, ck, mq, mk, dropout, causal, seed, offset, scale=scale
        )
        return (y, *gradients)

    return program


def step_of(program, inputs):
    step = trace(program, *inputs)
    run_passes(step, [RemoveCommonSubexpressions(), RemoveDeadCode()])
    return step


def call_in(step, target=FLASH):
    return next(iter(step.graph.find_nodes(op="call_function", target=target)))


def test_the_graph_before_and_after():
    step = step_of(attending(), operands())
    assert CallFastestAttention().run(step) == 1
    assert [line.split(" = ")[1] for line in show_plain(step).splitlines() if " = " in line] == [
        "_scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=None)",
        "_scaled_dot_product_cudnn_attention[0]",
        "_scaled_dot_product_cudnn_attention[1]",
        "_scaled_dot_product_cudnn_attention[6]",
        "_scaled_dot_product_cudnn_attention[7]",
        "_scaled_dot_product_cudnn_attention_backward(g, q, k, v, getitem, getitem.1, getitem.2,"
        " getitem.3, None, None, None, 6, 6, 0.0, True, scale=None)",
        "_scaled_dot_product_cudnn_attention_backward[0]",
        "_scaled_dot_product_cudnn_attention_backward[1]",
        "_scaled_dot_product_cudnn_attention_backward[2]",
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("trains", [True, False])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 3),
    shared=st.integers(1, 3),
    groups=st.integers(1, 2),
    t=st.integers(2, 9),
    s=st.integers(2, 9),
    scale=st.sampled_from([None, 0.3]),
    tokens_first=st.booleans(),
)
def test_numbers(causal, trains, b, shared, groups, t, s, scale, tokens_first):
    inputs = operands(b, shared * groups, groups, t, t if causal else s, tokens_first=tokens_first)
    step = step_of(attending(causal=causal, scale=scale, trains=trains), inputs)
    doubled = [each.double() for each in inputs]
    before, wanted = layouts(step), run(step.graph, *doubled)
    assert explain(CallFastestAttention(), call_in(step)) == "applies"
    assert CallFastestAttention().run(step) == 1
    assert layouts(step) == before
    targets = [node.target for node in step.graph.nodes]
    assert (targets.count(CUDNN), targets.count(CUDNN_BACKWARD)) == (1, trains)
    for found, best in zip(run(step.graph, *doubled), wanted, strict=True):
        torch.testing.assert_close(found, best, rtol=1e-12, atol=1e-12)
    assert CallFastestAttention().run(step) == 0


REFUSED = {
    "dropout": (attending(dropout=0.1), operands(), "has dropout"),
    "other keys": (attending(), operands(s=8), "kernels begin at different corners"),
    "odd heads": (attending(), operands(d=12), "12 wide"),
    "wide heads": (attending(), operands(d=136), "136 wide"),
    "a single query": (attending(), operands(t=1, s=1), "1 x 1 scores"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_a_call_stays(name):
    program, inputs, reason = REFUSED[name]
    step = step_of(program, inputs)
    assert reason in explain(CallFastestAttention(), call_in(step))
    assert CallFastestAttention().run(step) == 0


def test_gradients_of_another_call_keep_both():
    step = step_of(attending(), operands())
    set_argument(call_in(step, FLASH_BACKWARD), "is_causal", False)
    assert "is not the gradient of" in explain(CallFastestAttention(), call_in(step))
    assert CallFastestAttention().run(step) == 0


def test_sums_that_are_read_keep_the_call():
    step = step_of(lambda q, k, v, g: FLASH(q, k, v, 0.0, True)[:2], operands())
    assert "is read by others" in explain(CallFastestAttention(), call_in(step))


@pytest.mark.parametrize("number", [(8, 0), (8, 9)])
def test_devices_on_which_nothing_was_measured(monkeypatch, number):
    class Older(_Cuda):
        def capability(self, device):
            return number

    monkeypatch.setattr(
        attention_kernels, "target_for", lambda device: replace(CUDA, driver=Older())
    )
    assert f"capability {number}" in explain(
        CallFastestAttention(), call_in(step_of(attending(), operands()))
    )


def test_devices_without_cudnn(monkeypatch):
    monkeypatch.setattr(attention_kernels, "target_for", lambda device: CPU)
    assert "was not measured on cpu" in explain(
        CallFastestAttention(), call_in(step_of(attending(), operands()))
    )


def test_what_the_user_switches_off(monkeypatch):
    call = call_in(step_of(attending(), operands()))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert "is switched off" in explain(CallFastestAttention(), call)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in explain(CallFastestAttention(), call)
    finally:
        torch.use_deterministic_algorithms(False)


def test_rounding_reaches_the_pass():
    assert CallFastestAttention() in cleaning_of(Options())
    assert CallFastestAttention() not in cleaning_of(Options(numerics="eager"))
    assert CallFastestAttention() not in cleaning_of(Options(skip=("CallFastestAttention",)))


def test_what_is_no_call_of_the_kernel():
    step = trace(lambda x: x.exp(), torch.ones(3))
    node = call_in(step, torch.ops.aten.exp.default)
    assert explain(CallFastestAttention(), node) == f"{node} is not a call of the flash kernel"


def test_arguments_are_those_of_the_call():
    step = step_of(attending(scale=0.3), operands())
    CallFastestAttention().run(step)
    for target in (CUDNN, CUDNN_BACKWARD):
        given_ = arguments(call_in(step, target))
        assert (given_["is_causal"], given_["scale"], given_["dropout_p"]) == (True, 0.3, 0.0)
