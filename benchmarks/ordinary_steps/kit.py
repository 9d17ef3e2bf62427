"""What every ordinary step is made with, and the list that they stand in."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Kit:
    """Where a step runs, and how large it is."""

    device: torch.device
    small: bool = True

    def size(self, small: int, full: int) -> int:
        """One of two sizes."""
        return small if self.small else full

    def put(self, module: Any) -> Any:
        """The module, on the device."""
        return module.to(self.device)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.device)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape).to(self.device)

    def randint(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape).to(self.device)

    def pictures(self, side: tuple[int, int] = (16, 32), channels: int = 3) -> Tensor:
        """A batch of pictures."""
        n, at = self.size(4, 32), self.size(*side)
        return self.randn(n, channels, at, at)

    def labels(self, classes: int = 10) -> Tensor:
        """A class for each picture."""
        return self.randint(classes, self.size(4, 32))


@dataclass(frozen=True)
class Setup:
    """A whole training step of eager PyTorch, what it trains, and where its batches come from."""

    step: Callable[..., Any]
    models: Any
    optimizers: Any
    batch: Callable[[], tuple[Any, ...]]


ROWS: dict[str, Callable[[Kit], Setup]] = {}


def row(make: Callable[[Kit], Setup]) -> Callable[[Kit], Setup]:
    """Put a step into the list, under the name of the function that makes it."""
    assert make.__name__ not in ROWS, make.__name__
    ROWS[make.__name__] = make
    return make


def trained(
    model: Any, loss_of: Callable[..., Tensor], batch: Callable[[], tuple[Any, ...]], **given: Any
) -> Setup:
    """The ordinary step: loss, backward, AdamW (or ``optimizer``), gradients cleared."""
    models = list(model) if isinstance(model, list | tuple) else [model]
    parameters = [p for each in models for p in each.parameters() if p.requires_grad]
    optimizer = given.get("optimizer") or torch.optim.AdamW(parameters, lr=1e-3)

    def step(*values: Any) -> Tensor:
        loss = loss_of(*values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Setup(step, model, optimizer, batch)


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])
