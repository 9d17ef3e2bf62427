"""Library calls on invented data, to measure what they allocate and how long they take."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from treadle.compat.operators.operator_facts import facts_by_name
from treadle.runtime.execute.bindings import laid_out, same_strides, spec_bytes
from treadle.runtime.execute.halves import widened
from treadle.runtime.execute.library_calls import resolve, shares_memory
from treadle.runtime.kernels.packed import LENGTHS
from treadle.runtime.store.artifact import BufferSpec, CallStep, View
from treadle.util.memory import memory_start
from treadle.util.nested import Plain, leaves, map_leaves


class KernelRefuses(Exception):
    """PyTorch's kernel does not take operands of these types: ``step`` would fail in every call."""

    def __init__(self, step: CallStep, error: Exception) -> None:
        super().__init__(str(error))
        self.step, self.error = step, error


class InventedCall:
    """One call on zeros, or on other data if its operator rejects zeros. Its results are laid out
    as the step needs them, and then dropped. The arguments exist before the measurement begins.
    ``drawn``: floating-point numbers from 0 to 1 instead of zeros, for a kernel or a device that
    has less to do with zeros."""

    def __init__(
        self,
        step: CallStep,
        specs: Sequence[BufferSpec],
        device: torch.device,
        scale: float = 1.0,
        *,
        drawn: bool = False,
    ) -> None:
        self._step, self._specs = step, specs
        self._op = widened(step.op, resolve(step.op))
        invented = facts_by_name(step.op).invented

        def filled(leaf: View | Plain) -> Tensor | Plain:
            if not isinstance(leaf, View):
                return leaf
            zeros = _zeros(leaf, device)
            match invented:
                case "matrices":
                    return _as_matrices(zeros, scale)
                case "ones":
                    return zeros.fill_(1) if _is_apart(zeros) else zeros + 1
                case _:
                    return _drawn(leaf, device) if drawn else zeros

        self._args = [map_leaves(filled, argument) for argument in step.args]
        self._kwargs = {name: map_leaves(filled, arg) for name, arg in step.kwargs.items()}
        if invented == "bags":
            self._fill_bags()
        if invented == "bag sizes":
            sizes = self._args[4]
            assert isinstance(sizes, Tensor), step.op
            sizes.fill_(1)
        at = LENGTHS.get(step.op)
        if at is not None:  # no sequence may be empty
            lengths, sequences = self._args[at], self._args[at - 1]
            assert isinstance(lengths, Tensor), step.op
            assert isinstance(sequences, Tensor), step.op
            lengths.fill_(len(sequences))

    def _fill_bags(self) -> None:
        """The indices divided evenly, the last offset at their end where that is one."""
        indices, offsets = self._args[1:3]
        assert isinstance(indices, Tensor), self._step.op
        assert isinstance(offsets, Tensor), self._step.op
        ends = torch.arange(len(offsets), device=offsets.device) * len(indices)
        has_end = self._args[7:8] == [True] or self._kwargs.get("include_last_offset")
        offsets.copy_(ends // max(len(offsets) - bool(has_end), 1))

    def __call__(self) -> list[int]:
        """The bytes that PyTorch allocates for each result beyond those of its elements: some
        operators give a part of a larger storage."""
        try:
            result = self._op(*self._args, **self._kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise KernelRefuses(self._step, error) from error
        results = result if isinstance(result, tuple | list) else (result,)
        named = [each for each, name in zip(results, self._step.outputs, strict=False) if name]
        given = (*self._args, *self._kwargs.values())
        taken = {memory_start(leaf) for leaf in leaves(given) if isinstance(leaf, Tensor)} - {0}
        pairs = zip(named, self._specs, strict=False)
        placed = [_placed(each, spec, taken) for each, spec in pairs]  # all copies exist at once
        return [_spare(each, spec) for each, spec in zip(placed, self._specs, strict=False)]


def _placed(result: object, spec: BufferSpec, taken: set[int]) -> object:
    """The result, or the copy that the step makes of it. ``taken``: the memory of the arguments."""
    if not isinstance(result, Tensor) or result.shape != spec.shape:
        return result  # the step refuses it when it runs
    other = result.dtype is not spec.dtype or not same_strides(result, spec)
    return laid_out(result, spec) if other or shares_memory(result, taken) else result


def _spare(result: object, spec: BufferSpec) -> int:
    if not isinstance(result, Tensor) or result.layout is not torch.strided:
        return 0
    return max(0, result.untyped_storage().nbytes() - spec_bytes(spec))


def _zeros(view: View, device: torch.device) -> Tensor:
    size = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    storage = torch.zeros(max(size, 0), dtype=view.dtype, device=device)
    return storage.as_strided(view.shape, view.strides)


def _drawn(view: View, device: torch.device) -> Tensor:
    """Always the same numbers, whatever the generators of the process."""
    zeros = _zeros(view, device)
    if view.dtype.is_floating_point and view.dtype.itemsize > 1:
        storage = zeros.as_strided((zeros.untyped_storage().nbytes() // view.dtype.itemsize,), (1,))
        storage.uniform_(0, 1, generator=torch.Generator(device).manual_seed(0))
    return zeros


def _is_apart(tensor: Tensor) -> bool:
    """Whether no two elements share memory, as far as the strides tell."""
    return all(stride or n < 2 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _as_matrices(zeros: Tensor, scale: float) -> Tensor:
    """Matrices that have an inverse, roots and all factorizations; for integers the numbers from 1
    on."""
    if not _is_apart(zeros):
        return zeros
    if not (zeros.is_floating_point() or zeros.is_complex()):
        return zeros.copy_(torch.arange(1, zeros.shape[-1] + 1)) if zeros.ndim else zeros
    filled = zeros.uniform_(0, 0.1 / max(zeros.shape[-1], 1)) if zeros.ndim else zeros
    if zeros.ndim > 1:
        filled.diagonal(dim1=-2, dim2=-1).fill_(1)
    return filled.mul_(scale)


def signature_of(step: CallStep) -> str:
    """What tells the arguments of one call from those of another: layouts of tensors, and
    everything else as it is."""
    return repr(map_leaves(_signature, (step.args, dict(sorted(step.kwargs.items())))))


def _signature(leaf: View | Plain) -> Hashable:
    """What tells one call from another: layouts of tensors, and everything else as it is."""
    return (leaf.shape, leaf.strides, str(leaf.dtype)) if isinstance(leaf, View) else str(leaf)
