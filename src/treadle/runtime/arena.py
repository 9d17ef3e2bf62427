"""The one block of memory that the temporaries of a step lie in."""

import torch
from torch import Tensor

_ALIGNMENT = 64


class Arena:
    """The memory for temporaries; executables of one pattern take turns in it."""

    def __init__(self) -> None:
        self.bytes: Tensor | None = None

    def get(self, nbytes: int, device: torch.device) -> Tensor:
        """At least ``nbytes``, allocated when there are none."""
        if self.bytes is None or self.bytes.numel() < nbytes:
            self.bytes = None  # before the new one
            self.bytes = _aligned(nbytes, device)
        return self.bytes


def _aligned(nbytes: int, device: torch.device) -> Tensor:
    """``nbytes`` bytes whose address is a multiple of 64."""
    exact = torch.empty(nbytes, dtype=torch.uint8, device=device)
    shift = -exact.data_ptr() % _ALIGNMENT
    if shift == 0:
        return exact
    del exact
    longer = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    shift = -longer.data_ptr() % _ALIGNMENT
    return longer[shift : shift + nbytes]
