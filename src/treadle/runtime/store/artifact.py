"""A compiled step as data: sources, host steps, buffers. This module knows nothing of the compiler.

::

    artifact  =  source*  buffer*  step*
    step      =  launch | call
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from treadle.algebra.dims import Sizes
from treadle.algebra.extents import Size, all_at, at
from treadle.algebra.guards import Guard
from treadle.util.nested import Nested, Plain, leaves, map_leaves


class Storage(enum.StrEnum):
    """The kind of memory that a buffer is in."""

    INPUT = "input"  # bound at every call
    CONSTANT = "constant"
    ARENA = "arena"  # at a fixed byte offset
    CALL = "call"  # allocated by the library call that fills it


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Storage of a step: ``offset`` in bytes for ``ARENA``; strides in elements. ``unsized``: the
    call that fills it decides its size, or it is a number. ``device``: empty for the artifact's
    device."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: Storage
    offset: int = 0
    unsized: bool = False
    device: str = ""


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
    """One translation unit (C++) or module (Triton) and the functions it defines.

    ``spans``: where in ``text`` each function begins and ends, if that is known."""

    language: str
    text: str
    functions: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()

    def function(self, name: str) -> str:
        """The text of one function; all of it where spans are not known."""
        if not self.spans:
            return self.text
        begin, end = self.spans[self.functions.index(name)]
        return self.text[begin:end]


def joined(language: str, head: str, functions: Mapping[str, str], tail: str = "") -> Source:
    """A source of these functions, one after another between ``head`` and ``tail``."""
    spans: list[tuple[int, int]] = []
    at = len(head)
    for text in functions.values():
        spans.append((at, at + len(text)))
        at += len(text)
    whole = "".join((head, *functions.values(), tail))
    return Source(language, whole, tuple(functions), tuple(spans))


@dataclass(frozen=True, slots=True)
class Launch:
    """Run ``function`` once per entry of ``arguments``, all in one launch.

    Each entry lists buffer names and sizes for one instance: equal loops over different
    parameters are one launch. C++: ``void f(void* const* pointers, const int64_t* sizes,
    int64_t instances)`` with the pointers of all instances one after another. Triton: a launch
    function in the module, see ``codegen/triton/text.py``. ``shown``: its name in profiles.
    """

    function: str
    buffers: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    kernels: tuple[str, ...] = ()
    bytes_moved: int = 0
    origin: str = ""
    shown: str = ""


StepArgument: TypeAlias = Nested[View | Plain]
"""An argument of a library call."""


def views_in(*arguments: StepArgument) -> tuple[View, ...]:
    """The tensors of these, in order."""
    return tuple([leaf for leaf in leaves(*arguments) if isinstance(leaf, View)])


@dataclass(frozen=True, slots=True)
class CallStep:
    """A kernel of PyTorch's. ``out``: the out-variant that writes ``outputs[0]``'s buffer, or the
    part of it that ``into`` shows. ``bodies``: names of the artifacts that a loop runs, of its
    condition, of its body, and of the gradients of a round if it goes back. ``updates``: the
    arguments, by position or name, that its last outputs are once the call has written to them."""

    op: str
    args: tuple[StepArgument, ...]
    kwargs: Mapping[str, StepArgument]
    outputs: tuple[str | None, ...]
    out: str = ""
    reason: str = ""
    origin: str = ""
    into: View | None = None
    bodies: tuple[str, ...] = ()
    updates: tuple[int | str, ...] = ()

    @property
    def views(self) -> tuple[View, ...]:
        """The tensors among its arguments, in order."""
        return views_in(self.args, *self.kwargs.values())


@dataclass(frozen=True, slots=True)
class Artifact:
    """``releases[i]`` names the call-allocated buffers that die after step ``i``. ``bodies``: what
    the loops among its steps run in each round, under the digest of what each holds. ``untouched``:
    the number of first steps none of which writes to an input or communicates with other processes.
    ``host_bytes``: the size of the host block for offloaded buffers of a step on a GPU.

    Shapes, strides, offsets and sizes may hold a ``Size``: then the artifact is a pattern for many
    shapes, right for the sizes that fit its ``guards``, and ``at_sizes`` makes the one to run.
    Arena offsets and the peak are those of the largest sizes.
    """

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
    guards: tuple[Guard, ...] = ()
    bodies: "Mapping[str, Artifact]" = field(default_factory=dict[str, "Artifact"])
    untouched: int = 0
    host_bytes: int = 0

    @property
    def is_pattern(self) -> bool:
        """Whether it is for many shapes, so that only what ``at_sizes`` makes of it can run."""
        specs = self.buffers.values()
        return any(_has_sizes((*spec.shape, *spec.strides)) for spec in specs)

    def fits(self, sizes: Sizes) -> bool:
        """Whether this artifact is right for these sizes of the dims."""
        return all(guard.holds(sizes) for guard in self.guards)

    def at_sizes(self, sizes: Sizes) -> "Artifact":
        """The artifact for these sizes: every ``Size`` is a number."""
        return replace(
            self,
            buffers={name: spec_at(spec, sizes) for name, spec in self.buffers.items()},
            steps=tuple(step_at(step, sizes) for step in self.steps),
            results=tuple(None if view is None else _view_at(view, sizes) for view in self.results),
            guards=(),
        )

    def copied_by(self, step: CallStep) -> int:
        """How many of the arguments that a call writes to it copies first, because what was there
        is needed or is not in the arena."""
        count = len(step.updates)
        results = step.outputs[len(step.outputs) - count :]
        return sum(
            not self._is_in_place(
                step.kwargs[place] if isinstance(place, str) else step.args[place], name
            )
            for name, place in zip(results, step.updates, strict=True)
        )

    def _is_in_place(self, argument: StepArgument, result: str | None) -> bool:
        if result is None or not isinstance(argument, View):
            return False
        before, after = self.buffers[argument.buffer], self.buffers[result]
        in_arena = before.place is after.place is Storage.ARENA
        here = in_arena and before.device == after.device
        return before is after or (here and before.offset == after.offset)

    @property
    def fallbacks(self) -> tuple[CallStep, ...]:
        """Calls of operations without a lowering, each with its reason; calls inside loops have the
        origin of their loop."""
        calls: list[CallStep] = []
        for step in self.steps:
            if isinstance(step, CallStep):
                inside = [fallback for body in self.bodies_of(step) for fallback in body.fallbacks]
                calls += [step] if step.reason else []
                calls += [replace(fallback, origin=step.origin) for fallback in inside]
        return tuple(calls)

    @property
    def kernel_count(self) -> int:
        """Launches of generated kernels in one step, counting one iteration of each loop."""
        return sum(
            1 if isinstance(step, Launch) else sum(b.kernel_count for b in self.bodies_of(step))
            for step in self.steps
        )

    def bodies_of(self, step: CallStep) -> "tuple[Artifact, ...]":
        """The artifacts that a loop among its steps runs in each iteration; none for another
        call."""
        return tuple(self.bodies[name] for name in step.bodies)

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """Its own sources and those of its loops."""
        inside = (source for body in self.bodies.values() for source in body.all_sources)
        return (*self.sources, *inside)


def _has_sizes(numbers: Iterable[int]) -> bool:
    """Whether calls decide one of the sizes."""
    return any(isinstance(number, Size) for number in numbers)


def spec_at(spec: BufferSpec, sizes: Sizes) -> BufferSpec:
    """A buffer for these sizes."""
    if not _has_sizes((*spec.shape, *spec.strides)):
        return spec
    return replace(spec, shape=all_at(spec.shape, sizes), strides=all_at(spec.strides, sizes))


def _view_at(view: View, sizes: Sizes) -> View:
    shape, strides = all_at(view.shape, sizes), all_at(view.strides, sizes)
    return replace(view, shape=shape, strides=strides, offset=at(view.offset, sizes))


def step_at(step: Launch | CallStep, sizes: Sizes) -> Launch | CallStep:
    """A host step for these sizes."""
    if isinstance(step, Launch):
        if not any(map(_has_sizes, step.sizes)):
            return step
        return replace(step, sizes=tuple(all_at(size, sizes) for size in step.sizes))
    return call_at(step, sizes)


def call_at(step: CallStep, sizes: Sizes) -> CallStep:
    """A library call for these sizes."""

    def leaf_at(leaf: View | Plain) -> View | Plain:
        if isinstance(leaf, View):
            return _view_at(leaf, sizes)
        return at(leaf, sizes) if isinstance(leaf, Size) else leaf

    args = tuple(map_leaves(leaf_at, argument) for argument in step.args)
    kwargs = {name: map_leaves(leaf_at, argument) for name, argument in step.kwargs.items()}
    into = None if step.into is None else _view_at(step.into, sizes)
    return replace(step, args=args, kwargs=kwargs, into=into)
