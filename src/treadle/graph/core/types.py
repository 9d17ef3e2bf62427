"""What the compiler knows about a value without running it: dtype, shape, strides, device."""

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from treadle.algebra.extents import size_key
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.node_info import value_of

_SHORT = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "b1",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}


_ONE_KIND = frozenset({int})
"""Of sizes that are numbers: then they are their own keys."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorType:
    """``f32[4, 8]``. Equal types have equal strides and live on the same device; sizes that the
    call decides are equal where their formulas are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        sizes = (*self.shape, *self.strides)
        if not _ONE_KIND.issuperset(map(type, sizes)):
            sizes = tuple(map(size_key, sizes))
        return self.dtype, len(self.shape), sizes, self.device

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves; an expanded value occupies fewer."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether elements stand in memory in row-major order, without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


def short_dtype(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"f32"``; dtypes without a short name keep their own."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def short_dtypes() -> dict[str, torch.dtype]:
    """``"f32"`` -> ``torch.float32``: those that have a short name."""
    return {name: dtype for dtype, name in _SHORT.items()}


def type_of_tensor(value: torch.Tensor) -> TensorType:
    """The type of a tensor, fake or not, with formulas for sizes that are symbols."""
    shape, strides = layout_of(value)
    return TensorType(value.dtype, shape, strides, value.device)


def type_of(node: fx.Node) -> TensorType:
    """The type of a node that is one tensor; ``TypeError`` for any other."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{node} is not one tensor: {value!r}")
    return type_of_tensor(value)


def is_tensor(node: object) -> bool:
    """Whether ``node`` is a node that is one tensor."""
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def tensors_in(value: object) -> tuple[torch.Tensor, ...]:
    """The tensors of a node's ``val``: one, those of a tuple, or none."""
    match value:
        case torch.Tensor():
            return (value,)
        case tuple() | list():
            return tuple(tensor for item in value for tensor in tensors_in(item))
        case _:
            return ()


def same_types(left: object, right: object) -> bool:
    """Whether two ``val`` agree in structure, and tensor by tensor in type."""
    match left, right:
        case torch.Tensor(), torch.Tensor():
            return type_of_tensor(left) == type_of_tensor(right)
        case ((tuple() | list()), (tuple() | list())):
            return len(left) == len(right) and all(map(same_types, left, right))
        case _:
            return type(left) is type(right)


def show_type(value: object) -> str:
    """``f32[4, 8]``, or ``(f32[4, 8], i64[4])`` for an operation with several results."""
    match value:
        case torch.Tensor():
            return str(type_of_tensor(value))
        case tuple() | list():
            return f"({', '.join(map(show_type, value))})"
        case _:
            return type(value).__name__
