"""A tensor-parallel step whose products are computed piece by piece, beside eager DTensor."""

import warnings

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import treadle
from distributed.sharded_models import line

WIDTH, TOKENS, CALLS = 128, 1024, 2
CLOSE = 4e-6


class Gated(nn.Module):
    """Two products of one input, whose gradients meet in one reduce-scatter."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 512), nn.Linear(WIDTH, 512)
        self.down = nn.Linear(512, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), Gated()

    def forward(self, x):
        return x + self.wide(self.norm(x))


def divided():
    """The tokens of a sequence are divided between blocks, and their products within."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(Block()), line()
    shards, whole = {"input_layouts": Shard(1)}, {"desired_input_layouts": Replicate()}
    plan = {
        "norm": SequenceParallel(),
        "wide": PrepareModuleInput(**shards, **whole),
        "wide.gate": ColwiseParallel(),
        "wide.up": ColwiseParallel(),
        "wide.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    ahead = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    return parallelize_module(model, mesh, {"0": ahead})


def trained(tokens=TOKENS, **given):
    """Losses and parameters after some calls, and the collectives that were cut."""
    model = divided()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).full_tensor().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = step
    if given:
        options = treadle.Options(measure=False, codegen=False, **given)
        run = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    torch.manual_seed(1)
    losses = [run(torch.randn(1, tokens, WIDTH)) for _ in range(CALLS)]
    values = [*losses, *[each.full_tensor().detach() for each in model.parameters()]]
    pieces = run.graph("planned").count(", piece ") if given else 0
    return values, pieces


def far(values, wanted):
    return max((a - b).abs().max().item() for a, b in zip(values, wanted, strict=True))


def in_pieces():
    warnings.simplefilter("ignore")
    eager, _ = trained()
    values, pieces = trained(async_tensor_parallel=True)
    other, _ = trained(TOKENS - 1)
    uneven, none = trained(TOKENS - 1, async_tensor_parallel=True)
    return far(values, eager), pieces, far(uneven, other), none


def test_a_step_in_pieces_trains_as_eager_does(launch):
    """A gather and a scatter of each pass; none where ranks have other numbers of tokens."""
    for apart, pieces, apart_uneven, none in (rank.value for rank in launch(2, in_pieces)):
        assert max(apart, apart_uneven) < CLOSE
        assert pieces >= 8
        assert none == 0
