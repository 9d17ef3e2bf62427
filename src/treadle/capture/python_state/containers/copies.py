"""``copy.copy`` and ``copy.deepcopy`` of traced tensors: what PyTorch gives, by operations of it.

::

    copy.copy(x)           the same memory: x.detach(), with its flag, class and attributes
    copy.deepcopy(x)       other memory: x.clone(), likewise, and its gradient
    copy.deepcopy([x, v])  v is a view of x: c = x.clone(); [c, c.as_strided(like v)]

So are copied what is made of tensors: a ``state_dict``, a model, a batch.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.fake import MEMOS, class_of, stand_in_for
from treadle.compat.tensors import storage_key

_MEMORIES = "tensors by their memory"


def shallow_copied(tensor: Tensor) -> Tensor:
    """``copy.copy(tensor)``. A leaf, wherever the tensor came from, as PyTorch makes it."""
    copied = _like(tensor, tensor.detach())
    vars(copied).update(_attributes_beside(copied, tensor))
    return copied


def deep_copied(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """``copy.deepcopy(tensor, memo)`` of a leaf. A parameter's has neither gradient nor
    attributes."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        copied = _in_copied_memory(tensor, memo.setdefault(_MEMORIES, {}))
    stand_in = memo[id(tensor)] = stand_in_for(_like(tensor, copied), class_of(tensor))
    if issubclass(class_of(tensor), nn.Parameter):
        return stand_in
    if tensor.grad is not None:
        stand_in.grad = deepcopy(tensor.grad, memo)
    vars(stand_in).update(deepcopy(_attributes_beside(stand_in, tensor), memo))
    return stand_in


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Of the class of ``tensor``, and needing a gradient as it does."""
    if issubclass(class_of(tensor), nn.Parameter):
        return nn.Parameter(values, tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def _attributes_beside(copied: Tensor, tensor: Tensor) -> dict[str, object]:
    """Those of ``tensor`` that are the user's: one that was just made has no others."""
    known = vars(copied).keys() | MEMOS
    return {name: value for name, value in vars(tensor).items() if name not in known}


def _in_copied_memory(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """A copy of the memory that ``tensor`` is in, seen as it is. ``copies``: of memories that were
    met before, by their keys, each as a tensor of all of it."""
    key = storage_key(tensor)
    if key is None or layout_of(tensor) is not None or issubclass(class_of(tensor), nn.Parameter):
        return tensor.clone()
    whole = tensor if tensor._base is None else tensor._base
    if key not in copies:
        copied = whole.clone()
        if not _fills_its_memory(whole) or copied.stride() != whole.stride():
            return tensor.clone()
        copies[key] = copied
        if whole is tensor:
            return copied
    if copies[key].dtype is not tensor.dtype:
        return tensor.clone()
    return copies[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _fills_its_memory(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
