"""Softmax, losses over classes, and normalisations: reductions and the pointwise work around them.

Each is a few small steps; fusing them into one kernel is the scheduler's business.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from treadle.loop.expr import Array, Position, ReduceKind
from treadle.loop.index import Index, value_index
from treadle.lower.pointwise import pointwise
from treadle.lower.reductions import finish, mean_and_spread, reduced
from treadle.lower.registry import Decline, Value, lowers
from treadle.lower.scalars import Number, Operand, Term, cast, compute_dtype
from treadle.lower.site import Site, element, fresh_axes
from treadle.lower.views import reshaped

aten = torch.ops.aten
SUM = ReduceKind.SUM


def step(
    site: Site,
    tag: str,
    dtype: torch.dtype,
    formula: Callable[..., Term],
    *operands: Operand,
) -> Value:
    """A pointwise intermediate in the compute dtype of ``dtype``, broadcast over its operands."""
    shapes = [operand.shape for operand in operands if not isinstance(operand, Number)]
    axes = fresh_axes(torch.broadcast_shapes(*shapes))
    terms = [site.term(operand, axes, dtype) for operand in operands]
    return site.temp(tag, Array(axes, formula(*terms).expr))


def _shifted(site: Site, x: Value, dim: int, wide: torch.dtype) -> tuple[Value, Value, Value]:
    """Largest, ``exp(x - largest)`` and its sum, along ``dim``."""
    dims = (dim % len(x.shape),) if x.shape else ()
    largest = reduced(site, "max", ReduceKind.MAX, x, dims, wide)
    powers = step(site, "exp", wide, lambda x, top: (x - top).fn("exp"), x, largest)
    return largest, powers, reduced(site, "sum", SUM, powers, dims, wide)


@lowers(aten._softmax.default)
def softmax(site: Site, x: Value, dim: int, half_to_float: bool) -> Array:
    """``exp(x - max) / sum exp(x - max)``."""
    _, powers, total = _shifted(site, x, dim, compute_dtype(site.dtype))
    return pointwise(site, lambda power, total: power / total, powers, total)


@lowers(aten._safe_softmax.default)
def safe_softmax(site: Site, x: Value, dim: int, **_dtype: Any) -> Array:
    """Softmax with zeros, not NaN, for a row that is all ``-inf``."""
    largest, powers, total = _shifted(site, x, dim, compute_dtype(site.dtype))
    return pointwise(
        site,
        lambda power, total, top: top.fn("eq", -math.inf).choose(0, power / total),
        powers,
        total,
        largest,
    )


@lowers(aten._log_softmax.default)
def log_softmax(site: Site, x: Value, dim: int, half_to_float: bool) -> Array:
    """``x - max - log sum exp(x - max)``."""
    largest, _, total = _shifted(site, x, dim, compute_dtype(site.dtype))
    return pointwise(
        site, lambda x, top, total: x - top - total.fn("log"), x, largest, total,
        common=compute_dtype(site.dtype),
    )  # fmt: skip


@lowers(aten._softmax_backward_data.default)
def softmax_backward(
    site: Site, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Array:
    """``y * grad - y * sum(y * grad)``."""
    wide = compute_dtype(grad.dtype)
    product = step(site, "product", wide, lambda g, y: g * y, grad, output)
    dims = (dim % len(output.shape),) if output.shape else ()
    total = reduced(site, "sum", SUM, product, dims, wide)
    return pointwise(site, lambda p, y, total: p - y * total, product, output, total, common=wide)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    site: Site, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Array:
    """``grad - exp(y) * sum(grad)``."""
    wide = compute_dtype(grad.dtype)
    dims = (dim % len(output.shape),) if output.shape else ()
    total = reduced(site, "sum", SUM, grad, dims, wide)
    return pointwise(
        site, lambda g, y, total: g - y.fn("exp") * total, grad, output, total, common=wide
    )


# --- negative log likelihood ----------------------------------------------------------------


def _class_dim(x: Value) -> int:
    return 1 if len(x.shape) > 1 else 0


def _target(
    site: Site, x: Value, target: Value, axes: Sequence[Any], ignore_index: int
) -> tuple[Term, Index]:
    """Whether the target at ``axes`` counts, and its class as an index into ``x``."""
    wanted = Term(element(target, axes))
    counts = wanted.fn("ne", ignore_index)
    classes = x.shape[_class_dim(x)]
    safe = Term(cast(counts.choose(wanted, 0).expr, torch.int64))
    return counts, value_index(safe.expr, 0, classes - 1)


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    site: Site, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    """``-x[n, target[n]]`` summed over targets that count, over their number for the mean."""
    if weight is not None:
        raise Decline("class weights of nll_loss have no formula yet")
    loss_site, count_site = site.element_site(0), site.element_site(1)
    wide = compute_dtype(x.dtype)
    axes = fresh_axes(target.shape)
    counts, place = _target(site, x, target, axes, ignore_index)
    dim = _class_dim(x)
    picked = Term(cast(element(x, (*axes[:dim], place, *axes[dim:])), wide))
    losses = Array(axes, counts.choose(-picked, 0).expr)
    none = Array((), cast(Term(Position(Index.of(0))).expr, count_site.dtype))
    if reduction == 0:
        return Array(losses.axes, cast(losses.body, loss_site.dtype)), none
    dims = tuple(range(len(target.shape)))
    total = reduced(site, "sum", SUM, site.temp("picked", losses), dims, wide)
    total = reshaped(total, ())
    seen = lambda t: t.fn("ne", ignore_index).to(wide)  # noqa: E731
    number = reshaped(_count(site, target, dims, wide, seen), ())
    if reduction == 2:
        return finish(loss_site, total), finish(count_site, number)
    loss = pointwise(loss_site, lambda t, n: t / n, total, number, common=wide)
    return loss, finish(count_site, number)


def _count(
    site: Site,
    target: Value,
    dims: Sequence[int],
    wide: torch.dtype,
    seen: Callable[[Term], Term],
) -> Value:
    """How many targets count, as a float."""
    axes = fresh_axes(target.shape)
    flags = site.temp("seen", Array(axes, seen(Term(element(target, axes))).expr))
    return reduced(site, "count", SUM, flags, dims, wide)


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    site: Site,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Array:
    """``-grad`` (over the count for the mean) where the class is the target, else zero."""
    if weight is not None:
        raise Decline("class weights of nll_loss have no formula yet")
    axes, dim = site.axes(), _class_dim(x)
    wide = compute_dtype(site.dtype)
    others = (*axes[:dim], *axes[dim + 1 :])
    wanted = Term(cast(element(target, others), torch.int64))
    here = wanted.fn("eq", Term(Position(Index.of(axes[dim]))))
    hit = here.fn("and", wanted.fn("ne", ignore_index))
    slope = -site.term(grad, others if reduction == 0 else (), wide)
    if reduction == 1:
        slope = slope / site.term(total_weight, (), wide)
    return Array(axes, cast(hit.choose(slope, 0).expr, site.dtype))


# --- normalisations -------------------------------------------------------------------------


@lowers(aten.native_layer_norm.default)
def layer_norm(
    site: Site,
    x: Value,
    normalized: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    """``(x - mean) * rstd * weight + bias``, with ``rstd = 1 / sqrt(variance + eps)``."""
    out = site.element_site(0)
    wide = compute_dtype(x.dtype)
    dims = tuple(range(len(x.shape) - len(normalized), len(x.shape)))
    average, spread, count = mean_and_spread(site, x, dims, wide)
    rstd = step(site, "rstd", wide, lambda s: (s / max(count, 1) + eps).fn("rsqrt"), spread)
    operands = [operand for operand in (weight, bias) if operand is not None]

    def formula(x: Term, average: Term, rstd: Term, *affine: Term) -> Term:
        result = (x - average) * rstd
        if weight is not None:
            result = result * affine[0]
        return result + affine[-1] if bias is not None else result

    value = pointwise(out, formula, x, average, rstd, *operands, common=x.dtype)
    return value, finish(site.element_site(1), average), finish(site.element_site(2), rstd)


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    site: Site,
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
    xhat = step(site, "xhat", wide, lambda x, m, r: (x - m) * r, x, average, rstd)
    results: list[Value | None] = [None, None, None]
    if wanted[0]:
        scaled = grad
        if weight is not None:
            scaled = step(site, "scaled", wide, lambda g, w: g * w, grad, weight)
        results[0] = _centred_gradient(site, scaled, xhat, rstd, inner, wide)
    if wanted[1]:
        product = step(site, "product", wide, lambda g, x: g * x, grad, xhat)
        total = reduced(site, "dweight", SUM, product, outer, wide)
        results[1] = finish(site.element_site(1), total)
    if wanted[2]:
        total = reduced(site, "dbias", SUM, grad, outer, wide)
        results[2] = finish(site.element_site(2), total)
    return tuple(results)


def _centred_gradient(
    site: Site, scaled: Value, xhat: Value, rstd: Value, dims: Sequence[int], wide: torch.dtype
) -> Value:
    """``rstd * (g - mean(g) - xhat * mean(g * xhat))`` over ``dims``."""
    count = max(math.prod(scaled.shape[dim] for dim in dims), 1)
    along = step(site, "along", wide, lambda g, x: g * x, scaled, xhat)
    total = reduced(site, "sum_grad", SUM, scaled, dims, wide)
    aligned = reduced(site, "sum_along", SUM, along, dims, wide)

    def formula(g: Term, xhat: Term, rstd: Term, total: Term, aligned: Term) -> Term:
        return rstd * (g - total / count - xhat * (aligned / count))

    return pointwise(site.element_site(0), formula, scaled, xhat, rstd, total, aligned, common=wide)


@lowers(aten._fused_rms_norm.default)
def rms_norm(
    site: Site, x: Value, normalized: Sequence[int], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    """``x * rstd * weight``, with ``rstd = 1 / sqrt(mean(x^2) + eps)``."""
    wide = compute_dtype(x.dtype)
    dims = tuple(range(len(x.shape) - len(normalized), len(x.shape)))
    count = max(math.prod(normalized), 1)
    small = torch.finfo(wide).eps if eps is None else eps
    squares = reduced(site, "squares", SUM, x, dims, wide, lambda t: t * t)
    rstd = step(site, "rstd", wide, lambda s: (s / count + small).fn("rsqrt"), squares)
    if weight is None:
        value = pointwise(site.element_site(0), lambda x, r: x * r, x, rstd)
    else:
        value = pointwise(site.element_site(0), lambda x, r, w: x * r * w, x, rstd, weight)
    return value, finish(site.element_site(1), rstd)


@lowers(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    site: Site,
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
    xhat = step(site, "xhat", wide, lambda x, r: x * r, x, rstd)
    dx: Value | None = None
    dweight: Value | None = None
    if wanted[0]:
        scaled = grad
        if weight is not None:
            scaled = step(site, "scaled", wide, lambda g, w: g * w, grad, weight)
        along = step(site, "along", wide, lambda g, x: g * x, scaled, xhat)
        total = reduced(site, "sum_along", SUM, along, inner, wide)
        dx = pointwise(
            site.element_site(0), lambda g, x, r, t: r * (g - x * (t / count)),
            scaled, xhat, rstd, total, common=wide,
        )  # fmt: skip
    if wanted[1] and weight is not None:
        product = step(site, "product", wide, lambda g, x: g * x, grad, xhat)
        dweight = finish(site.element_site(1), reduced(site, "dweight", SUM, product, outer, wide))
    return dx, dweight


# --- batch norm -----------------------------------------------------------------------------


def _per_channel(value: Value, rank: int) -> Value:
    """``[C]`` as ``[1, C, 1, ...]``."""
    return reshaped(value, (1, value.shape[0], *(1,) * (rank - 2)))


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    site: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Normalised over all dims but the channel, and the running statistics moved along."""
    if not training:
        raise Decline("batch norm in evaluation mode has no formula yet")
    average, spread, count, rstd = _channel_statistics(site, x, eps)
    results = _normalised(site, x, weight, bias, average, rstd)
    unbiased = momentum / max(count - 1, 1)
    new_mean = pointwise(
        site.element_site(3), lambda old, now: old * (1 - momentum) + now * momentum,
        running_mean, reshaped(average, running_mean.shape),
    )  # fmt: skip
    new_var = pointwise(
        site.element_site(4), lambda old, now: old * (1 - momentum) + now * unbiased,
        running_var, reshaped(spread, running_var.shape),
    )  # fmt: skip
    return *results, new_mean, new_var


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    site: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    average, _, _, rstd = _channel_statistics(site, x, eps)
    return _normalised(site, x, weight, bias, average, rstd)


