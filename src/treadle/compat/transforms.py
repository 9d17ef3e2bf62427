"""Tensors within ``torch.func``, and derivatives in forward mode."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar, final

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch.autograd import forward_ad

from treadle.compat.late_modules import loading_late
from treadle.compat.operators.custom_op import kernels_replaced

P = ParamSpec("P")
T = TypeVar("T")


_FORWARD_RULES = "torch._decomp.decompositions_for_jvp"
"""What the first tangent of a process loads."""


def unwrapped(tensor: Tensor) -> Tensor:
    """What the wrappers of ``torch.func`` around a tensor hold, inside all of them."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_wrapped(tensor: Tensor) -> bool:
    """Whether it is a tensor of a transform of ``torch.func``."""
    return functorch.is_functorch_wrapped_tensor(tensor)


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs."""
    return functorch.maybe_current_level() is not None


@contextmanager
def without_vmap_fallback() -> Iterator[None]:
    """Inside, ``vmap`` raises where it would run an operation sample by sample."""
    enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(enabled)


def tensor_entries() -> tuple[tuple[object, str], ...]:
    """Functions of a tensor first that ``torch.func`` calls without asking any mode."""
    return (
        (eager_transforms, "_wrap_for_grad"),
        (functorch_vmap, "_add_batch_dim"),
        (forward_ad, "make_dual"),
    )


@final
class ForwardModeBegins(Exception):
    """A run makes the first tangent of the process: it is to be run again. TorchScript compiles
    PyTorch's rules for tangents from functions that are replaced while a run is traced."""

    def load(self) -> None:
        """Load the rules, outside a trace."""
        with loading_late():
            importlib.import_module(_FORWARD_RULES)


def with_forward_rules(make_dual: Callable[P, T]) -> Callable[P, T]:
    """``forward_ad.make_dual`` of a trace, which loads no rules."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        loads = __debug__ and os.environ.get("PYTORCH_JIT", "1") == "1"  # as PyTorch asks
        if loads and _FORWARD_RULES not in sys.modules:
            raise ForwardModeBegins
        return make_dual(*args, **kwargs)

    return call


@contextmanager
def viewed_zero_tangents() -> Iterator[None]:
    """Inside, views of tangents of zeros, which have no memory, are fake where the tangents are.
    PyTorch's own views of them ask no mode."""
    if _FORWARD_RULES not in sys.modules:  # no tangent has been made
        yield
        return
    with kernels_replaced("ZeroTensor", dict.fromkeys(("view", "as_strided"), _view_of_zeros)):
        yield


def _view_of_zeros(zeros: Tensor, size: Sequence[int], *_: object) -> Tensor:
    """Nobody can write to zeros without memory: others are as good as a view."""
    known = -math.prod(size)  # above 0 where one size is open
    shape = [zeros.numel() // known if each == -1 else each for each in size]
    return torch._efficientzerotensor(shape, dtype=zeros.dtype, device=zeros.device)
