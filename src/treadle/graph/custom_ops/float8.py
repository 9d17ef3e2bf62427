"""``treadle::to_float8``: numbers divided by their scale, as float8.

::

    y = to_float8(x, scale, dtype)        y[i] = dtype(clamp(x[i] / scale))

One operation and not four: its kernel reads ``x`` as it is, and nobody keeps what is between.
"""

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp


def _run(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (x.float() * scale.reciprocal()).clamp(-most, most).to(dtype)


TO_FLOAT8 = CustomOp(
    "to_float8(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    fake=lambda x, dtype: torch.empty_like(x, dtype=dtype),
    kernel=_run,
    tags=(torch.Tag.pointwise,),
)
