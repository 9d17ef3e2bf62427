"""A step that carries updates into its next call gives the plain step's bits, with default
numerics: random programs, optimizers and sets of what is carried."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

VOCABULARY = 23

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
}


class Scale(nn.Module):
    """Its gradients end in products of elements."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))

    def forward(self, x):
        return x * self.weight + self.bias


class Places(nn.Module):
    """A parameter as large as the activations: its gradient is no sum."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 9, width))

    def forward(self, x):
        return x * self.weight.tanh() - x


class Random(nn.Module):
    """Embeddings, then layers that a seed chooses, some with residuals."""

    def __init__(self, seed: int, width: int = 12):
        super().__init__()
        dice = random.Random(seed)
        made = {
            "linear": lambda: nn.Linear(width, width),
            "norm": lambda: nn.LayerNorm(width),
            "rms": lambda: nn.RMSNorm(width),
            "scale": lambda: Scale(width),
            "places": lambda: Places(width),
            "gelu": nn.GELU,
        }
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([made[dice.choice([*made])]() for _ in range(5)])
        self.residual = [dice.random() < 0.4 for _ in self.layers]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x):
        h = self.tokens(x)
        for layer, residual in zip(self.layers, self.residual, strict=True):
            h = h + layer(h) if residual else layer(h)
        return self.head(self.norm(h))


def training(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("seed", range(6))
def test_what_is_carried_rounds_as_it_does_in_place(seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    model, make = Random(seed), OPTIMIZERS[[*OPTIMIZERS][seed % len(OPTIMIZERS)]]
    names = [name for name, _ in model.named_parameters()]
    chosen = ("*",) if seed % 2 else tuple(dice.sample(names, len(names) // 2))
    pairs = [(model, treadle.Carry(chosen)), (copy.deepcopy(model), ())]
    optimizers = [make(each.parameters()) for each, _ in pairs]
    ours, plain = (
        treadle.compile(
            training(each, optimizer),
            model=each,
            optimizer=optimizer,
            options=treadle.Options(carry=carry),
        )
        for (each, carry), optimizer in zip(pairs, optimizers, strict=True)
    )
    for _ in range(5):
        x, y = torch.randint(VOCABULARY, (6, 9)), torch.randint(VOCABULARY, (6, 9))
        assert torch.equal(ours(x, y), plain(x, y))
    ours.flush()
    for (name, one), other in zip(model.named_parameters(), pairs[1][0].parameters(), strict=True):
        assert torch.equal(one, other), name
        for key, value in optimizers[0].state[one].items():
            assert torch.equal(value, optimizers[1].state[other][key]), (name, key)
