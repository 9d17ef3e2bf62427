"""Inputs that are on the host when a step on a GPU is called.

Each is copied on a stream of its own, so that the copy of pinned memory goes on while the GPU
still works at the step before; the step's own stream waits for it, the host does not.
"""

import torch
from torch import Tensor

from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep, Storage, View
from treadle.targets.registry import target_for

_COPY = "aten._to_copy.default"


class Incoming:
    """Copies from the host to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def copy(self, source: Tensor, spec: BufferSpec, *, may_wait: bool) -> Tensor:
        """``source`` on the device, in the layout of ``spec``, for the current stream.

        ``may_wait``: the caller may overwrite ``source`` as soon as the step returns. Pageable
        memory has been read by then; for pinned memory the host waits until it has.
        """
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            target = torch.empty_strided(
                spec.shape, spec.strides, dtype=spec.dtype, device=self._device
            )
            target.copy_(source, non_blocking=True)
        current.wait_stream(stream)
        target.record_stream(current)
        if may_wait and source.is_pinned():
            stream.synchronize()
        return target


def imported(artifact: Artifact, step: object) -> tuple[int, str, bool] | None:
    """Of a step that brings an input from the host to a GPU: the input's position, the buffer it
    fills, and whether the host may have to wait; ``None`` for any other step."""
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
    return artifact.inputs.index(source.buffer), target, not step.kwargs.get("non_blocking", False)
