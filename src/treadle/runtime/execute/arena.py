"""The one block of memory for the temporaries of a step.

All variants of a step (other shapes, other paths) share one block: the largest arena stays
allocated between calls, instead of the sum of all. If the library calls of a variant allocate much
outside its arena, the block of another variant may be too large; then a block of another size
replaces it, so that no call exceeds the largest promised peak. Recorded launches contain addresses
in the block, so they are dropped with it.
"""

import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor

from treadle.runtime.execute.bindings import laid_out, same_strides, spec_bytes
from treadle.runtime.replay.shared_recordings import SharedRecordings
from treadle.runtime.store.artifact import Artifact, BufferSpec
from treadle.targets.registry import target_for

_ALIGNMENT = 64


class Tenant(Protocol):
    """An executable that uses an arena in turn with others."""

    artifact: Artifact

    def leave_arena(self) -> None:
        """Forget every view of the block, which is about to go."""
        ...


class HostBlock:
    """Host memory that the device reads and writes by itself, for values that are offloaded. It
    only grows while the arena exists."""

    def __init__(self) -> None:
        self.block: Tensor | None = None

    def suits(self, nbytes: int) -> bool:
        """Whether the block has at least this many bytes."""
        return not nbytes or (self.block is not None and self.block.numel() >= nbytes)

    def allocate(self, nbytes: int, device: torch.device) -> None:
        """Replace the block by one of this many bytes."""
        self.block = None  # before there is the new one
        self.block = target_for(device).driver.host_memory(nbytes)


class Arena:
    """The memory for temporaries; executables of one step take turns in it, under ``lock``.
    ``recordings``: of their launches.

    ``grows_only``: some tenants are in the middle of a call and keep their views, so the block may
    not be replaced by a smaller one.
    """

    def __init__(self, *, grows_only: bool = False) -> None:
        self.bytes: Tensor | None = None
        self.lock = threading.RLock() if grows_only else threading.Lock()
        self.recordings = SharedRecordings()
        self.host = HostBlock()
        self._grows_only = grows_only
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._promised: tuple[int, int] | None = None  # to how many tenants, how much
        self._changes = 0  # of the tenants and of the block
        self._kept: tuple[int, ...] = ()  # of which the recordings were within the promise
        self._constants: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def stamp(self) -> tuple[int, int]:
        """A value that changes whenever a tenant joins, leaves or dies, or the block is
        replaced."""
        return self._changes, len(self._tenants)

    def join(self, tenant: Tenant) -> None:
        """Add a tenant, which takes turns with the others from now on."""
        self._tenants.add(tenant)
        self._promised = None
        self._changes += 1

    def leave(self, tenant: Tenant) -> None:
        """Take a tenant out until its next call, and free what only it needs."""
        self._tenants.discard(tenant)
        self._promised = None
        self._changes += 1
        tenant.leave_arena()
        needed = max((other.artifact.arena_bytes for other in self._tenants), default=-1)
        if self.bytes is not None and self.bytes.numel() > needed:
            self.free(again=True)

    @property
    def promised_bytes(self) -> int:
        """The largest peak of any tenant plus the constants of all others. Apart from recordings no
        call holds more, whichever tenant ran before."""
        if self._promised is None or self._promised[0] != len(self._tenants):  # one has died
            artifacts = [tenant.artifact for tenant in self._tenants]
            peaks = (each.peak_bytes - constant_bytes(each) for each in artifacts)
            constants = {
                id(values): spec_bytes(each.buffers[name])
                for each in artifacts
                for name, values in each.constants.items()
            }
            self._promised = len(artifacts), sum(constants.values()) + max(peaks, default=0)
        return self._promised[1]

    def constant(self, values: Tensor, spec: BufferSpec, device: torch.device) -> Tensor:
        """The device copy of a constant's values. Tenants with the same values share it, such as
        those made from one pattern."""
        placed = self._constants.get(id(values))  # who holds it holds the values, too
        if placed is None:
            here = values if spec.device else values.to(device)
            placed = here if same_strides(here, spec) else laid_out(here, spec)
            self._constants[id(values)] = placed
        return placed

    def keep_promise(self) -> None:
        """Drop recordings if a plan that was added later needs their bytes."""
        recordings = self.recordings
        if not recordings.newest:
            return
        now = *self.stamp(), *recordings.stamp()
        if now != self._kept:
            recordings.keep_within(self.promised_bytes)
            self._kept = *self.stamp(), *recordings.stamp()

    def keeps_block(self, tenant: Tenant) -> bool:
        """Whether ``get`` would return the present block."""
        there = self.bytes is not None and self._suits(self.bytes.numel(), tenant.artifact)
        return there and self.host.suits(tenant.artifact.host_bytes)

    def get(self, tenant: Tenant, device: torch.device) -> Tensor:
        """A block that is large enough for ``tenant``; allocated if there is none."""
        if tenant not in self._tenants:
            self.join(tenant)
        if not self.host.suits(tenant.artifact.host_bytes):
            self._forget(again=True)  # what was recorded copies to the old one
            self.host.allocate(max(each.artifact.host_bytes for each in self._tenants), device)
        held = self.bytes
        if held is None or not self._suits(held.numel(), tenant.artifact):
            sizes = {other.artifact.arena_bytes for other in self._tenants}
            size = max(size for size in sizes if self._suits(size, tenant.artifact))
            is_first, grows = held is None, held is None or size > held.numel()
            del held
            self._free_block(again=grows)  # before there is the new one
            if grows and not is_first:  # the new one does not fit where the old one was
                target_for(device).driver.give_back()
            held = self.bytes = _aligned(size, device)
            self._changes += 1
        return held

    def free(self, *, again: bool = True) -> None:
        """Free the block and the host block; the next call allocates them again. ``again``:
        recordings are made again, however often they were made."""
        self._free_block(again=again)
        self.host.block = None

    def _free_block(self, *, again: bool) -> None:
        self._forget(again=again)
        self.bytes = None

    def _forget(self, *, again: bool) -> None:
        """Make every tenant forget its views of the blocks."""
        self.recordings.lose_all(again=again)
        for tenant in self._tenants:
            tenant.leave_arena()
        self._changes += 1

    def _suits(self, size: int, artifact: Artifact) -> bool:
        beside = artifact.peak_bytes - artifact.arena_bytes
        within = self._grows_only or beside + size <= self.promised_bytes
        return artifact.arena_bytes <= size and within


def constant_bytes(artifact: Artifact) -> int:
    """Bytes of constants that stay allocated for this artifact alone."""
    return sum(spec_bytes(artifact.buffers[name]) for name in artifact.constants)


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
