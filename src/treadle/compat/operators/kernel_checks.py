"""Operands that PyTorch's kernels reject but its fake tensors accept: tested with a kernel during
the trace.

::

    layer_norm(x: f32, weight: f64)     fake: a type.  CPU kernel: "mixed dtype (CPU): ..."
    nll_loss(x, y: i32)                 fake: a type.  CPU kernel: "expected target dtype ..."
    softmax(x, 5)                       fake: a type.  all kernels: an IndexError
    max(x: f32[0])                      fake: a type.  all kernels: "max(): Expected ..."

Generated code would compute something there. So a call whose dtypes may be rejected runs once on
one-element tensors of the same dtypes and device, with the kernel that eager would call. A call
that may be rejected because it has no elements runs on its own empty operands.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor

from treadle.compat.operators.schemas import OpOverload
from treadle.compat.tracing import outside_modes

aten = torch.ops.aten

_DTYPES_UNCHECKED = (
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.mm.default,
    aten.binary_cross_entropy.default,
    aten.huber_loss_backward.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
)
"""Operators whose fake form looks at no dtypes, that of products in PyTorch 2.11."""

_ELEMENTS_UNCHECKED = (
    aten.max.default,
    aten.max.dim,
    aten.min.default,
    aten.min.dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
)
"""Operators whose fake form does not ask for elements. Those of ``amax`` and ``argmax`` do."""

_Kinds = tuple[object, ...]


def _asks(op: OpOverload) -> Callable[..., object]:
    def ask(*args: object, **kwargs: object) -> object:
        """The error of the kernel, if it has one; traced as it is."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if _may_be_refused(tensors):
            _runs(op, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
        return NotImplemented

    return ask


def _may_be_refused(tensors: list[Tensor]) -> bool:
    """Whether they are of several dtypes, or integers that are no ``int64``; on a device of
    this process."""
    floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    whole = {tensor.dtype for tensor in tensors} - floats
    return _are_here(tensors) and (len(floats) > 1 or not whole <= {torch.int64})


def _are_here(tensors: list[Tensor]) -> bool:
    devices = {tensor.device.type for tensor in tensors}
    return devices == {"cpu"} or (devices == {"cuda"} and torch.cuda.is_available())


def _needs_elements(op: OpOverload) -> Callable[..., object]:
    def ask(x: Tensor, *args: object, **kwargs: object) -> object:
        """The error of the kernel where ``x`` has no elements, if it has one."""
        known = all(type(size) is int for size in x.shape)
        if known and 0 in x.shape and _are_here([x]):
            with outside_modes(), torch.no_grad():
                op(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs)
        return NotImplemented

    return ask


def _kind(value: object) -> object:
    """What of an operand a kernel's check looks at; integers are sizes, or choices that do not
    matter."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.dim()
    if isinstance(value, list | tuple):
        return ("sizes", *(1 for _ in value))
    return 1 if isinstance(value, int | SymInt) and not isinstance(value, bool) else value


@functools.lru_cache(maxsize=1 << 8)
def _runs(op: OpOverload, args: _Kinds, kwargs: tuple[tuple[str, object], ...]) -> None:
    """Raises what the kernel raises."""
    with outside_modes(), torch.no_grad():
        op(*map(_example, args), **{name: _example(kind) for name, kind in kwargs})


def _example(kind: Any) -> object:
    match kind:
        case (torch.dtype() as dtype, torch.device() as device, int(dims)):
            return torch.zeros([1] * dims, dtype=dtype, device=device)
        case ("sizes", *sizes):
            return sizes
        case _:
            return kind


def dim_is_there(x: Tensor, dim: int, *_: object) -> object:
    """The error of all kernels for a dim that ``x`` does not have."""
    dims = max(x.dim(), 1)
    if not -dims <= dim < dims:
        raise IndexError(
            "Dimension out of range (expected to be in range of "
            f"[{-dims}, {dims - 1}], but got {dim})"
        )
    return NotImplemented


def _squares_of_none(grad: Tensor, x: Tensor, target: Tensor, *_: object) -> object:
    """Without elements PyTorch's form in Python divides by zero; kernels have nothing to do."""
    known = all(type(size) is int for size in (*x.shape, *target.shape))
    if not known or 0 not in x.shape or x.shape != target.shape:
        return NotImplemented
    return aten.zeros_like.default(x)


KERNEL_CHECKS: Mapping[object, Callable[..., object]] = {
    **{op: _asks(op) for op in _DTYPES_UNCHECKED},
    **{op: _needs_elements(op) for op in _ELEMENTS_UNCHECKED},
    aten.mse_loss_backward.default: _squares_of_none,
    aten._softmax.default: dim_is_there,
    aten._log_softmax.default: dim_is_there,
}
"""By operator, what looks at a call, and lets it be traced as it is where a fake form can be."""
