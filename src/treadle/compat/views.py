"""Views whose types a trace cannot express."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

aten = torch.ops.aten


def _split(x: Tensor, size: int, dim: int = 0) -> object:
    """A dim without elements is one piece, as eager has it: PyTorch 2.11 counts no piece, and
    shortens the last of them. All others are traced as they are."""
    if type(x.shape[dim]) is not int or x.shape[dim]:
        return NotImplemented
    return aten.split_with_sizes.default(x, [0], dim)


SPLITS: Mapping[object, Callable[..., object]] = {
    aten.split.Tensor: _split,
    aten.unsafe_split.Tensor: _split,
}
"""What to trace instead."""
