"""Calls of PyTorch's C code that run no Python but PyTorch's and ours."""

import functools
from collections.abc import Callable, Iterable
from types import (
    BuiltinFunctionType,
    EllipsisType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from treadle.compat.fake import STAND_INS
from treadle.compat.operators.custom_op import replaces_gradients

_PLAIN = frozenset(
    {
        *(int, float, bool, complex, str, NoneType, EllipsisType),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
        *(Tensor, nn.Parameter, *STAND_INS),
    }
)
"""Kinds of arguments that bring no code of their own: no class of a user's, no function."""
_LISTS: frozenset[type] = frozenset({list, tuple, torch.Size})
_OURS = ("torch.", "treadle.")


@functools.cache
def is_in_c(function: Callable[..., object]) -> bool:
    """Whether it is a function of tensors or a method of theirs, written in C."""
    if isinstance(function, MethodDescriptorType | WrapperDescriptorType):
        return function.__objclass__ is torch._C.TensorBase
    if isinstance(function, MethodWrapperType):
        got: object = function.__self__
        return isinstance(got, GetSetDescriptorType) and got.__objclass__ is torch._C.TensorBase
    if not isinstance(function, BuiltinFunctionType):
        return False
    owner: object = function.__self__
    if isinstance(owner, ModuleType):
        return owner.__name__.startswith("torch._C")
    return vars(torch).get(function.__name__) is function


def are_plain(values: Iterable[Any]) -> bool:
    """Whether no argument, nor any in a list, is of a kind that others have made."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is slice:
            value = _parts(value)
        elif kind not in _LISTS:
            return False
        for part in value:
            parts = _parts(part) if type(part) is slice else (part,)
            if not _PLAIN.issuperset(map(type, parts)):
                return False
    return True


def _parts(value: Any) -> tuple[object, ...]:
    return value.start, value.stop, value.step


def dispatch_depth() -> int:
    """How many modes hear of operations."""
    return torch._C._len_torch_dispatch_stack()


def hears_functions() -> bool:
    """Whether calls may run a user's code at once: a mode of theirs, or a kernel that they gave to
    one of PyTorch's operators ahead of where a trace hears of it."""
    modes = _get_current_function_mode_stack()
    ours = all(type(mode).__module__.startswith(_OURS) for mode in modes)
    return not ours or replaces_gradients()
