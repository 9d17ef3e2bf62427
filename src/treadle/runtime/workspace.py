"""The workspace of library calls: measured, so that a budget can be kept.

A convolution reorders its operands, attention's backward and products of 16 bits sum in another
dtype: none of this is in the graph. Each distinct call runs on zeros when a step is compiled, or on
other values if its operator rejects zeros, and the result is cached on disk.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from treadle.compat.operators.operator_facts import facts_by_name
from treadle.runtime.execute.bindings import laid_out, same_strides, spec_bytes
from treadle.runtime.execute.halves import widened
from treadle.runtime.execute.library_calls import resolve
from treadle.runtime.kernels.packed import LENGTHS
from treadle.runtime.meter import measure_each
from treadle.runtime.store.artifact import BufferSpec, CallStep, View
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.registry import target_for
from treadle.util.nested import Plain, map_leaves

_SCALES = (0.01, 1.0, 30.0)
"""Of invented matrices."""


class KernelRefuses(Exception):
    """PyTorch's kernel does not take operands of these types: ``step`` would fail in every call."""

    def __init__(self, step: CallStep, error: Exception) -> None:
        super().__init__(str(error))
        self.step, self.error = step, error


class Workspaces:
    """Measured workspaces by call; ``device`` is where calls run, ``machine`` the identity of all
    else that a measurement depends on."""

    def __init__(self, cache: Cache, device: str, machine: str) -> None:
        self._cache = cache
        self.machine = machine
        self._device = torch.device(device)
        self._known: dict[str, int] = {}

    @property
    def on_host(self) -> bool:
        """Whether calls run on the CPU."""
        return target_for(self._device).on_host

    def of(self, steps: Sequence[CallStep], buffers: Mapping[str, BufferSpec]) -> list[int]:
        """Bytes that each call holds while it runs, its arguments and results left out.
        ``KernelRefuses`` for one that cannot run."""
        keys = [self._key(step, buffers) for step in steps]
        missing: dict[str, CallStep] = {}
        for key, step in zip(keys, steps, strict=True):
            if key not in self._known:
                workspace = self._cache.get(key)
                if workspace is None:
                    missing[key] = step
                else:
                    self._known[key] = int(workspace)
        if missing:
            self._measure(missing, buffers)
        return [self._known[key] for key in keys]

    def _measure(self, steps: Mapping[str, CallStep], buffers: Mapping[str, BufferSpec]) -> None:
        """All of them in one session of the meter, each with arguments that are gone before the
        next but one has its own. The generators stay as they were."""
        scaled = [(key, step, scale) for key, step in steps.items() for scale in _scales_of(step)]
        with torch.random.fork_rng(devices=self._generators()), torch.no_grad():
            runs = (
                _Run(step, [buffers[name] for name in step.outputs if name], self._device, scale)
                for _, step, scale in scaled
            )
            peaks = measure_each(runs, self._device)
        largest: dict[str, int] = {}
        for (key, step, _), peak in zip(scaled, peaks, strict=True):
            results = sum(spec_bytes(buffers[name]) for name in step.outputs if name)
            largest[key] = max(0, peak - results, largest.get(key, 0))
        for key, extra in largest.items():
            self._known[key] = extra
            self._cache.put(key, str(extra).encode())

    def _generators(self) -> list[int]:
        return target_for(self._device).driver.generators(self._device)

    def _key(self, step: CallStep, buffers: Mapping[str, BufferSpec]) -> str:
        outputs = [buffers[name] for name in step.outputs if name]
        shapes = [(spec.shape, spec.strides, str(spec.dtype)) for spec in outputs]
        facts = (
            "workspace 3",  # of several scales, with copies of results
            step.op,
            repr(map_leaves(_signature, (step.args, dict(sorted(step.kwargs.items()))))),
            repr(shapes),
            self.machine,
        )
        return content_key(*facts)


def _scales_of(step: CallStep) -> tuple[float, ...]:
    """Sizes of the numbers that a call is run on: how many terms an exponential of a matrix has
    depends on them, and what they are kept in."""
    return _SCALES if facts_by_name(step.op).invented == "matrices" else (1.0,)


class _Run:
    """One call on zeros, or on what else its operator may be given, its results dropped, which are
    laid out as the step needs them before. Arguments exist before the measurement begins."""

    def __init__(
        self, step: CallStep, specs: Sequence[BufferSpec], device: torch.device, scale: float
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
                    return zeros

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

    def __call__(self) -> None:
        try:
            result = self._op(*self._args, **self._kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise KernelRefuses(self._step, error) from error
        results = result if isinstance(result, tuple | list) else (result,)
        named = [each for each, name in zip(results, self._step.outputs, strict=False) if name]
        pairs = zip(named, self._specs, strict=False)
        copies = [
            laid_out(each, spec)
            for each, spec in pairs
            if isinstance(each, Tensor)
            and each.shape == spec.shape
            and not same_strides(each, spec)
        ]
        del copies  # all of them are there at once


def _zeros(view: View, device: torch.device) -> Tensor:
    size = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    storage = torch.zeros(max(size, 0), dtype=view.dtype, device=device)
    return storage.as_strided(view.shape, view.strides)


def _is_apart(tensor: Tensor) -> bool:
    """Whether no two elements are the same memory, as far as strides say it."""
    return all(stride or n < 2 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _as_matrices(zeros: Tensor, scale: float) -> Tensor:
    """Matrices that have an inverse, roots and a factor of each kind; numbers from 1 on where they
    are whole ones."""
    if not _is_apart(zeros):
        return zeros
    if not (zeros.is_floating_point() or zeros.is_complex()):
        return zeros.copy_(torch.arange(1, zeros.shape[-1] + 1)) if zeros.ndim else zeros
    filled = zeros.uniform_(0, 0.1 / max(zeros.shape[-1], 1)) if zeros.ndim else zeros
    if zeros.ndim > 1:
        filled.diagonal(dim1=-2, dim2=-1).fill_(1)
    return filled.mul_(scale)


def _signature(leaf: View | Plain) -> Hashable:
    """What tells one call from another: layouts of tensors, and everything else as it is."""
    return (leaf.shape, leaf.strides, str(leaf.dtype)) if isinstance(leaf, View) else str(leaf)
