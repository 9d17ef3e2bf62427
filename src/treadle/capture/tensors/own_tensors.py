"""The user's own tensors, and views of them, that a step returns or stores outside.

::

    return model.weight                the parameter itself
    kept = model.weight.detach()[0]    at every call: a view of the user's weight, made anew
    return x.t()                       a view of the x of that call

A later write to one is visible in the other, as in eager.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from treadle.capture.python_state.external_state.left_objects import DeferredValue
from treadle.capture.sources import State
from treadle.capture.tensors.input_memory import bytes_of
from treadle.capture.tensors.result_slots import ClassSlot, slot_of
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.tensors import storage_key

Find = Callable[[], object]


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeptView:
    """Gives the view of what ``find`` finds at a call. ``offset``: of its first element from that
    of the tensor, in bytes; ``slot``: of a leaf that needs a gradient."""

    find: Find
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    slot: ClassSlot | None

    def __call__(self) -> Tensor:
        """The view. The tensor that ``find`` returns must have the layout of the traced one."""
        base = self.find()
        assert isinstance(base, Tensor), base
        view = self._of(base.detach())
        return view if self.slot is None else self.slot.around(view)

    def _of(self, tensor: Tensor) -> Tensor:
        if self.dtype is tensor.dtype:
            if (tensor.shape, tensor.stride(), 0) == (self.shape, self.strides, self.offset):
                return tensor
            start = tensor.storage_offset() + self.offset // tensor.element_size()
            return tensor.as_strided(self.shape, self.strides, start)
        start = tensor.storage_offset() * tensor.element_size() + self.offset
        view = torch.empty(0, dtype=self.dtype, device=tensor.device)
        storage = tensor.untyped_storage()
        return view.set_(storage, start // self.dtype.itemsize, self.shape, self.strides)


class OwnTensors:
    """The traced tensors for those of the user's, and where a call finds the latter."""

    def __init__(self) -> None:
        self._itself: dict[int, tuple[Tensor, DeferredValue]] = {}
        self._owners: dict[int, list[tuple[Tensor, Find]]] = {}  # by the keys of their storages

    def add(self, find: Find, now: Tensor, was: Tensor | None) -> None:
        """Add a tensor. ``was``: the memory in which it was before the step; ``None`` if a new
        value is written to its memory at the end, unlike in eager, so that its views are copies.
        """
        self._itself.setdefault(id(now), (now, DeferredValue(find)))
        key = storage_key(was)
        if key is not None and was is not None and layout_of(was) is None and _is_plain(was):
            self._owners.setdefault(key, []).append((was, find))

    def of(self, leaf: Tensor) -> DeferredValue | None:
        """The tensor or the view that ``leaf`` is at a call, the same one whenever it is asked for;
        ``None`` for what is of the step, and where symbols are in a layout."""
        if id(leaf) not in self._itself:
            view = self._view(leaf)
            if view is None:
                return None
            self._itself[id(leaf)] = leaf, DeferredValue(view)
        return self._itself[id(leaf)][1]

    def _view(self, leaf: Tensor) -> KeptView | None:
        if layout_of(leaf) is not None or not _is_plain(leaf):
            return None
        low, high = bytes_of(leaf)
        for owner, find in self._owners.get(storage_key(leaf) or 0, ()):
            first, end = bytes_of(owner)
            if first <= low and high <= end:
                slot = slot_of(leaf)
                return KeptView(
                    find,
                    leaf.dtype,
                    tuple(leaf.shape),
                    leaf.stride(),
                    low - first,
                    slot if isinstance(slot, ClassSlot) else None,
                )
        return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether numbers say where each element is, and its bytes are its value."""
    layout: Sequence[object] = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if tensor.is_conj() or tensor.is_neg():
        return False
    return all(type(size) is int for size in layout)


def own_tensor(leaf: object) -> Tensor | None:
    """The user's own parameter, buffer or optimizer state that a leaf of a result is at every call,
    or that it is a view of."""
    compute = leaf.compute if isinstance(leaf, DeferredValue) else None
    compute = compute.find if isinstance(compute, KeptView) else compute
    if not isinstance(compute, functools.partial):
        return None
    is_state = isinstance(getattr(compute.func, "__self__", None), State)
    tensor_ = compute() if is_state or compute.func in (itself, buffer_of) else None
    return tensor_ if isinstance(tensor_, Tensor) else None


def buffer_of(owner: nn.Module, key: str) -> Tensor | None:
    """A buffer by its name."""
    return owner._buffers[key]


def itself(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter."""
    return parameter
