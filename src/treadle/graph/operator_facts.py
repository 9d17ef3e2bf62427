"""The one table of facts about operators: what one does besides its results, and what it costs.

``facts_of(op)`` derives them from what PyTorch says of the operator itself: tags, arguments,
mutability, namespace. So an operator that nobody here has heard of has its facts as well. What
PyTorch does not say stands in the tables of this file, with the reason, and nowhere else.
"""

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from treadle.compat.operators import OpOverload, schema_of
from treadle.graph.ctc import OPERATIONS as CTC

aten = torch.ops.aten


class CostClass(enum.StrEnum):
    """What an operator costs in comparison with its bytes."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"  # with what surrounds it in a row: softmax, layer norm
    PRODUCT = "product"  # worth a kernel of its own: mm, bmm, convolution, attention
    LIBRARY = "library"  # a kernel of PyTorch's that is none of these


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What is known about an operator.

    ``draws``: a call may advance a random generator (``call_draws``: whether this one does).
    ``mutates``: writes to an argument. ``raises``: called to check data, and may raise.
    ``communicates``: meets other processes. ``opaque``: a user's, with anything inside; it happens
    exactly once and in order. ``slow_elements``: a transcendental function of each element.
    ``measurable``: a call that ``follows_seed`` does not say otherwise of runs on invented numbers
    (zeros) without harm: the operator checks no data, and is PyTorch's own or ours.
    """

    draws: bool
    mutates: bool
    raises: bool
    communicates: bool
    opaque: bool
    cost: CostClass
    slow_elements: bool
    measurable: bool

    @property
    def has_effect(self) -> bool:
        """Whether a call matters even if nobody reads its results, random numbers aside."""
        return self.mutates or self.raises or self.communicates or self.opaque

    @property
    def may_recompute(self) -> bool:
        """Whether a second call gives the same and does nothing else."""
        return not (self.draws or self.has_effect)


