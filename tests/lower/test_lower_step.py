"""Whole steps: write-backs, results, library calls, refusals, and a small transformer block."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from lower.lowering_help import calls_of, check, fallbacks, run, trace
from treadle.graph.core.node_info import with_info
from treadle.loop.program import Call
from treadle.lower import lower
from treadle.lower.registry import lowers
from treadle.util.errors import LoweringError, VerifyError

aten = torch.ops.aten


def test_products_write_into_our_buffers() -> None:
    x, w, b = torch.randn(3, 5), torch.randn(5, 7), torch.randn(7)
    program = check(
        lambda x, w, b: [x @ w, torch.addmm(b, x, w), torch.bmm(x[None], w[None])], x, w, b
    )
    assert {call.out for call in calls_of(program)} == {
        "aten.mm.out", "aten.addmm.out", "aten.bmm.out"
    }  # fmt: skip


def test_convolution_and_attention_are_chosen_calls() -> None:
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)

    def fn(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = F.conv2d(x, w, stride=2, padding=1)
        q = y.flatten(2).transpose(1, 2)[:, None]
        z = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return [z, *torch.autograd.grad(z.sum(), (x, w))]

    program = check(fn, x, w, rtol=1e-3, atol=1e-4)
    assert all(isinstance(call, Call) for call in calls_of(program))


def test_a_fallback_says_why() -> None:
    x = torch.randn(3, 5)
    program = check(lambda x: [x.cumsum(1), torch.special.bessel_j0(x)], x, formulas=False)
    assert fallbacks(program) == ["TR-312: aten.special_bessel_j0.default has no lowering rule"]
    step = trace(lambda x: x.exp(), x)
    (node,) = step.graph.find_nodes(op="call_function", target=aten.exp.default)
    with_info(node, where="model.py:3: y = x.exp()", module="net.act", phase="forward")
    (compute,) = lower(step).steps
    assert compute.origin.nodes == (node.name,)
    assert (compute.origin.where, compute.origin.phase) == ("model.py:3: y = x.exp()", "forward")


def test_refusals() -> None:
    x = torch.randn(3)
    step = trace(lambda x: x.exp(), x)
    (node,) = step.graph.find_nodes(op="call_function", target=aten.exp.default)
    with_info(node, where="model.py:3")
    del node.meta["val"]
    with pytest.raises(LoweringError, match=r"TR-301.*no fake value(.|\n)*model.py:3"):
        lower(step)
    node.meta["val"] = 3
    with pytest.raises(LoweringError, match="the result is not a tensor"):
        lower(step)


def test_an_operation_has_one_rule() -> None:
    with pytest.raises(VerifyError, match="two lowering rules"):
        lowers(aten.add.Tensor)(lambda site: None)


def _adamw(w, grad, m, v, count, lr):
    count = count + 1
    m = torch.lerp(m, grad, 0.1)
    v = v * 0.999 + 0.001 * grad * grad
    unbiased = m / (1 - 0.9**count)
    scale = (v / (1 - 0.999**count)).sqrt() + 1e-8
    return w * (1 - lr * 0.01) - lr * unbiased / scale, m, v, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_with_scalars_as_tensors(dtype: torch.dtype) -> None:
    w, grad, m = (torch.randn(5, 3).to(dtype) for _ in range(3))
    v = torch.rand(5, 3).to(dtype)
    count, lr = torch.tensor(3.0), torch.tensor(0.01, dtype=torch.float64)
    inputs = [w, grad, m, v, count, lr]
    expected = _adamw(*[x.clone() for x in inputs])
    program = lower(trace(_adamw, *inputs, writes=[0, 2, 3, 4]))
    run(program, inputs)
    for mine, eager in zip((w, m, v, count), expected, strict=True):
        torch.testing.assert_close(mine, eager.to(mine.dtype))
    assert not calls_of(program)


def test_a_scalar_on_another_device_is_copied_once() -> None:
    """And what is made of it there stays there."""
    with FakeTensorMode():
        w, lr = torch.empty(3, device="cuda"), torch.empty((), dtype=torch.float64)
        step = trace(lambda w, lr: (w * lr + w / lr, lr * 0.5), w, lr, writes=[0, 1])
    program = lower(step, device="cuda")
    moved, half, back = calls_of(program)
    assert moved.op == "aten._to_copy.default"
    assert moved.kwargs == {"device": "cuda", "non_blocking": False}
    assert half.op == "aten.mul.Tensor"
    assert (back.op, back.outputs, back.out) == (
        "aten.copy.default", (program.inputs[1],), "aten.copy.out"
    )  # fmt: skip


def _block(x, target, qkv, out, up, down, w1, b1, w2, b2):
    params = [p.detach().requires_grad_() for p in (qkv, out, up, down, w1, b1, w2, b2)]
    qkv, out, up, down, w1, b1, w2, b2 = params
    B, T, C = x.shape
    h = F.layer_norm(x, (C,), w1, b1)
    q, k, v = (h @ qkv).split(C, -1)
    q, k, v = (t.view(B, T, 2, C // 2).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / (C // 2) ** 0.5
    mask = torch.tril(torch.ones(T, T, dtype=torch.bool))
    scores = scores.masked_fill(~mask, float("-inf"))
    y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(B, T, C)
    x = x + y @ out
    x = x + F.gelu(F.layer_norm(x, (C,), w2, b2) @ up, approximate="tanh") @ down
    loss = F.cross_entropy(x.view(-1, C), target.view(-1))
    grads = torch.autograd.grad(loss, params)
    new = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
    return [loss, *grads, *new]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_transformer_block_trains(dtype: torch.dtype) -> None:
    B, T, C = 2, 5, 6
    shapes = [(B, T, C), (C, 3 * C), (C, C), (C, 4 * C), (4 * C, C), (C,), (C,), (C,), (C,)]
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    target = torch.randint(0, C, (B, T))
    check(_block, tensors[0], target, *tensors[1:], rtol=1e-4, atol=1e-5)
