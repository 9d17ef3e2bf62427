"""What library calls allocate beside their results: measured, so that a budget can be kept.

A convolution reorders its operands, attention's backward and products of 16 bits sum in another
dtype: none of it is in the graph. Each distinct call runs once on zeros when a step is compiled,
and the answer is kept in the cache on disk.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from treadle.runtime.execute.bindings import spec_bytes
from treadle.runtime.execute.halves import widened
from treadle.runtime.execute.library_calls import resolve
from treadle.runtime.kernels.packed import LENGTHS
from treadle.runtime.meter import measure_each
from treadle.runtime.store.artifact import BufferSpec, CallStep, View
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.registry import target_for
from treadle.util.nested import Plain, map_leaves


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
        with torch.random.fork_rng(devices=self._generators()), torch.no_grad():
            runs = (_Run(step, self._device) for step in steps.values())
            peaks = measure_each(runs, self._device)
        for (key, step), peak in zip(steps.items(), peaks, strict=True):
            results = sum(spec_bytes(buffers[name]) for name in step.outputs if name)
            extra = max(0, peak - results)
            self._known[key] = extra
            self._cache.put(key, str(extra).encode())

    def _generators(self) -> list[int]:
        return target_for(self._device).driver.generators(self._device)

    def _key(self, step: CallStep, buffers: Mapping[str, BufferSpec]) -> str:
        outputs = [buffers[name] for name in step.outputs if name]
        shapes = [(spec.shape, spec.strides, str(spec.dtype)) for spec in outputs]
        facts = (
            "workspace",
            step.op,
            repr(map_leaves(_signature, (step.args, dict(sorted(step.kwargs.items()))))),
            repr(shapes),
            self.machine,
        )
        return content_key(*facts)


class _Run:
    """One call on zeros, its result dropped. Arguments exist before the measurement begins."""

    def __init__(self, step: CallStep, device: torch.device) -> None:
        self._step = step
        self._op = widened(step.op, resolve(step.op))

        def zeros(leaf: View | Plain) -> Tensor | Plain:
            return _zeros(leaf, device) if isinstance(leaf, View) else leaf

        self._args = [map_leaves(zeros, argument) for argument in step.args]
        self._kwargs = {name: map_leaves(zeros, argument) for name, argument in step.kwargs.items()}
        at = LENGTHS.get(step.op)
        if at is not None:  # no sequence may be empty
            lengths, sequences = self._args[at], self._args[at - 1]
            assert isinstance(lengths, Tensor), step.op
            assert isinstance(sequences, Tensor), step.op
            lengths.fill_(len(sequences))

    def __call__(self) -> None:
        try:
            self._op(*self._args, **self._kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise KernelRefuses(self._step, error) from error


def _zeros(view: View, device: torch.device) -> Tensor:
    size = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    storage = torch.zeros(max(size, 0), dtype=view.dtype, device=device)
    return storage.as_strided(view.shape, view.strides)


def _signature(leaf: View | Plain) -> Hashable:
    """What tells one call from another: layouts of tensors, and everything else as it is."""
    return (leaf.shape, leaf.strides, str(leaf.dtype)) if isinstance(leaf, View) else str(leaf)
