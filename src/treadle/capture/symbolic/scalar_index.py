"""Indices that are 0-dim integer tensors, whose values PyTorch reads: here they stay tensors.

::

    x[i]         ->  x[i[None]].squeeze(0)
    x[i] = v     ->  x[i[None]] = v.expand(...).unsqueeze(0)
    x[3, i]      ->  x[:, i[None]].squeeze(1)[3]          and so beside masks, None and ...
    x[3, i] = v  ->  x[3][i] = v

In eager ``x[i]`` is a view. Here it is a copy, so writing to it is refused.
"""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from treadle.capture.explain_errors import here
from treadle.capture.symbolic.number_index import has_stand_ins, number_index
from treadle.capture.symbolic.numbers import is_number, plain
from treadle.util.errors import CaptureError


class ScalarIndices:
    """Does what indices of that kind do, and remembers what it copied."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, int, str, tuple[object, ...]]] = []

    def instead_of(
        self, func: Callable[..., object], args: tuple[object, ...]
    ) -> Callable[..., object] | None:
        """What to call in place of ``func``; ``None``: ``func`` itself."""
        if func not in (Tensor.__getitem__, Tensor.__setitem__) or len(args) < 2:
            return None
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        if has_stand_ins((*entries, *args[2:])):
            return self._get_numbers if func is Tensor.__getitem__ else self._set_numbers
        dim = _dim(entries)
        if dim is None:
            return self._beside_others(func, args[0], entries)
        index = tuple(entry[None] if isinstance(entry, Tensor) else entry for entry in entries)
        place = (id(args[0]), *(id(e) if isinstance(e, Tensor) else str(e) for e in entries))
        if func is Tensor.__getitem__:
            return lambda x, _: self._get(x, index, dim, place)
        return lambda x, _, value: self._set(x, index, dim, value, place)

    def _beside_others(
        self, func: Callable[..., object], x: object, entries: tuple[object, ...]
    ) -> Callable[..., object] | None:
        """Of indices with other entries than slices beside them. PyTorch selects by them first."""
        dims = _dims(x.ndim, entries) if isinstance(x, Tensor) else None
        if dims is None or not any(map(_is_scalar, entries)):
            return None
        place = (id(x), *(id(e) if isinstance(e, Tensor) else str(e) for e in entries))
        if func is Tensor.__getitem__:
            return lambda x, _: self._selected(x, entries, dims, place)
        if any(isinstance(entry, Tensor) and not _is_scalar(entry) for entry in entries):
            return None
        view = tuple(slice(None) if _is_scalar(entry) else entry for entry in entries)
        left = [entry for entry in entries if not isinstance(entry, int)]
        if _dim(tuple(entry if _is_scalar(entry) else slice(None) for entry in left)) is None:
            return None
        return lambda x, _, value: self._set_in(x[view], left, value, place)

    def _set_in(
        self, x: Tensor, entries: list[object], value: object, place: tuple[object, ...]
    ) -> None:
        """Of a view, by what of an index it was not made by."""
        left = tuple(slice(None) if entry is None else entry for entry in entries)
        dims = _dims(x.ndim, left)
        assert dims is not None
        pairs = zip(dims, left, strict=True)
        placed = {dim: entry[None] for dim, entry in pairs if isinstance(entry, Tensor)}
        index = tuple(placed.get(dim, slice(None)) for dim in range(x.ndim))
        self._set(x, index, min(placed), value, place)

    def _selected(
        self, x: Tensor, entries: tuple[Any, ...], dims: Sequence[int], place: tuple[object, ...]
    ) -> Tensor:
        selected = x
        for dim, entry in reversed([*zip(dims, entries, strict=True)]):
            if _is_scalar(entry):
                selected = selected[(slice(None),) * dim + (entry[None],)].squeeze(dim)
        selected = selected[tuple(entry for entry in entries if not _is_scalar(entry))]
        self._copies.append((selected, selected._version, here(), place))
        return selected

    def _get_numbers(self, x: Tensor, entries: object) -> Tensor:
        index = number_index(x, entries if isinstance(entries, tuple) else (entries,))
        copied = index.get(x)
        if index.moved:
            self._copies.append((copied, copied._version, here(), (id(x), *index.key)))
        return copied

    def _set_numbers(self, x: Tensor, entries: object, value: Any) -> None:
        index = number_index(x, entries if isinstance(entries, tuple) else (entries,))
        if is_number(value):
            tensor: object = value.tensor(x, copied=True)
            value = tensor.to(x.dtype) if isinstance(tensor, Tensor) else tensor
        value = plain(value)
        if not index.moved:
            x[index.entries] = value
            return
        target = index.place(x)
        if target is None:
            raise CaptureError(
                "the step writes to elements that several numbers or tensors select",
                code="TR-107",
                where=here(),
                remedy="write along one dim at a time: x[i][:, j] = value",
            )
        whole, at, dim = target
        place = (id(x), *index.key)
        self._copies = [e for e in self._copies if not (e[0] is value and e[3] == place)]
        if at.ndim:
            whole[(slice(None),) * dim + (at,)] = value
        else:
            _set(whole, (slice(None),) * dim + (at[None],), dim, value)

    def _get(
        self, x: Tensor, index: tuple[Any, ...], dim: int, place: tuple[object, ...]
    ) -> Tensor:
        copied = x[index].squeeze(dim)
        self._copies.append((copied, copied._version, here(), place))
        return copied

    def _set(
        self,
        x: Tensor,
        index: tuple[object, ...],
        dim: int,
        value: object,
        place: tuple[object, ...],
    ) -> None:
        """``x[i] += v`` writes to a copy, and then puts it back where it is from."""
        self._copies = [e for e in self._copies if not (e[0] is value and e[3] == place)]
        _set(x, index, dim, value)

    def check(self) -> None:
        """TR-107 if a copy that is a view in eager was written to."""
        for copy, version, where, _ in self._copies:
            if copy._version != version:
                raise CaptureError(
                    "the step writes to x[i], where i is a tensor: a view in eager, but a copy "
                    "here",
                    code="TR-107",
                    where=where,
                    remedy="write x[i] = value, or x.index_copy_(0, i[None], value[None])",
                )


def _set(x: Tensor, index: tuple[Any, ...], dim: int, value: Any) -> None:
    if isinstance(value, Tensor) and value.ndim:
        shape = list(x[index].shape)
        del shape[dim]
        extra = max(value.ndim - len(shape), 0)
        value = value.reshape(value.shape[extra:]) if extra else value
        value = value.expand(shape).unsqueeze(dim).to(x.dtype)
    x[index] = value


def _dim(entries: tuple[object, ...]) -> int | None:
    """The dim of the first such index; ``None`` where there is none, or something else than slices
    beside them."""
    places = [at for at, entry in enumerate(entries) if _is_scalar(entry)]
    others = [entry for entry in entries if not _is_scalar(entry)]
    if not places or any(not isinstance(entry, slice) for entry in others):
        return None
    together = places == list(range(places[0], places[0] + len(places)))
    return places[0] if together else None


def _dims(count: int, entries: tuple[object, ...]) -> list[int] | None:
    """At which of ``count`` dims each entry of an index begins; ``None`` where one is none of a
    slice, an integer, a tensor, ``None`` and ``...``."""
    taken: list[int] = []
    for entry in entries:
        match entry:
            case bool():
                return None
            case None | EllipsisType():
                taken.append(0)
            case int() | slice():
                taken.append(1)
            case Tensor():
                taken.append(entry.ndim if entry.dtype in (torch.bool, torch.uint8) else 1)
            case _:
                return None
    dims, dim = list[int](), 0
    for entry, many in zip(entries, taken, strict=True):
        dims.append(dim)
        dim += count - sum(taken) if entry is ... else many
    return dims


def _is_scalar(value: object) -> bool:
    integers = (torch.int64, torch.int32, torch.int16, torch.int8)  # uint8 is a mask
    return isinstance(value, Tensor) and value.ndim == 0 and value.dtype in integers
