"""PyTorch functions that take numbers, rewritten with tensors instead of the numbers.

::

    leaky_relu(x, a)         where(x > 0, x, x * a)
    addmm(c, x, y, beta=a)   c * a + x @ y
    cross_entropy(..., a)    cross_entropy(..., 0) * (1 - a) + cross_entropy(..., 1) * a

Operands and defaults are those of torch's functions. An unselected branch gets numbers at which it
has a finite gradient, because ``where`` multiplies that gradient by zero. The arguments that these
functions pass to the original function contain no substitute numbers, which would lead back here.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.capture.integrations.averaging import averaged_batch_norm
from treadle.capture.symbolic.numbers import Number, PlainNumber, is_number, plain

ScaledFunction = Callable[..., Tensor]
Operand = Tensor | Number | PlainNumber


def beside(tensor: Tensor, value: Operand) -> Tensor | float:
    """A number that stands in as a tensor for arithmetic with ``tensor``; others as they are."""
    by = value.tensor(tensor) if is_number(value) else value
    return cast("Tensor | float", by)  # PyTorch takes NumPy's numbers, its annotations do not


def _itself(value: Operand) -> float:
    """The number itself, on which the graph then depends, as PyTorch takes it."""
    return cast(float, plain(value))


def _as(tensor: Tensor, value: Operand) -> Tensor | float:
    """Likewise, with the dtype of ``tensor``."""
    by = beside(tensor, value)
    return by.to(tensor.dtype) if isinstance(by, Tensor) else by


# An element at a bound that is a number keeps its gradient until PyTorch 2.13, and has none since.
_TIES_PASS = torch.__version__ < "2.14"  # compared as versions
_BELOW, _ABOVE = (torch.lt, torch.gt) if _TIES_PASS else (torch.le, torch.ge)

# -- elementwise ------------------------------------------------------------------------------


def _add(input: Tensor, other: Operand, *, alpha: Operand = 1) -> Tensor:
    by = beside(input, other)
    return input + by * beside(by if isinstance(by, Tensor) else input, alpha)


def _sub(input: Tensor, other: Operand, *, alpha: Operand = 1) -> Tensor:
    by = beside(input, other)
    return input - by * beside(by if isinstance(by, Tensor) else input, alpha)


def _lerp(input: Tensor, end: Tensor, weight: Operand) -> Tensor:
    return torch.lerp(input, end, _as(input, weight))


def _addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, value: Operand = 1) -> Tensor:
    return input + tensor1 * beside(tensor1, value) * tensor2


def _addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, value: Operand = 1) -> Tensor:
    return input + tensor1 / tensor2 * beside(tensor1, value)


def _clamp(input: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """By comparisons: bounds that are tensors share the gradient of ties since PyTorch 2.14."""
    for bound, beyond in ((min, _BELOW), (max, _ABOVE)):
        if bound is not None:
            limit = beside(input, bound)
            input = torch.where(beyond(input, limit) | (limit != limit), limit, input)
    return input


def _clamp_min(input: Tensor, min: Operand) -> Tensor:
    return _clamp(input, min=min)


def _clamp_max(input: Tensor, max: Operand) -> Tensor:
    return _clamp(input, max=max)


def _where(condition: Tensor, input: Operand, other: Operand) -> Tensor:
    tensor = input if isinstance(input, Tensor) else other
    if not isinstance(tensor, Tensor):
        return torch.where(condition, _itself(input), _itself(other))
    return torch.where(condition, beside(tensor, input), beside(tensor, other))


def _masked_fill(input: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return torch.where(mask, beside(input, value), input)


def fill(input: Tensor, value: Operand) -> Tensor:
    """A number in the shape and the dtype of a tensor."""
    number: Any = value.tensor(input, copied=True) if is_number(value) else value
    return (
        number.expand(input.shape) if isinstance(number, Tensor) else torch.full_like(input, number)
    )


def _leaky_relu(input: Tensor, negative_slope: Operand = 0.01) -> Tensor:
    return torch.where(input > 0, input, input * beside(input, negative_slope))


def _elu(
    input: Tensor, alpha: Operand = 1.0, scale: Operand = 1.0, input_scale: Operand = 1.0
) -> Tensor:
    above, below = (beside(input, factor) for factor in (scale, input_scale))
    negative = torch.where(input > 0, 0, input)
    bent = torch.expm1(negative * below) * beside(input, alpha) * above
    return torch.where(input > 0, input * above, bent)


def _celu(input: Tensor, alpha: Operand = 1.0) -> Tensor:
    by = beside(input, alpha)
    negative = torch.where(input > 0, 0, input)
    return torch.where(input > 0, input, torch.expm1(negative / by) * by)


def _threshold(input: Tensor, threshold: Operand, value: Operand) -> Tensor:
    return torch.where(input <= beside(input, threshold), beside(input, value), input)


def _hardtanh(input: Tensor, min_val: Operand = -1.0, max_val: Operand = 1.0) -> Tensor:
    low, high = beside(input, min_val), beside(input, max_val)
    return torch.where(input <= low, low, torch.where(input >= high, high, input))


def _softplus(input: Tensor, beta: Operand = 1.0, threshold: Operand = 20.0) -> Tensor:
    by = beside(input, beta)
    is_linear = input * by > beside(input, threshold)
    bent = torch.log1p(torch.exp(torch.where(is_linear, 0, input * by))) / by
    return torch.where(is_linear, input, bent)


def _softshrink(input: Tensor, lambd: Operand = 0.5) -> Tensor:
    by = beside(input, lambd)
    return torch.where(input.abs() > by, input - torch.sign(input) * by, input * 0)


def _hardshrink(input: Tensor, lambd: Operand = 0.5) -> Tensor:
    return torch.where(input.abs() <= beside(input, lambd), 0, input)


def _logit(input: Tensor, eps: Operand | None = None) -> Tensor:
    if eps is not None:
        by = beside(input, eps)
        input = _clamp(input, by, 1 - by)
    return torch.log(input / (1 - input))


def _nan_to_num(
    input: Tensor,
    nan: Operand | None = None,
    posinf: Operand | None = None,
    neginf: Operand | None = None,
) -> Tensor:
    numbers = (nan, posinf, neginf)
    fixed: list[Any] = [None if is_number(number) else number for number in numbers]
    usual = torch.nan_to_num(input, *fixed)
    for number, is_one in zip(numbers, (torch.isnan, torch.isposinf, torch.isneginf), strict=True):
        if is_number(number):
            usual = torch.where(is_one(input), beside(input, number), usual)
    return usual


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    return torch.index_fill(input, plain(dim), index, _as(input, value))


# -- products and what adds to them -----------------------------------------------------------


def _added(product: Callable[[Tensor, Tensor], Tensor]) -> ScaledFunction:
    def form(
        input: Tensor, one: Tensor, other: Tensor, *, beta: Operand = 1, alpha: Operand = 1
    ) -> Tensor:
        term = product(one, other) * beside(one, alpha)
        if not is_number(beta) and beta == 0:
            return term  # whatever is in ``input``, as in PyTorch
        return input * beside(input, beta) + term

    return form


def _summed_products(one: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(one, other).sum(0)


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addmm": torch.mm,
    "addmv": torch.mv,
    "addr": torch.outer,
    "baddbmm": torch.bmm,
    "addbmm": _summed_products,
}


def _attention(
    query: Tensor, *args: object, scale: Operand | None = None, **kwargs: object
) -> Tensor:
    """A scale of the scores is one of the queries."""
    if is_number(scale):
        query, scale = (query * beside(query, scale)).to(query.dtype), 1.0
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    return attend(query, *plain(args), scale=scale, **plain(kwargs))


# -- losses -----------------------------------------------------------------------------------


_REDUCTIONS = ("none", "mean", "sum")  # by PyTorch's own numbers for them


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


def _huber(input: Tensor, target: Tensor, reduction: int = 1, delta: Operand = 1.0) -> Tensor:
    by, off = beside(input, delta), (input - target).abs()
    return _reduced(torch.where(off < by, 0.5 * off * off, by * (off - 0.5 * by)), reduction)


def _smooth_l1(input: Tensor, target: Tensor, reduction: int = 1, beta: Operand = 1.0) -> Tensor:
    by, off = beside(input, beta), (input - target).abs()
    return _reduced(torch.where(off < by, 0.5 * off * off / by, off - 0.5 * by), reduction)


def _margin_ranking(
    input1: Tensor, input2: Tensor, target: Tensor, margin: Operand = 0.0, reduction: int = 1
) -> Tensor:
    return _reduced((beside(input1, margin) - target * (input1 - input2)).clamp_min(0), reduction)


def _hinge_embedding(
    input: Tensor, target: Tensor, margin: Operand = 1.0, reduction: int = 1
) -> Tensor:
    apart = torch.where(target != 1, (beside(input, margin) - input).clamp_min(0), 0)
    return _reduced(apart + torch.where(target != -1, input, 0), reduction)


def _triplet_margin(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: Operand = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Tensor:
    near, far = (torch.pairwise_distance(anchor, e, p, eps) for e in (positive, negative))
    if swap:
        far = torch.minimum(far, torch.pairwise_distance(positive, negative, p, eps))
    return _reduced((near - far + beside(near, margin)).clamp_min(0), reduction)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: Operand = 0.0,
) -> Tensor:
    """The loss is linear in the share that all classes get."""

    def loss(share: float) -> Tensor:
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=plain(ignore_index),
            reduction=_REDUCTIONS[reduction],
            label_smoothing=share,
        )

    if not is_number(label_smoothing):
        return loss(_itself(label_smoothing))
    if label_smoothing.decided(_is_nothing, (label_smoothing,)):
        return loss(0.0)
    if not label_smoothing.decided(_is_share, (label_smoothing,)):
        return loss(_itself(label_smoothing))
    usual, even = loss(0.0), loss(1.0)
    by = beside(usual, label_smoothing)
    return usual * (1 - by) + even * by


def _is_nothing(value: PlainNumber) -> bool:
    return bool(value == 0)


def _is_share(value: PlainNumber) -> bool:
    return bool(0 <= value <= 1)


# -- others -----------------------------------------------------------------------------------


def _pad(
    input: Tensor, pad: list[int], mode: str = "constant", value: Operand | None = None
) -> Tensor:
    if mode != "constant" or not is_number(value):
        return F.pad(input, plain(pad), mode, None if value is None else _itself(value))
    added, pad = torch.zeros_like(input, dtype=torch.bool), plain(pad)
    usual = torch.constant_pad_nd(input, pad, 0)
    return torch.where(torch.constant_pad_nd(added, pad, 1), beside(usual, value), usual)


def _constant_pad(input: Tensor, pad: list[int], value: Operand = 0) -> Tensor:
    return _pad(input, pad, "constant", value)


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: Operand,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if running_mean is None or running_var is None or not training:
        averages, share = (running_mean, running_var), 0.0  # asks for no momentum
        rest = bool(training), share, plain(eps), cudnn_enabled
        return torch.batch_norm(input, weight, bias, *averages, *rest)
    share = beside(running_mean, momentum)
    return averaged_batch_norm(input, weight, bias, (running_mean, running_var), share, plain(eps))


def _drawn_normal(input: Tensor, mean: Operand = 0.0, std: Operand = 1.0, **rest: Any) -> Tensor:
    if is_number(std) and not std.decided(operator.ge, (std, 0)):
        return input.normal_(0.0, _itself(std), **rest)  # an error of PyTorch's
    input.normal_(**rest)
    return input.mul_(beside(input, std)).add_(beside(input, mean))


def _drawn_uniform(input: Tensor, low: Any = 0.0, high: Any = 1.0, **rest: Any) -> Tensor:
    low, high = rest.pop("from", low), rest.pop("to", high)
    number = next(bound for bound in (low, high) if is_number(bound))
    if not number.decided(operator.le, (low, high)):
        return input.uniform_(_itself(low), _itself(high), **rest)  # an error of PyTorch's
    input.uniform_(**rest)
    return input.mul_(beside(input, high - low)).add_(beside(input, low))


def _normal(mean: Operand, std: Operand = 1.0, *size: Any, **rest: Any) -> Tensor:
    """Of a tensor of means or deviations the shape, of two numbers the one that is given."""
    shaped = next((moment for moment in (mean, std) if isinstance(moment, Tensor)), None)
    if shaped is None:
        drawn = torch.normal(0.0, 1.0, *plain(size), **plain(rest))
    else:
        drawn = torch.empty_like(shaped).normal_(**rest)
    if is_number(std) and not std.decided(operator.ge, (std, 0)):
        return drawn.normal_(0.0, _itself(std))  # an error of PyTorch's
    return drawn.mul(beside(drawn, std)).add(beside(drawn, mean))


def _linspace(start: Operand, end: Operand, steps: int, **rest: Any) -> Tensor:
    """From both ends to the middle, as PyTorch counts."""
    steps = plain(steps)
    at = torch.arange(steps, **plain(rest))
    if not at.is_floating_point() and "dtype" not in rest:
        at = at.to(torch.get_default_dtype())
    first, last = (_as(at, bound) for bound in (start, end))
    width = (last - first) / max(steps - 1, 1)
    from_end = last - width * (steps - 1 - at)
    return torch.where(at < steps // 2, first + width * at, from_end if steps > 1 else first)


def _broadcast(*tensors: Any) -> Any:
    """Of what distributions are given: a number beside a tensor is one of its dtype."""
    lead = next(tensor for tensor in tensors if isinstance(tensor, Tensor))
    return torch.broadcast_tensors(*(_as(lead, tensor) for tensor in tensors))


def _functions_by_name(**others: ScaledFunction) -> dict[str, ScaledFunction]:
    return others


ELEMENTWISE: dict[str, ScaledFunction] = _functions_by_name(
    add=_add,
    sub=_sub,
    subtract=_sub,
    lerp=_lerp,
    addcmul=_addcmul,
    addcdiv=_addcdiv,
    clamp=_clamp,
    clip=_clamp,
    clamp_min=_clamp_min,
    clamp_max=_clamp_max,
    where=_where,
    masked_fill=_masked_fill,
    fill=fill,
    leaky_relu=_leaky_relu,
    elu=_elu,
    celu=_celu,
    threshold=_threshold,
    hardtanh=_hardtanh,
    softplus=_softplus,
    softshrink=_softshrink,
    hardshrink=_hardshrink,
    logit=_logit,
    nan_to_num=_nan_to_num,
    pad=_pad,
    constant_pad_nd=_constant_pad,
    huber_loss=_huber,
    smooth_l1_loss=_smooth_l1,
    margin_ranking_loss=_margin_ranking,
    hinge_embedding_loss=_hinge_embedding,
    triplet_margin_loss=_triplet_margin,
    **{name: _added(product) for name, product in _PRODUCTS.items()},
)
"""Their results have the dtype of their tensors, and are computed at the precision at which
PyTorch's kernels compute."""

OTHERS: dict[str, ScaledFunction] = _functions_by_name(
    index_fill=_index_fill,
    scaled_dot_product_attention=_attention,
    cross_entropy_loss=_cross_entropy,
    batch_norm=_batch_norm,
    normal_=_drawn_normal,
    uniform_=_drawn_uniform,
    normal=_normal,
    linspace=_linspace,
    broadcast_tensors=_broadcast,
)
