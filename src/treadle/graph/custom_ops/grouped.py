"""``treadle::grouped_mm``: products of groups of rows, each with its own matrix.

::

    y = grouped_mm(x, w, ends)        y[i] = x[i] @ w[g]   for ends[g - 1] <= i < ends[g]

It runs PyTorch's ``_grouped_mm``, as in eager. PyTorch infers its result type only for bfloat16,
and with other strides than the kernels have on CPUs, although these accept float32 and float16 as
well. Here all of them are supported, with the checks and the strides of the kernels.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp
from treadle.compat.operators.schemas import OpOverload

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BYTES = 16
"""Rows of operands and of results begin at multiples of that many."""


def _run(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    return aten._grouped_mm.default(a, b, ends)


def _type(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """The result, if the kernels take the operands; PyTorch's words if not."""
    _check(a, b, ends)
    groups = () if ends is None else (ends.shape[0],)
    match a.dim(), b.dim():
        case 2, 2:
            size = (*groups, a.shape[0], b.shape[1])
        case 2, 3:
            size = (a.shape[0], b.shape[2])
        case 3, 2:
            size = (a.shape[1], b.shape[1])
        case _:
            size = (a.shape[0], a.shape[1], b.shape[2])
    alignment = 1 if torch.version.hip else _BYTES // a.element_size()
    row = (size[-1] + alignment - 1) // alignment * alignment
    strides = (row, 1) if len(size) == 2 else (size[1] * row, row, 1)
    return a.new_empty_strided(size, strides)


def _check(a: Tensor, b: Tensor, ends: Tensor | None) -> None:
    for name, tensor in (("mat_a", a), ("mat2", b)):
        torch._check(
            tensor.dtype in _DTYPES,
            lambda name=name, operand=tensor: (
                f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {operand.dtype}"
            ),
        )
        torch._check(tensor.dim() in (2, 3), lambda name=name: f"{name} has to be 2 or 3d")
    flat = a.dim() == 2 or b.dim() == 2
    if not (a.dim() == 2 and b.dim() == 2):
        torch._check(
            a.shape[-1] == b.shape[-2],
            lambda: "contraction dimension of mat_a and mat_b must match",
        )
    torch._check(a.dtype == b.dtype, lambda: "expected mat_a and mat_b of one dtype")
    torch._check(
        (ends is not None) == flat,
        lambda: "Have to provide offsets if there is a 2d matrix, and none otherwise",
    )
    if ends is not None:
        torch._check(ends.dim() == 1, lambda: "offs has to be 1D")
        torch._check(ends.dtype is torch.int32, lambda: "Offsets have to be int32")
        for tensor in (a, b):
            torch._check(
                tensor.dim() == 2 or tensor.shape[0] == ends.shape[0],
                lambda: "matrix batch sizes have to match",
            )
    elif a.dim() == 3:
        torch._check(a.shape[0] == b.shape[0], lambda: "batched dimension has to match")
    _check_rows(a)
    _check_rows(b)


def _check_rows(value: Tensor) -> None:
    """One of the last two dims is dense, and the other one goes in multiples of 16 bytes."""
    columns, rows = value.stride()[-2:]
    height, width = value.shape[-2:]
    if columns == 1 and rows >= max(1, height):
        far = rows
    elif rows == 1 and columns >= max(1, width):
        far = columns
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {value.stride()} for strides and {tuple(value.shape)} "
            "for sizes"
        )
    torch._check(
        far % (_BYTES // value.element_size()) == 0,
        lambda: "strides should be multiple of 16 bytes",
    )


def _traced(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    torch._check(bias is None, lambda: "Bias not supported yet")
    torch._check(
        out_dtype in (None, a.dtype), lambda: "Grouped gemm output dtype must match `mat_a` dtype"
    )
    return grouped_mm(a, b, offs)


def _flops(a: Sequence[int], b: Sequence[int]) -> int:
    """Of shapes. Where one operand has no groups, each of its rows or columns meets one of them."""
    per_row = 2 * a[-2] * a[-1] * b[-1]
    return a[0] * per_row if len(a) == len(b) == 3 else per_row


OPERATORS = (
    CustomOp(
        "grouped_mm(Tensor a, Tensor b, Tensor? ends) -> Tensor",
        fake=_type,
        kernel=_run,
        flops=_flops,
        library="a product: the vendor's library",
    ),
)
(grouped_mm,) = (operator.op for operator in OPERATORS)

GROUPED: Mapping[OpOverload, Callable[..., Tensor]] = {aten._grouped_mm.default: _traced}
"""What to trace instead of PyTorch's operator."""
