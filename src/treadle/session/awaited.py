"""Tensors that a pending update will still write, between two calls.

::

    type(p)                   a class of ours, under nn.Parameter, until the update has run
    p.mul_(0.9), p.norm()     the update runs, p has its own class again, and then the operation
    d.mul_(0.9)               with ``d = p.data`` from before: seen by the version, or by the bytes

Every operation on ``p`` itself goes through ``__torch_function__``, before it reads or writes.
Other access to its memory needs a second holder of the storage: such memory is compared.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from treadle.compat.fake import WatchedClass
from treadle.compat.tensors import address_of, is_held_elsewhere, same_bytes, storage_of
from treadle.compat.tracing import without_classes

_TENSOR: Any = Tensor  # whose attributes are descriptors, which its declared type does not say
_READ = [
    *(_TENSOR.shape, _TENSOR.dtype, _TENSOR.device, _TENSOR.layout, _TENSOR.ndim),
    *(_TENSOR.is_leaf, _TENSOR.requires_grad, _TENSOR.grad_fn, _TENSOR.grad),
]
_WITHOUT_VALUES = frozenset(
    [
        *(name.__get__ for name in _READ),
        *(_TENSOR.grad.__set__, _TENSOR.grad.__delete__),
        *(_TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.nelement, _TENSOR.stride),
        *(_TENSOR.element_size, _TENSOR.is_floating_point, _TENSOR.is_complex, _TENSOR.__len__),
        _TENSOR.is_contiguous,
    ]
)
"""What is asked of a tensor and says nothing of its elements: nobody has to catch up for that."""


@final
class AwaitedTensors:
    """``told`` is called before anything is done with one of them, from ``attach`` on until
    ``detach``."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told
        self._held: Sequence[Tensor] = ()
        self._classes: dict[type, type] = {
            Tensor: _awaiting(Tensor, self),
            nn.Parameter: _awaiting(nn.Parameter, self),
        }
        self._own = {ours: own for own, ours in self._classes.items()}

    @property
    def is_attached(self) -> bool:
        """Whether any of them is watched."""
        return bool(self._held)

    def attach(self, tensors: Sequence[Tensor]) -> None:
        """Watch these, but for those of classes that are not PyTorch's own."""
        self._held = tensors
        classes = self._classes
        for tensor in tensors:
            if type(tensor) in classes:
                tensor.__class__ = classes[type(tensor)]

    def detach(self) -> None:
        """They are what they were."""
        held, self._held = self._held, ()
        own = self._own
        for tensor in held:
            if type(tensor) in own:
                tensor.__class__ = own[type(tensor)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Not watched within, and after it only if it fails."""
        held = self._held
        self.detach()
        try:
            yield
        except BaseException:
            self.attach(held)
            raise

    def look(self) -> None:
        """Somebody is about to."""
        with self.aside():
            self._told()


def _awaiting(own: type, awaited: AwaitedTensors) -> type:
    """The class of a watched tensor whose class is ``own``."""

    def function(
        cls: type,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _WITHOUT_VALUES or not awaited.is_attached:
            with without_classes():
                return func(*args, **kwargs or {})
        awaited.look()
        return func(*args, **kwargs or {})

    def copied(self: Tensor, memo: dict[int, object]) -> object:
        awaited.look()
        return copy.deepcopy(self, memo)

    def reduced(self: Tensor, protocol: object) -> object:
        awaited.look()
        return self.__reduce_ex__(protocol)

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    methods = {"__deepcopy__": copied, "__reduce_ex__": reduced}
    hears = {"__torch_function__": classmethod(function)}
    return type(own)(own.__name__, (own, WatchedClass), named | methods | hears)


@final
class AsLeft:
    """Whether tensors have the elements that they were left with: by their versions, and where
    somebody else holds the memory as well (``p.data``, an array of NumPy's), by a copy."""

    def __init__(self, tensors: Sequence[Tensor], ours: Callable[[], Iterable[Tensor]]) -> None:
        """``ours``: tensors of the compiled programs, which write where they are told to."""
        self._tensors = tensors
        self._ours = ours
        self._storages = [_storage_of(tensor) for tensor in tensors]
        self._versions: list[int] = []
        self._copies: dict[int, Tensor] = {}
        self.note()

    def note(self) -> None:
        """What they hold now is what they are left with."""
        self._versions = [held._version for held in self._tensors]
        copies, self._copies = self._copies, {}
        known = Counter(map(storage_of, self._ours()))
        for at, storage in enumerate(self._storages):
            if storage is not None and is_held_elsewhere(storage, known[address_of(storage)]):
                kept = copies.get(at)
                tensor = self._tensors[at].detach()
                self._copies[at] = tensor.clone() if kept is None else kept.copy_(tensor)

    def holds(self) -> bool:
        """Whether nobody has written to them since."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return all(tensor._version == before for tensor, before in pairs) and all(
            same_bytes(self._tensors[at].detach(), kept) for at, kept in self._copies.items()
        )


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
