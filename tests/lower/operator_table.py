"""What one row of the table of operations is, and inputs for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Make = Callable[[], Tensor]


@dataclass(frozen=True)
class Sample:
    """``fn`` of fresh ``inputs``, and the gradients of every floating result to every floating
    input unless ``grad`` is false."""

    family: str
    name: str
    fn: Callable[..., Any]
    inputs: tuple[Make, ...]
    grad: bool = True
    rtol: float = 1e-4
    atol: float = 1e-5

    def program(self) -> Callable[..., list[Tensor]]:
        """A function of the inputs alone that returns results and gradients."""
        return _with_gradients(self.fn) if self.grad else lambda *x: _tensors(self.fn(*x))

    def make(self) -> list[Tensor]:
        return [make() for make in self.inputs]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    def run(*inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = _tensors(fn(*leaves))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        slopes = [out for out in outputs if out.requires_grad]
        weights = [out.detach() * 0.37 + 0.5 for out in slopes]
        grads = torch.autograd.grad(slopes, wanted, weights, allow_unused=True) if slopes else ()
        return [*(out.detach() for out in outputs), *(g for g in grads if g is not None)]

    return run


def normal(*shape: int) -> Make:
    return lambda: torch.randn(shape)


def away(*shape: int) -> Make:
    """Between 0.1 and 0.9 of either sign: away from kinks and poles."""
    return lambda: (torch.rand(shape) * 0.8 + 0.1) * (torch.randint(2, shape) * 2 - 1)


def positive(*shape: int) -> Make:
    return lambda: torch.rand(shape) * 0.8 + 0.1


def whole(high: int, *shape: int, low: int = 0) -> Make:
    return lambda: torch.randint(low, high, shape)


def distinct(*shape: int) -> Make:
    """All elements different, so that an order has one answer."""
    count = math.prod(shape)
    return lambda: torch.randperm(count).reshape(shape).to(torch.float32) / max(count, 1)


def truth(*shape: int) -> Make:
    return lambda: torch.rand(shape) > 0.5


@dataclass
class Family:
    """Collects the samples of one family."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    def add(self, name: str, fn: Callable[..., Any], *inputs: Make, **options: Any) -> None:
        self.samples.append(Sample(self.name, name, fn, inputs, **options))

    def add_module(
        self, name: str, module: nn.Module, call: Callable[..., Any], *inputs: Make
    ) -> None:
        """A module, its parameters among the inputs: ``call(module, *inputs)``."""
        names = [each for each, _ in module.named_parameters()]
        made = [lambda p=p: p.detach().clone() for _, p in module.named_parameters()]
        count = len(inputs)

        def run(*values: Tensor) -> Any:
            weights = dict(zip(names, values[count:], strict=True))
            wrapped = _Called(module, call)
            renamed = {f"module.{key}": value for key, value in weights.items()}
            return torch.func.functional_call(wrapped, renamed, values[:count])

        self.add(name, run, *inputs, *made)


class _Called(nn.Module):
    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.module, *inputs)
