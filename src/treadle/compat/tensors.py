"""A tensor's memory and layout, as PyTorch keeps them."""

import functools
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards


def impl_of(tensor: Tensor) -> int:
    """The address of the tensor itself, behind its object of Python's."""
    return tensor._cdata


def storage_of(tensor: Tensor) -> int:
    """The address of its storage, which views share."""
    return tensor.untyped_storage()._cdata


def address_of(storage: torch.UntypedStorage) -> int:
    """Likewise, of a storage at hand."""
    return storage._cdata


def is_held_elsewhere(storage: torch.UntypedStorage, known: int = 0) -> bool:
    """Whether memory has a holder beside one tensor, the object at hand and ``known`` others:
    another tensor, or an array; memory that is not PyTorch's own may always have one."""
    return torch._C._storage_Use_Count(storage._cdata) > 2 + known or not storage.resizable()


@functools.cache
def saturates() -> bool:
    """Whether a number that float8 e4m3 has not becomes its largest one, and not NaN: PyTorch 2.13
    does that, 2.11 does not."""
    return not bool(torch.tensor(1e9).to(torch.float8_e4m3fn).isnan())


class WrapperTensor(Tensor):
    """A base of tensors that have no memory themselves: their ``__torch_dispatch__`` says what they
    do, and PyTorch's functions give plain tensors."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def wrapping(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """One without attributes yet."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type and shape have the same elements, NaN for NaN."""
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def is_zerotensor(tensor: Tensor) -> bool:
    """Whether it is zeros that have no memory."""
    return tensor._is_zerotensor()


def are_alike(one: object, other: object) -> bool:
    """Whether both are tensors, of one shape and dtype."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def storage_key(value: object) -> int | None:
    """Equal for values that share storage; ``None`` for other objects and sparse tensors."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return storage_of(value)


def dispatch_keys(tensor: Tensor) -> int:
    """What kind of a tensor it is to PyTorch's dispatcher, as bits."""
    return torch._C._dispatch_keys(tensor).raw_repr()


class SameLayouts:
    """Whether tensors have the types that they had: class, dtype, device, sizes, strides, whether
    they want gradients. PyTorch looks at all of them at some 100 ns each; of those whose words are
    known (``tensor_fingerprint``) these are compared instead."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        sizes: Any = [list(each.shape) for each in tensors]  # their declared types are others
        strides: Any = [list(each.stride()) for each in tensors]
        self._guards = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        )

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "SameLayouts | None":
        """For these; ``None`` if some are not dense or not PyTorch's own."""
        unique = list({id(each): each for each in tensors}.values())
        known = (Tensor, nn.Parameter)
        if any(type(t) not in known or t.layout is not torch.strided for t in unique):
            return None
        found = SameLayouts(unique)
        return found if found.hold() else None

    def hold(self) -> bool:
        """Whether each is as it was. Says no as well where modes are on that change operations."""
        return self._guards.check(*self._tensors)
