"""The context in which one operation is lowered: rules read operands and emit steps through it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from treadle.algebra.extents import same, sample_of, surely_less
from treadle.algebra.guards import GuardSet
from treadle.algebra.index import Axis, FloorDiv, Index, linear
from treadle.algebra.strides import contiguous_strides, is_dense
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dynamic import Symbols, layout_of
from treadle.graph.core.node_info import value_of
from treadle.loop.expr import DTYPES, Array, Const, Expr, Load, Reduce
from treadle.loop.program import (
    IMPORT,
    Buffer,
    BufferKind,
    Call,
    Compute,
    Origin,
    Step,
    TensorRef,
)
from treadle.loop.traverse import loads, substitute, walk
from treadle.lower.registry import Value
from treadle.lower.scalars import Operand, ScalarExpr, cast, compute_dtype, const, number
from treadle.targets.cpu import CPU
from treadle.targets.record import DeviceTarget
from treadle.util.errors import LoweringError, VerifyError, require

Axes = tuple[Axis, ...]


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """``(3, 1), (4,) -> (3, 4)``: the shape that all of them are stretched to."""
    rank = max(map(len, shapes), default=0)
    columns = zip(*([1] * (rank - len(shape)) + list(shape) for shape in shapes), strict=True)
    return tuple(next((n for n in column if not same(n, 1)), 1) for column in columns)


def fresh_axes(shape: Sequence[int]) -> Axes:
    """One new loop variable per dim."""
    return tuple(Axis(extent) for extent in shape)


def element(value: Value, indices: Sequence[Index | Axis | int]) -> Expr:
    """The element of ``value`` at ``indices``, one per dim."""
    places = [Index.of(index) for index in indices]
    if isinstance(value, TensorRef):
        return Load(value.buffer, linear(places, value.strides, value.offset), value.dtype)
    return substitute(value.body, dict(zip(value.axes, places, strict=True)))


def broadcast(value: Value, indices: Sequence[Index | Axis]) -> Expr:
    """The element of ``value`` broadcast to the dims of ``indices``, aligned at the right."""
    aligned = indices[len(indices) - len(value.shape) :]
    return element(
        value, [0 if same(n, 1) else index for n, index in zip(value.shape, aligned, strict=True)]
    )


def as_tensor(operand: Operand, dtype: torch.dtype) -> Value:
    """A number as a 0-dim tensor of ``dtype``; tensors as they are."""
    if isinstance(operand, TensorRef | Array):
        return operand
    return Array((), number(operand, dtype))


def is_lazy(array: Array) -> bool:
    """Whether ``array`` reads no buffer and sums nothing, so it costs less to repeat than store."""
    return not any(isinstance(part, Load | Reduce) for part in walk(array.body))


def _strides_of_reads(array: Array) -> tuple[int, ...]:
    """Without gaps, in the order of memory of the first read that every axis moves: what is made
    of channels-last images is channels-last. Contiguous where there is no such read."""
    real = [dim for dim, axis in enumerate(array.axes) if not surely_less(axis.extent, 2)]
    for load in loads(array.body):
        far = [_step(load.index, array.axes[dim]) for dim in real]
        if all(step > 0 for step in far) and far != sorted(far, reverse=True):
            return _dense(array.shape, sorted(real, key=lambda dim: -far[real.index(dim)]))
        if all(far):
            break
    return contiguous_strides(array.shape)


def _step(index: Index, axis: Axis) -> float:
    """How far apart in memory neighbours along ``axis`` are, on average."""
    step: float = sample_of(index.coefficient(axis))
    for atom, factor in index.terms:
        if isinstance(atom, FloorDiv) and axis in atom.axes:
            step += sample_of(factor) * _step(atom.index, axis) / sample_of(atom.n)
    return step


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, with the dims of ``order`` from the outermost to the innermost."""
    strides = [1] * len(shape)
    inner = contiguous_strides([shape[dim] for dim in order])
    for dim, stride in zip(order, inner, strict=True):
        strides[dim] = stride
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Layout:
    """A buffer with room around its value: its own extents, and the strides in it."""

    strides: tuple[int, ...]
    extents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layouts:
    """Nodes with a layout other than eager's, and for products the shapes of their factors,
    zeros around them included. See ``padding.py``."""

    buffers: Mapping[fx.Node, Layout] = field(default_factory=dict[fx.Node, Layout])
    factors: Mapping[fx.Node, tuple[tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=dict[fx.Node, tuple[tuple[int, ...], tuple[int, ...]]]
    )


@dataclass(frozen=True, slots=True)
class Mark:
    """A state of a program under construction, to which it can be reset."""

    steps: int
    buffers: int
    moved: Mapping[str, str]


@dataclass(slots=True)
class Builder:
    """The program so far. ``is_placed``: the step was traced on the devices that it runs on;
    ``layouts``: what is not laid out as in eager; ``library``: no formulas, only library calls,
    for machines that cannot compile; ``target``: what the device can do; ``symbols``: the dims of a
    graph with dynamic shapes."""

    device: str
    is_placed: bool = True
    layouts: Layouts = field(default_factory=lambda: Layouts())
    library: bool = False
    target: DeviceTarget = CPU
    symbols: Symbols | None = None
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    steps: list[Step] = field(default_factory=list[Step])
    constants: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    moved: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def guards(self) -> GuardSet:
        """The conditions on sizes under which the program is right."""
        return GuardSet() if self.symbols is None else self.symbols.guards

    def mark(self) -> "Mark":
        """Where the program stands now, for ``since`` and ``reset``."""
        return Mark(len(self.steps), len(self.buffers), dict(self.moved))

    def since(self, mark: "Mark") -> Sequence[Step]:
        """The steps that came after ``mark``."""
        return self.steps[mark.steps :]

    def reset(self, mark: "Mark") -> None:
        """Forget everything that came after ``mark``."""
        del self.steps[mark.steps :]
        for name in list(self.buffers)[mark.buffers :]:
            del self.buffers[name]
            self.constants.pop(name, None)
        self.moved = dict(mark.moved)

    def buffer(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        kind: BufferKind = BufferKind.TEMPORARY,
        device: str | None = None,
        layout: Layout | None = None,
        unsized: bool = False,
    ) -> TensorRef:
        """A new buffer and the view of its value; ``name`` gets a number when it is taken."""
        unique, tries = name, 1
        while unique in self.buffers:
            unique, tries = f"{name}_{tries}", tries + 1
        shape = tuple(shape)
        strides = contiguous_strides(shape) if strides is None else tuple(strides)
        where = self.device if device is None else device
        extents = shape
        if layout is not None:
            strides, extents = layout.strides, layout.extents
        self.buffers[unique] = Buffer(unique, dtype, extents, strides, kind, where, unsized)
        return TensorRef(unique, dtype, shape, strides)

    def constant(self, name: str, data: torch.Tensor) -> TensorRef:
        """A constant buffer with the elements of ``data``; equal ones are one buffer."""
        data = data.detach().contiguous()
        for known, other in self.constants.items():
            alike = other.dtype is data.dtype and other.shape == data.shape
            if alike and other.device == data.device and torch.equal(other, data):
                return self.whole(known)
        ref = self.buffer(name, data.dtype, data.shape, kind=BufferKind.CONSTANT)
        self.constants[ref.buffer] = data
        return ref

    def device_of(self, val: torch.Tensor) -> str:
        """Where a traced value lives."""
        here = not self.is_placed or val.device.type == torch.device(self.device).type
        return self.device if here else val.device.type

    def whole(self, name: str) -> TensorRef:
        """The view of all of buffer ``name``."""
        buffer = self.buffers[name]
        return TensorRef(name, buffer.dtype, buffer.shape, buffer.strides)

    def has_formulas(self, *dtypes: torch.dtype) -> bool:
        """Whether kernels are generated for numbers of all these dtypes."""
        return not self.library and DTYPES.issuperset(dtypes)

    def compute(self, name: str, array: Array, origin: Origin) -> TensorRef:
        """A temporary filled with ``array``, in the order of memory of what that reads."""
        ref = self.buffer(name, array.dtype, array.shape, _strides_of_reads(array))
        self.steps.append(
            self._filled(ref, array, origin) if self.library else Compute(ref, array, origin)
        )
        return ref

    def _filled(self, ref: TensorRef, array: Array, origin: Origin) -> Call:
        """A literal as a library call; without generated code there are no other formulas."""
        require(isinstance(array.body, Const), VerifyError, f"{ref} is a formula: {array.body}")
        assert isinstance(array.body, Const)
        kwargs = {"dtype": ref.dtype, "device": self.device}
        return Call(
            "aten.full.default", (ref.shape, array.body.value), kwargs, (ref.buffer,), origin
        )

    def copied(self, name: str, ref: TensorRef, origin: Origin) -> TensorRef:
        """The elements of ``ref`` in a contiguous temporary of its own."""
        return self.relaid(name, ref, contiguous_strides(ref.shape), origin)

    def relaid(self, name: str, value: Value, strides: Sequence[int], origin: Origin) -> TensorRef:
        """The elements of ``value`` in a temporary of its own with these strides, which leave no
        gaps."""
        copy = self.buffer(name, value.dtype, value.shape, strides)
        if self.has_formulas(value.dtype):
            axes = fresh_axes(value.shape)
            self.steps.append(Compute(copy, Array(axes, element(value, axes)), origin))
            return copy
        if isinstance(value, Array):
            value = self.compute(f"{name}_value", value, origin)
        self.steps.append(Call("aten.clone.default", (value,), {}, (copy.buffer,), origin))
        return copy

    def laid_out(
        self, name: str, value: Value, strides: Sequence[int], origin: Origin
    ) -> TensorRef:
        """``value`` in a temporary with ``strides``; where one is 0 the element is stored once."""
        shape = tuple(
            1 if stride == 0 else size for size, stride in zip(value.shape, strides, strict=True)
        )
        axes = fresh_axes(shape)
        once = Array(axes, element(value, axes))
        ref = self.buffer(name, once.dtype, shape, strides)
        if not self.library:
            self.steps.append(Compute(ref, once, origin))
        elif isinstance(value, TensorRef):
            kept = replace(value, shape=shape)
            self.steps.append(Call("aten.clone.default", (kept,), {}, (ref.buffer,), origin))
        else:
            self.steps.append(self._filled(ref, once, origin))
        return replace(ref, shape=tuple(value.shape))

    def fill_margins(self, ref: TensorRef, origin: Origin) -> None:
        """Zeros in the room around a value that a larger product reads."""
        for start, shape in margins(ref.shape, self.buffers[ref.buffer].shape):
            offset = sum(s * stride for s, stride in zip(start, ref.strides, strict=True))
            block = TensorRef(ref.buffer, ref.dtype, shape, ref.strides, offset)
            zeros = Array(fresh_axes(shape), const(0, ref.dtype))
            self.steps.append(Compute(block, zeros, origin))

    def local(self, ref: TensorRef, origin: Origin, *, may_wait: bool = True) -> TensorRef:
        """``ref`` on the device of the program: what lives elsewhere is copied once. ``may_wait``:
        whether its bytes may change once the step has returned."""
        buffer = self.buffers[ref.buffer]
        if buffer.device == self.device:
            return ref
        if ref.buffer not in self.moved:
            copy = self.buffer(f"{ref.buffer}_local", buffer.dtype, buffer.shape, buffer.strides)
            kwargs = {"device": self.device, "non_blocking": not may_wait}
            source = self.whole(ref.buffer)
            self.steps.append(Call(IMPORT, (source,), kwargs, (copy.buffer,), origin))
            self.moved[ref.buffer] = copy.buffer
        return TensorRef(self.moved[ref.buffer], ref.dtype, ref.shape, ref.strides, ref.offset)


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """One node being lowered. ``val`` is its fake result: the truth on shape, strides, dtype."""

    builder: Builder
    node: fx.Node
    origin: Origin
    val: Any
    name: str

    @property
    def target(self) -> OpOverload:
        """The operation of the node."""
        target = self.node.target
        assert isinstance(target, OpOverload), self.node
        return target

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return layout_of(self.val)[0]

    @property
    def strides(self) -> tuple[int, ...]:
        """Those that eager gives the result."""
        return layout_of(self.val)[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return self.val.dtype

    def element_context(self, position: int) -> "LoweringContext":
        """The context of one result of many."""
        return LoweringContext(
            self.builder, self.node, self.origin, self.val[position], f"{self.name}_{position}"
        )

    def fault(self, message: str, remedy: str = "") -> LoweringError:
        """The error for this node: TR-301, with the user's line."""
        text = f"{self.node.format_node() or self.node.name}: {message}"
        return LoweringError(text, code="TR-301", where=self.origin.where, remedy=remedy)

    def temp(self, tag: str, array: Array) -> Value:
        """An intermediate of this node: a step of its own unless it reads nothing."""
        if is_lazy(array):
            return array
        return self.builder.compute(f"{self.name}_{tag}", array, self.origin)

    def stored(self, value: Value) -> TensorRef:
        """``value`` in a buffer, for a library call or a result."""
        if isinstance(value, TensorRef):
            return value
        return self.builder.compute(f"{self.name}_value", value, self.origin)

    def result(self, value: Value) -> Value:
        """What a rule returned, as this node's value: formulas that read get their buffer."""
        if isinstance(value, TensorRef) or is_lazy(value):
            return value
        ref = self.output()
        self.builder.steps.append(Compute(ref, value, self.origin))
        self.builder.fill_margins(ref, self.origin)
        return ref

    @property
    def layout(self) -> Layout | None:
        """How the node's one result is laid out, if not as in eager."""
        own = self.val is value_of(self.node)
        return self.builder.layouts.buffers.get(self.node) if own else None

    def output(self) -> TensorRef:
        """A new buffer with eager's strides (contiguous ones if eager's have gaps or overlap)."""
        kept = self.strides if is_dense(self.shape, self.strides) else None
        return self.builder.buffer(self.name, self.dtype, self.shape, kept, layout=self.layout)

    def axes(self) -> Axes:
        """New axes of the result's shape."""
        return fresh_axes(self.shape)

    def term(
        self, operand: Operand, axes: Sequence[Index | Axis], common: torch.dtype
    ) -> ScalarExpr:
        """``operand`` broadcast to ``axes`` in the compute dtype of ``common``.

        A tensor is rounded to ``common`` first; a number or 0-dim tensor is not, as in eager.
        """
        wide = compute_dtype(common)
        value = as_tensor(operand, wide)
        expr = broadcast(value, axes)
        if value.shape and expr.dtype is not wide:
            expr = cast(expr, common)
        return ScalarExpr(cast(expr, wide))


def margins(
    shape: Sequence[int], extents: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and shape of the blocks of ``extents`` outside ``shape``, which do not overlap.

    ``(5, 7)`` in ``(8, 8)``: rows 5..7 of 8 columns, then column 7 of rows 0..4.
    """
    for dim, (size, room) in enumerate(zip(shape, extents, strict=True)):
        if room > size:
            start = tuple(size if d == dim else 0 for d in range(len(shape)))
            yield start, (*shape[:dim], room - size, *extents[dim + 1 :])
