"""Rolling back a step that failed midway."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treadle.capture.snapshot import Snapshot
from treadle.compiler.compiled import Compiled
from treadle.targets.registry import target_for


@dataclass(frozen=True, slots=True)
class Undo:
    """Copies of what a step overwrites, and the generators; without ``complete`` only those."""

    values: tuple[tuple[Tensor, Tensor], ...]
    random: Tensor | None  # of a step that draws
    own: tuple[tuple[torch.Generator, Tensor], ...]  # the user's generators
    cuda: tuple[Tensor, ...]
    complete: bool
    eager: tuple[Snapshot, ...] = ()
    grads: tuple[tuple[nn.Parameter, Tensor | None], ...] = ()

    @staticmethod
    def of(compiled: Compiled, inputs: Sequence[Tensor]) -> "Undo":
        """Before a call. Copies are made once per variant, in host memory, within the budget."""
        if compiled.has_run and not compiled.draws:
            return _NOTHING
        return Undo.kept(compiled, inputs, values=not compiled.has_run)

    @staticmethod
    def kept(compiled: Compiled, inputs: Sequence[Tensor], *, values: bool = True) -> "Undo":
        """Likewise, whether it has run or not; without ``values`` of the generators alone."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        random = torch.get_rng_state()
        own = tuple(
            (generator, generator.get_state()) for generator in compiled.captured.generators
        )
        if not values or not _has_room(compiled, inputs):
            return Undo((), random, own, cuda, complete=False)
        written = _written(compiled, inputs)
        copies = tuple(zip(written, copies_on_host(written), strict=True))
        eager = tuple(optimizer.snapshot() for optimizer in compiled.captured.optimizers.eager)
        grads = _grads(compiled)
        return Undo(copies, random, own, cuda, complete=True, eager=eager, grads=grads)

    def restore(self) -> bool:
        """Put everything back that was kept; whether that is all the step may have changed."""
        if self.random is not None:
            torch.set_rng_state(self.random)
        for generator, state in self.own:
            generator.set_state(state)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        with torch.no_grad():
            for tensor, value in self.values:
                tensor.copy_(value)
        for parameter, grad in self.grads:
            parameter.grad = None if grad is None else grad.to(parameter.device)
        for snapshot in self.eager:
            snapshot.restore()
        return self.complete


_ALIGNMENT = 64
"""Bytes; no dtype needs more."""
_NOTHING = Undo((), None, (), (), complete=False)


def copies_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory, those of a device's tensors in one block.

    A copy from a device into memory that the system has not given out yet waits for it page by
    page; filling the block first makes all threads ask for it.
    """
    copied = [tensor.detach() for tensor in tensors]
    places, size = [], 0
    for tensor in copied:
        places.append(size)
        size += 0 if tensor.is_cpu else -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8).zero_()
    return [
        tensor.clone()
        if tensor.is_cpu
        else _laid_out(block[at : at + tensor.nbytes], tensor).copy_(tensor)
        for at, tensor in zip(places, copied, strict=True)
    ]


def _laid_out(memory: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of the same dtype, shape and, where it has no gaps, strides."""
    strides = torch.empty_like(like, device="meta").stride()
    return memory.view(like.dtype).as_strided(like.shape, strides)


def _grads(compiled: Compiled) -> tuple[tuple[nn.Parameter, Tensor | None], ...]:
    """Gradients that the step lets go of before it runs. Those of a device are copied: its memory
    is for the step."""
    kept = set(map(id, compiled.captured.gradients.kept))
    held = [(parameter, parameter.grad) for parameter in compiled.captured.gradients.fresh]
    moved = [
        grad
        for parameter, grad in held
        if type(grad) is Tensor
        and id(parameter) not in kept
        and not target_for(grad.device).on_host
    ]
    copies = dict(zip(map(id, moved), copies_on_host(moved), strict=True))
    return tuple((parameter, copies.get(id(grad), grad)) for parameter, grad in held)


def _written(compiled: Compiled, inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs = compiled.captured.step.signature.outputs
    return [inputs[output.writes] for output in outputs if output.writes is not None]


def _has_room(compiled: Compiled, inputs: Sequence[Tensor]) -> bool:
    """Whether copies beside the planned peak stay within the budget; a GPU's are on the host."""
    budget = compiled.options.budget
    if budget is None or not target_for(compiled.artifact.device).on_host:
        return True
    if budget.nbytes is None:  # a ratio leaves no room by its meaning
        return False
    grads = (parameter.grad for parameter in compiled.captured.gradients.fresh)
    held = [*_written(compiled, inputs), *(grad for grad in grads if grad is not None)]
    size = sum(tensor.untyped_storage().nbytes() for tensor in held)
    return compiled.executable.promised_bytes + size <= budget.nbytes
