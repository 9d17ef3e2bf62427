"""Layer, RMS and group norms: ``(x - mean) * rstd * weight + bias``, and their derivatives."""

import math
from collections.abc import Sequence

import torch

from treadle.algebra.extents import same
from treadle.loop.expr import Array, ReduceKind
from treadle.loop.program import TensorRef
from treadle.lower.context import LoweringContext, element, fresh_axes
from treadle.lower.operators.pointwise import pointwise
from treadle.lower.operators.reductions import (
    finish,
    mean_and_spread,
    reduced,
    spread_from,
    step,
)
from treadle.lower.operators.views import reshaped
from treadle.lower.registry import Value, lowers
from treadle.lower.scalars import ScalarExpr, compute_dtype

aten = torch.ops.aten
SUM = ReduceKind.SUM


@lowers(aten.native_layer_norm.default)
def layer_norm(
    context: LoweringContext,
    x: Value,
    normalized: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    """``(x - mean) * rstd * weight + bias``, with ``rstd = 1 / sqrt(variance + eps)``."""
    wide = compute_dtype(x.dtype)
    dims = tuple(range(len(x.shape) - len(normalized), len(x.shape)))
    average, spread, count = mean_and_spread(context, x, dims, wide)
    rstd = step(context, "rstd", wide, lambda s: (s / max(count, 1) + eps).fn("rsqrt"), spread)
    value = normalised(context, x, average, rstd, weight, bias)
    return (
        value,
        finish(context.element_context(1), average),
        finish(context.element_context(2), rstd),
    )


def normalised(
    context: LoweringContext,
    x: Value,
    average: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
) -> Value:
    """``(x - average) * rstd * weight + bias``, with the weight and the bias that are given."""
    affine = [parameter for parameter in (weight, bias) if parameter is not None]

    def formula(
        x: ScalarExpr, average: ScalarExpr, rstd: ScalarExpr, *affine: ScalarExpr
    ) -> ScalarExpr:
        result = (x - average) * rstd
        if weight is not None:
            result = result * affine[0]
        return result + affine[-1] if bias is not None else result

    first = context.element_context(0)
    return pointwise(first, formula, x, average, rstd, *affine, common=x.dtype)


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    context: LoweringContext,
    grad: Value,
    x: Value,
    normalized: Sequence[int],
    average: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    wanted: Sequence[bool],
) -> tuple[Value | None, ...]:
    """``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`` with ``g = grad * weight``."""
    wide = compute_dtype(x.dtype)
    first = len(x.shape) - len(normalized)
    inner, outer = tuple(range(first, len(x.shape))), tuple(range(first))
    xhat = step(context, "xhat", wide, lambda x, m, r: (x - m) * r, x, average, rstd)
    results: list[Value | None] = [None, None, None]
    if wanted[0]:
        scaled = grad
        if weight is not None:
            scaled = step(context, "scaled", wide, lambda g, w: g * w, grad, weight)
        results[0] = _centred_gradient(context, scaled, xhat, rstd, inner, wide)
    if wanted[1]:
        product = step(context, "product", wide, lambda g, x: g * x, grad, xhat)
        total = reduced(context, "dweight", SUM, product, outer, wide)
        results[1] = finish(context.element_context(1), total)
    if wanted[2]:
        total = reduced(context, "dbias", SUM, grad, outer, wide)
        results[2] = finish(context.element_context(2), total)
    return tuple(results)


def _centred_gradient(
    context: LoweringContext,
    scaled: Value,
    xhat: Value,
    rstd: Value,
    dims: Sequence[int],
    wide: torch.dtype,
) -> Value:
    """``rstd * (g - mean(g) - xhat * mean(g * xhat))`` over ``dims``."""
    count = max(math.prod(scaled.shape[dim] for dim in dims), 1)
    along = step(context, "along", wide, lambda g, x: g * x, scaled, xhat)
    total = reduced(context, "sum_grad", SUM, scaled, dims, wide)
    aligned = reduced(context, "sum_along", SUM, along, dims, wide)
    return centred(context, scaled, xhat, rstd, total, aligned, count)


def centred(
    context: LoweringContext,
    grad: Value,
    xhat: Value,
    scale: Value,
    total: Value,
    aligned: Value,
    count: int,
) -> Value:
    """``scale * (grad - total / count - xhat * (aligned / count))``, for the first result."""
    return pointwise(
        context.element_context(0),
        lambda g, xhat, scale, total, aligned: scale * (
            g - total / count - xhat * (aligned / count)
        ),
        grad, xhat, scale, total, aligned, common=xhat.dtype,
    )  # fmt: skip


