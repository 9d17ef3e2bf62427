"""Training steps as graphs for the memory tests: traced by ``make_fx``, phases by position."""

import operator
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.passes.memory.order import as_traced, facts_of
from treadle.passes.memory.simulate import LiveBytes, timeline

aten = torch.ops.aten
_FUNCTIONAL = {
    aten.div_.Scalar: aten.div.Scalar,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.add_.Tensor: aten.add.Tensor,
}


def random_loss(seed: int, count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """``loss(w, x)``: ``count`` operations on results drawn from those before; ``w`` is square, as
    wide as ``x``."""
    draw = random.Random(seed)
    plan = [(draw.randrange(6), draw.random(), draw.random()) for _ in range(count)]

    def loss(w: Tensor, x: Tensor) -> Tensor:
        values = [x, x @ w]
        for what, a, b in plan:
            left = values[int(a * len(values))]
            right = values[int(b * len(values))]
            made = (
                left * right, left.tanh(), left @ w, left.softmax(-1) + right,
                F.dropout(left, 0.3) - right.t().t(), torch.cat((left, right), 0)[: len(x)],
            )  # fmt: skip
            values.append(made[what])
        return torch.stack([value.sin().mean() for value in values]).sum()

    return loss


def traced(
    loss: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    batch: Sequence[Tensor],
    *,
    lr: float = 0.1,
    clip: bool = False,
) -> StepGraph:
    """``loss(*parameters, *batch)``, its gradients, and one step of plain descent."""
    count = len(parameters)
    border: list[int] = []

    def step(*inputs: Tensor):
        value = loss(*inputs)
        border.append(len(tracer_graph().nodes))
        grads = torch.autograd.grad(value, inputs[:count])
        border.append(len(tracer_graph().nodes))
        scale = lr
        if clip:
            scale = lr / (sum((g * g).sum() for g in grads).sqrt() + 1)
        return value, *(p - scale * g for p, g in zip(inputs[:count], grads, strict=True))

    def tracer_graph() -> fx.Graph:
        return torch.fx.experimental.proxy_tensor.get_proxy_mode().tracer.graph

    leaves = [p.detach().requires_grad_() for p in parameters]
    graph = make_fx(step, tracing_mode="fake")(*leaves, *batch).graph
    nodes = list(graph.nodes)
    _annotate(graph, nodes, border)
    inputs = [Input(Role.PARAMETER, f"p{i}") for i in range(count)]
    inputs += [Input(Role.BATCH, f"x{i}") for i in range(len(batch))]
    outputs = [Output("loss"), *(Output(f"p{i}", writes=i) for i in range(count))]
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(output.args[0]),)
    return StepGraph(graph, Signature(tuple(inputs), tuple(outputs)))


def _annotate(graph: fx.Graph, nodes: list[fx.Node], border: list[int]) -> None:
    for position, node in enumerate(nodes):
        phase = sum(position >= each for each in border)
        with_info(node, phase=("forward", "backward", "optimizer")[phase])
        if node.target is aten.bernoulli_.float:
            node.target = aten.bernoulli.p
            with torch.no_grad():
                val = node.args[0].meta["val"]
                node.meta["val"] = val.new_empty_strided(val.shape, val.stride())
        elif node.target in _FUNCTIONAL:
            node.target = _FUNCTIONAL[node.target]
            val = node.meta["val"]
            node.meta["val"] = val.new_empty_strided(val.shape, val.stride())
    for node in reversed(nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    graph.lint()


def perceptron(layers: int = 8, width: int = 32, rows: int = 256):
    """``(loss, parameters, batch)`` of a stack of linear layers with GELU."""

    def loss(*inputs: Tensor) -> Tensor:
        x = inputs[-1]
        for weight in inputs[:-1]:
            x = F.gelu(x @ weight)
        return x.square().mean()

    parameters = [torch.randn(width, width) / width**0.5 for _ in range(layers)]
    return loss, parameters, [torch.randn(rows, width)]


def transformer(
    layers: int = 6,
    width: int = 48,
    heads: int = 4,
    batch: int = 4,
    length: int = 32,
    dropout: float = 0.1,
):
    """``(loss, parameters, batch)`` of pre-norm blocks with explicit causal attention."""
    mask = torch.ones(length, length).tril().bool()

    def block(x: Tensor, qkv_w: Tensor, out_w: Tensor, up_w: Tensor, down_w: Tensor, m: Tensor):
        y = F.layer_norm(x, (width,)) @ qkv_w
        q, k, v = y.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (width // heads) ** -0.5
        weights = F.dropout(scores.masked_fill(~m, float("-inf")).softmax(-1), dropout)
        y = (weights @ v).transpose(1, 2).reshape(batch, length, width) @ out_w
        x = x + F.dropout(y, dropout)
        hidden = F.gelu(F.layer_norm(x, (width,)) @ up_w) @ down_w
        return x + F.dropout(hidden, dropout)

    def loss(*inputs: Tensor) -> Tensor:
        x, m = inputs[-2:]
        for i in range(layers):
            x = block(x, *inputs[4 * i : 4 * i + 4], m)
        return F.layer_norm(x, (width,)).square().mean()

    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    parameters = [torch.randn(shape) * 0.1 for _ in range(layers) for shape in shapes]
    return loss, parameters, [torch.randn(batch, length, width), mask]


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def simulate(step: StepGraph) -> LiveBytes:
    """The bytes alive in the order of the graph."""
    return timeline(as_traced(facts_of(step)))


def by_simulation(step: StepGraph) -> int:
    """A peak for plans, in the place of an exact one."""
    return simulate(step).peak_bytes


def stack() -> StepGraph:
    return traced(*perceptron(layers=6, width=32, rows=256))


def attention() -> StepGraph:
    return traced(*transformer(layers=3, width=32, heads=2, batch=2, length=24))
