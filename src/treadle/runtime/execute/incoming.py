"""The inputs of a call that are not on the device at its beginning: inputs on the host when a step
on a GPU is called, and the gradients of a forward's results, which arrive after it has run.

Each input on the host is copied on a separate stream, so the copy from pinned memory overlaps with
the previous step on the GPU; the step's own stream waits for it, the host does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treadle.runtime.execute.bindings import Live
from treadle.runtime.execute.bound_inputs import GONE, BoundInputs
from treadle.runtime.store.artifact import Artifact, CallStep, Storage, View
from treadle.targets.registry import target_for

_COPY = "aten._to_copy.default"
INCOMING = "treadle.incoming_gradient.default"
"""The operator of a step that brings one of ``Incoming.gradients``."""


@final
@dataclass(frozen=True, slots=True)
class HostInput:
    """An input that a step brings from the host to a GPU: its position among the inputs, the buffer
    that it fills, and whether the host may have to wait."""

    position: int
    buffer: str
    may_wait: bool


@final
class Incoming:
    """Copies of a call's ``inputs`` from the host to the device of ``artifact``. ``brought``: the
    copies that the call already has, by position; ``gradients``: those of its results, once they
    are known."""

    def __init__(self, artifact: Artifact, inputs: BoundInputs, live: Live) -> None:
        self.brought: Mapping[int, Tensor] = {}
        self.gradients: list[Tensor] = []
        self._buffers = artifact.buffers
        self._device = torch.device(artifact.device)
        self._inputs = inputs
        self._live = live
        imports = (imported(artifact, step) for step in artifact.steps)
        self._imports = {
            host_input.position: host_input for host_input in imports if host_input is not None
        }
        self._stream: torch.cuda.Stream | None = None

    def fill(self, host_input: HostInput) -> None:
        """Run the step that brings an input: bind its buffer to the copy."""
        place = self.brought.get(host_input.position)
        copy = self._copied(self._inputs.tensors, host_input) if place is None else place
        self._live.define(self._buffers[host_input.buffer], copy)

    def gradient(self, _results: object, number: int, *_type: object) -> Tensor:
        """Return one of the gradients and release it here."""
        taken, self.gradients[number] = self.gradients[number], GONE
        return taken

    def copy(self, inputs: Sequence[Tensor], position: int) -> Tensor:
        """A copy on the device of one of ``inputs`` that is on the host, for the current stream."""
        return self._copied(inputs, self._imports[position])

    def _copied(self, inputs: Sequence[Tensor], host_input: HostInput) -> Tensor:
        """If the host may wait, the caller may overwrite the input as soon as the step returns:
        pageable memory has been read by then, and for pinned memory the host waits until it has
        been read."""
        source, spec = inputs[host_input.position], self._buffers[host_input.buffer]
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            target = torch.empty_strided(
                spec.shape, spec.strides, dtype=spec.dtype, device=self._device
            )
            target.copy_(source, non_blocking=True)
        current.wait_stream(stream)
        target.record_stream(current)
        if host_input.may_wait and source.is_pinned():
            stream.synchronize()
        return target


def imported(artifact: Artifact, step: object) -> HostInput | None:
    """The input that a step brings from the host to a GPU, if the step does nothing else."""
    if target_for(artifact.device).on_host or not isinstance(step, CallStep):
        return None
    source = step.args[0] if step.op == _COPY and len(step.args) == 1 else None
    if not isinstance(source, View) or source.buffer not in artifact.inputs:
        return None
    (target,) = step.outputs
    spec = artifact.buffers[source.buffer]
    if spec.place is not Storage.INPUT or not spec.device or target is None:
        return None
    if artifact.buffers[target].device:
        return None
    may_wait = not step.kwargs.get("non_blocking", False)
    return HostInput(artifact.inputs.index(source.buffer), target, may_wait)
