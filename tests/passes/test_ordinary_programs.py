"""The rewrites of the clean stage in steps as people write them."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.compiler.cleaning import CLEAN, rewritten
from treadle.passes.products.joined_products import JoinProducts
from treadle.passes.products.sums import AccumulateProducts


def clean(step):
    """Cleaned, with the rewrites of products that are off by default too."""
    return rewritten(step, (*CLEAN, JoinProducts(), AccumulateProducts()))


class PackedAttention(nn.Module):
    """Projections packed in one layer, cut, turned by halves, and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = torch.cat([q, k, v], -1).split(12, -1)
        left, right = q.chunk(2, -1)
        turned = torch.cat([-right, left], -1)
        return self.out(F.softmax(turned @ k.transpose(1, 2), -1) @ v)


class Gathered(nn.Module):
    """Features joined layer after layer, as dense blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 4), nn.Linear(16, 4), nn.Linear(20, 12)

    def forward(self, x):
        x = torch.cat([x, self.first(x).relu()], -1)
        x = torch.cat([x, self.second(x).relu()], -1)
        return self.last(x)


class Positions(nn.Module):
    """Positions counted from a mask of ones, and rows taken apart and stacked again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 12), nn.Linear(12, 12)

    def forward(self, x):
        positions = torch.cumsum(torch.ones(x.shape[:2], dtype=torch.int64), 1) - 1
        rows = torch.unbind(x + self.table(positions), 1)
        return self.layer(torch.stack(rows, 1))


class Mixed(nn.Module):
    """A value read by several layers, a layer used twice, and a layer with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.narrow, self.wide = nn.Linear(12, 1), nn.Linear(1, 12, bias=False)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.a(h) + self.b(h) + self.wide(self.narrow(h))


aten = torch.ops.aten
LEFT = {  # how many calls of each operation are left in the whole step
    PackedAttention: {aten.split.Tensor: 2, aten.cumsum.default: 0},
    Gathered: {aten.mm.default: 5, aten.cat.default: 2},
    Positions: {aten.cumsum.default: 0, aten.stack.default: 0, aten.unbind.int: 0},
    Mixed: {aten.addmm.default: 2},
}


def training(model, optimizer):
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_what_is_left(kind):
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture(
        training(model, optimizer),
        models=named_models(model),
        optimizers=named_optimizers(optimizer),
        args=(torch.randn(2, 7, 12), torch.randn(2, 7, 12)),
        kwargs={},
    )
    found = collections.Counter(node.target for node in clean(captured.step).graph.nodes)
    assert {target: found[target] for target in LEFT[kind]} == LEFT[kind]


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_it_trains_as_eager_does(kind):
    model = kind()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    step = treadle.compile(training(model, ours), model=model, optimizer=ours)
    eager = training(twin, theirs)
    for _ in range(3):
        x, y = torch.randn(2, 7, 12), torch.randn(2, 7, 12)
        torch.testing.assert_close(step(x, y), eager(x, y))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


class Sequences(nn.Module):
    """Cuts and joins along a dim whose size only a call tells, and along others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)

    def forward(self, x):
        shifted = torch.cat([x[:, 1:], x[:, :1]], 1)
        both = torch.cat([self.a(x), self.b(shifted)], 1)
        first, second = both[:, : x.shape[1]], both[:, x.shape[1] :]
        joined = torch.cat([x[:, :2], x[:, 2:]], 1) * torch.cat(x.chunk(3, -1), -1)
        rows = torch.cat([torch.cat([first, second], -1), joined], -1)
        counted = torch.cumsum(torch.ones(x.shape[1], 1), 0)
        return (rows * counted).reshape(-1, 36) @ self.a.weight.repeat(3, 1)


def test_one_compile_for_every_length():
    model = Sequences()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, twin))

    def training_sequences(model, optimizer):
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    shapes = treadle.dynamic({"x": (None, "time", None)}, time=(3, 12))
    step = treadle.compile(
        training_sequences(model, ours), model=model, optimizer=ours, shapes=shapes
    )
    eager = training_sequences(twin, theirs)
    for length in (5, 3, 7, 12, 4):
        x = torch.randn(2, length, 12)
        torch.testing.assert_close(step(x), eager(x))
    assert len([note for note in step.recompiles if note.startswith("compiled for")]) == 1
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
