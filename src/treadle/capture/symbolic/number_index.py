"""Indices that are numbers which change from call to call, or NumPy arrays.

::

    x[i]               ->  x[p[None]][0]                   p: a 0-dim tensor, i % len(x) of the call
    x[i * 8 : i * 8 + 8]   ->  x[p + arange(8)]            p: where the slice begins
    x[indices]         ->  x[a tensor of the array of the call]

Whether ``i`` is within bounds, and the length of a slice, are branches. In eager the first two are
views; here they are copies, so writing to one is refused.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from treadle.capture.python_state.plain_values import is_whole
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf, is_array
from treadle.capture.symbolic.deferred import is_deferred
from treadle.capture.symbolic.numbers import (
    Number,
    is_number,
    is_stand_in,
    lead_of,
    plain,
    value_now,
)

_TO_INDEX = "ib"
"""Kinds of arrays that are indices, or masks."""


@final
@dataclass(frozen=True, slots=True)
class NumberIndex:
    """An index as entries without numbers, and the positions of those that move. ``moved``: by dim
    a tensor without dims, or one of consecutive positions; ``key``: equal for equal indices."""

    entries: tuple[Any, ...]
    moved: dict[int, Tensor]
    key: tuple[object, ...]

    def get(self, x: Tensor) -> Tensor:
        """A copy of what is there."""
        for dim, position in self.moved.items():
            at = position if position.ndim else position[None]
            x = x[(slice(None),) * dim + (at,)]
        return x[self.entries]

    def place(self, x: Tensor) -> tuple[Tensor, Tensor, int] | None:
        """A view of ``x``, and the positions along which of its dims; ``None`` where there are
        several, or other tensors beside them."""
        if len(self.moved) > 1 or any(isinstance(entry, Tensor) for entry in self.entries):
            return None
        ((dim, position),) = self.moved.items()
        dims = _dims(self.entries, x.ndim)
        at = dims.index(dim)
        before = self.entries[:at]
        removed = sum(type(earlier) is int for earlier in before)
        whole = (*before, slice(None), *self.entries[at + 1 :])
        return x[whole], position, dim - removed + sum(earlier is None for earlier in before)


def has_stand_ins(entries: Sequence[object]) -> bool:
    """Whether numbers or arrays that stand in are in an index."""
    return any(is_stand_in(part) for entry in entries for part in _parts(entry))


def _parts(entry: object) -> tuple[object, ...]:
    if type(entry) is slice:
        return entry.start, entry.stop, entry.step
    return (entry,)


def number_index(x: Tensor, entries: Sequence[object]) -> NumberIndex:
    """What stands in becomes tensors where it can; else what it stands for, on which the graph then
    depends."""
    entries = [_with_sizes(_of_array(entry)) for entry in entries]
    key = tuple(part.key if is_number(part) else id(part) for e in entries for part in _parts(e))
    fixed: list[object] = []
    moved: dict[int, Tensor] = {}
    for entry, dim in zip(entries, _dims(entries, x.ndim), strict=True):
        position = None
        if dim is not None and any(map(is_number, _parts(entry))):
            position, entry = _position(entry, x, dim)
        if position is not None and dim is not None:
            moved[dim] = position
        fixed.append(_literal(entry))
    return NumberIndex(tuple(fixed), moved, key)


def _of_array(entry: object) -> object:
    """An index that is an array, as a tensor: integers, or a mask."""
    if not is_array(entry):
        return entry
    leaf: ArrayLeaf = entry
    if leaf.value.dtype.kind not in _TO_INDEX:
        return leaf.plain()
    tensor = leaf.tensor()
    return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)


def _with_sizes(entry: object) -> object:
    """With sizes in the place of numbers that are some."""
    if type(entry) is slice:
        return slice(*map(_size_or_itself, (entry.start, entry.stop, entry.step)))
    return _size_or_itself(entry)


def _size_or_itself(value: object) -> object:
    size = value.uses.as_size(value) if is_number(value) else None
    return value if size is None else size


def _literal(entry: object) -> object:
    if type(entry) is slice:
        return slice(*map(plain, (entry.start, entry.stop, entry.step)))
    return plain(entry)


def _dims(entries: Sequence[object], ndim: int) -> list[int | None]:
    """Of a tensor of ``ndim`` dims, which one each entry is about."""
    taken = [_dims_taken(entry) for entry in entries]
    rest = max(ndim - sum(taken), 0)
    dims: list[int | None] = []
    dim = 0
    for entry, count in zip(entries, taken, strict=True):
        dims.append(dim if count else None)
        dim += rest if entry is ... else count
    return dims


def _dims_taken(entry: object) -> int:
    if entry is None or entry is ... or isinstance(entry, bool):
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


def _position(entry: Any, x: Tensor, dim: int) -> tuple[Tensor | None, object]:
    """Where an entry begins at a call, if that moves; and the entry for what was picked."""
    size: object = x.shape[dim] if dim < x.ndim else None
    numbers = [part for part in _parts(entry) if is_number(part)]
    if any(map(is_deferred, numbers)):
        return _deferred(entry, size, x)
    whole = all(is_whole(number.value) and number.scales for number in numbers)
    if not whole or type(size) is not int:
        return None, entry
    if is_number(entry):
        inside = entry.decided(functools.partial(_is_inside, size), (entry,))
        position = Number.of(operator.mod, (entry, size)) if inside else None
        return (None, entry) if position is None else (_tensor(position, x), 0)
    return _of_slice(entry, numbers, size, x)


def _deferred(entry: object, size: object, x: Tensor) -> tuple[Tensor | None, object]:
    """The position for numbers that the step reads from tensors. The trace assumes that they are
    within bounds, and that a slice of known length is not cut off; each call checks it."""
    if type(size) is not int:
        return None, entry
    if is_deferred(entry) and entry.in_graph is not None:
        at = entry.in_graph()
        entry.deferred.require((at >= -size) & (at < size))
        return (at % size).to(x.device), 0
    if type(entry) is not slice or entry.step not in (None, 1):
        return None, entry
    start, stop = entry.start, entry.stop
    if not is_deferred(start) or not is_deferred(stop) or start.base is not stop.base:
        return None, entry
    count = stop.ahead - start.ahead
    if start.in_graph is None or not 0 < count <= size:
        return None, entry
    first = start.in_graph()
    start.deferred.require((first >= 0) & (first <= size - count))
    return first.to(x.device) + torch.arange(count, device=x.device), slice(None)


def _of_slice(
    entry: slice, numbers: Sequence[Number], size: int, x: Tensor
) -> tuple[Tensor | None, object]:
    start, stop, step = entry.start, entry.stop, entry.step
    if is_number(step):
        return None, entry

    ends = tuple(None if is_number(end) else (end,) for end in (start, stop))
    count = lead_of(numbers).decided(functools.partial(_count, ends, step, size), numbers)
    if not is_number(start) or not isinstance(count, int) or not count:
        return None, slice(value_now(start), value_now(stop), step)
    first = Number.of(functools.partial(_first, ends, step, size), numbers)
    span = torch.arange(count, device=x.device) * (step or 1)
    return _tensor(first, x) + span, slice(None)


Ends = tuple[tuple[int | None] | None, ...]
"""Of a slice; ``None`` for one that is a number of the call."""


def _is_inside(size: int, at: int) -> bool:
    return -size <= at < size


def _count(ends: Ends, step: int | None, size: int, *numbers: int) -> int:
    return len(_places(ends, step, size, numbers))


def _first(ends: Ends, step: int | None, size: int, *numbers: int) -> int:
    return _places(ends, step, size, numbers).start


def _places(ends: Ends, step: int | None, size: int, numbers: Sequence[int]) -> range:
    remaining = iter(numbers)
    start, stop = (next(remaining) if end is None else end[0] for end in ends)
    return range(*slice(start, stop, step).indices(size))


def _tensor(number: Number, x: Tensor) -> Any:
    return number.tensor(torch.empty((), dtype=torch.int64, device=x.device))
