"""Softmax and related operations: a few small steps each, which the scheduler fuses."""

import math

import torch

from treadle.loop.expr import Array, ReduceKind
from treadle.lower.context import LoweringContext
from treadle.lower.operators.pointwise import pointwise
from treadle.lower.operators.reductions import reduced, step
from treadle.lower.registry import Value, lowers
from treadle.lower.scalars import compute_dtype

aten = torch.ops.aten
SUM = ReduceKind.SUM


def _shifted(
    context: LoweringContext, x: Value, dim: int, wide: torch.dtype
) -> tuple[Value, Value, Value]:
    """Largest, ``exp(x - largest)`` and its sum, along ``dim``."""
    dims = (dim % len(x.shape),) if x.shape else ()
    largest = reduced(context, "max", ReduceKind.MAX, x, dims, wide)
    powers = step(context, "exp", wide, lambda x, top: (x - top).fn("exp"), x, largest)
    return largest, powers, reduced(context, "sum", SUM, powers, dims, wide)


@lowers(aten._softmax.default)
def softmax(context: LoweringContext, x: Value, dim: int, half_to_float: bool) -> Array:
    """``exp(x - max) / sum exp(x - max)``."""
    _, powers, total = _shifted(context, x, dim, compute_dtype(context.dtype))
    return pointwise(context, lambda power, total: power / total, powers, total)


@lowers(aten._safe_softmax.default)
def safe_softmax(context: LoweringContext, x: Value, dim: int, **_dtype: object) -> Array:
    """Softmax with zeros, not NaN, for a row that is all ``-inf``."""
    largest, powers, total = _shifted(context, x, dim, compute_dtype(context.dtype))
    return pointwise(
        context,
        lambda power, total, top: top.fn("eq", -math.inf).choose(0, power / total),
        powers,
        total,
        largest,
    )


@lowers(aten._log_softmax.default)
def log_softmax(context: LoweringContext, x: Value, dim: int, half_to_float: bool) -> Array:
    """``x - max - log sum exp(x - max)``; the logarithm is a value of each row, beside which the
    rest costs next to nothing to compute again."""
    wide = compute_dtype(context.dtype)
    largest, _, total = _shifted(context, x, dim, wide)
    log = step(context, "log", wide, lambda total: total.fn("log"), total)
    return pointwise(context, lambda x, top, log: x - top - log, x, largest, log, common=wide)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(
    context: LoweringContext, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Array:
    """``(grad - sum(y * grad)) * y``; on GPUs multiplied out, as in eager's kernel."""
    wide = compute_dtype(grad.dtype)
    product = step(context, "product", wide, lambda g, y: g * y, grad, output)
    dims = (dim % len(output.shape),) if output.shape else ()
    total = reduced(context, "sum", SUM, product, dims, wide)
    if not context.builder.target.on_host:
        return pointwise(context, lambda p, y, t: p - y * t, product, output, total, common=wide)
    return pointwise(context, lambda g, y, total: (g - total) * y, grad, output, total, common=wide)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    context: LoweringContext, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Array:
    """``grad - exp(y) * sum(grad)``."""
    wide = compute_dtype(grad.dtype)
    dims = (dim % len(output.shape),) if output.shape else ()
    total = reduced(context, "sum", SUM, grad, dims, wide)
    return pointwise(
        context, lambda g, y, total: g - y.fn("exp") * total, grad, output, total, common=wide
    )
