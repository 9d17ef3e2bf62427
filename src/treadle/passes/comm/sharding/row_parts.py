"""Scalars computed from all rows of a value, as scalars computed from each rank's rows.

::

    norm(w, p)   part: sum |own rows|^p     combined: sum    finish: ^(1/p)
    norm(w, inf) part: amax |own rows|      combined: amax
    mean(w)      part: sum own rows         combined: sum    finish: / elements of w
    any(w)       part: amax (own rows != 0) combined: amax   finish: != 0

A rank may have no rows: its part is then the neutral value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

import torch
from torch import fx

from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dataflow import list_call
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.rules import NoMatch
from treadle.util.errors import require

aten = torch.ops.aten

Emit: TypeAlias = Callable[..., fx.Node]
"""``emit(operator, *args, **kwargs)``: a new node."""
Step: TypeAlias = Callable[[Emit, fx.Node], fx.Node]

_HALVES = (torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True, slots=True)
class Combined:
    """One number: of each rank's rows a ``part``, of all parts by ``combine`` a total, and the
    ``finish`` of that. ``dtype``: of parts."""

    combine: OpOverload
    dtype: torch.dtype
    part: Step
    finish: Step


def _norm(reader: fx.Node) -> Combined:
    args = arguments(list_call(reader) or reader)
    order, dtype = float(args["ord"]), _number(reader)
    if math.isinf(order):
        combine, fill = (_MOST, 0.0) if order > 0 else (_LEAST, math.inf)

        def extreme(emit: Emit, own: fx.Node) -> fx.Node:
            return _extreme(emit, combine, emit(aten.abs.default, _as(emit, own, dtype)), fill)

        return Combined(combine, dtype, extreme, partial(_converted, reader))

    def part(emit: Emit, own: fx.Node) -> fx.Node:
        return emit(aten.sum.default, _power(emit, _as(emit, own, dtype), order))

    def finish(emit: Emit, total: fx.Node) -> fx.Node:
        if order == 2:
            total = emit(aten.sqrt.default, total)
        elif order not in (0, 1):
            total = emit(aten.pow.Tensor_Scalar, total, 1 / order)
        return _converted(reader, emit, total)

    return Combined(aten.sum.dim_IntList, dtype, part, finish)


def _power(emit: Emit, own: fx.Node, order: float) -> fx.Node:
    """What the norm sums: ``|x|^order``."""
    if order == 2:
        return emit(aten.mul.Tensor, own, own)
    if order == 0:
        return _as(emit, emit(aten.ne.Scalar, own, 0), type_of(own).dtype)
    size = emit(aten.abs.default, own)
    return size if order == 1 else emit(aten.pow.Tensor_Scalar, size, order)


def _sum(reader: fx.Node) -> Combined:
    dtype = _number(reader)

    def part(emit: Emit, own: fx.Node) -> fx.Node:
        return emit(aten.sum.default, _as(emit, own, dtype))

    return Combined(aten.sum.dim_IntList, dtype, part, partial(_converted, reader))


def _mean(reader: fx.Node) -> Combined:
    summed = _sum(reader)
    count = type_of(arguments(reader)["self"]).numel

    def finish(emit: Emit, total: fx.Node) -> fx.Node:
        return _converted(reader, emit, emit(aten.div.Tensor, total, count))

    return Combined(summed.combine, summed.dtype, summed.part, finish)


def _bound(combine: OpOverload, fill: float, reader: fx.Node) -> Combined:
    dtype = _number(reader)
    require(dtype.is_floating_point, NoMatch, f"{reader} is not a floating-point number: {dtype}")

    def part(emit: Emit, own: fx.Node) -> fx.Node:
        return _extreme(emit, combine, _as(emit, own, dtype), fill)

    return Combined(combine, dtype, part, partial(_converted, reader))


def _truth(combine: OpOverload, fill: float, reader: fx.Node) -> Combined:
    _number(reader)

    def part(emit: Emit, own: fx.Node) -> fx.Node:
        is_true = _as(emit, emit(aten.ne.Scalar, own, 0), torch.float32)
        return _extreme(emit, combine, is_true, fill)

    def finish(emit: Emit, total: fx.Node) -> fx.Node:
        return emit(aten.ne.Scalar, total, 0)

    return Combined(combine, torch.float32, part, finish)


def _number(reader: fx.Node) -> torch.dtype:
    """The dtype in which parts of the number ``reader`` are computed: that of PyTorch's kernels."""
    tensor_type = type_of(reader)
    require(tensor_type.ndim == 0, NoMatch, f"{reader} is more than one number: {tensor_type}")
    return torch.float32 if tensor_type.dtype in _HALVES else tensor_type.dtype


def _extreme(emit: Emit, combine: OpOverload, own: fx.Node, fill: float) -> fx.Node:
    """The greatest or the least element; ``fill`` where there is none."""
    tensor_type = type_of(own)
    if not tensor_type.numel:
        return emit(aten.full.default, [], fill, dtype=tensor_type.dtype, device=tensor_type.device)
    return emit(combine, own, list(range(tensor_type.ndim)))


def _as(emit: Emit, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if type_of(x).dtype is dtype else emit(aten._to_copy.default, x, dtype=dtype)


def _converted(reader: fx.Node, emit: Emit, total: fx.Node) -> fx.Node:
    return _as(emit, total, type_of(reader).dtype)


_MOST, _LEAST = aten.amax.default, aten.amin.default
PARTS: dict[object, Callable[[fx.Node], Combined]] = {
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norm,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.max.default: partial(_bound, _MOST, -math.inf),
    aten.amax.default: partial(_bound, _MOST, -math.inf),
    aten.min.default: partial(_bound, _LEAST, math.inf),
    aten.amin.default: partial(_bound, _LEAST, math.inf),
    aten.any.default: partial(_truth, _MOST, 0.0),
    aten.all.default: partial(_truth, _LEAST, 1.0),
}
"""By operator: how one number is made of rows. ``NoMatch`` where the call makes several."""
