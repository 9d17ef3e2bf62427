"""A stand-in for a collective in one process: an operator that counts its calls."""

import itertools

import torch
from torch import Tensor, nn

calls: list[int] = [0]
"""How often it ran."""

torch.library.define(
    "test::counted_all_reduce", "(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,)
)
torch.library.define("test::strange", "(Tensor x) -> Tensor")


@torch.library.impl("test::counted_all_reduce", "CPU")
def _counted(x: Tensor) -> Tensor:
    calls[0] += 1
    return x * 0.5


@torch.library.impl("test::strange", "CPU")
def _strange(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("test::counted_all_reduce")
@torch.library.register_fake("test::strange")
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def reduced(model: nn.Module) -> None:
    """Every gradient through the stand-in."""
    for each in model.parameters():
        if each.grad is not None:
            each.grad = torch.ops.test.counted_all_reduce(each.grad)


def stack(layers: int = 2, width: int = 5, seed: int = 0) -> nn.Sequential:
    """Linear and ReLU in turn, from 4 features to 3."""
    torch.manual_seed(seed)
    sizes = [4, *[width] * (layers - 1), 3]
    found: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        found += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*found[:-1])


def batch() -> tuple[Tensor, Tensor]:
    """Fresh data for ``stack``."""
    return torch.randn(6, 4), torch.randn(6, 3)
