"""Operations that compute what an in-place one writes, and operations that undo a view."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import (
    OpOverload,
    argument_types,
    changes_shape,
    filled_arguments,
    written_arguments,
)
from treadle.compat.tracing import Args, Kwargs
from treadle.graph.core.dim_maps import COPIES, RESHAPES, SPLITS, SQUEEZES, permutation
from treadle.graph.core.node_info import tensor_of, value_of
from treadle.runtime.execute.functional import functional_of

aten = torch.ops.aten

_NAMED: dict[object, OpOverload] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.zero_.default: aten.zeros_like.default,
    aten.rrelu_with_noise.default: aten.rrelu_with_noise_functional.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
}
"""Functional forms whose names or arguments differ from those of the operation that writes."""


@functools.cache
def functional_form(target: Any) -> OpOverload | None:
    """``aten.add_.Tensor`` and ``aten.add.out`` -> ``aten.add.Tensor``: the operation of the same
    name, writing nothing, with the same arguments but those written to only. ``None``: none."""
    if target in _NAMED:
        return _NAMED[target]
    name = str(target.overloadpacket).removeprefix("aten.")
    packet = getattr(aten, _without_writing(name), None)
    if packet is None or not str(target).startswith("aten."):
        return None
    wanted = argument_types(target)
    for overload in packet.overloads():
        overload_ = getattr(packet, overload)
        if not facts_of(overload_).writes and argument_types(overload_) == wanted:
            return overload_
    return None


def _without_writing(name: str) -> str:
    """``add_`` -> ``add``, ``__ilshift__`` -> ``__lshift__``."""
    if name.startswith("__i") and name.endswith("__"):
        return f"__{name.removeprefix('__i')}"
    return name.removesuffix("_")


def functional_call(node: fx.Node) -> tuple[OpOverload, Args, Kwargs] | None:
    """The operation, arguments and options that compute what ``node`` writes; ``None``: none."""
    target: Any = node.target
    form = functional_form(target)
    if form is None:
        form = functional_of(target) if target.namespace != "aten" else None
        return form and (form, node.args, dict(node.kwargs))
    args = filled_arguments(target, node.args) if target in _NAMED else node.args
    outs = [name for _, name in written_arguments(target)]
    return form, args, {key: value for key, value in node.kwargs.items() if key not in outs}


_SCATTERS: dict[object, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_CONVERSIONS: dict[object, OpOverload] = {
    aten.view_as_real.default: aten.view_as_complex.default,
    aten.view_as_complex.default: aten.view_as_real.default,
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""Operations that read the same memory in another way, and their inverses."""
Call = Callable[[OpOverload, Args, Kwargs], fx.Node]
"""Adds one operation with its arguments to a graph."""


def base_of(call: Call, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    """The base of which ``view`` is ``value`` and whose other elements are ``base``'s.

    ``None`` if no operation makes it.
    """
    if view.target is operator.getitem:
        return _with_piece(call, view, base, value)
    args: Args = view.args[1:]
    target = in_place_of(view.target)
    shape = list(tensor_of(base).shape)
    if target in COPIES:
        return value
    if target in _CONVERSIONS:
        return call(_CONVERSIONS[target], (_even(call, value),), {})
    if target in RESHAPES or target in SQUEEZES:
        return call(reshaping(value), (value, shape), {})
    if target in _SCATTERS:
        return call(_SCATTERS[target], (base, value, *args), dict(view.kwargs))
    if target is aten.t.default:
        return call(target, (value,), {})
    if target is aten.transpose.int:
        return call(target, (value, *args), {})
    if target is aten.permute.default:
        order = permutation(view)
        return call(target, (value, [order.index(dim) for dim in range(len(order))]), {})
    if target is aten.view.dtype:
        return call(target, (value, tensor_of(base).dtype), {})
    if target is aten.expand.default:
        return _of_expanded(call, base, value)
    return _strided(call, view, base, value)


def _even(call: Call, value: fx.Node) -> fx.Node:
    """``value`` in a layout of its own, whose last pairs may be complex numbers."""
    if tensor_of(value).is_contiguous():
        return value
    return call(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})


def _with_piece(call: Call, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    """``base`` with one of its pieces, of a split or an unbind, replaced by ``value``."""
    pieces, at = item_of(view)
    values: Args = pieces.args
    if pieces.target is aten.unbind.int:
        dim = values[1] if len(values) > 1 else 0
        return call(aten.select_scatter.default, (base, value, dim, at), {})
    if pieces.target in SPLITS:
        dim = values[2] if len(values) > 2 else 0
        sizes = [piece.shape[dim] for piece in value_of(pieces)]
        start = sum(sizes[:at])
        span = (start, start + sizes[at])
        return call(aten.slice_scatter.default, (base, value, dim, *span), {})
    return None


def _of_expanded(call: Call, base: fx.Node, value: fx.Node) -> fx.Node:
    """The first of the elements that share a place in memory: all of them were given the same
    value."""
    shape = tensor_of(base).shape
    extra = tensor_of(value).ndim - len(shape)
    for _ in range(extra):
        value = call(aten.select.int, (value, 0, 0), {})
    for dim, size in enumerate(shape):
        if size == 1:
            value = call(aten.slice.Tensor, (value, dim, 0, 1), {})
    return value


def _strided(call: Call, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    """Any other view, by its strides; they count in the storage, which ``base`` must fill."""
    like: Tensor = tensor_of(base)
    if not like.is_contiguous() or like.storage_offset():
        return None
    return call(aten.as_strided_scatter.default, (base, value, *place_of(view)), {})


def place_of(view: fx.Node) -> tuple[list[int], list[int], int]:
    """Size, strides and offset of a value in its storage."""
    val: Tensor = tensor_of(view)
    return list(val.shape), list(val.stride()), int(val.storage_offset())


def item_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The index that ``getitem`` takes, and its operand."""
    args: Args = node.args
    return args[0], args[1]


def in_place_of(target: object) -> Any:
    """``aten.t_`` -> ``aten.t``: changing a tensor's shape in place makes a view of it."""
    return functional_form(target) if changes_shape(target) else target


def reshaping(value: fx.Node) -> OpOverload:
    """The operation that gives ``value`` another shape: a view if its layout allows any."""
    contiguous = tensor_of(value).is_contiguous()
    return aten.view.default if contiguous else aten.reshape.default
