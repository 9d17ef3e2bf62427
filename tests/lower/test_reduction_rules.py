"""Reductions, softmax, losses and norms against eager."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from lower.lowering_help import check, run, run_as_on_gpus
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.loop.expr import Reduce
from treadle.loop.traverse import walk
from treadle.lower import lower

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 7, 1), (2, 0, 3), (13, 11, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        out = [x.sum(), x.sum(0), x.sum((0, 1)), x.sum((0, 2), keepdim=True), x.sum(-1)]
        out += [(x > 0).any(), (x > 0).all(1), (x > 0).any(2), (x > 0).sum(), x.prod(2)]
        if dtype.is_floating_point:
            out += [x.mean(), x.mean((0, 1)), x.norm(), torch.linalg.vector_norm(x, 1)]
        if 0 not in shape:
            out += [x.amax(1), x.amin((0, 2)), x.max(), x.min(), *x.max(1), *x.min(2, True)]
            out += [x.argmax(), x.argmin(1), x.argmax(0, keepdim=True)]
        return out

    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-4  # eager adds in another order
    check(fn, x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [16384, 16385, 65536, 65537, 50000])
def test_long_sums_run_in_rows(count: int) -> None:
    x = torch.randn(count, dtype=torch.float64)
    program = check(lambda x: [x.sum(), x.amax(), (x * x).mean(), x.norm()], x)
    reduces = [
        part for step in program.steps for part in walk(step.array.body) if isinstance(part, Reduce)
    ]
    longest = max(math.prod(axis.extent for axis in r.axes) for r in reduces)
    assert longest <= 16384


def test_long_sums_of_other_layouts() -> None:
    x = torch.randn(64, 40, 37, dtype=torch.float64)
    check(lambda x: [x.permute(2, 0, 1).sum(), x[:, 1:].sum(), x[:, :, ::2].amax(), x.sum()], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_variance(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 6, 5) + 100).to(dtype)
    tolerance = 3e-2 if dtype is torch.bfloat16 else None
    check(
        lambda x: [
            x.var(1), x.var(), x.var((0, 2), correction=0), x.std(-1), *torch.var_mean(x, 2)
        ],
        x, rtol=tolerance, atol=tolerance,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 1), (1, 0, 4), (2, 5, 3)])
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax_and_backward(shape: tuple[int, ...], dim: int) -> None:
    x, g = torch.randn(shape), torch.randn(shape)

    def fn(x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        soft, log = torch.softmax(x, dim), torch.log_softmax(x, dim)
        return [
            soft, log, aten._softmax_backward_data(g, soft, dim, torch.float32),
            aten._log_softmax_backward_data(g, log, dim, torch.float32),
        ]  # fmt: skip

    check(fn, x, g)


def test_masked_softmax() -> None:
    x = torch.randn(3, 5)
    x[0, 1:] = -math.inf
    check(lambda x: torch.softmax(x, -1), x)
    x[1] = -math.inf
    check(lambda x: [torch.softmax(x, -1), aten._safe_softmax(x, -1)], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_softmax(dtype: torch.dtype) -> None:
    x = torch.randn(4, 9).to(dtype)
    check(
        lambda x: [torch.softmax(x, -1), torch.log_softmax(x, -1), torch.softmax(x.float(), 0)], x
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (2, 4, 3, 5)])
def test_cross_entropy_and_backward(reduction: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target[0] = -100

    def fn(x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, target, reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        return [loss, grad]

    check(fn, x.detach(), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 7), (1, 1), (0, 4)])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, g = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    w, b = torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)

    def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        x, g, w, b = (t.detach().requires_grad_() for t in tensors)
        y = F.layer_norm(x, shape[-1:], w, b)
        grads = torch.autograd.grad(y, (x, w, b), g)
        return [y, F.layer_norm(x, shape[-1:]), *grads]

    # One element a row: the true gradient is 0, and rstd magnifies the rounding 300 times.
    tolerance = 6e-2 if dtype is torch.bfloat16 else 1e-3 if shape[-1] == 1 else 1e-5
    check(fn, x, g, w, b, rtol=tolerance, atol=tolerance)


def _single(op, args, out) -> StepGraph:
    """A graph of one node, for an operation that traces to others on this device."""
    graph = fx.Graph()
    nodes = {}
    for i, arg in enumerate(arg for arg in args if isinstance(arg, torch.Tensor)):
        nodes[id(arg)] = graph.placeholder(f"x{i}")
        nodes[id(arg)].meta["val"] = arg
    node = graph.call_function(op, tuple(nodes.get(id(arg), arg) for arg in args))
    node.meta["val"] = out
    results = []
    for i in range(len(out)):
        results.append(graph.call_function(operator.getitem, (node, i)))
        results[-1].meta["val"] = out[i]
    graph.output(tuple(results))
    inputs = tuple(Input(Role.BATCH, name) for name in "abcd"[: len(nodes)])
    outputs = tuple(Output(str(i)) for i in range(len(out)))
    return StepGraph(graph, Signature(inputs, outputs))


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 7), (1, 1)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, g, w = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    last = [shape[-1]]
    step = _single(aten._fused_rms_norm.default, (x, last, w, 1e-6), (x * rstd * w, rstd))
    torch.testing.assert_close(run(lower(step), [x, w]), [x * rstd * w, rstd])
    x.requires_grad_(), w.requires_grad_()
    grads = torch.autograd.grad(F.rms_norm(x, last, w, 1e-6), (x, w), g)
    x, w = x.detach(), w.detach()
    args = (g, x, last, rstd, w, [True, True])
    step = _single(aten._fused_rms_norm_backward.default, args, grads)
    torch.testing.assert_close(run(lower(step), [g, x, rstd, w]), list(grads))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 16, 8, 8)])
def test_batch_norm(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    x = torch.randn(shape).to(memory_format=layout)
    g = torch.randn(shape).to(memory_format=layout)
    w, b, mean, var = (torch.rand(shape[1]) + 0.5 for _ in range(4))

    def fn(x, g, w, b, mean, var):
        y, saved, rstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
            x, w, b, mean, var, True, 0.1, 1e-5
        )
        grads = aten.native_batch_norm_backward(
            g, x, w, mean, var, saved, rstd, True, 1e-5, [True, True, True]
        )
        return [y, saved, rstd, new_mean, new_var, *grads]

    check(fn, x, g, w, b, mean, var, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_softmax_is_multiplied_out_on_gpus() -> None:
    """``(1 - 2) * 0`` is ``-0.0``, and ``1 * 0 - 0 * 2`` is not."""

    def step(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._softmax_backward_data.default(g, y, 1, torch.float32)

    g, y = torch.randn(3, 7), torch.randn(3, 7).softmax(1)
    (found,) = run_as_on_gpus(step, (g, y))
    product = g * y
    torch.testing.assert_close(found, product - y * product.sum(1, keepdim=True))
    g, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])
    (found,) = run_as_on_gpus(step, (g, y))
    assert not found.signbit().any()
