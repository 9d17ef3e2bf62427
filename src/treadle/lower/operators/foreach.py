"""Operations on lists of tensors: ``_foreach_f(xs, ys)[i] = f(xs[i], ys[i])``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from treadle.compat.operators.schemas import OpOverload
from treadle.loop.expr import Array, ReduceKind
from treadle.lower.context import LoweringContext
from treadle.lower.operators.pointwise import (
    Formula,
    add,
    addcdiv,
    addcmul,
    copy,
    div,
    lerp,
    maximum,
    minimum,
    mul,
    named,
    pointwise,
    sub,
)
from treadle.lower.operators.powers import power
from treadle.lower.operators.reductions import reduce_node, vector_norm, wrapped
from treadle.lower.registry import Value, aten_op, lowers
from treadle.lower.scalars import Number

aten = torch.ops.aten


def _register_foreach(op: OpOverload, single: Callable[..., Array]) -> None:
    """``_foreach_f(xs, ys, k)`` is ``[f(x, y, k) for x, y in zip(xs, ys)]``."""

    @lowers(op)
    def rule(context: LoweringContext, *args: Any, **kwargs: object) -> tuple[Value, ...]:
        results: list[Value] = []
        for i in range(len(args[0])):
            operands = [arg[i] if isinstance(arg, tuple | list) else arg for arg in args]
            named = {
                key: arg[i] if isinstance(arg, tuple | list) else arg for key, arg in kwargs.items()
            }
            results.append(single(context.element_context(i), *operands, **named))
        return tuple(results)


def _foreach_rules() -> None:
    arithmetic = {"add": add, "sub": sub, "mul": mul, "div": div}
    bounds = {"maximum": maximum, "minimum": minimum, "clamp_min": maximum, "clamp_max": minimum}
    listed = ("List", "Scalar", "ScalarList")
    for name, rule in (arithmetic | bounds | {"pow": power}).items():
        for kind in listed:
            _register_foreach(aten_op(f"_foreach_{name}.{kind}"), rule)
    for name in ("add", "mul", "div"):
        _register_foreach(aten_op(f"_foreach_{name}.Tensor"), arithmetic[name])
    for name, rule in {"addcmul": addcmul, "addcdiv": addcdiv}.items():
        for kind in ("Scalar", "ScalarList"):
            _register_foreach(aten_op(f"_foreach_{name}.{kind}"), rule)
    for kind in listed:
        _register_foreach(aten_op(f"_foreach_lerp.{kind}"), lerp)
    for name in _FOREACH_UNARY:
        _register_foreach(aten_op(f"_foreach_{name}.default"), _unary(named(name)))
    _register_foreach(aten._foreach_copy.default, copy)


_FOREACH_UNARY = (
    *("neg", "abs", "exp", "expm1", "log", "log1p", "log2"),
    *("sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "sign"),
)


def _unary(formula: Formula) -> Callable[[LoweringContext, Value], Array]:
    return lambda context, x: pointwise(context, formula, x)


_foreach_rules()


@lowers(aten._foreach_max.default)
def foreach_max(context: LoweringContext, tensors: Sequence[Value]) -> tuple[Value, ...]:
    """The largest element of each tensor."""
    contexts = [context.element_context(i) for i in range(len(tensors))]
    return tuple(
        reduce_node(each, ReduceKind.MAX, x, wrapped(None, len(x.shape)), each.dtype)
        for each, x in zip(contexts, tensors, strict=True)
    )


@lowers(aten._foreach_norm.Scalar)
def foreach_norm(
    context: LoweringContext, tensors: Sequence[Value], order: Number = 2, **_dtype: object
) -> tuple[Value, ...]:
    """The norm of each tensor."""
    return tuple(
        vector_norm(context.element_context(i), tensor, order) for i, tensor in enumerate(tensors)
    )
