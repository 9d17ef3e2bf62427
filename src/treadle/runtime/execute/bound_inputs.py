"""The inputs of a call: checked, and bound if they differ from the last call."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import final

import torch
from torch import Tensor

from treadle.runtime.execute.bindings import Bindings, BufferUses, same_strides
from treadle.runtime.execute.checks import check_layout, mismatch, wrong_count
from treadle.runtime.replay.unchanged_inputs import SteadyInputs, Vouched
from treadle.runtime.store.artifact import Artifact, BufferSpec

GONE = torch.empty(0, device="cpu")
"""Stands in the place of a tensor that a call has released."""


@final
class BoundInputs:
    """``tensors``: the inputs of the call that runs now. ``steady``: which of them need no check;
    ``moving``: which are released after each call, even if the next call gets the same."""

    def __init__(
        self,
        artifact: Artifact,
        bindings: Bindings,
        steady: SteadyInputs | None = None,
        moving: frozenset[int] = frozenset(),
    ) -> None:
        self.tensors: Sequence[Tensor] = ()
        self.steady = steady
        buffers = [artifact.buffers[name] for name in artifact.inputs]
        self._inputs = tuple(
            _Input(spec, bindings.uses[spec.name], may_stay=at not in moving)
            for at, spec in enumerate(buffers)
        )
        self._passing: list[_Input] = []  # bound for this call alone
        self._device = torch.device(artifact.device)

    def __len__(self) -> int:
        return len(self._inputs)

    def bind(
        self, inputs: Sequence[Tensor], *, trusted: bool = False, vouched: Vouched = ()
    ) -> None:
        """Bind the inputs of a call. ``RuntimeFailure`` TR-401 if one is not what the step was
        compiled for. ``trusted``: all of them are known to have the right types."""
        if len(inputs) != len(self._inputs):
            raise wrong_count(len(inputs), len(self._inputs))
        self.tensors = inputs
        steady = self.steady
        others = range(len(inputs)) if steady is None else steady.others(inputs, vouched)
        for index in others:
            tensor, bound = inputs[index], self._inputs[index]
            spec = bound.spec
            if not trusted:
                dense = tensor.layout is torch.strided
                if not dense or tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                    raise mismatch(tensor, spec)
            address = tensor.data_ptr()
            is_known = address == bound.address and bound.tensor() is tensor
            if bound.stays and is_known:
                if tensor.stride() != spec.strides and not same_strides(tensor, spec):
                    raise mismatch(tensor, spec)
                continue
            if not trusted:
                check_layout(tensor, spec, self._device)
            bound.bind(tensor, address, again=is_known)
            if not bound.stays:
                self._passing.append(bound)
        if steady is not None and not steady.is_known:
            steady.learn(inputs, [bound.stays for bound in self._inputs])

    def let_go(self, names: Collection[str]) -> None:
        """Release inputs of the call that runs now."""
        tensors = list(self.tensors)
        for at, bound in enumerate(self._inputs):
            if bound.spec.name in names:
                tensors[at] = GONE
                if not bound.stays:
                    bound.uses.drop()
        self.tensors = tensors

    def clear(self) -> None:
        """End the call: release the inputs that may be elsewhere in the next one."""
        for bound in self._passing:
            bound.uses.drop()
        self._passing.clear()
        self.tensors = ()

    def forget(self) -> None:
        """Release all inputs."""
        for bound in self._inputs:
            bound.forget()
        if self.steady is not None:
            self.steady.drop()


class _Input:
    """One input. Its views stay bound from the second call with the same tensor on. So parameters
    and state stay bound, while neither a batch nor the inputs of a backward are kept alive between
    calls. The address alone does not identify a tensor: an allocator may give a new tensor the
    address of a freed one."""

    __slots__ = ("_may_stay", "address", "spec", "stays", "tensor", "uses")

    def __init__(self, spec: BufferSpec, uses: BufferUses, *, may_stay: bool) -> None:
        self.spec, self.uses, self._may_stay = spec, uses, may_stay
        self.forget()

    def forget(self) -> None:
        """Forget the tensor."""
        self.address = -1  # in the last call
        self.stays = False  # do its views stay bound?
        self.tensor: Callable[[], Tensor | None] = _no_tensor  # of the last call, if it is there

    def bind(self, tensor: Tensor, address: int, *, again: bool) -> None:
        """Bind the input to ``tensor``, which is at ``address``; ``again``: it is that of the last
        call."""
        self.stays = again and self._may_stay
        if not again:
            self.tensor, self.address = weakref.ref(tensor), address
        self.uses.bind(tensor, self.spec, address)


def _no_tensor() -> None:
    return None
