"""``treadle::counted_mask``: zeros and ones that are a function of a key and the position.

::

    mask[i] = squares(i, keys[at]) < p * 2^32        i counts the elements in the order of size

The numbers are those of "Squares: A Fast Counter-Based RNG" (Widynski, 2020, arXiv:2004.06278),
four rounds, 32 bits. An operation of its own, and not the twenty-five it is made of, so that a
graph stays readable and the memory planner sees what it is: next to nothing to compute again.
"""

import math
from typing import Any

import torch
from torch import Tensor

WORD = 32  # bits of a random number
LOW = (1 << WORD) - 1
ROUNDS = 4

_library = torch.library.Library("treadle", "DEF")
_library.define(
    "counted_mask(Tensor keys, int at, SymInt[] size, float p, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pointwise,),
)
counted_mask: Any = torch.ops.treadle.counted_mask.default


def limit(p: float) -> int:
    """A number below it is a one."""
    return round(p * (1 << WORD))


def _mask(keys: Tensor, at: int, size: list[int], p: float, dtype: torch.dtype) -> Tensor:
    """By PyTorch's kernels, whose whole numbers wrap at 64 bits."""
    count = torch.arange(math.prod(size), dtype=torch.int64, device=keys.device)
    x = count.mul_(keys[at])
    terms = x.clone(), x + keys[at]
    for number in range(ROUNDS):
        x = x * x + terms[number % 2]
        high = (x >> WORD) & LOW
        x = high if number == ROUNDS - 1 else (x << WORD) | high
    return (x < limit(p)).to(dtype).view(size)


_library.impl("counted_mask", _mask, "CompositeExplicitAutograd")


def _fake(keys: Tensor, at: int, size: list[int], p: float, dtype: torch.dtype) -> Tensor:
    return keys.new_empty(size, dtype=dtype)


torch.library.register_fake("treadle::counted_mask", _fake, lib=_library)


__all__ = ["LOW", "ROUNDS", "WORD", "counted_mask", "limit"]
