"""Layer, RMS and group norms: ``(x - mean) * rstd * weight + bias``, and their derivatives."""

import math
from collections.abc import Sequence

import torch

from treadle.loop.expr import ReduceKind
from treadle.lower.pointwise import pointwise
from treadle.lower.reductions import finish, mean_and_spread, reduced, step
from treadle.lower.registry import Value, lowers
from treadle.lower.scalars import Term, compute_dtype
from treadle.lower.site import Site
from treadle.lower.views import reshaped

aten = torch.ops.aten
SUM = ReduceKind.SUM


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


@lowers(aten.native_group_norm.default)
def group_norm(
    site: Site,
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
    grouped = reshaped(site, x, (batch, groups, channels // max(groups, 1) * plane))
    average, spread, count = mean_and_spread(site, grouped, (2,), wide)
    rstd = step(site, "rstd", wide, lambda s: (s / max(count, 1) + eps).fn("rsqrt"), spread)
    normal = step(site, "xhat", wide, lambda x, m, r: (x - m) * r, grouped, average, rstd)
    rank = len(x.shape)
    affine = [per_channel(site, each, rank) for each in (weight, bias) if each is not None]

    def formula(xhat: Term, *affine: Term) -> Term:
        result = xhat * affine[0] if weight is not None else xhat
        return result + affine[-1] if bias is not None else result

    out = pointwise(
        site.element_site(0), formula, reshaped(site, normal, x.shape), *affine, common=x.dtype
    )
    return out, finish(site.element_site(1), average), finish(site.element_site(2), rstd)


def per_channel(site: Site, value: Value, rank: int) -> Value:
    """``[C]`` as ``[1, C, 1, ...]``."""
    return reshaped(site, value, (1, value.shape[0], *(1,) * (rank - 2)))


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    site: Site, grad: Value, v: Value, g: Value, norms: Value, dim: int
) -> tuple[Value, Value]:
    """``dg = sum(grad * v) / n``, ``dv = g / n * (grad - v * dg / n)`` with ``n = norm(v)``."""
    wide = compute_dtype(v.dtype)
    dims = tuple(d for d in range(len(v.shape)) if d != dim % len(v.shape))
    product = step(site, "product", wide, lambda x, y: x * y, grad, v)
    total = reduced(site, "total", SUM, product, dims, wide)

    def slope(grad: Term, v: Term, g: Term, n: Term, total: Term) -> Term:
        return g / n * (grad - v * (total / (n * n)))

    dv = pointwise(site.element_site(0), slope, grad, v, g, norms, total, common=wide)
    dg = pointwise(site.element_site(1), lambda t, n: t / n, total, norms, common=wide)
    return dv, dg