def _channel_statistics(site: Site, x: Value, eps: float) -> tuple[Value, Value, int, Value]:
    wide = compute_dtype(x.dtype)
    dims = tuple(dim for dim in range(len(x.shape)) if dim != 1)
    average, spread, count = mean_and_spread(site, x, dims, wide)
    rstd = step(site, "rstd", wide, lambda s: (s / max(count, 1) + eps).fn("rsqrt"), spread)
    return average, spread, count, rstd


def _normalised(
    site: Site, x: Value, weight: Value | None, bias: Value | None, average: Value, rstd: Value
) -> tuple[Value, Value, Value]:
    rank = len(x.shape)
    affine = [_per_channel(each, rank) for each in (weight, bias) if each is not None]

    def formula(x: Term, average: Term, rstd: Term, *affine: Term) -> Term:
        result = (x - average) * rstd
        if weight is not None:
            result = result * affine[0]
        return result + affine[-1] if bias is not None else result

    value = pointwise(site.element_site(0), formula, x, average, rstd, *affine, common=x.dtype)
    return value, finish(site.element_site(1), average), finish(site.element_site(2), rstd)


@lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    site: Site,
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
        raise Decline("batch norm in evaluation mode has no formula yet")
    wide, rank = compute_dtype(x.dtype), len(x.shape)
    dims = tuple(dim for dim in range(rank) if dim != 1)
    centre, scale = _per_channel(average, rank), _per_channel(rstd, rank)
    xhat = step(site, "xhat", wide, lambda x, m, r: (x - m) * r, x, centre, scale)
    product = step(site, "product", wide, lambda g, x: g * x, grad, xhat)
    aligned = reduced(site, "dweight", SUM, product, dims, wide)
    total = reduced(site, "dbias", SUM, grad, dims, wide)
    count = max(math.prod(x.shape[dim] for dim in dims), 1)
    gain = scale if weight is None else step(
        site, "gain", wide, lambda r, w: r * w, scale, _per_channel(weight, rank)
    )  # fmt: skip

    def formula(g: Term, xhat: Term, gain: Term, total: Term, aligned: Term) -> Term:
        return gain * (g - total / count - xhat * (aligned / count))

    dx = pointwise(site.element_site(0), formula, grad, xhat, gain, total, aligned, common=wide)
    dweight = finish(site.element_site(1), aligned) if wanted[1] else None
    dbias = finish(site.element_site(2), total) if wanted[2] else None
    return (dx if wanted[0] else None), dweight, dbias
