"""The inputs of a call: looked at, and bound where they are not what they were in the last one."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treadle.runtime.execute.bindings import Bindings, same_strides
from treadle.runtime.execute.checks import check_layout, mismatch, wrong_count
from treadle.runtime.replay.unchanged_inputs import SteadyInputs
from treadle.runtime.store.artifact import Artifact


@final
class BoundInputs:
    """``tensors``: of the call that runs now. ``steady``: which of them need no look."""

    def __init__(
        self, artifact: Artifact, bindings: Bindings, steady: SteadyInputs | None = None
    ) -> None:
        self.tensors: Sequence[Tensor] = ()
        self.steady = steady
        self._specs = tuple(artifact.buffers[name] for name in artifact.inputs)
        self._uses = tuple(bindings.uses[spec.name] for spec in self._specs)
        self._device = torch.device(artifact.device)
        self.forget()

    def __len__(self) -> int:
        return len(self._specs)

    def bind(self, inputs: Sequence[Tensor], *, trusted: bool = False) -> None:
        """``RuntimeFailure`` TR-401 where one is not what the step was compiled for. ``trusted``:
        all of them have the types that they should have."""
        if len(inputs) != len(self._specs):
            raise wrong_count(len(inputs), len(self._specs))
        self.tensors = inputs
        addresses = self._addresses
        steady = self.steady
        for index in range(len(inputs)) if steady is None else steady.others(inputs):
            tensor, spec = inputs[index], self._specs[index]
            if not trusted:
                dense = tensor.layout is torch.strided
                if not dense or tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                    raise mismatch(tensor, spec)
            address = tensor.data_ptr()
            if address == addresses[index] and self._kept[index]:
                if tensor.stride() != spec.strides and not same_strides(tensor, spec):
                    raise mismatch(tensor, spec)
                continue
            if not trusted:
                check_layout(tensor, spec, self._device)
            # Views stay bound from the second call at one address on: parameters and state
            # stay in place, and a batch that moves is not kept alive between calls.
            self._kept[index] = address == addresses[index]
            addresses[index] = address
            self._uses[index].bind(tensor, spec)
        if steady is not None:
            steady.learn(inputs, self._kept)

    def clear(self) -> None:
        """The call is over: let go of those that may be elsewhere in the next one."""
        for uses, kept in zip(self._uses, self._kept, strict=True):
            if not kept:
                uses.drop()
        self.tensors = ()

    def forget(self) -> None:
        """From now on nothing is bound."""
        self._addresses = [-1] * len(self._specs)  # of the last call
        self._kept = [False] * len(self._specs)  # are views of the input bound?
        if self.steady is not None:
            self.steady.drop()
