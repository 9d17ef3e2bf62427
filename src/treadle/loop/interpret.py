"""The meaning of the loop IR, in PyTorch on whole tensors. Code generators are tested against it.

Each axis gets one dim; a node's value is a tensor with extent 1 in the dims it does not vary
over. Every ``Apply`` computes in its dtype exactly as PyTorch does; all of it runs on the CPU.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treadle.algebra.index import Axis, FloorDiv, Index, Mod, Value
from treadle.loop.expr import Apply, Array, Const, Expr, Load, Local, Position, Reduce, ReduceKind
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Program, TensorRef
from treadle.loop.traverse import walk
from treadle.util.errors import VerifyError, require
from treadle.util.nested import Plain, map_leaves


def _divide_safely(
    divide: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Division of integers by zero gives some number, and no error: it may be masked."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return divide(x, y if y.is_floating_point() else torch.where(y == 0, 1, y))

    return function


def _floordiv(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")


def _minimum(x: Tensor, y: Tensor) -> Tensor:
    """NaN wins; of 0.0 and -0.0 the second, where PyTorch's answer depends on the layout."""
    return torch.where((x < y) | (x != x), x, y)


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | ((x != x) & (y != y))


def _maximum(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x > y) | (x != x), x, y)


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sigmoid": torch.sigmoid,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": _divide_safely(_floordiv),
    "mod": _divide_safely(torch.remainder),
    "fmod": _divide_safely(torch.fmod),
    "pow": torch.pow,
    "minimum": _minimum,
    "maximum": _maximum,
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "bitnot": torch.bitwise_not,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "same": _same,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "not": torch.logical_not,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "where": torch.where,
}
"""What each scalar function but ``cast`` means."""


