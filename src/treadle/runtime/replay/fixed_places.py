"""The places of a recording's inputs: inputs that move from call to call are copied to fixed
places, the others are where they were during the recording."""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from treadle.runtime.execute.bindings import same_strides, spec_bytes, view_of, whole
from treadle.runtime.execute.call_frame import CallFrame
from treadle.runtime.replay.replay_policy import ReplayPolicy
from treadle.runtime.replay.unchanged_inputs import SteadyInputs, Vouched, WatchedInputs
from treadle.runtime.store.artifact import Artifact, BufferSpec

_ALIGNMENT = 256
"""The alignment of the allocator's own tensors, so that kernels read places in the same widths."""


@final
class FixedPlaces:
    """``placeable``: the inputs that may have places. Which of them move is learned from calls."""

    def __init__(
        self, artifact: Artifact, frame: CallFrame, policy: ReplayPolicy, placeable: frozenset[int]
    ) -> None:
        self._specs = [artifact.buffers[name] for name in artifact.inputs]
        self._device = torch.device(artifact.device)
        self._frame, self._policy, self._placeable = frame, policy, placeable
        hosted = {at for at, spec in enumerate(self._specs) if spec.device}
        self._moving = (policy.moving | hosted) & placeable
        self._addresses: list[int] = []
        self._stays: list[bool] = []  # by input, whether it was recorded where it is
        self.drop()

    def drop(self) -> None:
        """Forget the places."""
        self._places: dict[int, Tensor] = {}
        self._steady: SteadyInputs | None = None  # of what stays, what is the same tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the places of all moving inputs."""
        return place_bytes(self._specs[at] for at in self._moving)

    @property
    def are_written(self) -> bool:
        """Whether the step writes to an input that would be copied to a place."""
        return bool(self._moving & self._policy.written)

    def observe(self, inputs: Sequence[Tensor]) -> None:
        """Note the inputs that are elsewhere than in the previous call as moving, unless the step
        writes to them."""
        addresses = [input_.data_ptr() for input_ in inputs]
        if self._addresses:
            pairs = zip(addresses, self._addresses, strict=True)
            moved = {at for at, (a, b) in enumerate(pairs) if a != b}
            self._moving |= (moved & self._placeable) - self._policy.written
        self._addresses = addresses

    def are_alike(self, inputs: Sequence[Tensor]) -> bool:
        """Whether all moving inputs have the layouts of their places."""
        return all(self._is_alike(inputs[at], at) for at in sorted(self._moving))

    def settle(self, inputs: Sequence[Tensor], memory: Tensor) -> None:
        """Fix the places: the moving inputs, by their numbers, get places in ``memory``, and the
        rest stays."""
        moving = sorted(self._moving)
        self._places = dict(
            zip(moving, places_in(memory, [self._specs[at] for at in moving]), strict=True)
        )
        self._addresses = [input_.data_ptr() for input_ in inputs]
        fixed = self._placeable - self._places.keys()
        self._stays = [at in fixed for at in range(len(inputs))]
        self._steady = self._policy.steady_inputs(len(inputs), frozenset(self._places))
        self.fill(inputs)

    @property
    def watched(self) -> WatchedInputs | None:
        """The inputs that stay, which ``fit`` checks."""
        return None if self._steady is None else self._steady.watched

    def fit(self, inputs: Sequence[Tensor], vouched: Vouched = ()) -> bool:
        """Whether the recording is valid for these inputs: moving ones have the layouts of their
        places, and no other one has moved."""
        for at in self._places:
            if not self._is_alike(inputs[at], at):
                return False
        steady = self._steady
        others = range(len(inputs)) if steady is None else steady.others(inputs, vouched)
        moved = {at for at in others if self._stays[at] and self._has_moved(inputs[at], at)}
        if moved:
            self._moving |= moved - self._policy.written
        elif steady is not None and not steady.is_known:
            steady.learn(inputs, self._stays)
        return not moved

    def _has_moved(self, tensor: Tensor, at: int) -> bool:
        return tensor.data_ptr() != self._addresses[at] or tensor.dtype is not self._specs[at].dtype

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """Copy moving inputs to their places."""
        for at, place in self._places.items():
            hosted = self._specs[at].device
            place.copy_(self._frame.bring(inputs, at) if hosted else inputs[at])

    def bound(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """The inputs with places for those that move, and the places of those from the host."""
        brought = {at: place for at, place in self._places.items() if self._specs[at].device}
        bound = [
            input_ if at in brought else self._places.get(at, input_)
            for at, input_ in enumerate(inputs)
        ]
        return bound, brought

    def _is_alike(self, tensor: Tensor, at: int) -> bool:
        spec = self._specs[at]
        return (
            tensor.shape == spec.shape
            and tensor.dtype is spec.dtype
            and tensor.device.type == (spec.device or self._device.type)
            and (tensor.stride() == spec.strides or same_strides(tensor, spec))
        )


def place_bytes(specs: Iterable[BufferSpec]) -> int:
    """Bytes of memory that has a place for each."""
    return sum(_rounded(spec_bytes(spec)) for spec in specs)


def places_in(memory: Tensor, specs: Iterable[BufferSpec]) -> list[Tensor]:
    """The places in ``memory``, one after another."""
    places: list[Tensor] = []
    start = 0
    for spec in specs:
        raw = memory[start : start + spec_bytes(spec)]
        places.append(view_of(raw.view(spec.dtype), whole(spec)))
        start += _rounded(spec_bytes(spec))
    return places


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
