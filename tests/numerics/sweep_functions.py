"""Functions that users call, with their gradients, and what is fused with them."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]

_TORCH = """
    abs neg exp expm1 sin cos tan tanh sinh cosh sigmoid erf erfc square atan asinh exp2 sgn sign
    floor ceil round trunc frac sinc deg2rad rad2deg nan_to_num relu log1p log log2 log10 sqrt rsqrt
    reciprocal logit asin acos atanh acosh erfinv lgamma digamma i0
"""
_NN = """
    silu mish hardswish hardsigmoid leaky_relu elu selu celu softplus logsigmoid hardtanh gelu relu6
    softsign tanhshrink softshrink hardshrink
"""
FUNCTIONS: dict[str, Function] = {name: getattr(torch, name) for name in _TORCH.split()}
FUNCTIONS |= {name: getattr(F, name) for name in _NN.split()}
FUNCTIONS |= {f"x**{n}": lambda x, n=n: x**n for n in (0.5, 2, 3, 4, -0.5, -1, -2, 2.5, 1 / 3)}
FUNCTIONS |= {
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "2**x": lambda x: 2.0**x,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp min": lambda x: x.clamp(min=0.0),
    "clamp max": lambda x: x.clamp(max=-0.0),
    "remainder": lambda x: x % 3,
    "fmod": lambda x: torch.fmod(x, 3),
    "smooth l1": lambda x: F.smooth_l1_loss(x, torch.ones_like(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.ones_like(x), reduction="none", delta=0.5),
    "l1": lambda x: F.l1_loss(x, torch.ones_like(x), reduction="none"),
    "mse": lambda x: F.mse_loss(x, torch.ones_like(x), reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.detach() * 0 + 0.3, reduction="none"),
    "kl": lambda x: F.kl_div(x, torch.full_like(x, 0.3), reduction="none"),
    "poisson": lambda x: F.poisson_nll_loss(x, torch.full_like(x, 2.0), reduction="none"),
    "soft margin": lambda x: F.soft_margin_loss(x, -torch.ones_like(x), reduction="none"),
}

NEIGHBOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "- inf": lambda y, g: y - math.inf,
    "+ g": lambda y, g: y + g,
    "* g": lambda y, g: y * g,
    "g - y": lambda y, g: g - y,
    "y / g": lambda y, g: y / g,
    "chosen": lambda y, g: torch.where(g > 0, y, g),
    "sum": lambda y, g: torch.stack([y, g, y]).sum(0),
}
"""What a compiler may take into the last operation of a function."""
CONTRACTED = frozenset({"square", "x**2", "x**3", "x**4", "mse", "rad2deg", "deg2rad"})
"""A product of the user's: it may round once together with a sum, which takes an infinity back."""


def with_gradient(function: Function, x: Tensor, g: Tensor) -> list[Tensor]:
    """``function(x)`` and its gradient for ``g``, if it has one."""
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf)
    if not y.requires_grad:
        return [y]
    (slope,) = torch.autograd.grad(y, leaf, g)
    return [y.detach(), slope]


def grid(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each of ``values`` with some gradients."""
    slopes = [1.0, 0.0, -0.0, math.inf, -math.inf, math.nan, -2.0, 0.3]
    x, g = torch.cartesian_prod(values, torch.tensor(slopes, dtype=values.dtype)).t().contiguous()
    return x, g


__all__: list[Any] = ["CONTRACTED", "FUNCTIONS", "NEIGHBOURS", "grid", "with_gradient"]
