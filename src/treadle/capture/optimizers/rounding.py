"""The compound operations of ``torch.optim``'s updates: half precisions are rounded once per
operation.

Scalars are 0-dim float64 tensors, which the in-place forms with ``alpha=`` and ``value=`` do not
take.
"""

import torch
from torch import Tensor

from treadle.util.errors import CaptureError


def add(x: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """``x + alpha * y``."""
    return (_wide(x) + _wide(y) * alpha).to(x.dtype)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """``x + value * a * b``."""
    return (_wide(x) + _wide(a) * value * _wide(b)).to(x.dtype)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """``x + value * a / b``."""
    return (_wide(x) + _wide(a) * value / _wide(b)).to(x.dtype)


def lerp(x: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """``x + weight * (end - x)``, of one dtype as in PyTorch."""
    if x.dtype is not end.dtype:
        raise CaptureError(
            f"the optimizer's state is {x.dtype}, and the gradient {end.dtype}",
            code="TR-126",
            remedy=(
                "after model.double(), half() or to(dtype), convert the state as well: "
                "optimizer.load_state_dict(optimizer.state_dict())"
            ),
        )
    return (_wide(x) + (_wide(end) - _wide(x)) * weight).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
