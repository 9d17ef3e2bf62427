"""A third target, added from outside: whole steps in Python beside eager.

``TREADLE_TARGET=python python -m pytest tests/contract tests/models`` runs any part of the suite
on it.
"""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from targets.python_target import PYTHON, add
from treadle.options import from_environment
from treadle.targets.registry import add_target
from treadle.util.errors import TreadleError

if os.environ.get("TREADLE_TARGET") != "python":
    add()

OPTIONS = replace(from_environment(), target="python")


class Block(nn.Module):
    """Attention, a norm and a loss over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, 16)
        self.attend = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 53)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.attend(self.embed(tokens))).flatten(0, 1), labels)


class Pictures(nn.Module):
    """Convolutions, batch norms, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(0.3), nn.Linear(5 * 3 * 3, 7), nn.Softplus(),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


class Wide(nn.Module):
    """Long rows, whose sums are shared, and a sum over many rows of few columns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.logsumexp(x, 1).mean() + x.std(1).mean()
        return rows + (x.t()[:, :3] * self.scale).tanh().pow(2).sum(0).mean()


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(53, (3, 11), generator=generator)
    return found, found.roll(1).flatten()


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randn(4, 7, generator=generator)


def long_rows(seed: int) -> tuple[Tensor]:
    return (torch.randn(5, 40_009, generator=torch.Generator().manual_seed(seed)),)


STEPS = {
    "transformer": (Block, tokens, torch.optim.SGD),
    "pictures": (Pictures, pictures, torch.optim.SGD),
    "long rows": (Wide, long_rows, torch.optim.RMSprop),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_is_eagers(name, tmp_path):
    make, batch, optimizer = STEPS[name]
    torch.manual_seed(3)
    model = make()
    twin = copy.deepcopy(model)
    ours = optimizer(model.parameters(), lr=1e-3)
    theirs = optimizer(twin.parameters(), lr=1e-3)

    def step(*given: Tensor) -> Tensor:
        ours.zero_grad()
        loss = model(*given)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ours.step()
        return loss.detach()

    options = replace(OPTIONS, cache_dir=tmp_path)
    compiled = treadle.compile(step, model=model, optimizer=ours, options=options)
    for seed in range(3):
        given = batch(seed)
        torch.manual_seed(seed)
        found = compiled(*given)
        torch.manual_seed(seed)
        theirs.zero_grad()
        loss = twin(*given)
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        theirs.step()
        torch.testing.assert_close(found, loss.detach(), rtol=2e-5, atol=2e-6)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=3e-5)
    assert compiled.compiled.artifact.kernel_count > 0
    assert {source.language for source in compiled.compiled.artifact.sources} == {"python"}


def test_a_name_is_taken_once():
    with pytest.raises(TreadleError, match="there is a target 'python' already"):
        add_target(PYTHON)


def test_an_unknown_target_is_named_with_those_there_are(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = replace(OPTIONS, target="abacus", cache_dir=tmp_path)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    before = model.weight.detach().clone()
    with pytest.raises(TreadleError, match="target='abacus' is not one of cpu, cuda"):
        compiled(torch.ones(1, 2))
    assert torch.equal(model.weight, before)
