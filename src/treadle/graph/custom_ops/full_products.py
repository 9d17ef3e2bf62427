"""``treadle::full_bmm``: ``bmm`` in the digits of its dtype, whatever PyTorch may round.

::

    y = full_bmm(a, b)        y[i] = a[i] @ b[i]
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp
from treadle.compat.switches import full_products

aten = torch.ops.aten


def _run(a: Tensor, b: Tensor) -> Tensor:
    with full_products():
        return aten.bmm.default(a, b)


def _run_into(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    with full_products():
        return aten.bmm.out(a, b, out=out)


def _type(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def _flops(a: Sequence[int], b: Sequence[int]) -> int:
    """Of shapes."""
    return 2 * a[0] * a[1] * a[2] * b[2]


FULL_BMM_INTO = CustomOp(
    "full_bmm.out(Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)",
    fake=lambda out: out,
    kernel=_run_into,
)
"""The first one: a later overload would hide the formula of flops from PyTorch."""
FULL_BMM = CustomOp(
    "full_bmm(Tensor a, Tensor b) -> Tensor",
    fake=_type,
    kernel=_run,
    flops=_flops,
    library="a product: the vendor's library",
)
