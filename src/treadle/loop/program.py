"""A lowered step: buffers, and in order the formulas and library calls that fill them.

::

    program  =  buffer*  step*
    step     =  compute | call
    compute  =  ref <- array              every element of the ref, from one formula: a template
                                          with other names for its buffers
    call     =  buffer, ... = op(ref | number | list, ...)

Steps are in a valid order. A compute may write an input buffer (a write-back); then every read of
the old value is before it in the program, or reads exactly the element being written.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from treadle.compat.operators.operator_facts import (
    IN_ORDER,
    Effect,
    ends_a_start,
    facts_by_name,
    may_accumulate,
)
from treadle.loop.expr import Array, Load, Position, values_of
from treadle.loop.traverse import buffers_in, rename_buffers, walk
from treadle.util.nested import Nested, Plain, leaves, map_leaves


class BufferKind(enum.StrEnum):
    """Whose memory a buffer is."""

    INPUT = "input"  # bound at each call: parameters, state, batch, scalars
    CONSTANT = "constant"  # known at compile time; ``data`` of the program holds it
    TEMPORARY = "temporary"  # ours: kernel-local, in the arena, or allocated by a call


@dataclass(frozen=True, slots=True)
class Buffer:
    """A block of storage. ``shape`` and ``strides`` are those of the value that fills it.
    ``unsized``: they are a bound, and a call decides the true ones; or it is a number. ``spare``:
    bytes that the call which allocates it takes beyond its elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: BufferKind
    device: str = "cpu"
    unsized: bool = False
    spare: int = 0

    @property
    def elements(self) -> int:
        """Elements of storage, gaps between strides included."""
        if 0 in self.shape:
            return 0
        last = 0
        for size, stride in zip(self.shape, self.strides, strict=True):
            last += (size - 1) * stride
        return 1 + last

    @property
    def nbytes(self) -> int:
        """Bytes of storage, gaps between strides included."""
        return self.elements * self.dtype.itemsize

    @property
    def allocated(self) -> int:
        """Bytes that are taken as long as it lives."""
        return self.nbytes + self.spare


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a buffer; ``offset`` and ``strides`` in elements of ``dtype``."""

    buffer: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a step came from: graph nodes, the user's line, the module path, the phase. ``chunk``:
    steps of two chunks share no kernel, nor do they with others: one chunk is in memory at a time.
    ``operation``: what the nodes call, as reports name it.
    """

    nodes: tuple[str, ...]
    where: str = ""
    module: str = ""
    phase: str = ""
    chunk: int | None = None
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Compute:
    """``output[axes] <- array.body``; ``array.shape == output.shape``.

    Steps of equal blocks differ in their buffers alone. They have one ``template``, whose buffers
    are called ``reads`` here, in the order in which the template reads them::

        template:  [i<8] -> exp(a[i]) + b[i]     reads: (c, d)     array:  [i<8] -> exp(c[i]) + d[i]

    So what does not depend on names is found once for a template: its smaller form, its place in a
    loop nest. A step of its own is its own template.
    """

    output: TensorRef
    template: Array
    origin: Origin
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.reads:
            object.__setattr__(self, "reads", buffers_in(self.template.body))

    @property
    def writes(self) -> tuple[str, ...]:
        """The one buffer that it writes to."""
        return (self.output.buffer,)

    @property
    def names(self) -> dict[str, str]:
        """What each buffer of the template is called here."""
        return dict(zip(buffers_in(self.template.body), self.reads, strict=True))

    @property
    def array(self) -> Array:
        """The formula, with the names of this step."""
        return _named(self.template, self.names)

    def of_template(self, template: Array) -> "Compute":
        """The step with another formula in place of its template: one of no other buffers."""
        if template is self.template:
            return self
        names = self.names
        reads = tuple([names[name] for name in buffers_in(template.body)])
        return Compute(self.output, template, self.origin, reads)

    def renamed(self, names: Mapping[str, str], origin: Origin | None = None) -> "Compute":
        """The step on other buffers; buffers that ``names`` does not know stay. Different buffers
        stay different."""
        output = renamed_ref(self.output, names)
        origin = origin or self.origin
        reads = tuple([names.get(name, name) for name in self.reads])
        if reads == self.reads:
            return Compute(output, self.template, origin, reads)
        if _reads_to_index(self.template):
            template = _named(self.template, dict(zip(self.reads, reads, strict=True)))
            return Compute(output, template, origin)
        return Compute(output, self.template, origin, reads)


def _named(array: Array, names: Mapping[str, str]) -> Array:
    body = rename_buffers(array.body, names)
    return array if body is array.body else Array(array.axes, body)


def _reads_to_index(array: Array) -> bool:
    """Whether an index depends on what is read: then the order of its terms depends on names."""
    nodes = (node for node in walk(array.body) if isinstance(node, Load | Position))
    return any(values_of(node.index) for node in nodes)


def renamed_ref(ref: TensorRef, names: Mapping[str, str]) -> TensorRef:
    """The same view of another buffer; those that ``names`` does not know stay."""
    name = names.get(ref.buffer, ref.buffer)
    if name == ref.buffer:
        return ref
    return TensorRef(name, ref.dtype, ref.shape, ref.strides, ref.offset)


