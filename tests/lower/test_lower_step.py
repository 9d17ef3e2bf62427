"""Whole steps: write-backs, results, library calls, refusals, and a small transformer block."""

import pytest
import torch
import torch.nn.functional as F
from lowering_help import calls_of, check, fallbacks, program_of, run, trace

from treadle.loop.program import Call, Compute
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

    program = check(fn, x, w, rtol=1e-4, atol=1e-5)
    assert all(isinstance(call, Call) for call in calls_of(program))


def test_a_fallback_says_why() -> None:
    x = torch.randn(3, 5)
    program = check(lambda x: [x.cumsum(1), *x.sort(1)], x, formulas=False)
    assert fallbacks(program) == [
        "aten.cumsum.default has no lowering rule", "aten.sort.default has no lowering rule"
    ]  # fmt: skip
    program = check(
        lambda x: x[x[:, 0] > 9, 1:] if False else x.gather(0, x[0].argsort()[None] % 3),
        x,
        formulas=False,
    )
    assert len(fallbacks(program)) == 1


def test_random_numbers_stay_calls_in_order() -> None:
    x = torch.randn(4, 5)

    def fn(x):
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        return [x * mask + torch.rand(4, 5), torch.randn(3)]

    program = program_of(fn, x)
    assert [call.op for call in calls_of(program)] == [
        "aten.bernoulli.default", "aten.rand.default", "aten.randn.default"
    ]  # fmt: skip
    assert not fallbacks(program)


def _sgd(x, w, m):
    x, w = x.detach(), w.detach().requires_grad_()
    loss = (x @ w).tanh().square().sum()
    (grad,) = torch.autograd.grad(loss, w)
    new_m = m * 0.9 + grad
    return loss, w - 0.1 * new_m, new_m


def test_write_backs_change_inputs_in_place() -> None:
    x, w, m = torch.randn(3, 5), torch.randn(5, 4), torch.randn(5, 4)
    expected = _sgd(x, w, m)
    program = lower(trace(_sgd, x, w, m, writes=[None, 1, 2]))
    results = run(program, [x, w, m])
    torch.testing.assert_close(results[0], expected[0].detach())
    torch.testing.assert_close(w, expected[1].detach())
    torch.testing.assert_close(m, expected[2].detach())
    assert program.results[1:] == (None, None)


def test_a_swap_goes_through_a_temporary() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    old_a, old_b = a.clone(), b.clone()
    program = lower(trace(lambda a, b: (b, a.t(), a * 1), a, b, writes=[0, 1, None]))
    results = run(program, [a, b])
    torch.testing.assert_close(a, old_b)
    torch.testing.assert_close(b, old_a.t())
    torch.testing.assert_close(results[2], old_a)


def test_a_write_back_waits_for_the_last_reader() -> None:
    w = torch.randn(3)
    program = lower(trace(lambda w: (w + 1, (w.view(1, 3) * 2).exp()), w, writes=[0, None]))
    written = [
        i for i, s in enumerate(program.steps)
        if isinstance(s, Compute) and s.output.buffer == program.inputs[0]
    ]  # fmt: skip
    assert written == [2]
    old = w.clone()
    results = run(program, [w])
    torch.testing.assert_close(w, old + 1)
    torch.testing.assert_close(results[1], (old.view(1, 3) * 2).exp())


def test_results_never_alias_inputs() -> None:
    x = torch.randn(3, 4)
    program = check(lambda x: (x, x.t(), torch.zeros(3), x[1]), x)
    assert not {ref.buffer for ref in program.results if ref} & set(program.inputs)


def test_dead_nodes_leave_nothing() -> None:
    x = torch.randn(3, 4)
    program = lower(trace(lambda x: (x.exp().sum(), x * 2)[1], x))
    assert len(program.steps) == 1
    assert set(program.buffers) == {program.inputs[0], program.results[0].buffer}


def test_origins_name_the_line() -> None:
    x = torch.randn(3)
    step = trace(lambda x: x.exp(), x)
    (node,) = step.graph.find_nodes(op="call_function", target=aten.exp.default)
    node.meta |= {"where": "model.py:3: y = x.exp()", "module": "net.act", "phase": "forward"}
    (compute,) = lower(step).steps
    assert compute.origin.nodes == (node.name,)
    assert (compute.origin.where, compute.origin.phase) == ("model.py:3: y = x.exp()", "forward")


def test_refusals() -> None:
    x = torch.randn(3)
    step = trace(lambda x: x.exp(), x)
    (node,) = step.graph.find_nodes(op="call_function", target=aten.exp.default)
    node.meta["where"] = "model.py:3"
    del node.meta["val"]
    with pytest.raises(LoweringError, match=r"TR-301.*no fake value(.|\n)*model.py:3"):
        lower(step)
    node.meta["val"] = 3
    with pytest.raises(LoweringError, match="the result is not a tensor"):
        lower(step)


def test_an_operation_has_one_rule() -> None:
    with pytest.raises(VerifyError, match="two lowering rules"):
        lowers(aten.add.Tensor)(lambda site: None)


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
