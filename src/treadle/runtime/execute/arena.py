"""The one block of memory that the temporaries of a step lie in.

All variants of a step (other shapes, other paths) take turns in one block: what stays between
calls is the largest arena and not the sum of all. A variant whose library calls hold much beside
its arena may find the block of another one too large; then a block of another size takes its
place, so that no call holds more than the largest peak that was promised.
"""

import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor

from treadle.runtime.store.artifact import Artifact

_ALIGNMENT = 64


class Tenant(Protocol):
    """What lies in an arena, in turn with others."""

    artifact: Artifact

    def leave_arena(self) -> None:
        """Forget every view of the block, which is about to go."""
        ...


class Arena:
    """The memory for temporaries; executables of one step take turns in it, under ``lock``.

    ``grows_only``: tenants that are in the middle of something keep their views, so the block may
    not be exchanged for a smaller one.
    """

    def __init__(self, *, grows_only: bool = False) -> None:
        self.bytes: Tensor | None = None
        self.lock = threading.RLock() if grows_only else threading.Lock()
        self._grows_only = grows_only
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()

    def join(self, tenant: Tenant) -> None:
        """From now on it takes turns with the others."""
        self._tenants.add(tenant)

    @property
    def promised_bytes(self) -> int:
        """The largest peak of any tenant: no call holds more, whoever was there before."""
        return max((tenant.artifact.peak_bytes for tenant in self._tenants), default=0)

    def get(self, tenant: Tenant, device: torch.device) -> Tensor:
        """A block that is large enough for ``tenant``, allocated when there is none."""
        held = self.bytes
        if held is None or not self._suits(held.numel(), tenant.artifact):
            self.give_back()  # before the new one
            sizes = {other.artifact.arena_bytes for other in self._tenants}
            suiting = [size for size in sizes if self._suits(size, tenant.artifact)]
            held = self.bytes = _aligned(max(suiting), device)
        return held

    def give_back(self) -> None:
        """Free the block; the next call allocates it again."""
        for tenant in self._tenants:
            tenant.leave_arena()
        self.bytes = None

    def _suits(self, size: int, artifact: Artifact) -> bool:
        beside = artifact.peak_bytes - artifact.arena_bytes
        within = self._grows_only or beside + size <= self.promised_bytes
        return artifact.arena_bytes <= size and within


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