@lowers(aten._fused_rms_norm.default)
def rms_norm(
    context: LoweringContext,
    x: Value,
    normalized: Sequence[int],
    weight: Value | None,
    eps: float | None,
) -> tuple[Value, Value]:
    """``x * rstd * weight``, with ``rstd = 1 / sqrt(mean(x^2) + eps)``."""
    wide = compute_dtype(x.dtype)
    dims = tuple(range(len(x.shape) - len(normalized), len(x.shape)))
    count = max(math.prod(normalized), 1)
    small = torch.finfo(wide).eps if eps is None else eps
    squares = reduced(context, "squares", SUM, x, dims, wide, lambda t: t * t)
    rstd = step(context, "rstd", wide, lambda s: (s / count + small).fn("rsqrt"), squares)
    if weight is None:
        value = pointwise(context.element_context(0), lambda x, r: x * r, x, rstd)
    else:
        value = pointwise(context.element_context(0), lambda x, r, w: x * r * w, x, rstd, weight)
    return value, finish(context.element_context(1), rstd)


@lowers(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    context: LoweringContext,
    grad: Value,
    x: Value,
    normalized: Sequence[int],
    rstd: Value,
    weight: Value | None,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None]:
    """``dx = rstd * (g - xhat * mean(g * xhat))`` with ``g = grad * weight``."""
    wide = compute_dtype(x.dtype)
    first = len(x.shape) - len(normalized)
    inner, outer = tuple(range(first, len(x.shape))), tuple(range(first))
    count = max(math.prod(normalized), 1)
    xhat = step(context, "xhat", wide, lambda x, r: x * r, x, rstd)
    dx: Value | None = None
    dweight: Value | None = None
    if wanted[0]:
        scaled = grad
        if weight is not None:
            scaled = step(context, "scaled", wide, lambda g, w: g * w, grad, weight)
        along = step(context, "along", wide, lambda g, x: g * x, scaled, xhat)
        total = reduced(context, "sum_along", SUM, along, inner, wide)
        dx = pointwise(
            context.element_context(0), lambda g, x, r, t: r * (g - x * (t / count)),
            scaled, xhat, rstd, total, common=wide,
        )  # fmt: skip
    if wanted[1] and weight is not None:
        product = step(context, "product", wide, lambda g, x: g * x, grad, xhat)
        dweight = finish(
            context.element_context(1), reduced(context, "dweight", SUM, product, outer, wide)
        )
    return dx, dweight


