"""Memory words of tensors: class, dtype, device, sizes, strides, address, ``requires_grad``, hooks.

A Python tensor refers to PyTorch's C++ object, and that to its storage and its autograd data::

    tensor -> sizes, strides, dtype, device, dispatch keys -> storage -> address of the numbers
                                                           -> autograd -> .grad, requires_grad

Their positions are found once, from known tensors. A layout that is not understood is not used, and
neither is a tensor that does not match PyTorch's description.
"""

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from treadle.compat.hooks import hook_dicts_of
from treadle.compat.tensors import dispatch_keys, impl_of, storage_of
from treadle.compat.tracing import outside_modes
from treadle.guards.dict_fingerprint import of_dict
from treadle.guards.memory_fingerprint import WORD, MemoryFingerprint, find, layout, word

_INLINE = 5  # dims whose sizes and strides are in the object itself
_OWN = (Tensor, nn.Parameter)
_HOST: Any = {"device": "cpu", "dtype": torch.float32}


def of_tensor(tensor: Tensor) -> MemoryFingerprint | None:
    """``None`` for what is not dense, or not PyTorch's own."""
    found = _tensor_layout()
    if found is None or type(tensor) not in _OWN or tensor.layout is not torch.strided:
        return None
    return found.words(tensor)


def grad_word(tensor: Tensor) -> int | None:
    """Where the address of its gradient is, as long as its words are the same; ``None`` where
    there is none as long."""
    found = _tensor_layout()
    known = 0 if found is None else word(impl_of(tensor) + found.autograd)
    return known + found.grad if found is not None and known else None


def no_grad() -> int:
    """What stands for no gradient."""
    found = _tensor_layout()
    return 0 if found is None else found.none


@final
class _TensorLayout:
    """Where words lie, in bytes. ``LookupError`` where that cannot be said."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        shape, strides = (7919, 104729), (1299709, 15485863)
        sample = torch.empty_strided(shape, strides, dtype=torch.float64, device="meta")
        self.impl = find(sample, impl_of(sample))
        self.storage = _within(impl_of(sample), storage_of(sample))
        self.sizes = _within(impl_of(sample), shape[0])
        self.strides = _within(impl_of(sample), strides[0])
        self.keys = _within(impl_of(sample), dispatch_keys(sample))
        self.ndim = self.sizes - WORD
        inside = self.storage < self.ndim < self.sizes < self.strides < self.keys
        if not inside or self.strides != self.sizes + _INLINE * WORD:
            raise LookupError("sizes and strides")
        leaf, grad = torch.zeros(1, **_HOST), torch.zeros(1, **_HOST)
        self.data = _within(storage_of(leaf), leaf.data_ptr())
        self.autograd = self._changed(impl_of(leaf), lambda: leaf.requires_grad_(True))
        known = word(impl_of(leaf) + self.autograd)
        leaf.grad = grad
        self.grad = _within(known, impl_of(grad))
        leaf.grad = None
        self.none = word(known + self.grad)
        self.requires = self._changed(known, lambda: leaf.requires_grad_(False))
        leaf.requires_grad_(True).register_hook(_hook)
        leaf.register_post_accumulate_grad_hook(_hook)
        self.hooks = tuple(find(leaf, id(each)) for each in hook_dicts_of(leaf))

    def _changed(self, address: int, change: Callable[[], object]) -> int:
        """Which word a change changes: the only one of twenty."""
        places = range(2 * WORD, 20 * WORD, WORD)
        before = [word(address + at) for at in places]
        change()
        found = [at for at, old in zip(places, before, strict=True) if word(address + at) != old]
        if len(found) != 1:
            raise LookupError("autograd")
        return found[0]

    def words(self, tensor: Tensor) -> MemoryFingerprint | None:
        """Those of a tensor, if they say what PyTorch says."""
        impl, kind = impl_of(tensor), type(tensor)
        places = id(tensor) + self.kind, id(tensor) + self.impl
        known = tensor.ndim <= _INLINE and tuple(map(word, places)) == (id(kind), impl)
        if not known or not self._describes(tensor):
            return None
        at = [*places, *(id(tensor) + offset for offset in self.hooks)]
        at += (impl + offset for offset in self._places(tensor.ndim))
        at.append(word(impl + self.storage) + self.data)
        autograd = word(impl + self.autograd)
        at += [autograd + self.requires] if autograd else []
        held: list[Any] = [tensor, kind]
        for hooks in hook_dicts_of(tensor):
            entries = None if hooks is None else of_dict(hooks)
            if hooks is not None and entries is None:
                return None
            at += entries.at if entries else ()
            held += [hooks, entries and entries.held]
        return MemoryFingerprint(tuple(at), tuple(map(word, at)), tuple(held), direct=False)

    def _places(self, ndim: int) -> list[int]:
        """From the storage to the dispatch keys; not the sizes and strides of dims that it has
        not, which are not kept."""
        unused = {
            first + WORD * at for first in (self.sizes, self.strides) for at in range(ndim, _INLINE)
        }
        places = range(self.storage, self.keys + WORD, WORD)
        return [each for each in places if each not in unused]

    def _describes(self, tensor: Tensor) -> bool:
        impl, ndim = impl_of(tensor), tensor.ndim
        sizes, strides = (
            tuple(word(impl + first + WORD * at) for at in range(ndim))
            for first in (self.sizes, self.strides)
        )
        return (
            word(impl + self.ndim) == ndim
            and sizes == tensor.shape
            and strides == tensor.stride()
            and word(impl + self.keys) == dispatch_keys(tensor)
            and word(impl + self.storage) == storage_of(tensor)
        )


def _within(address: int, held: int) -> int:
    """Where an object of PyTorch's keeps a word."""
    for offset in range(2 * WORD, 30 * WORD, WORD):
        if word(address + offset) == held:
            return offset
    raise LookupError("tensor")


def _hook(_: object) -> None: ...


@functools.cache
def _tensor_layout() -> _TensorLayout | None:
    usual = layout()
    if usual is None:
        return None
    try:
        with outside_modes(), torch.inference_mode(False), torch.enable_grad():
            found = _TensorLayout(usual.kind)
            return found if _is_seen(found) else None
    except (LookupError, RuntimeError):
        return None


def _is_seen(found: _TensorLayout) -> bool:
    """Whether changes of each kind show, and computing with a tensor does not."""
    other, leaf = torch.zeros(3, 2, **_HOST), nn.Parameter(torch.zeros(2, 3, **_HOST))
    changes: tuple[Callable[[], object], ...] = (
        lambda: leaf.detach().mul_(2),
        lambda: setattr(leaf, "grad", torch.zeros(2, 3, **_HOST)),
        lambda: setattr(leaf, "grad", None),
        lambda: setattr(leaf, "data", leaf.data.clone()),
        lambda: setattr(leaf, "data", other.t()),
        lambda: setattr(leaf, "data", other),
        lambda: leaf.requires_grad_(False),
        lambda: setattr(leaf, "data", other.double()),
        lambda: setattr(leaf, "data", other.long()),
        lambda: setattr(leaf, "data", leaf.data[:1]),
        lambda: leaf.untyped_storage().resize_(0),
    )
    shown: list[bool] = []
    for change in changes:
        before = found.words(leaf)
        if before is None:
            return False
        change()
        shown.append(tuple(map(word, before.at)) != before.expected)
    return shown == [False] * 3 + [True] * (len(changes) - 3)
