"""``torch.tensor`` of lists that contain tensors instead of numbers.

::

    torch.tensor([t, 2.0])      ->  torch.stack([t.to(float32), full((), 2.0)])
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from treadle.capture.python_state.plain_values import is_real

_OPTIONS = {"dtype", "device"}


def of_listed(args: Sequence[object], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What ``torch.tensor`` makes of such lists; ``None`` for anything else. As PyTorch's it has no
    gradient, and is on the host where nobody says otherwise."""
    if len(args) != 1 or kwargs.keys() - _OPTIONS or not _is_list(args[0]):
        return None
    found = list(leaves(args[0]))
    if not any(isinstance(e, Tensor) for e in found) or not all(map(_is_number, found)):
        return None
    dtype = kwargs.get("dtype") or functools.reduce(torch.promote_types, map(_dtype, found))
    device = kwargs.get("device") or torch.get_default_device()
    with torch.no_grad():
        return _stacked(args[0], dtype, device)


def _is_list(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return type(value) in (list, tuple)


def leaves(nest: object) -> Iterator[object]:
    """What is in lists in lists."""
    if not _is_list(nest):
        yield nest
        return
    for item in nest:
        yield from leaves(item)


def _is_number(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return not leaf.ndim
    return type(leaf) is bool or (is_real(leaf) and type(leaf) in (int, float))


def _dtype(leaf: object) -> torch.dtype:
    if isinstance(leaf, Tensor):
        return leaf.dtype
    whole = torch.bool if type(leaf) is bool else torch.int64
    return torch.get_default_dtype() if type(leaf) is float else whole


def _stacked(nest: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if _is_list(nest):
        return torch.stack([_stacked(item, dtype, device) for item in nest])
    if isinstance(nest, Tensor):
        return nest.to(dtype=dtype, device=device)
    return torch.full((), nest, dtype=dtype, device=device)