def apply_function(fn: str, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One ``Apply`` on the values of its operands."""
    if fn == "cast":
        if dtype is torch.float8_e4m3fn and operands[0].is_floating_point():
            return operands[0].clamp(-448.0, 448.0).to(dtype)
        return operands[0].to(dtype)
    return FUNCTIONS[fn](*operands)


def interpret_array(array: Array, buffers: Mapping[str, Tensor]) -> Tensor:
    """The tensor that ``array`` is. ``buffers`` holds one-dimensional storages."""
    if 0 in array.shape:
        return torch.empty(array.shape, dtype=array.dtype)
    reduced = [axis for node in walk(array.body) if isinstance(node, Reduce) for axis in node.axes]
    frame = _Evaluation.of((*array.axes, *reduced), buffers)
    value = frame.evaluate(array.body)
    return value.reshape(value.shape[: len(array.axes)]).expand(array.shape).contiguous()


def interpret_kernel(kernel: Kernel, buffers: Mapping[str, Tensor]) -> None:
    """Run the items one after another, each for every value of its axes; stores write in place."""
    frame = _Evaluation.of((kernel.rows, kernel.cols), buffers)
    if 0 in (kernel.rows.extent, kernel.cols.extent):
        return
    for item in kernel.body:
        sizes = tuple(
            axis.extent if axis in item.axes else 1 for axis in (kernel.rows, kernel.cols)
        )
        match item:
            case Definition():
                frame.locals[item.name] = frame.evaluate(item.expr).expand(sizes)
            case Store():
                position = frame.index(item.index).expand(sizes)
                value = frame.evaluate(item.value).expand(sizes)
                storage = _storage_as(buffers[item.buffer], value.dtype)
                _check_inside(position, storage, item.buffer)
                storage[position] = value.to(storage.device)


def interpret_program(program: Program, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Run the program on its inputs, by buffer name; write-backs change them in place."""
    storages: dict[str, Tensor] = {}
    for name, buffer in program.buffers.items():
        if buffer.kind is BufferKind.TEMPORARY:
            storages[name] = _fresh(buffer)
        else:
            is_input = buffer.kind is BufferKind.INPUT
            source = tensors[name] if is_input else program.constants[name]
            storages[name] = _storage_of(source, buffer)
    for step in program.steps:
        match step:
            case Compute():
                result = interpret_array(step.array, storages)
                view(step.output, storages).copy_(result)
            case Call():
                _run_call(step, program, storages)
    return tuple(None if ref is None else view(ref, storages) for ref in program.results)


def view(ref: TensorRef, storages: Mapping[str, Tensor]) -> Tensor:
    """The strided view that ``ref`` names."""
    storage = _storage_as(storages[ref.buffer], ref.dtype)
    return storage.as_strided(ref.shape, ref.strides, storage.storage_offset() + ref.offset)


def positions(index: Index) -> Tensor:
    """The values that ``index`` takes, over all its axes; it must hold no ``Value``."""
    return _Evaluation.of(sorted(index.axes, key=lambda axis: axis.serial), {}).index(index)


def _run_call(call: Call, program: Program, storages: dict[str, Tensor]) -> None:
    """``outputs = op(*args)`` through ``torch.ops``; each result gets its buffer's strides."""
    op: Callable[..., Any] = operator.attrgetter(call.op)(torch.ops)

    def value(leaf: TensorRef | Plain) -> Tensor | Plain:
        return view(leaf, storages) if isinstance(leaf, TensorRef) else leaf

    kwargs = {name: map_leaves(value, arg) for name, arg in call.kwargs.items()}
    result = op(*[map_leaves(value, arg) for arg in call.args], **kwargs)
    if call.into is not None:
        view(call.into, storages).copy_(result)
        return
    results = (result,) if isinstance(result, Tensor) else tuple(result or ())
    for name, tensor in zip(call.outputs, results, strict=True):
        if name is not None:
            buffer = program.buffers[name]
            require(
                tuple(tensor.shape) == buffer.shape and tensor.dtype is buffer.dtype,
                VerifyError,
                f"{call.op} gave {tensor.dtype}{tuple(tensor.shape)} for {buffer}",
            )
            storages[name].as_strided(buffer.shape, buffer.strides).copy_(tensor)


def _fresh(buffer: Buffer) -> Tensor:
    """Storage filled with values that show when they are read before they are written."""
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return torch.full((buffer.elements,), math.nan, dtype=buffer.dtype, device=buffer.device)
    poison = 1 if buffer.dtype is torch.bool else torch.iinfo(buffer.dtype).max
    return torch.full((buffer.elements,), poison, dtype=buffer.dtype, device=buffer.device)


def _storage_of(tensor: Tensor, buffer: Buffer) -> Tensor:
    require(
        tuple(tensor.shape) == buffer.shape and tensor.dtype is buffer.dtype,
        VerifyError,
        f"{buffer.name} is {tensor.dtype}{tuple(tensor.shape)}, expected {buffer}",
    )
    strides = zip(tensor.shape, tensor.stride(), buffer.strides, strict=True)
    require(
        tensor.numel() == 0 or all(size == 1 or ours == theirs for size, ours, theirs in strides),
        VerifyError,
        f"{buffer.name} has strides {tensor.stride()}, expected {buffer.strides}",
    )
    return tensor.detach().as_strided((buffer.elements,), (1,), tensor.storage_offset())


def _storage_as(storage: Tensor, dtype: torch.dtype) -> Tensor:
    return storage if storage.dtype is dtype else storage.view(dtype)


def _check_inside(position: Tensor, storage: Tensor, buffer: str) -> None:
    low, high = int(position.min()), int(position.max())
    require(
        low >= 0 and high < storage.numel(),
        VerifyError,
        f"{buffer}[{low}..{high}] reaches outside its {storage.numel()} elements",
    )


@dataclass(frozen=True)
class _Evaluation:
    """One dim per axis, and the values so far of one evaluation."""

    dims: Mapping[Axis, int]
    buffers: Mapping[str, Tensor]
    is_empty: bool
    locals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @staticmethod
    def of(axes: Sequence[Axis], buffers: Mapping[str, Tensor]) -> "_Evaluation":
        unique = tuple(dict.fromkeys(axes))
        is_empty = any(axis.extent == 0 for axis in unique)
        return _Evaluation({axis: dim for dim, axis in enumerate(unique)}, buffers, is_empty)

    def evaluate(self, expr: Expr) -> Tensor:
        memo: dict[int, Tensor] = {}
        for node in walk(expr):
            memo[id(node)] = self._node(node, memo)
        return memo[id(expr)]

    def index(self, index: Index, memo: Mapping[int, Tensor] | None = None) -> Tensor:
        """``index`` at every value of its axes, int64."""
        total = torch.full((1,) * len(self.dims), index.const, dtype=torch.int64)
        for atom, coefficient in index.terms:
            total = total + coefficient * self._atom(atom, memo or {})
        return total

    def _atom(self, atom: Axis | FloorDiv | Mod | Value, memo: Mapping[int, Tensor]) -> Tensor:
        match atom:
            case Axis():
                require(atom in self.dims, VerifyError, f"{atom} is not bound here")
                shape = [1] * len(self.dims)
                shape[self.dims[atom]] = atom.extent
                return torch.arange(atom.extent).reshape(shape)
            case FloorDiv():
                return _floordiv(self.index(atom.index, memo), torch.tensor(atom.n))
            case Mod():
                return torch.remainder(self.index(atom.index, memo), atom.n)
            case Value():
                return memo[id(atom.formula)].to(torch.int64)

    def _node(self, node: Expr, memo: Mapping[int, Tensor]) -> Tensor:
        match node:
            case Const():
                return torch.full((1,) * len(self.dims), node.value, dtype=node.dtype)
            case Position():
                return self.index(node.index, memo)
            case Load():
                return self._load(node, memo)
            case Local():
                require(node.name in self.locals, VerifyError, f"%{node.name} is not defined")
                return self.locals[node.name]
            case Apply():
                operands = [memo[id(inner)] for inner in node.operands]
                return apply_function(node.fn, operands, node.dtype)
            case Reduce():
                return self._reduce(node, memo[id(node.body)])

    def _load(self, load: Load, memo: Mapping[int, Tensor]) -> Tensor:
        require(load.buffer in self.buffers, VerifyError, f"no buffer is named {load.buffer}")
        storage = _storage_as(self.buffers[load.buffer], load.dtype)
        position = self.index(load.index, memo)
        mask = None if load.mask is None else memo[id(load.mask)]
        if mask is not None:
            position = torch.where(mask, position, 0)
        if storage.numel() == 0 and (mask is not None or self.is_empty):
            return torch.zeros(position.shape, dtype=load.dtype)
        if self.is_empty:  # nothing is read, whatever the offsets are
            position = position.clamp(0, storage.numel() - 1)
        elif mask is None or bool(mask.any()):
            _check_inside(position, storage, load.buffer)
        found = storage[position.to(storage.device)].cpu()
        return found if mask is None else torch.where(mask, found, torch.zeros_like(found))

    def _reduce(self, reduce: Reduce, body: Tensor) -> Tensor:
        dims = [self.dims[axis] for axis in reduce.axes]
        sizes = list(body.shape)
        for axis, dim in zip(reduce.axes, dims, strict=True):
            sizes[dim] = axis.extent
        body = body.expand(sizes)
        match reduce.kind:
            case ReduceKind.SUM:
                return body.sum(dims, keepdim=True, dtype=body.dtype)
            case ReduceKind.PROD:
                for dim in dims:
                    body = body.prod(dim, keepdim=True, dtype=body.dtype)
                return body
            case ReduceKind.MAX:
                return body.amax(dims, keepdim=True)
            case ReduceKind.MIN:
                return body.amin(dims, keepdim=True)
            case ReduceKind.ANY:
                for dim in dims:
                    body = body.any(dim, keepdim=True)
                return body.to(reduce.dtype)
            case ReduceKind.ARGMAX | ReduceKind.ARGMIN:
                require(len(dims) == 1, VerifyError, f"{reduce.kind} over {len(dims)} axes")
                number = body.to(torch.uint8) if body.dtype is torch.bool else body
                pick = torch.argmax if reduce.kind is ReduceKind.ARGMAX else torch.argmin
                return pick(number, dims[0], keepdim=True)