CallArgument: TypeAlias = Nested[TensorRef | Plain]
"""An argument of a library call."""


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel of PyTorch's: ``outputs = op(*args, **kwargs)``.

    ``op`` is ``"aten.mm.default"``; ``args`` and ``kwargs`` nest tuples of numbers, strings,
    dtypes, ``None`` and ``TensorRef``. ``outputs`` names a buffer per result, ``None`` where the
    result is unused. With ``out`` (``"aten.mm.out"``) the one result is written into its buffer
    through the out-variant, or into the part of it that ``into`` shows; otherwise PyTorch
    allocates it. ``reason`` is empty for the library
    calls that are chosen (products, convolutions, attention, random numbers) and says why for
    a fallback. ``workspace`` is the bytes the call allocates beside its results.
    ``effects``: what it does besides its results, by the table of operators. Calls that draw random
    numbers and users' operators keep their order; these, and calls without results, happen even if
    nobody reads what they give. ``updates``: the arguments, by position or name, that its last
    results are once they are written to; these results are in buffers of ours.
    """

    op: str
    args: tuple[CallArgument, ...]
    kwargs: Mapping[str, CallArgument]
    outputs: tuple[str | None, ...]
    origin: Origin
    out: str = ""
    reason: str = ""
    workspace: int = 0
    effects: Effect = Effect.NONE
    into: TensorRef | None = None
    updates: tuple[int | str, ...] = ()

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """The tensors among its arguments, in order."""
        return tuple(
            leaf
            for leaf in leaves(*self.args, *self.kwargs.values())
            if isinstance(leaf, TensorRef)
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads, each once, in order of appearance."""
        return tuple(dict.fromkeys([ref.buffer for ref in self.refs]))

    @property
    def writes(self) -> tuple[str, ...]:
        """The buffers that it fills, or writes to."""
        return tuple([name for name in self.outputs if name is not None])

    @property
    def allocated(self) -> tuple[str, ...]:
        """Of these the ones that PyTorch allocates."""
        count = len(self.outputs) - len(self.updates)
        own = () if self.out and not self.updates else self.outputs[:count]
        return tuple([name for name in own if name is not None])

    @property
    def continued(self) -> tuple[tuple[str, TensorRef], ...]:
        """Results that go on from an argument, which they may do in its memory, and the argument:
        elsewhere the call copies it first."""
        places = (0,) if may_accumulate(self.out) else self.updates
        results = self.outputs[len(self.outputs) - len(places) :]
        pairs = zip(results, map(self._argument, places), strict=True)
        return tuple([(name, ref) for name, ref in pairs if name and isinstance(ref, TensorRef)])

    def _argument(self, place: int | str) -> CallArgument:
        return self.kwargs[place] if isinstance(place, str) else self.args[place]

    def renamed(self, names: Mapping[str, str], origin: Origin | None = None) -> "Call":
        """The call on other buffers; buffers that ``names`` does not know stay."""

        def leaf(value: TensorRef | Plain) -> TensorRef | Plain:
            return renamed_ref(value, names) if isinstance(value, TensorRef) else value

        return replace(
            self,
            args=tuple([map_leaves(leaf, value) for value in self.args]),
            kwargs={key: map_leaves(leaf, value) for key, value in self.kwargs.items()},
            outputs=tuple([name and names.get(name, name) for name in self.outputs]),
            into=self.into and renamed_ref(self.into, names),
            origin=origin or self.origin,
        )

    @property
    def is_in_order(self) -> bool:
        """Whether it keeps its place among all others of which this is true."""
        return bool(self.effects & (IN_ORDER | Effect.COMMUNICATES))

    @property
    def is_wait(self) -> bool:
        """Whether it ends what another call started: the stream waits there, and not before."""
        return ends_a_start(self.out)

    @property
    def may_end_the_call(self) -> bool:
        """Whether nothing may be written to an input before it is over: a condition may not hold,
        and another rank may have ended. Then the call leaves everything as it was."""
        return bool(self.effects & (Effect.CONDITION | Effect.COMMUNICATES))

    @property
    def may_refuse(self) -> bool:
        """Whether its kernel raises for some values."""
        return facts_by_name(self.op).refuses


IMPORT = "aten._to_copy.default"
"""The call that copies a buffer from one device to another."""

Step = Compute | Call


def may_end_the_call(steps: Sequence[Step]) -> list[int]:
    """At which of ``steps`` a call may end before anything is written to an input. After an update
    no values are refused that way: to keep two of each parameter until then would cost more."""
    found: list[int] = []
    is_updated = False
    for at, step in enumerate(steps):
        is_updated = is_updated or step.origin.phase == "optimizer"
        if isinstance(step, Call):
            refuses = not is_updated and step.may_refuse
            found += [at] if step.may_end_the_call or refuses else []
    return found


@dataclass(frozen=True, slots=True)
class Program:
    """``inputs`` in signature order; ``results`` in the order of the signature's outputs,
    ``None`` for write-backs (their computes stand in ``steps``) and for constants of None.
    ``device``: where it runs; empty where there is only one."""

    buffers: Mapping[str, Buffer]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    results: tuple[TensorRef | None, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    device: str = ""

    def is_elsewhere(self, buffer: Buffer) -> bool:
        """Whether ``buffer`` is on another device than the program's."""
        return bool(self.device) and buffer.device != self.device
