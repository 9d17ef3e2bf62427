"""Losses over classes and over differences."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from treadle.algebra.index import Index
from treadle.loop.expr import Array, Position, ReduceKind
from treadle.loop.traverse import value_index
from treadle.lower.context import LoweringContext, broadcast_shapes, element, fresh_axes
from treadle.lower.operators.pointwise import pointwise
from treadle.lower.operators.reductions import finish, reduce_node, reduced
from treadle.lower.operators.views import reshaped
from treadle.lower.registry import Unsupported, Value, lowers
from treadle.lower.scalars import ScalarExpr, cast, compute_dtype, times_ratio

aten = torch.ops.aten
SUM = ReduceKind.SUM


def _class_dim(x: Value) -> int:
    return 1 if len(x.shape) > 1 else 0


def _target(
    context: LoweringContext, x: Value, target: Value, axes: Sequence[Any], ignore_index: int
) -> tuple[ScalarExpr, Index]:
    """Whether the target at ``axes`` counts, and its class as an index into ``x``."""
    wanted = ScalarExpr(element(target, axes))
    counts = wanted.fn("ne", ignore_index)
    classes = x.shape[_class_dim(x)]
    safe = ScalarExpr(cast(counts.choose(wanted, 0).expr, torch.int64))
    return counts, value_index(safe.expr, 0, classes - 1)


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    context: LoweringContext,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Value, Value]:
    """``-w[t] * x[n, t]`` with ``t = target[n]``, summed over targets that count; the mean is that
    over the sum of their weights. Without weights each is one."""
    loss_site, count_site = context.element_context(0), context.element_context(1)
    wide = compute_dtype(x.dtype)
    axes = fresh_axes(target.shape)
    counts, place = _target(context, x, target, axes, ignore_index)
    dim = _class_dim(x)
    picked = -ScalarExpr(cast(element(x, (*axes[:dim], place, *axes[dim:])), wide))
    if weight is not None:
        picked = picked * ScalarExpr(cast(element(weight, (place,)), wide))
    losses = Array(axes, counts.choose(picked, 0).expr)
    if reduction == 0:
        none = Array((), cast(Position(Index.of(0)), count_site.dtype))
        return Array(losses.axes, cast(losses.body, loss_site.dtype)), none
    dims = tuple(range(len(target.shape)))
    total = reduced(context, "sum", SUM, context.temp("picked", losses), dims, wide)
    total = reshaped(context, total, ())
    seen = _seen(context, x, target, weight, ignore_index, wide)
    number = reshaped(context, reduced(context, "count", SUM, seen, dims, wide), ())
    if reduction == 2:
        return finish(loss_site, total), finish(count_site, number)
    loss = pointwise(loss_site, lambda t, n: t / n, total, number, common=wide)
    return loss, finish(count_site, number)


def _seen(
    context: LoweringContext,
    x: Value,
    target: Value,
    weight: Value | None,
    ignore_index: int,
    wide: torch.dtype,
) -> Value:
    """The weight of each target; zero for one that does not count."""
    axes = fresh_axes(target.shape)
    counts, place = _target(context, x, target, axes, ignore_index)
    if weight is None:
        return context.temp("seen", Array(axes, cast(counts.expr, wide)))
    found = ScalarExpr(cast(element(weight, (place,)), wide))
    return context.temp("seen", Array(axes, counts.choose(found, 0).expr))


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    context: LoweringContext,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Array:
    """``-w[c] * grad`` (over the total weight for the mean) where the class is the target."""
    axes, dim = context.axes(), _class_dim(x)
    wide = compute_dtype(context.dtype)
    others = (*axes[:dim], *axes[dim + 1 :])
    wanted = ScalarExpr(cast(element(target, others), torch.int64))
    here = wanted.fn("eq", ScalarExpr(Position(Index.of(axes[dim]))))
    hit = here.fn("and", wanted.fn("ne", ignore_index))
    slope = -context.term(grad, others if reduction == 0 else (), wide)
    if weight is not None:
        slope = slope * context.term(weight, (axes[dim],), wide)
    if reduction == 1:
        slope = slope / context.term(total_weight, (), wide)
    return Array(axes, cast(hit.choose(slope, 0).expr, context.dtype))


@lowers(aten.mse_loss.default)
def mse_loss(context: LoweringContext, x: Value, target: Value, reduction: int = 1) -> Value:
    """``(x - target)^2``, summed, averaged or left alone."""
    wide = compute_dtype(context.dtype)
    if reduction == 0:
        return pointwise(context, lambda x, y: (x - y) * (x - y), x, target)
    axes = fresh_axes(broadcast_shapes([x.shape, target.shape]))
    gap = context.term(x, axes, wide) - context.term(target, axes, wide)
    squares = context.temp("square", Array(axes, (gap * gap).expr))
    count = math.prod(squares.shape) if reduction == 1 else 1
    dims = tuple(range(len(squares.shape)))
    return reduce_node(context, ReduceKind.SUM, squares, dims, wide, after=lambda t: t / count)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(
    context: LoweringContext, grad: Value, x: Value, target: Value, reduction: int
) -> Array:
    """``2 (x - target) grad``, divided by the count for the mean."""
    elements = max(math.prod(x.shape), 1)
    count = elements if reduction == 1 else 1
    return pointwise(
        context, lambda grad, x, target: times_ratio(x - target, 2.0, count) * grad, grad, x, target
    )


def _check_floating(context: LoweringContext) -> None:
    if not context.dtype.is_floating_point:
        raise Unsupported(f"a gradient of {context.dtype} has no formula")


@lowers(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    context: LoweringContext, grad: Value, x: Value, target: Value, reduction: int, beta: float
) -> Array:
    """``grad * (x - target) / beta`` where ``|x - target| < beta``, else ``grad`` with the sign of
    the difference; divided by the count for the mean. NaN where the difference is."""
    _check_floating(context)
    count = max(math.prod(x.shape), 1) if reduction == 1 else 1

    def formula(grad: ScalarExpr, x: ScalarExpr, target: ScalarExpr) -> ScalarExpr:
        gap, share = x - target, times_ratio(grad, 1.0, count)
        within = times_ratio(gap, 1.0, count) * grad / beta
        return gap.fn("le", -beta).choose(-share, gap.fn("ge", beta).choose(share, within))

    return pointwise(context, formula, grad, x, target)


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    context: LoweringContext, grad: Value, x: Value, target: Value, reduction: int
) -> Array:
    """``-target * z / (1 + z) * grad`` where ``z = e^(-target * x)``; divided by the count for the
    mean."""
    _check_floating(context)
    count = max(math.prod(x.shape), 1) if reduction == 1 else 1

    def formula(grad: ScalarExpr, x: ScalarExpr, target: ScalarExpr) -> ScalarExpr:
        z = (-target * x).fn("exp")
        return times_ratio(target * z, -1.0, count) / (z + 1) * grad

    return pointwise(context, formula, grad, x, target)