_OURS = frozenset({"aten", "prims", "rngprims", "treadle"})
_COMMUNICATION = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of PyTorch's own operators, and of those that meet other processes. Any other is a
user's or a library's."""

_DRAW_NOTHING: Mapping[Any, str] = {
    aten._scaled_dot_product_efficient_attention_backward: "gets its forward's seed",
    aten._scaled_dot_product_cudnn_attention_backward: "gets its forward's seed",
    aten._cudnn_attention_backward: "gets its forward's seed",
    aten._fused_sdp_choice: "looks at layouts alone",
    aten.initial_seed: "reads a number of a generator",
}
"""Operators that PyTorch tags as random and that advance no generator."""

_NO_DRAW_IF: Mapping[str, Any] = {
    "dropout_p": 0,
    "dropout": 0,
    "train": False,
    "training": False,
}
"""Arguments and their values with which a random operator advances no generator: attention
without dropout, and dropout, ``rrelu`` and recurrent layers in evaluation."""

_POINTWISE = frozenset({
    aten.arange, aten.clone, aten.constant_pad_nd, aten.copy, aten.embedding, aten.empty,
    aten.empty_like, aten.fill, aten.full, aten.full_like, aten.gather, aten.index,
    aten.index_select, aten.new_full, aten.new_ones, aten.new_zeros, aten.one_hot, aten.ones,
    aten.ones_like, aten.scalar_tensor, aten.select_backward, aten.slice_backward, aten.tril,
    aten.triu, aten.zeros, aten.zeros_like, aten._to_copy, aten.lift_fresh_copy,
})  # fmt: skip
"""One pass over the result, like pointwise operators, though PyTorch does not tag them so."""

_REDUCTIONS = frozenset({
    aten._log_softmax, aten._log_softmax_backward_data, aten._softmax,
    aten._softmax_backward_data, aten.all, aten.amax, aten.amin, aten.any, aten.argmax,
    aten.argmin, aten.linalg_vector_norm, aten.logsumexp, aten.max, aten.mean, aten.min,
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.nll_loss_forward,
    aten.nll_loss_backward, aten.norm, aten.sum, aten.var, aten.var_mean,
})  # fmt: skip
"""One pass over the rows of an operand; PyTorch tags some of them since 2.12."""

_PRODUCTS = frozenset({aten.linear, aten.matmul})
"""Besides those that PyTorch has, or was given, a formula of floating-point operations for."""

_SLOW_ELEMENTS = frozenset({
    aten._log_softmax, aten._softmax, aten.cos, aten.erf, aten.exp, aten.gelu, aten.log,
    aten.logsumexp, aten.pow, aten.sigmoid, aten.silu, aten.sin, aten.softplus, aten.tanh,
})  # fmt: skip

_MEASURABLE = frozenset({
    aten._embedding_bag_dense_backward, aten._trilinear, aten._unsafe_index_put,
    aten.batch_norm_backward, aten.bucketize, aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward, aten._batch_norm_with_update_functional,
    aten.embedding_dense_backward, aten.grid_sampler_2d_backward, aten.grid_sampler_3d,
    aten.grid_sampler_3d_backward, aten.kthvalue, aten.linear_backward, aten.logcumsumexp,
    aten.max_pool2d_with_indices_backward, aten.median, aten.native_batch_norm_backward,
    aten.native_group_norm_backward, aten.native_layer_norm_backward, aten.searchsorted,
    aten.upsample_bicubic2d_backward, aten._cdist_backward,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._native_batch_norm_legit_functional, aten.native_batch_norm,
    aten._convolution_double_backward, aten.cudnn_convolution, aten._fft_c2c, aten.cummax,
    aten.cummin, aten.mode, aten.nanmedian, aten._unsafe_masked_index_put_accumulate,
})  # fmt: skip
"""Arithmetic for which zeros are numbers, and places, like any others; not among PyTorch's core
operators, all of which are."""

_UNMEASURABLE: Mapping[Any, str] = {
    aten._embedding_bag: "the last offset may have to be the number of indices",
} | {op.overloadpacket: "the lengths of targets sum to their number" for op in CTC}
"""Core operators and operators of ours that zeros may not be given to."""

_DATA_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@functools.cache
def facts_of(op: OpOverload) -> OperatorFacts:
    """The facts about one operator."""
    schema = schema_of(op)
    packet, namespace = op.overloadpacket, op.namespace
    opaque = namespace not in _OURS | _COMMUNICATION and torch.Tag.pointwise not in op.tags
    draws = _may_draw(op)
    return OperatorFacts(
        draws=draws,
        mutates=bool(schema.is_mutable),
        raises=not schema.returns,
        communicates=namespace in _COMMUNICATION,
        opaque=opaque,
        cost=_cost_of(op),
        slow_elements=packet in _SLOW_ELEMENTS,
        measurable=bool(schema.returns)
        and (not draws or _draws_sometimes(op))
        and packet not in _UNMEASURABLE
        and (namespace == "treadle" or _is_arithmetic(op)),
    )


def call_draws(op: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these ``arguments`` (by name, defaults included) advances a generator."""
    if not facts_of(op).draws:
        return False
    return not any(
        name in arguments and arguments[name] is not None and arguments[name] == value
        for name, value in _NO_DRAW_IF.items()
    )


def follows_seed(op: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a call makes random numbers, its own or once more those of a seed that it is given:
    dropout within attention, forward and backward."""
    return call_draws(op, arguments) or bool(arguments.get("dropout_p"))


def _may_draw(op: OpOverload) -> bool:
    if op.overloadpacket in _DRAW_NOTHING:
        return False
    schema = schema_of(op)
    takes_generator = any("Generator" in str(each.type) for each in schema.arguments)
    return torch.Tag.nondeterministic_seeded in op.tags or takes_generator


def _draws_sometimes(op: OpOverload) -> bool:
    """Whether an argument decides if a call draws."""
    schema = schema_of(op)
    return any(each.name in _NO_DRAW_IF for each in schema.arguments)


def _cost_of(op: OpOverload) -> CostClass:
    packet = op.overloadpacket
    if packet in flop_registry or packet in _PRODUCTS:
        return CostClass.PRODUCT
    if torch.Tag.reduction in op.tags or packet in _REDUCTIONS:
        return CostClass.REDUCTION
    if torch.Tag.pointwise in op.tags or packet in _POINTWISE:
        return CostClass.POINTWISE
    return CostClass.LIBRARY


def _is_arithmetic(op: OpOverload) -> bool:
    """Whether any numbers are as good as any others for ``op``."""
    if op.namespace != "aten" or not _DATA_TAGS.isdisjoint(op.tags) or not schema_of(op).returns:
        return False
    known = torch.Tag.core in op.tags or _cost_of(op) is not CostClass.LIBRARY
    return known or op.overloadpacket in _MEASURABLE


__all__ = ["CostClass", "OperatorFacts", "call_draws", "facts_of", "follows_seed"]
