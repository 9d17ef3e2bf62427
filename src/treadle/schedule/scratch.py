"""The memory that kernels need in addition to their operands while they run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scratch:
    """``count`` elements of ``dtype`` that nobody reads after the kernel."""

    dtype: torch.dtype
    count: int
