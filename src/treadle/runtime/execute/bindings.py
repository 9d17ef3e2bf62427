"""The places that refer to a buffer, so that a new tensor updates all of them at once.

A buffer is used as a pointer (an entry of a launch's pointer array), as a view (an argument of
a library call) or as its storage, one element after another (an argument of a Triton launch).
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from treadle.algebra.extents import same, same_sizes
from treadle.runtime.store.artifact import BufferSpec, StepArgument, Storage, View
from treadle.util.generators import GeneratorRef

Container = list[object] | dict[str, object]
Slot = tuple[Container, Any]
"""A container and the key in it, a number or a name: ``container[key]`` is the place."""
Pointers = ctypes.Array[ctypes.c_void_p]


def elements(spec: BufferSpec) -> int:
    """Elements of storage, gaps between strides included."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))


def same_strides(tensor: Tensor, spec: BufferSpec) -> bool:
    """Whether both put every element in the same place. The stride of a dim of one element does not
    matter."""
    if tensor.stride() == spec.strides or 0 in spec.shape:
        return True
    triples = zip(spec.shape, spec.strides, tensor.stride(), strict=True)
    return all(n == 1 or s == t for n, s, t in triples)


def storage_of(tensor: Tensor, spec: BufferSpec) -> Tensor:
    """The elements of a buffer in memory order, as a 1-D tensor of stride 1."""
    return tensor.as_strided((elements(spec),), (1,), tensor.storage_offset())


def view_of(storage: Tensor, view: View) -> Tensor:
    """``out[i, j] = storage[view.offset + i * strides[0] + j * strides[1]]``. A ``storage`` of the
    view's dtype may be any tensor that begins at the buffer's first element."""
    typed = storage if storage.dtype is view.dtype else storage.view(view.dtype)
    return typed.as_strided(view.shape, view.strides, typed.storage_offset() + view.offset)


def whole(spec: BufferSpec) -> View:
    """The view that shows the buffer as its specification says."""
    return View(spec.name, spec.dtype, spec.shape, spec.strides)


def shows_all(view: View, spec: BufferSpec) -> bool:
    """Whether ``view`` shows all of the buffer; in a step for many sizes, for all of them."""
    mine, other = (*view.shape, *view.strides), (*spec.shape, *spec.strides)
    return view.dtype is spec.dtype and same(view.offset, 0) and same_sizes(mine, other)


def laid_out(values: Tensor, spec: BufferSpec) -> Tensor:
    """A copy of ``values`` in the strides of ``spec``; a dim of stride 0 is stored once."""
    copy = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=values.device)
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in spec.strides)
    copy[once].copy_(values[once])
    return copy


@dataclass(slots=True)
class BufferUses:
    """The places where one buffer appears: for each view of it, the places that hold this view.
    ``whole``: the view for which the tensor itself is bound, for a buffer that a call allocates."""

    whole: View | None = None
    pointers: list[tuple[Pointers, int]] = field(default_factory=list[tuple[Pointers, int]])
    views: dict[View | None, list[Slot]] = field(default_factory=dict[View | None, list[Slot]])

    @property
    def slots(self) -> Iterator[Slot]:
        """All places of views."""
        return chain.from_iterable(self.views.values())

    def bind(self, tensor: Tensor, spec: BufferSpec, address: int | None = None) -> None:
        """Bind the buffer to ``tensor``, whose layout is that of ``spec``. ``address``: that of its
        first byte, if known."""
        if self.pointers:
            self.bind_pointers(tensor.data_ptr() if address is None else address)
        if self.views:
            self.bind_views(tensor, spec)

    def bind_pointers(self, address: int) -> None:
        """Write the address of the buffer's first byte into every pointer array."""
        for array, position in self.pointers:
            array[position] = address

    def bind_views(self, tensor: Tensor, spec: BufferSpec) -> None:
        """Set every view of the buffer to the memory of ``tensor``."""
        storage = None  # most views are of the tensor's own dtype, and made in one step
        for view, slots in self.views.items():
            if view is None:
                storage = storage_of(tensor, spec) if storage is None else storage
                shown = storage
            elif view is self.whole and tensor.stride() == view.strides:
                shown = tensor
            elif view.dtype is tensor.dtype:
                shown = view_of(tensor, view)
            else:
                storage = storage_of(tensor, spec) if storage is None else storage
                shown = view_of(storage, view)
            for container, key in slots:
                container[key] = shown

    def hold(self, value: object) -> None:
        """Bind a buffer without a fixed size to ``value``, a tensor or a number."""
        for container, key in self.slots:
            container[key] = value

    def drop(self) -> None:
        """Forget the tensor, so that nothing here keeps its memory."""
        for slots in self.views.values():
            for container, key in slots:
                container[key] = None


