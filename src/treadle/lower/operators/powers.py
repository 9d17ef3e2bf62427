"""Powers: ``out[i] = x[i] ** y[i]``, with roots and products for some constant exponents."""

from collections.abc import Callable, Mapping

import torch

from treadle.algebra.extents import Size
from treadle.loop.expr import Array
from treadle.lower.context import LoweringContext
from treadle.lower.operators.pointwise import pointwise
from treadle.lower.registry import Unsupported, lowers
from treadle.lower.scalars import Number, Operand, ScalarExpr, compute_dtype, const

aten = torch.ops.aten

_ROOTS: Mapping[float, Callable[[ScalarExpr], ScalarExpr]] = {
    0.5: lambda x: x.fn("sqrt"),
    -0.5: lambda x: x.fn("rsqrt"),
}
"""These differ from the power at ``-0.0`` and ``-inf``."""
_PRODUCTS: Mapping[float, Callable[[ScalarExpr], ScalarExpr]] = {
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: lambda x: 1 / x,
    -2.0: lambda x: 1 / (x * x),
}


@lowers(aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.pow.Tensor_Tensor)
def power(context: LoweringContext, x: Operand, y: Operand) -> Array:
    """``out[i] = x[i] ** y[i]``; small constant exponents become products and roots."""
    if not isinstance(y, Number) or isinstance(y, Size):
        return pointwise(context, lambda x, y: x.fn("pow", y), x, y)
    exponent = _exponent(context, y)
    formula = _formula(context, exponent)
    if formula is None:
        return pointwise(context, lambda x, y: x.fn("pow", y), x, exponent)
    if not context.dtype.is_floating_point and exponent < 0:
        raise Unsupported("a whole number to a negative power has no formula")
    return pointwise(context, formula, x)


def _exponent(context: LoweringContext, y: Number) -> Number:
    """``y`` as the kernel sees it: PyTorch rounds it to half precisions of ``x``."""
    dtype = context.dtype
    if compute_dtype(dtype) is dtype:
        return y
    return const(y, dtype).value


def _formula(
    context: LoweringContext, exponent: Number
) -> Callable[[ScalarExpr], ScalarExpr] | None:
    """The product or the root; for float16 PyTorch takes no roots on CPUs."""
    value = float(exponent)
    if context.builder.target.on_host and context.dtype is torch.float16:
        return _PRODUCTS.get(value)
    return _PRODUCTS.get(value) or _ROOTS.get(value)
