"""Views: another shape, strides and offset over the same buffer, or the same formula re-indexed.

The arithmetic is PyTorch's own: the operation is replayed on a tensor without data that has the
strides of the buffer, and the resulting strides are the answer. Dynamic sizes are replayed as
PyTorch's symbols.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import SymInt

from treadle.algebra.extents import Size, size_key
from treadle.algebra.index import linear, unflatten
from treadle.algebra.strides import contiguous_strides, is_dense, strides_match
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dynamic import layout_of, offset_of
from treadle.graph.core.dim_maps import EXPANDS, PARTS, RESHAPES, SPLITS, SQUEEZES, SWAPS
from treadle.graph.core.node_info import value_of
from treadle.loop.expr import Array
from treadle.loop.program import TensorRef
from treadle.lower.context import LoweringContext, element, fresh_axes
from treadle.lower.registry import Value, lowers
from treadle.util.nested import leaves, map_leaves

aten = torch.ops.aten

_RESHAPES = (*RESHAPES, aten._reshape_alias.default)


@lowers(*_RESHAPES)
def reshape(context: LoweringContext, x: Value, *_args: object) -> Value:
    """``out[i] = x[unflatten(flat(i))]``, which may need a copy."""
    return reshaped(context, x, context.shape)


def reshaped(context: LoweringContext, x: Value, shape: Sequence[int]) -> Value:
    """``x`` in ``shape``: a view when the strides allow, else the formula of the copy."""
    if isinstance(x, TensorRef):
        try:
            layout = _replayed(context, aten.view.default, (x, list(shape)), {})
        except (RuntimeError, ValueError):  # the strides cannot be merged
            return _reindexed(x, shape)
        return _over(x, layout)
    return _reindexed(x, shape)


def _reindexed(x: Value, shape: Sequence[int]) -> Array:
    axes = fresh_axes(shape)
    flat = linear(axes, contiguous_strides(shape))
    return Array(axes, element(x, unflatten(flat, x.shape)))


Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


def _replayed(
    context: LoweringContext, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:
    """The layout of what ``op`` gives, or one for each piece, from the layouts of its operands."""
    symbols = context.builder.symbols
    numbers = map_leaves(_numbers, args)
    if symbols is None or not any(isinstance(leaf, Size) for leaf in leaves(numbers)):
        ghosts = [map_leaves(partial(_ghost, _itself), value) for value in args]
        return _layouts(op(*ghosts, **kwargs), int)

    def replay() -> object:
        with symbols.replaying():
            ghosts = [map_leaves(partial(_ghost, symbols.symint), value) for value in args]
            return _layouts(op(*ghosts, **kwargs), symbols.size)

    key = op, map_leaves(_key, numbers), tuple(sorted(kwargs.items()))
    return symbols.remembered(key, replay)


def _key(leaf: object) -> object:
    return size_key(leaf) if isinstance(leaf, int) else leaf


def _itself(size: int) -> int:
    return size


def _numbers(leaf: object) -> object:
    return (leaf.shape, _strides(leaf)) if isinstance(leaf, TensorRef | Array) else leaf


def _strides(x: Value) -> tuple[int, ...]:
    return x.strides if isinstance(x, TensorRef) else contiguous_strides(x.shape)


def _ghost(number: Callable[[int], int | SymInt], leaf: object) -> object:
    """A tensor without data: the strides of a ref from offset 0, or contiguous for a formula."""
    if isinstance(leaf, TensorRef | Array):
        shape, strides = (list(map(number, numbers)) for numbers in (leaf.shape, _strides(leaf)))
        return torch.empty_strided(shape, strides, dtype=leaf.dtype, device="meta")
    return number(leaf) if isinstance(leaf, int) else leaf


def _layouts(result: Any, size: Callable[[Any], int]) -> object:
    if not isinstance(result, torch.Tensor):
        return tuple(_layouts(result_part, size) for result_part in result)
    shape, strides = (tuple(map(size, numbers)) for numbers in (result.shape, result.stride()))
    return shape, strides, size(result.storage_offset())


def _over(x: Value, layout: Layout) -> Value:
    shape, strides, offset = layout
    if isinstance(x, TensorRef):
        return TensorRef(x.buffer, x.dtype, shape, tuple(strides), x.offset + offset)
    axes = fresh_axes(shape)
    return Array(axes, element(x, unflatten(linear(axes, strides, offset), x.shape)))


OTHER_VIEWS: tuple[OpOverload, ...] = (
    *SWAPS,
    *EXPANDS,
    *SQUEEZES,
    *PARTS,
    *SPLITS,
    aten.diagonal.default,
    aten.unfold.default,
    aten.narrow.default,
    aten.view_as.default,
    aten.expand_as.default,
    aten.movedim.intlist,
    aten.mT.default,
)

VIEWS = frozenset((*_RESHAPES, *OTHER_VIEWS))
"""Operations that give their operand's buffer where its strides allow."""
BY_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_copy.default})
"""Operations that count in their operand's storage: never a library call, for which that would be
the arena."""


@lowers(*OTHER_VIEWS)
def view(
    context: LoweringContext, x: Value, *args: object, **kwargs: object
) -> Value | tuple[Value, ...]:
    """A view of ``x``, or one for each piece."""
    result = _replayed(context, context.target, (x, *args), kwargs)
    if isinstance(context.val, torch.Tensor):
        return _over(x, result)
    return tuple(_over(x, piece) for piece in result)


@lowers(aten.as_strided.default)
def as_strided(
    context: LoweringContext,
    x: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> TensorRef:
    """A view by its strides. The offset counts from eager's storage, not from ``x``.

    What is not laid out as in eager is copied so first.
    """
    source = value_of(context.node.all_input_nodes[0])
    if not isinstance(x, TensorRef) or not strides_match(x.shape, x.strides, layout_of(source)[1]):
        x = as_eager(context, x, source)
    start = offset_of(source)
    moved = 0 if storage_offset is None else storage_offset - start
    return TensorRef(x.buffer, x.dtype, tuple(size), tuple(stride), x.offset + moved)


@lowers(aten.as_strided_copy.default)
def as_strided_copy(
    context: LoweringContext,
    x: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> TensorRef:
    """``as_strided`` in a buffer of its own."""
    shown = as_strided(context, x, size, stride, storage_offset)
    return context.builder.copied(context.name, shown, context.origin)


def as_eager(context: LoweringContext, x: Value, source: torch.Tensor) -> TensorRef:
    """``x`` in a buffer with eager's strides, which must leave no gaps."""
    strides = layout_of(source)[1]
    if not is_dense(x.shape, strides):
        raise context.fault(
            "a view by strides reaches outside the value it is taken of",
            "take it of the tensor that owns the storage",
        )
    return context.builder.relaid(f"{context.name}_base", x, strides, context.origin)