@lowers(aten.native_group_norm.default)
def group_norm(
    context: LoweringContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: int,
    channels: int,
    plane: int,
    groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    """As layer norm's, over the ``channels / groups * plane`` elements of each group."""
    wide = compute_dtype(x.dtype)
    grouped = reshaped(context, x, (batch, groups, channels // max(groups, 1) * plane))
    if _is_channels_last(x):
        average, spread, count = _statistics_by_channel(context, x, groups, wide)
    else:
        average, spread, count = mean_and_spread(context, grouped, (2,), wide)
    rstd = step(context, "rstd", wide, lambda s: (s / max(count, 1) + eps).fn("rsqrt"), spread)
    normal = step(context, "xhat", wide, lambda x, m, r: (x - m) * r, grouped, average, rstd)
    rank = len(x.shape)
    affine = [
        per_channel(context, parameter, rank)
        for parameter in (weight, bias)
        if parameter is not None
    ]

    def formula(xhat: ScalarExpr, *affine: ScalarExpr) -> ScalarExpr:
        result = xhat * affine[0] if weight is not None else xhat
        return result + affine[-1] if bias is not None else result

    out = pointwise(
        context.element_context(0),
        formula,
        reshaped(context, normal, x.shape),
        *affine,
        common=x.dtype,
    )
    return (
        out,
        finish(context.element_context(1), average),
        finish(context.element_context(2), rstd),
    )


@lowers(aten.native_group_norm_backward.default)
def group_norm_backward(
    context: LoweringContext,
    grad: Value,
    x: Value,
    average: Value,
    rstd: Value,
    weight: Value | None,
    batch: int,
    channels: int,
    plane: int,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Value | None, ...]:
    """As layer norm's over each group, whose sums are those of its channels."""
    wide, rank = compute_dtype(x.dtype), len(x.shape)
    each = channels // max(groups, 1)
    by_group, count = (batch, groups, each), max(each * plane, 1)

    gain = None if weight is None else per_channel(context, weight, rank)

    def spread(value: Value) -> Value:
        """A value of each group as one of each of its channels."""
        axes = fresh_axes((batch, groups, each))
        group = element(reshaped(context, value, (batch, groups)), axes[:2])
        return reshaped(context, Array(axes, group), (batch, channels, *(1,) * (rank - 2)))

    def grouped(tag: str, sums: Value) -> Value:
        """The sum over the channels of each group, as far as ``weight`` counts it."""
        if gain is not None:
            sums = step(context, f"{tag}_scaled", wide, lambda s, w: s * w, sums, gain)
        return reduced(context, tag, SUM, reshaped(context, sums, by_group), (2,), wide)

    def formula(
        grad: ScalarExpr,
        xhat: ScalarExpr,
        scale: ScalarExpr,
        total: ScalarExpr,
        aligned: ScalarExpr,
        *gain: ScalarExpr,
    ) -> ScalarExpr:
        scaled = grad * gain[0] if gain else grad
        return scale * (scaled - total / count - xhat * (aligned / count))

    places = tuple(range(2, rank))
    centre, scale = spread(average), spread(rstd)
    xhat = step(context, "xhat", wide, lambda x, m, r: (x - m) * r, x, centre, scale)
    along = step(context, "along", wide, lambda g, x: g * x, grad, xhat)
    aligned = reduced(context, "sum_along", SUM, along, places, wide)
    total = reduced(context, "sum_grad", SUM, grad, places, wide)
    results: list[Value | None] = [None, None, None]
    if wanted[0]:
        sums = spread(grouped("total", total)), spread(grouped("aligned", aligned))
        gains = () if gain is None else (gain,)
        first = context.element_context(0)
        results[0] = pointwise(first, formula, grad, xhat, scale, *sums, *gains, common=wide)
    for position, sums in ((1, aligned), (2, total)):
        if wanted[position]:
            over = reduced(context, f"sum_{position}", SUM, sums, (0,), wide)
            results[position] = finish(context.element_context(position), over)
    return tuple(results)


def _is_channels_last(x: Value) -> bool:
    """Whether the channels of one place are next to each other."""
    if not isinstance(x, TensorRef) or len(x.shape) < 3:
        return False
    return same(x.strides[1], 1) and not any(same(stride, 1) for stride in x.strides[2:])


def _statistics_by_channel(
    context: LoweringContext, x: Value, groups: int, dtype: torch.dtype
) -> tuple[Value, Value, int]:
    """As ``mean_and_spread`` of each group, from those of its channels: sums down columns, where
    channels are next to each other (Chan, Golub and LeVeque, 1983, equation 2.1)."""
    batch, channels, *_ = x.shape
    shape = batch, groups, channels // max(groups, 1)
    places = tuple(range(2, len(x.shape)))
    totals = reduced(context, "sum", SUM, x, places, dtype)
    _, spreads, size = spread_from(context, x, totals, places, dtype)
    totals, spreads = (reshaped(context, each, shape) for each in (totals, spreads))
    averages = step(context, "mean", dtype, lambda total: total / max(size, 1), totals)
    average, between, count = mean_and_spread(context, averages, (2,), dtype)
    within = reduced(context, "within", SUM, spreads, (2,), dtype)
    spread = step(context, "spread", dtype, lambda w, b: w + b * size, within, between)
    return average, spread, count * size


def per_channel(context: LoweringContext, value: Value, rank: int) -> Value:
    """``[C]`` as ``[1, C, 1, ...]``."""
    return reshaped(context, value, (1, value.shape[0], *(1,) * (rank - 2)))


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    context: LoweringContext, grad: Value, v: Value, g: Value, norms: Value, dim: int
) -> tuple[Value, Value]:
    """``dg = sum(grad * v) / n``, ``dv = g / n * (grad - v * dg / n)`` with ``n = norm(v)``."""
    wide = compute_dtype(v.dtype)
    dims = tuple(d for d in range(len(v.shape)) if d != dim % len(v.shape))
    product = step(context, "product", wide, lambda x, y: x * y, grad, v)
    total = reduced(context, "total", SUM, product, dims, wide)

    def slope(
        grad: ScalarExpr, v: ScalarExpr, g: ScalarExpr, n: ScalarExpr, total: ScalarExpr
    ) -> ScalarExpr:
        return g / n * (grad - v * (total / (n * n)))

    dv = pointwise(context.element_context(0), slope, grad, v, g, norms, total, common=wide)
    dg = pointwise(context.element_context(1), lambda t, n: t / n, total, norms, common=wide)
    return dv, dg
