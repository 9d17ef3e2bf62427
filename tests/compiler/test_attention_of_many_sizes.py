"""Attention kernels of GPUs in steps of many sizes, planned without a GPU: no size decides."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.compiler.cleaning import cleaned
from treadle.compiler.memory import planned
from treadle.compiler.target import Target
from treadle.graph.analysis.dynamic import dims_of_graph, guards_of
from treadle.loop.program import Call
from treadle.options import from_environment
from treadle.session.variants.shapes import find, sampled_dims
from treadle.targets.cuda import CUDA

aten = torch.ops.aten
KERNELS = {
    "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, True
    ),
    "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False),
    "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False
    ),
}


class Attention(nn.Module):
    """Of an odd vocabulary, whose logits get room on GPUs."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.words, self.qkv = nn.Embedding(1003, 64), nn.Linear(64, 3 * 64)

    def forward(self, tokens):
        rows = self.qkv(self.words(tokens)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in rows)
        return self.kernel(q, k, v)[0].transpose(1, 2).flatten(2) @ self.words.weight.mT


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_plan_is_for_all_sizes(kernel):
    with torch.device("meta"):
        model = Attention(KERNELS[kernel])
        tokens = torch.empty(3, 17, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens):
        with torch.autocast("cuda", torch.bfloat16, enabled=kernel != "efficient"):
            logits = model(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    shapes = treadle.dynamic({"tokens": ("batch", "time")}, batch=(2, 8), time=(2, 512))
    found = find(shapes, step, (tokens,), {})
    captured = capture(
        step,
        models=named_models(model),
        optimizers=named_optimizers(optimizer),
        args=(tokens,),
        kwargs={},
        place=torch.device("cpu"),
        dims=sampled_dims(shapes, found, frozenset(), {4, 16, 64, 1003}),
    )
    target = Target(CUDA.device, from_environment(), like="h200")
    program = planned(cleaned(captured.step, target.options), target).plan
    assert {dim.name for dim in dims_of_graph(captured.step.graph)} == {"batch", "time"}
    assert not guards_of(captured.step.graph).guards
    assert any("attention" in step.op for step in program.steps if isinstance(step, Call))
