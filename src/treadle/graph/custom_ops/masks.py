"""``treadle::counted_mask``: zeros and ones that are a function of a key and the position.

::

    mask[i] = squares(i, keys[at]) < p * 2^32        i counts the elements in the order of size

The numbers are those of "Squares: A Fast Counter-Based RNG" (Widynski, 2020, arXiv:2004.06278),
four rounds, 32 bits. It is a single operation instead of the twenty-five that it consists of, so
that a graph stays readable and the memory planner sees that recomputing it costs almost nothing.
"""

import math

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp

WORD = 32  # bits of a random number
LOW = (1 << WORD) - 1
ROUNDS = 4


def limit(p: float) -> int:
    """A number below it is a one."""
    return round(p * (1 << WORD))


def _mask(keys: Tensor, at: int, size: list[int], p: float, dtype: torch.dtype) -> Tensor:
    """By PyTorch's kernels, whose integers wrap at 64 bits."""
    count = torch.arange(math.prod(size), dtype=torch.int64, device=keys.device)
    x = count.mul_(keys[at])
    terms = x.clone(), x + keys[at]
    for number in range(ROUNDS):
        x = x * x + terms[number % 2]
        high = (x >> WORD) & LOW
        x = high if number == ROUNDS - 1 else (x << WORD) | high
    return (x < limit(p)).to(dtype).view(size)


def _fake(keys: Tensor, size: list[int], dtype: torch.dtype) -> Tensor:
    return keys.new_empty(size, dtype=dtype)


COUNTED_MASK = CustomOp(
    "counted_mask(Tensor keys, int at, SymInt[] size, float p, ScalarType dtype) -> Tensor",
    fake=_fake,
    kernel=_mask,
    tags=(torch.Tag.pointwise,),
)
counted_mask = COUNTED_MASK.op
