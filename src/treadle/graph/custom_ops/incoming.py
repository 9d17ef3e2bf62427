"""``treadle::incoming_gradient``: where a forward and a backward of one graph meet.

::

    g = incoming_gradient(results, 0, [4, 3], [3, 1], float32)

The caller needs ``results``, all outputs of the forward, before it knows any of their gradients. So
a graph that receives gradients through this operation is scheduled with the forward before the
backward, and its runner stops there.
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
