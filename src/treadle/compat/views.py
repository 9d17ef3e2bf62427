"""Views and pads whose types a trace cannot express."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from treadle.compat.unsized import is_unsized

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


def _pad(x: Tensor, pad: Sequence[int], value: float = 0) -> object:
    """Where values decide sizes PyTorch has no type of the result: the parts are put together.

    ::

        constant_pad_nd(x, [1, 2], 0)    ->    cat([full([n, 1], 0), x, full([n, 2], 0)], 1)
    """
    if not any(map(is_unsized, x.shape)):
        return NotImplemented
    for at in range(len(pad) // 2):
        dim = x.ndim - 1 - at
        before, after = pad[2 * at : 2 * at + 2]
        x = x.narrow(dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
        parts = [_filled(x, dim, before, value), x, _filled(x, dim, after, value)]
        x = torch.cat([part for part in parts if part is not None], dim)
    return x


def _filled(x: Tensor, dim: int, size: int, value: float) -> Tensor | None:
    shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    return x.new_full(shape, value) if size > 0 else None


PADS: Mapping[object, Callable[..., object]] = {aten.constant_pad_nd.default: _pad}
"""What to trace instead."""
