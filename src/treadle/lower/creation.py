"""Tensors made from nothing. They stay formulas: no buffer holds a constant or a mask."""

from collections.abc import Sequence
from typing import Any

import torch

from treadle.graph.masks import LOW, ROUNDS, WORD, counted_mask, limit
from treadle.loop.expr import Array, Position
from treadle.loop.index import Index
from treadle.loop.program import TensorRef
from treadle.lower.registry import Value, lowers
from treadle.lower.scalars import Number, Operand, Term, cast, const
from treadle.lower.site import Site, element

aten = torch.ops.aten


@lowers(counted_mask)
def counted(site: Site, keys: Value, at: int, _size: Any, p: float, _dtype: torch.dtype) -> Array:
    """``out[i] = squares(position of i, keys[at]) < p * 2^32``."""
    axes = site.axes()
    key = Term(element(keys, (at,)))
    place = Index.of(0)
    for axis in axes:
        place = place * axis.extent + axis
    first = Term(Position(place)) * key
    x, terms = first, (first, first + key)
    for number in range(ROUNDS):
        x = x * x + terms[number % 2]
        high = x.fn("floordiv", 1 << WORD).fn("bitand", LOW)
        x = high if number == ROUNDS - 1 else (x * (1 << WORD)).fn("bitor", high)
    return Array(axes, x.fn("lt", limit(p)).to(site.dtype).expr)


def _filled(site: Site, value: Operand) -> Array:
    axes = site.axes()
    if isinstance(value, Number):
        return Array(axes, const(value, site.dtype))
    return Array(axes, cast(site.term(value, axes, site.dtype).expr, site.dtype))


@lowers(aten.full.default, aten.full_like.default)
def full(site: Site, _like: Any, value: Operand, **_kwargs: Any) -> Array:
    """``out[i] = value``."""
    return _filled(site, value)


@lowers(aten.new_full.default)
def new_full(site: Site, _like: Any, _size: Any, value: Operand, **_kwargs: Any) -> Array:
    return _filled(site, value)


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def fill(site: Site, _like: Any, value: Operand) -> Array:
    return _filled(site, value)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(site: Site, value: Number, **_kwargs: Any) -> Array:
    return _filled(site, value)


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zero.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._efficientzerotensor.default,
)
def zeros(site: Site, *_args: Any, **_kwargs: Any) -> Array:
    """``out[i] = 0``; what nobody wrote may as well be zero."""
    return _filled(site, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(site: Site, *_args: Any, **_kwargs: Any) -> Array:
    return _filled(site, 1)


@lowers(aten._foreach_zero.default)
def foreach_zero(site: Site, tensors: Sequence[Value]) -> tuple[Array, ...]:
    return tuple(_filled(site.element_site(i), 0) for i in range(len(tensors)))


def _range(site: Site, start: Number, step: Number) -> Array:
    """``out[i] = start + step * i``."""
    (axis,) = site.axes()
    if isinstance(start, int) and isinstance(step, int):
        return Array((axis,), cast(Position(Index.of(axis) * step + start), site.dtype))
    wide = Term(cast(Position(Index.of(axis)), torch.float64))
    return Array((axis,), cast((wide * step + start).expr, site.dtype))


@lowers(aten.arange.default)
def arange(site: Site, end: Number, **_kwargs: Any) -> Array:
    return _range(site, 0, 1 if isinstance(end, int) else 1.0)


@lowers(aten.arange.start)
def arange_start(site: Site, start: Number, end: Number, **_kwargs: Any) -> Array:
    return _range(site, start, 1)


@lowers(aten.arange.start_step)
def arange_step(site: Site, start: Number, end: Number, step: Number = 1, **_kwargs: Any) -> Array:
    return _range(site, start, step)


@lowers(aten.linspace.default)
def linspace(site: Site, start: Number, end: Number, steps: int, **_kwargs: Any) -> Array:
    """``start + i * step`` from the nearer end, as eager does; whole numbers are cut off."""
    (axis,) = site.axes()
    place = Term(cast(Position(Index.of(axis)), torch.float64))
    step = (end - start) / max(steps - 1, 1)
    low = place * step + float(start)
    high = (place * -1 + float(steps - 1)) * -step + float(end)
    value = place.fn("lt", steps // 2).choose(low, high) if steps > 1 else low
    return Array((axis,), cast(value.expr, site.dtype))


@lowers(aten.tril_indices.default, aten.triu_indices.default)
def triangle_indices(
    site: Site, rows: int, columns: int, offset: int = 0, **_kwargs: Any
) -> TensorRef:
    """A table of constants."""
    is_lower = site.node.target is aten.tril_indices.default
    make = torch.tril_indices if is_lower else torch.triu_indices
    return site.builder.constant(site.name, make(rows, columns, offset, dtype=site.dtype))


@lowers(aten.eye.default, aten.eye.m)
def eye(site: Site, *_args: Any, **_kwargs: Any) -> Array:
    """``out[i, j] = 1 if i == j else 0``."""
    row, column = site.axes()
    on_diagonal = Term(Position(Index.of(row))).fn("eq", Term(Position(Index.of(column))))
    return Array((row, column), cast(on_diagonal.expr, site.dtype))


def _triangle(site: Site, x: Value, comparison: str, diagonal: int) -> Array:
    axes = site.axes()
    kept = Term(Position(Index.of(axes[-1]) - axes[-2])).fn(comparison, diagonal)
    term = site.term(x, axes, site.dtype)
    return Array(axes, cast(kept.choose(term, 0).expr, site.dtype))


@lowers(aten.tril.default)
def tril(site: Site, x: Value, diagonal: int = 0) -> Array:
    """``out[i, j] = x[i, j] if j - i <= diagonal else 0``."""
    return _triangle(site, x, "le", diagonal)


@lowers(aten.triu.default)
def triu(site: Site, x: Value, diagonal: int = 0) -> Array:
    """``out[i, j] = x[i, j] if j - i >= diagonal else 0``."""
    return _triangle(site, x, "ge", diagonal)
