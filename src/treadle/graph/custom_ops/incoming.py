"""``treadle::incoming_gradient``: where a forward and a backward of one graph meet.

::

    g = incoming_gradient(results, 0, [4, 3], [3, 1], float32)

The caller has ``results``, all that the forward gives, before it knows the gradient of any. So a
graph that takes gradients by this operation is scheduled with the forward ahead of the backward,
and whoever runs it stops there.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp
from treadle.util.errors import RuntimeFailure


def _type(
    results: Sequence[Tensor], size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return results[0].new_empty_strided(size, stride, dtype=dtype)


def _nobody(*_: object) -> NoReturn:
    raise RuntimeFailure("a gradient is given by the caller, and there is none", code="TR-403")


INCOMING_GRADIENT = CustomOp(
    "incoming_gradient(Tensor[] results, int number, int[] size, int[] stride, ScalarType dtype)"
    " -> Tensor",
    fake=_type,
    kernel=_nobody,
    holds=lambda: 0,
    library="a gradient that the caller brings",
)
incoming_gradient = INCOMING_GRADIENT.op
