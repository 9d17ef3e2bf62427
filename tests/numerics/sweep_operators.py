"""Every operator that has a formula, called with awkward values: the registry decides which."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import treadle.lower.graph  # noqa: F401  # imports all rules
from treadle.compat.operators.schemas import OpOverload, schema_of
from treadle.lower.registry import registered

aten = torch.ops.aten

MOVES = frozenset(
    f"treadle.lower.operators.{room}"
    for room in ("views", "creation", "indexing", "scatter", "resize", "pooling", "recurrent")
)
"""Rooms of rules that move elements, make constants, or add elements with weights of their own."""
PASSES = frozenset({
    aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
    aten._conj.default, aten._neg_view.default, aten.to.dtype, aten._to_copy.default,
    aten.copy.default, aten.clone.default, aten.contiguous.default, aten.view.dtype,
})  # fmt: skip
"""Operators that hand a value on."""
ON_GPUS = frozenset({aten._fused_rms_norm_backward.default})
"""Operators that PyTorch has no kernel for on CPUs."""
NUMBERS: Mapping[str, Any] = {
    "other": 3, "exponent": 3, "self": 2, "value": 2, "min": -1, "max": 1, "negative_slope": 0.1,
    "threshold": 1, "lambd": 0.5, "beta": 2, "alpha": 2, "min_val": -1, "max_val": 1, "ord": 2,
    "weight": 0.3, "approximate": "none", "self_is_result": False, "scale": 2.0, "reduction": 0,
    "scalar": 3, "half_to_float": False, "rounding_mode": "floor",
}  # fmt: skip
"""What numbers and words are given, by their names."""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Sample:
    """``call`` of tensors: ``kind`` says of which of the swept values."""

    name: str
    kind: str
    call: Call


def swept() -> list[OpOverload]:
    """The operators whose formulas compute."""
    return [
        op
        for op, rule in registered().items()
        if rule.__module__ not in MOVES and op not in PASSES and op.namespace == "aten"
    ]


def samples_of(op: OpOverload) -> list[Sample]:
    """Calls of ``op``; a ``LookupError`` where nobody said how."""
    if op in _OWN:
        return [Sample(f"{op} {i}", *each) for i, each in enumerate(_OWN[op])]
    return [Sample(str(op), *_by_schema(op))]


def _by_schema(op: OpOverload) -> tuple[str, Call]:
    """The call with tensors where the schema has them, and numbers by their names."""
    args: list[Any] = []
    count = 0
    for each in schema_of(op).arguments:
        kind = str(each.type)
        if kind == "Tensor":
            args.append(_At(count))
            count += 1
        elif kind == "List[Tensor]":
            args.append([_At(count)])
            count += 1
        elif each.kwarg_only and each.name not in ("alpha", "value", "rounding_mode"):
            continue
        elif each.default_value is not None and each.name not in ("alpha", "value"):
            args.append(each.default_value)
        elif each.name in ("scalars",) or kind == "List[number]":
            args.append([NUMBERS["scalar"]])
        elif each.name in NUMBERS:
            args.append(NUMBERS[each.name])
        else:
            raise LookupError(f"{op}: nobody says what {each.name} ({kind}) is to be")
    names = [each.name for each in schema_of(op).arguments]
    only = {each.name for each in schema_of(op).arguments if each.kwarg_only}
    options = {n: a for n, a in zip(names, args, strict=False) if n in only}
    plain = [a for n, a in zip(names, args, strict=False) if n not in only]

    def call(*tensors: Tensor) -> Any:
        def fill(leaf: Any) -> Any:
            return tensors[leaf.place] if isinstance(leaf, _At) else leaf

        return op(*pytree.tree_map(fill, plain), **pytree.tree_map(fill, options))

    kind = ("", "one", "two", "three")[count]
    return kind, call


@dataclass(frozen=True)
class _At:
    place: int


def _along(op: Any, *more: Any, **options: Any) -> tuple[str, Call]:
    return "rows", lambda x: op(x, *more, **options)


_CONDITIONS: dict[Any, list[tuple[str, Call]]] = {
    aten.where.self: [("two", lambda x, y: aten.where.self(x > y, x, y))],
    aten.where.ScalarOther: [("one", lambda x: aten.where.ScalarOther(x > 0, x, 2))],
    aten.where.ScalarSelf: [("one", lambda x: aten.where.ScalarSelf(x > 0, 2, x))],
    aten.where.Scalar: [("one", lambda x: aten.where.Scalar(x > 0, 2.0, 3.0))],
    aten.masked_fill.Scalar: [("one", lambda x: aten.masked_fill.Scalar(x, x > 0, 2))],
    aten.masked_fill.Tensor: [
        ("one", lambda x: aten.masked_fill.Tensor(x, x > 0, torch.full((), 2, dtype=x.dtype)))
    ],
    aten.native_dropout_backward.default: [
        ("two", lambda g, x: aten.native_dropout_backward.default(g, x > 0, 2.0))
    ],
    aten.clamp.default: [
        ("one", lambda x: aten.clamp.default(x, -1, 1)),
        ("one", lambda x: aten.clamp.default(x, 0, None)),
    ],
    aten.clamp.Tensor: [("three", aten.clamp.Tensor)],
    aten.div.Tensor_mode: [
        ("two", lambda x, y: aten.div.Tensor_mode(x, y, rounding_mode="floor")),
        ("two", lambda x, y: aten.div.Tensor_mode(x, y, rounding_mode="trunc")),
    ],
    aten.gelu.default: [
        ("one", lambda x, e=each: aten.gelu.default(x, approximate=e)) for each in ("none", "tanh")
    ],
    aten.gelu_backward.default: [
        ("two", lambda g, x, e=each: aten.gelu_backward.default(g, x, approximate=e))
        for each in ("none", "tanh")
    ],
    aten.pow.Tensor_Scalar: [
        ("one", lambda x, n=n: aten.pow.Tensor_Scalar(x, n))
        for n in (0, 0.5, 1, 2, 3, 4, -0.5, -1, -2, -3, 2.5, 1 / 3)
    ],
    aten.log_sigmoid_backward.default: [
        ("two", lambda g, x: aten.log_sigmoid_backward.default(g, x, _kept(x)))
    ],
    aten.mse_loss.default: [("two", lambda x, y: aten.mse_loss.default(x, y, 0))],
    aten.lerp.Tensor: [("three", aten.lerp.Tensor)],
}


def _kept(x: Tensor) -> Tensor:
    return aten.log_sigmoid_forward.default(x)[1]


_REDUCTIONS: dict[Any, list[tuple[str, Call]]] = {
    **{
        op: [_along(op, [1])]
        for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
                   aten.any.dims, aten.all.dims)
    },
    **{
        op: [_along(op, 1)]
        for op in (aten.any.dim, aten.all.dim, aten.argmax.default, aten.argmin.default,
                   aten.max.dim, aten.min.dim, aten.prod.dim_int)
    },
    **{
        op: [("mild", lambda x, op=op: op(x, [1], correction=1))]
        for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction,
                   aten.std_mean.correction)
    },
    aten.linalg_vector_norm.default: [
        _along(aten.linalg_vector_norm.default, n, [1])
        for n in (0, 1, 2, 3, float("inf"), float("-inf"))
    ],
    aten._softmax.default: [_along(aten._softmax.default, 1, False)],
    aten._log_softmax.default: [_along(aten._log_softmax.default, 1, False)],
    aten._safe_softmax.default: [_along(aten._safe_softmax.default, 1)],
    aten._softmax_backward_data.default: [
        ("rows", lambda x: aten._softmax_backward_data.default(x, x.flip(0).softmax(1), 1, x.dtype))
    ],
    aten._log_softmax_backward_data.default: [
        ("rows", lambda x: aten._log_softmax_backward_data.default(
            x, x.flip(0).log_softmax(1), 1, x.dtype))
    ],
}  # fmt: skip


def _whole_at_once(op: Any) -> list[tuple[str, Call]]:
    """A reduction of everything, of a few numbers each."""
    return [("rows", lambda x, a=a: op(x[a])) for a in (slice(0, 1), slice(7, 8), slice(40, 41), 3)]


_WHOLE = {
    op: _whole_at_once(op)
    for op in (aten.sum.default, aten.mean.default, aten.prod.default, aten.max.default,
               aten.min.default, aten.any.default, aten.all.default)
}  # fmt: skip
_CLASSES = {
    op: [("rows", call)]
    for op, call in {
        aten.nll_loss_forward.default: lambda x: aten.nll_loss_forward.default(
            x, _targets(x), x[0].clone(), 1, -100
        ),
        aten.nll_loss_backward.default: lambda x: aten.nll_loss_backward.default(
            x[:, 0].contiguous(), x, _targets(x), None, 0, 3, x.sum()
        ),
        aten.nll_loss2d_forward.default: lambda x: aten.nll_loss2d_forward.default(
            x[:, :, None, None], _targets(x)[:, None, None], None, 0, 2
        ),
        aten.nll_loss2d_backward.default: lambda x: aten.nll_loss2d_backward.default(
            x[:, :1, None].contiguous(), x[:, :, None, None], _targets(x)[:, None, None],
            None, 0, 2, x.sum(),
        ),
    }.items()
}  # fmt: skip


def _targets(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) % 5


def _batch_norm_functional(x: Tensor) -> Any:
    if x.dtype.itemsize < 4:
        raise TypeError("of half precisions PyTorch's kernel and its shapes differ in a dtype")
    op = aten._native_batch_norm_legit_functional.default
    return op(x[:8], None, None, x[0].clone(), x[1].abs(), True, 0.1, 1e-5)


def _normed(op: Any, *more: Any) -> list[tuple[str, Call]]:
    """The normed rows alone: what is kept for the gradient is NaN in some kernels only."""
    return [("mild", lambda x: op(x, *more)[0])]


def _layer_norm_backward(x: Tensor) -> Any:
    y, mean, scale = aten.native_layer_norm.default(x, [5], None, None, 1e-5)
    return aten.native_layer_norm_backward.default(
        y, x, [5], mean, scale, x[7].clone(), x[8].clone(), [True, True, True]
    )


def _rms_norm_backward(x: Tensor) -> Any:
    y, scale = aten._fused_rms_norm.default(x, [5], x[7].clone(), 1e-5)
    return aten._fused_rms_norm_backward.default(y, x, [5], scale, x[7].clone(), [True, True])


def _batch_norm_backward(x: Tensor) -> Any:
    w = torch.ones(5, dtype=x.dtype, device=x.device)
    _, mean, scale = aten.native_batch_norm.default(x[:8], w, w, None, None, True, 0.1, 1e-5)
    return aten.native_batch_norm_backward.default(
        x[:8], x[8:16], w, None, None, mean, scale, True, 1e-5, [True, True, True]
    )


def _group_norm_backward(x: Tensor) -> Any:
    rows = x[:8].unsqueeze(0)  # eight channels in two groups
    y, mean, scale = aten.native_group_norm.default(rows, None, None, 1, 8, 5, 2, 1e-5)
    weight = torch.linspace(0.5, 2, 8, dtype=x.dtype, device=x.device)
    return aten.native_group_norm_backward.default(
        y, rows, mean, scale, weight, 1, 8, 5, 2, [True, True, True]
    )


def _weight_norm_backward(x: Tensor) -> Any:
    g = x[:, :1].contiguous()
    _, norms = aten._weight_norm_interface.default(x, g, 0)
    return aten._weight_norm_interface_backward.default(x.flip(0), x, g, norms, 0)


_NORMS = {
    aten.native_layer_norm.default: _normed(aten.native_layer_norm.default, [5], None, None, 1e-5),
    aten.native_layer_norm_backward.default: [("mild", _layer_norm_backward)],
    aten._fused_rms_norm.default: _normed(aten._fused_rms_norm.default, [5], None, 1e-5),
    aten._fused_rms_norm_backward.default: [("mild", _rms_norm_backward)],
    aten.native_group_norm.default: [
        ("mild", lambda x: aten.native_group_norm.default(
            x, None, None, len(x), 5, 1, 1, 1e-5)[0])
    ],
    aten.native_group_norm_backward.default: [("mild", _group_norm_backward)],
    aten._weight_norm_interface_backward.default: [("mild", _weight_norm_backward)],
    aten.native_batch_norm.default: [
        ("mild", lambda x: aten.native_batch_norm.default(
            x[:8], None, None, None, None, True, 0.1, 1e-5))
    ],
    aten.native_batch_norm_backward.default: [("mild", _batch_norm_backward)],
    aten._native_batch_norm_legit.no_stats: [
        ("mild", lambda x: aten._native_batch_norm_legit.no_stats(
            x[:8], None, None, True, 0.1, 1e-5))
    ],
    aten._native_batch_norm_legit_functional.default: [("mild", _batch_norm_functional)],
    aten._native_batch_norm_legit_no_training.default: [
        ("mild", lambda x: aten._native_batch_norm_legit_no_training.default(
            x[:8], None, None, x[0].clone(), x[1].abs(), 0.1, 1e-5))
    ],
}  # fmt: skip

_LISTS: dict[Any, list[tuple[str, Call]]] = {
    aten._foreach_norm.Scalar: [("rows", lambda x: aten._foreach_norm.Scalar([x[7], x[40]], 2))],
    aten._foreach_max.default: [("rows", lambda x: aten._foreach_max.default([x[7], x[40]]))],
    aten._foreach_copy.default: [("two", lambda x, y: aten._foreach_copy.default([x], [y]))],
    **{
        op: [("one", lambda x, op=op: op([x], torch.full((), 3, dtype=x.dtype)))]
        for op in (aten._foreach_add.Tensor, aten._foreach_mul.Tensor, aten._foreach_div.Tensor)
    },
}
_OWN = {**_CONDITIONS, **_REDUCTIONS, **_WHOLE, **_CLASSES, **_NORMS, **_LISTS}
