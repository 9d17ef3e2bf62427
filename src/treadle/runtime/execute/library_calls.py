"""Library calls of an artifact as actions: the operator, its arguments, where its results go."""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from treadle.compat.tensors import is_zerotensor
from treadle.runtime.execute.bindings import Container, Slot, laid_out, same_strides
from treadle.runtime.execute.functional import NAMESPACE, named
from treadle.runtime.store.artifact import BufferSpec, View
from treadle.util.errors import RuntimeFailure, require
from treadle.util.memory import memory_start
from treadle.util.nested import leaves

_PYTHON = {"_operator": operator, "math": math, "torch": torch}
"""Modules whose functions compute sizes."""


@final
class CallInto:
    """A library call that writes the buffer it is given."""

    __slots__ = ("args", "checked", "kwargs", "op", "target")

    def __init__(
        self,
        op: Callable[..., object],
        args: list[object],
        kwargs: dict[str, object],
        target: View,
    ) -> None:
        self.op, self.args, self.kwargs, self.target = op, args, kwargs, target
        self.checked = False

    def __call__(self) -> None:
        if self.checked:
            self.op(*self.args, **self.kwargs)
            return
        out, target = self.kwargs["out"], self.target
        assert isinstance(out, Tensor)
        address = out.data_ptr()
        self.op(*self.args, **self.kwargs)
        # An out-variant silently resizes a result of another shape: it would leave the buffer.
        same = out.shape == target.shape and out.stride() == target.strides
        if not same or out.data_ptr() != address:
            raise RuntimeFailure(
                f"it returned {tuple(out.shape)}, but {target.buffer} has {target.shape}",
                code="TR-403",
            )
        self.checked = True


@final
class CallAllocating:
    """A library call whose results PyTorch allocates."""

    __slots__ = ("aliased", "args", "define", "kwargs", "op", "slots", "specs")

    def __init__(
        self,
        op: Callable[..., object],
        args: list[object],
        kwargs: dict[str, object],
        specs: tuple[BufferSpec | None, ...],
        define: Callable[[BufferSpec, object], None],
    ) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.specs, self.define = specs, define
        self.aliased: tuple[bool, ...] | None = None
        self.slots: list[Slot] | None = None  # where tensors are among the arguments

    def __call__(self) -> None:
        result: Any = self.op(*self.args, **self.kwargs)
        if not self.specs:
            return
        results = result if isinstance(result, tuple | list) else (result,)
        if self.aliased is None:
            self.aliased = self._inspect(results)
        for spec, tensor, aliased in zip(self.specs, results, self.aliased, strict=False):
            if spec is None:
                continue
            if spec.unsized:
                self.define(spec, self._own(tensor))
                continue
            if aliased or not same_strides(tensor, spec):
                tensor = laid_out(tensor, spec)
            self.define(spec, tensor)

    def _own(self, value: object) -> object:
        """A tensor that shares no storage with an argument, whose bytes may be given away."""
        if not isinstance(value, Tensor):
            return value
        if self.slots is None:
            self.slots = [*_tensor_slots(self.args), *_tensor_slots(self.kwargs)]
        memory = memory_start(value)
        if not memory:
            return value
        for held, key in self.slots:
            argument: object = held[key]
            if isinstance(argument, Tensor) and memory_start(argument) == memory:
                return value.clone()
        return value

    def _inspect(self, results: Sequence[object]) -> tuple[bool, ...]:
        """Which results must be copied: those that share the storage of an argument, or have no
        storage, or are floats of another precision than PyTorch's type rules say.

        An argument's bytes may be given to another buffer, or written, while the result lives.
        """
        taken = {memory_start(t) for t in _tensors(self.args, self.kwargs)} - {0}
        for spec, tensor in zip(self.specs, results, strict=False):
            if spec is not None and not spec.unsized:
                _require_like(tensor, spec)
        if len(results) < len(self.specs):
            raise RuntimeFailure(f"it returned {len(results)} results", code="TR-403")
        specs = (*self.specs, *[None] * (len(results) - len(self.specs)))
        return tuple(
            isinstance(t, Tensor)
            and (shares_memory(t, taken) or (spec is not None and t.dtype is not spec.dtype))
            for t, spec in zip(results, specs, strict=True)
        )


def _require_like(result: object, spec: BufferSpec) -> None:
    """TR-403 unless a result is what PyTorch's type rules say, or a float of another precision."""
    if not isinstance(result, Tensor):
        raise RuntimeFailure(f"it returned no tensor for {spec.name}", code="TR-403")
    floats = result.is_floating_point() and spec.dtype.is_floating_point
    if result.shape != spec.shape or not (result.dtype is spec.dtype or floats):
        raise RuntimeFailure(
            f"it returned {result.dtype} {tuple(result.shape)}, but {spec.name} is {spec.dtype} "
            f"{spec.shape}",
            code="TR-403",
        )


def shares_memory(tensor: Tensor, taken: set[int]) -> bool:
    """Whether its bytes are those of others, or nobody's: zeros that have no memory. ``taken``: the
    addresses of the storages of others."""
    return is_zerotensor(tensor) or memory_start(tensor) in taken


def _tensor_slots(held: Container) -> Iterator[Slot]:
    """The places of tensors in lists that are filled in at every call: ``held[key]``."""
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(value, Tensor):
            yield held, key
        elif isinstance(value, list):
            yield from _tensor_slots(value)


def _tensors(*nested: object) -> list[Tensor]:
    return [leaf for leaf in leaves(nested) if isinstance(leaf, Tensor)]


@functools.cache
def resolve(name: str) -> Callable[..., object]:
    """``"aten.mm.out"`` -> the operator."""
    if name.startswith(f"{NAMESPACE}."):
        return named(name.split(".")[1])
    target: object = torch.ops
    if name.startswith("python."):
        _, module, name = name.split(".")
        require(module in _PYTHON, RuntimeFailure(f"{name} is not an operator", code="TR-402"))
        target = _PYTHON[module]
    try:
        for part in name.split("."):
            target = getattr(target, part)  # the way to an operator whose name is data
    except AttributeError as error:
        raise RuntimeFailure(
            f"this PyTorch ({torch.__version__}) has no operator {name}",
            code="TR-402",
            remedy="compile the step again with this version of PyTorch",
        ) from error
    assert callable(target)
    return target
