"""Batch norm: over every dim but the channel, which is dim 1."""

import math
from collections.abc import Sequence

import torch

from treadle.loop.expr import Array, ReduceKind
from treadle.lower.context import LoweringContext
from treadle.lower.operators.norms import centred, normalised, per_channel
from treadle.lower.operators.pointwise import pointwise
from treadle.lower.operators.reductions import finish, mean_and_spread, reduced, step
from treadle.lower.operators.views import reshaped
from treadle.lower.registry import Unsupported, Value, lowers
from treadle.lower.scalars import compute_dtype, const, times_ratio

aten = torch.ops.aten
SUM = ReduceKind.SUM


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    context: LoweringContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Normalised over all dims but the channel; in training the running statistics are updated."""
    if not training:
        results = _with_statistics(context, x, weight, bias, running_mean, running_var, eps)
        return *results, running_mean, running_var
    average, spread, count, rstd = _channel_statistics(context, x, eps)
    results = _normalised(context, x, weight, bias, average, rstd)
    freedom = max(count - 1, 1)
    new_mean = pointwise(
        context.element_context(3), lambda old, now: old * (1 - momentum) + now * momentum,
        running_mean, reshaped(context, average, running_mean.shape),
    )  # fmt: skip
    new_var = pointwise(
        context.element_context(4),
        lambda old, now: old * (1 - momentum) + times_ratio(now, momentum, freedom),
        running_var, reshaped(context, spread, running_var.shape),
    )  # fmt: skip
    return *results, new_mean, new_var


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    context: LoweringContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Normalised by the statistics of the batch; there are no running ones."""
    average, _, _, rstd = _channel_statistics(context, x, eps)
    return _normalised(context, x, weight, bias, average, rstd)


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    context: LoweringContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Normalised by the running statistics, which do not change."""
    return _with_statistics(context, x, weight, bias, running_mean, running_var, eps)


@lowers(aten.native_batch_norm.default)
def batch_norm(
    context: LoweringContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Normalised by the statistics of the batch, or by the given ones, which do not change."""
    if not training and running_mean is not None and running_var is not None:
        return _with_statistics(context, x, weight, bias, running_mean, running_var, eps)
    if running_mean is not None or running_var is not None:
        raise Unsupported("it writes to running statistics without saying so")
    average, _, _, rstd = _channel_statistics(context, x, eps)
    return _normalised(context, x, weight, bias, average, rstd)


def _with_statistics(
    context: LoweringContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    average: Value,
    variance: Value,
    eps: float,
) -> tuple[Value, Value, Value]:
    """Normalised by given statistics. What eager saves beside it is empty, or the statistics."""
    rank = len(x.shape)
    wide = compute_dtype(x.dtype)
    rstd = step(
        context, "rstd", wide, lambda v: (v + eps).fn("rsqrt"), per_channel(context, variance, rank)
    )
    out, _, _ = _normalised(context, x, weight, bias, per_channel(context, average, rank), rstd)
    saved: list[Value] = []
    for position, value in ((1, average), (2, rstd)):
        place = context.element_context(position)
        empty = math.prod(place.shape) == 0
        saved.append(Array(place.axes(), const(0, place.dtype)) if empty else finish(place, value))
    return out, saved[0], saved[1]


def _channel_statistics(
    context: LoweringContext, x: Value, eps: float
) -> tuple[Value, Value, int, Value]:
    wide = compute_dtype(x.dtype)
    dims = tuple(dim for dim in range(len(x.shape)) if dim != 1)
    average, spread, count = mean_and_spread(context, x, dims, wide)
    rstd = step(context, "rstd", wide, lambda s: (s / max(count, 1) + eps).fn("rsqrt"), spread)
    return average, spread, count, rstd


def _normalised(
    context: LoweringContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    average: Value,
    rstd: Value,
) -> tuple[Value, Value, Value]:
    rank = len(x.shape)
    weight = None if weight is None else per_channel(context, weight, rank)
    bias = None if bias is None else per_channel(context, bias, rank)
    value = normalised(context, x, average, rstd, weight, bias)
    saved = [context.element_context(i) for i in (1, 2)]
    if math.prod(saved[0].shape) == 0:
        return value, average, rstd
    return value, finish(saved[0], average), finish(saved[1], rstd)


@lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    context: LoweringContext,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    average: Value | None,
    rstd: Value | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Value | None, ...]:
    """As layer norm's, over every dim but the channel."""
    if not training or average is None or rstd is None:
        raise Unsupported("in evaluation mode its parts are enough")
    wide, rank = compute_dtype(x.dtype), len(x.shape)
    dims = tuple(dim for dim in range(rank) if dim != 1)
    centre, scale = per_channel(context, average, rank), per_channel(context, rstd, rank)
    xhat = step(context, "xhat", wide, lambda x, m, r: (x - m) * r, x, centre, scale)
    product = step(context, "product", wide, lambda g, x: g * x, grad, xhat)
    aligned = reduced(context, "dweight", SUM, product, dims, wide)
    total = reduced(context, "dbias", SUM, grad, dims, wide)
    count = max(math.prod(x.shape[dim] for dim in dims), 1)
    gain = scale if weight is None else step(
        context, "gain", wide, lambda r, w: r * w, scale, per_channel(context, weight, rank)
    )  # fmt: skip
    dx = centred(context, grad, xhat, gain, total, aligned, count)
    dweight = finish(context.element_context(1), aligned) if wanted[1] else None
    dbias = finish(context.element_context(2), total) if wanted[2] else None
    return (dx if wanted[0] else None), dweight, dbias