def _own_view(spec: BufferSpec) -> View | None:
    return whole(spec) if spec.place is Storage.CALL and not spec.unsized else None


class Bindings:
    """The uses of every buffer, collected while the steps are prepared."""

    def __init__(
        self, buffers: Mapping[str, BufferSpec], generators: Sequence[torch.Generator] = ()
    ) -> None:
        """``generators``: the user's, which calls draw from."""
        self._buffers = buffers
        self.uses = {name: BufferUses(_own_view(spec)) for name, spec in buffers.items()}
        self._generators = generators

    def views(self) -> list[Tensor]:
        """All tensors that stand in a place now, each once."""
        values = (held[key] for uses in self.uses.values() for held, key in uses.slots)
        return list({id(value): value for value in values if isinstance(value, Tensor)}.values())

    def drop(self) -> None:
        """Forget the tensors of all buffers."""
        for uses in self.uses.values():
            uses.drop()

    def pointers(self, rows: tuple[tuple[str, ...], ...]) -> Pointers:
        """A C array with a slot for each buffer of each instance, one instance after another."""
        names = [name for row in rows for name in row]
        array = (ctypes.c_void_p * len(names))()
        for position, name in enumerate(names):
            self.uses[name].pointers.append((array, position))
        return array

    def storages(self, rows: tuple[tuple[str, ...], ...]) -> list[list[Tensor]]:
        """The same as lists of 1-D tensors."""
        lists: list[list[Any]] = [[None] * len(row) for row in rows]
        for row, slots in zip(rows, lists, strict=True):
            for position, name in enumerate(row):
                self.uses[name].views.setdefault(None, []).append((slots, position))
        return lists

    def argument(self, value: StepArgument, slot: Slot) -> None:
        """Put ``value`` in a place; a view becomes the tensor bound at the time."""
        container, key = slot
        if isinstance(value, View):
            container[key] = None
            uses = self.uses[value.buffer]
            own = uses.whole is not None and shows_all(value, self._buffers[value.buffer])
            view = uses.whole if own else value
            uses.views.setdefault(view, []).append(slot)
        elif isinstance(value, tuple | list):
            items: list[object] = [None] * len(value)
            for position, item in enumerate(value):
                self.argument(item, (items, position))
            container[key] = items
        elif isinstance(value, GeneratorRef):
            container[key] = self._generators[value.number]
        else:
            container[key] = value


class Live:
    """The buffers of ``Storage.CALL`` of the call that runs now. They are no part of the
    executable, so that its actions hold no reference to it: the arena is freed with the last
    reference to a step."""

    def __init__(self, bindings: Bindings, device: torch.device) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._bindings = bindings
        self._device = device

    def allocate(self, spec: BufferSpec) -> None:
        """New memory for a buffer."""
        new = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=self._device)
        self.define(spec, new)

    def define(self, spec: BufferSpec, tensor: Any) -> None:
        """Bind a buffer to ``tensor``, which may be a number for a buffer without a size."""
        self.tensors[spec.name] = tensor
        uses = self._bindings.uses[spec.name]
        if spec.unsized:
            uses.hold(tensor)
        else:
            uses.bind(tensor, spec)

    def release(self, names: tuple[str, ...]) -> None:
        """Let go of buffers that nothing reads any more."""
        for name in names:
            self.tensors.pop(name, None)
            self._bindings.uses[name].drop()


def sizes_array(rows: tuple[tuple[int, ...], ...]) -> ctypes.Array[ctypes.c_int64]:
    """The sizes of all instances as one C array of ``int64_t``."""
    flat = [size for row in rows for size in row]
    return (ctypes.c_int64 * max(1, len(flat)))(*flat)


def spec_bytes(spec: BufferSpec) -> int:
    """Bytes of storage, gaps between strides included."""
    return elements(spec) * spec.dtype.itemsize
