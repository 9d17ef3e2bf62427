"""Operations that stay library calls: products, convolutions, attention, scans, random numbers.

``CHOSEN`` lists those that are meant to be calls when no rule takes them. Any other operation
without a rule becomes a call too, with the reason written on it.
"""

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from treadle.loop.expr import Array
from treadle.loop.program import Call, TensorRef
from treadle.lower.registry import Value
from treadle.lower.site import Site, is_dense
from treadle.lower.workspace import workspace_of

aten = torch.ops.aten

OUT_VARIANTS = {
    aten.mm.default: "aten.mm.out",
    aten.addmm.default: "aten.addmm.out",
    aten.bmm.default: "aten.bmm.out",
    aten.baddbmm.default: "aten.baddbmm.out",
    aten.mv.default: "aten.mv.out",
    aten.addmv.default: "aten.addmv.out",
    aten.dot.default: "aten.dot.out",
}
"""Products that write into a buffer of ours."""

RANDOM = frozenset(
    {
        aten.bernoulli.default,
        aten.bernoulli.p,
        aten.rand.default,
        aten.rand_like.default,
        aten.randn.default,
        aten.randn_like.default,
        aten.randint.default,
        aten.randint.low,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.randperm.default,
        aten.normal_functional.default,
        aten.uniform.default,
        aten.multinomial.default,
        aten.native_dropout.default,
        aten.exponential.default,
    }
)
"""Operations that advance the random generator: they keep their order and are never dropped."""

RANDOM_NAMES = frozenset(str(op) for op in RANDOM)

CHOSEN = (
    frozenset(OUT_VARIANTS)
    | RANDOM
    | {
        aten.cumsum.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.embedding_dense_backward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        aten.cudnn_batch_norm.default,
        aten.cudnn_batch_norm_backward.default,
        aten._batch_norm_with_update_functional.default,
        aten.batch_norm_backward.default,
        aten.native_dropout_backward.default,
    }
)
"""Operations whose library kernel is the right answer."""

_DROPPED = frozenset({"layout", "pin_memory", "non_blocking"})


def qualified(op: OpOverload) -> str:
    """``aten.mm.default``."""
    return str(op)


def call(site: Site, op: OpOverload, args: Any, kwargs: Mapping[str, Any], reason: str) -> Any:
    """``op`` as a library call; its tensor results are buffers of ours."""
    plain_args = _with_margins(site, tuple(_plain(site, arg) for arg in args))
    plain_kwargs = {
        key: _plain(site, value) for key, value in kwargs.items() if key not in _DROPPED
    }
    single = isinstance(site.val, torch.Tensor)
    used = _used_results(site)
    sites = [site] if single else [site.element_site(i) for i in range(len(site.val))]
    results: list[Value | int | None] = []
    out = OUT_VARIANTS.get(op, "")
    for position, each in enumerate(sites):
        results.append(_result(each, bool(out)) if single or position in used else None)
    if out and not site.layout and not is_dense(site.shape, site.val.stride()):
        out = ""
    names = tuple(r.buffer if isinstance(r, TensorRef) else None for r in results)
    site.builder.steps.append(
        Call(
            qualified(op),
            plain_args,
            plain_kwargs,
            names,
            site.origin,
            out,
            reason,
            workspace_of(op, plain_args, site.builder.device),
        )
    )
    return results[0] if single else tuple(results)


def _with_margins(site: Site, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The factors of a product with the zeros around them, where it is to be a larger one."""
    shapes = site.builder.layouts.factors.get(site.node)
    if shapes is None:
        return args
    return tuple(replace(arg, shape=shape) for arg, shape in zip(args, shapes, strict=True))


def _result(site: Site, ours: bool) -> Value | int | None:
    """The buffer of one result; numbers among the results are known from the trace."""
    if not isinstance(site.val, torch.Tensor):
        return site.val
    strides, place = tuple(site.val.stride()), site.builder.device_of(site.val)
    layout = site.layout if ours else None
    return site.builder.buffer(
        site.name, site.dtype, site.shape, strides, device=place, layout=layout
    )


def _used_results(site: Site) -> set[int]:
    """Which of many results anyone reads."""
    places = [user.args[1] for user in site.node.users if user.target is operator.getitem]
    return {place for place in places if isinstance(place, int)}


def _plain(site: Site, arg: Any) -> Any:
    """An argument as a call may hold it: formulas get a buffer, lists become tuples."""
    if isinstance(arg, Array):
        return site.stored(arg)
    if isinstance(arg, tuple | list):
        return tuple(_plain(site, item) for item in arg)
    return str(arg) if isinstance(arg, torch.device) else arg
