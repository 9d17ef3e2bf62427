"""What stays allocated between the calls of a step: its place in the arena, and its constants."""

from typing import final

import torch
from torch import Tensor

from treadle.runtime.execute.arena import Arena
from treadle.runtime.execute.bindings import Bindings, spec_bytes, view_of, whole
from treadle.runtime.replay.shared_recordings import (
    Recorded,
    RecordingBytes,
    SharedRecordings,
)
from treadle.runtime.store.artifact import Artifact, BufferSpec, Storage


@final
class StepMemory:
    """A tenant of ``arena`` that binds the buffers of the artifact to the arena's block."""

    def __init__(self, artifact: Artifact, bindings: Bindings, arena: Arena) -> None:
        self.artifact = artifact
        self.constants: dict[str, Tensor] = {}
        self._bindings = bindings
        self._device = torch.device(artifact.device)
        self._arena = arena
        self._block: Tensor | None = None
        self._allocated: tuple[int, int] | None = None  # when all of it was there
        places = artifact.buffers.items()
        ours = [name for name, spec in places if spec.place is Storage.ARENA]
        self._in_block = [name for name in ours if not artifact.buffers[name].device]
        self._on_host = [name for name in ours if artifact.buffers[name].device]
        self._host_block: Tensor | None = None
        arena.join(self)

    def allocate(self) -> None:
        """Allocate block and constants if they do not exist or the block has changed."""
        if self._allocated == self._arena.stamp():
            return
        block = self._arena.get(self, self._device)
        if self._block is not block:
            self._block = block
            begin = block.data_ptr()
            for name in self._in_block:
                spec, uses = self.artifact.buffers[name], self._bindings.uses[name]
                uses.bind_pointers(begin + spec.offset)
                if uses.views:
                    uses.bind_views(self.in_arena(spec), spec)
        self._bind_host()
        if len(self.constants) < len(self.artifact.constants):
            self._place_constants()
        self._allocated = self._arena.stamp()

    def _bind_host(self) -> None:
        """Bind the buffers that are offloaded to the host."""
        block = self._arena.host.block
        if self._on_host and self._host_block is not block:
            self._host_block = block
            for name in self._on_host:
                spec = self.artifact.buffers[name]
                self._bindings.uses[name].bind(self.in_arena(spec), spec)

    def _place_constants(self) -> None:
        for name, values in self.artifact.constants.items():
            spec = self.artifact.buffers[name]
            placed = self._arena.constant(values, spec, self._device)
            self.constants[name] = placed
            self._bindings.uses[name].bind(placed, spec)

    def in_arena(self, spec: BufferSpec) -> Tensor:
        """The tensor of a buffer in the block or in the host block."""
        block = self._host_block if spec.device else self._block
        assert block is not None
        raw = block[spec.offset : spec.offset + spec_bytes(spec)]
        return view_of(raw.view(spec.dtype), whole(spec))

    def copied(self) -> Tensor | None:
        """A copy of the block."""
        return None if self._block is None else self._block.clone()

    def restore(self, copy: Tensor | None) -> None:
        """Put back what was copied."""
        if copy is not None and self._block is not None:
            self._block.copy_(copy)

    def held(self) -> list[Tensor]:
        """The block and the constants, as far as they exist."""
        block = self._arena.bytes
        return [*([] if block is None else [block]), *self.constants.values()]

    def leave_arena(self) -> None:
        """Forget the block, so that nothing here keeps its memory."""
        self._allocated = None
        if self._block is not None:
            self._block = self._host_block = None
            for name in (*self._in_block, *self._on_host):
                self._bindings.uses[name].drop()

    def keeps_block(self) -> bool:
        """Whether ``allocate`` would leave everything where it is."""
        if self._allocated is not None and self._allocated == self._arena.stamp():
            return True
        return self._block is not None and self._arena.keeps_block(self)

    @property
    def recordings(self) -> SharedRecordings:
        """The recordings of all tenants of the arena."""
        return self._arena.recordings

    def admit(self, member: Recorded, need: RecordingBytes) -> Tensor | None:
        """Memory for the fixed places of a recording, in addition to the plans; ``None`` if there
        is no room."""
        promised = self._arena.promised_bytes
        return self._arena.recordings.admit(member, need, promised, self._device)

    def give_back(self) -> None:
        """Free block and constants; the other tenants lose the block as well."""
        self._arena.free()
        self.constants, self._allocated = {}, None

    def leave(self) -> None:
        """Free the constants, and the part of the block that no other tenant needs."""
        self._arena.leave(self)
        self.constants, self._allocated = {}, None
