"""A compiled step as data: sources, host steps, buffers. Nothing here knows the compiler.

::

    artifact  =  source*  buffer*  step*
    step      =  launch | call
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


class Language(enum.StrEnum):
    CPP = "cpp"
    TRITON = "triton"


class Place(enum.StrEnum):
    INPUT = "input"  # bound at every call
    CONSTANT = "constant"
    ARENA = "arena"  # at a fixed byte offset
    CALL = "call"  # allocated by the library call that fills it


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Storage of a step: ``offset`` in bytes for ``ARENA``; strides in elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: Place
    offset: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a buffer, as an argument of a library call or a result."""

    buffer: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """One translation unit (C++) or module (Triton) and the functions it defines."""

    language: Language
    text: str
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """Run ``function`` once per entry of ``arguments``, all in one launch.

    Each entry lists buffer names and sizes for one instance: equal loops over different
    parameters are one launch. C++: ``void f(void* const* pointers, const int64_t* sizes,
    int64_t instances)`` with the pointers of all instances one after another. Triton: a launch
    function in the module, see ``codegen/triton.py``.
    """

    function: str
    buffers: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    kernels: tuple[str, ...] = ()
    bytes_moved: int = 0
    origin: str = ""


@dataclass(frozen=True, slots=True)
class CallStep:
    """A kernel of PyTorch's. ``out``: the out-variant that writes ``outputs[0]``'s buffer."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[str | None, ...]
    out: str = ""
    reason: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Artifact:
    """``releases[i]`` names the call-allocated buffers that die after step ``i``."""

    device: str
    sources: tuple[Source, ...]
    buffers: Mapping[str, BufferSpec]
    steps: tuple[Launch | CallStep, ...]
    releases: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    results: tuple[View | None, ...]
    arena_bytes: int
    peak_bytes: int
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @property
    def fallbacks(self) -> tuple[CallStep, ...]:
        """Calls that no one chose: operations without a lowering, each with its reason."""
        return tuple(step for step in self.steps if isinstance(step, CallStep) and step.reason)

    @property
    def kernel_count(self) -> int:
        """Launches of generated kernels in one step."""
        return sum(isinstance(step, Launch) for step in self.steps)
