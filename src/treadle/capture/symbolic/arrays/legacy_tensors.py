"""Classes that make tensors: ``torch.Tensor(values)``, ``torch.FloatTensor(values)``.

They read real numbers from lists and arrays before any mode can intercept it. Code that calls one
is rewritten to call a function of treadle, as ``number_calls`` does for ``float``.
"""

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from treadle.capture.symbolic.arrays.array_functions import array_of
from treadle.capture.symbolic.arrays.arrays import is_array
from treadle.capture.symbolic.arrays.listed_tensors import leaves
from treadle.capture.symbolic.numbers import is_stand_in, value_now
from treadle.capture.symbolic.texts.text_code import codes_within


def _made(kind: Any, *args: object, **kwargs: object) -> object:
    """``kind(*args)``: of an array its memory, if it is of that dtype; of lists that contain
    tensors or numbers that are known later, what ``torch.tensor`` makes of them."""
    if len(args) != 1 or kwargs:
        return kind(*args, **kwargs)
    dtype, device = _dtype_of(kind), _device_of(kind)
    if is_array(args[0]) or array_of(args[0]) is not None:
        return torch.as_tensor(args[0], dtype=dtype, device=device)
    if _are_listed(args[0], dtype):
        return torch.tensor(args[0], dtype=dtype, device=device)
    return kind(*args, **kwargs)


def _are_listed(value: object, dtype: torch.dtype) -> bool:
    """Whether ``value`` is such lists, of numbers that this dtype has without rounding them down to
    whole ones."""
    if type(value) not in (list, tuple):
        return False
    found = list(leaves(value))
    if not any(isinstance(leaf, Tensor) or is_stand_in(leaf) for leaf in found):
        return False
    if dtype.is_floating_point:
        return True
    return not any(_is_float(leaf) for leaf in found)


def _is_float(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    return isinstance(value_now(leaf), float)


def _dtype_of(kind: Any) -> torch.dtype:
    return torch.get_default_dtype() if kind is torch.Tensor else kind.dtype


def _device_of(kind: object) -> str:
    return "cuda" if kind.__module__ == "torch.cuda" else "cpu"


def _classes() -> dict[type, Callable[..., object]]:
    names = ("Half", "BFloat16", "Float", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
    kinds = [getattr(m, f"{name}Tensor", None) for m in (torch, torch.cuda) for name in names]
    classes = [torch.Tensor, *(kind for kind in kinds if kind is not None)]
    return {kind: functools.partial(_made, kind) for kind in classes}


LEGACY: Mapping[Any, Callable[..., object]] = _classes()
"""What is called in the place of each of them."""

NAMES = frozenset(kind.__name__ for kind in LEGACY)


def maker(function: object) -> object:
    """What is called in the place of ``function``; itself, if it is another."""
    try:
        return LEGACY.get(function, function)
    except TypeError:  # it cannot be a key
        return function


def names(code: CodeType) -> bool:
    """Whether code may call one of them as an attribute, or what is defined in it."""
    return not NAMES.isdisjoint(code.co_names) or any(map(names, codes_within(code)))
