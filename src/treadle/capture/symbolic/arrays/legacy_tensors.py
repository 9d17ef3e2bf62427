"""Classes that make tensors: ``torch.Tensor(values)``, ``torch.FloatTensor(values)``.

They read real numbers from lists and arrays before any mode can intercept it. Code that calls one
is rewritten to call a function of treadle, as ``number_calls`` does for ``float``.
"""

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch

from treadle.capture.symbolic.arrays.array_functions import array_of
from treadle.capture.symbolic.arrays.arrays import is_array
from treadle.capture.symbolic.texts.text_code import codes_within


def _made(kind: Any, *args: object, **kwargs: object) -> object:
    """``kind(*args)``: of an array its memory, if it is of that dtype."""
    if len(args) == 1 and not kwargs and (is_array(args[0]) or array_of(args[0]) is not None):
        return torch.as_tensor(args[0], dtype=_dtype_of(kind), device=_device_of(kind))
    return kind(*args, **kwargs)


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
