"""Operators that leave the rows of a batch where they are, and say nothing of their dims."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from treadle.graph.core.types import type_of

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class Aligned:
    """An operator whose ``rows`` have the batch in one of their first dims, all in the same, as
    many as ``lead`` says; the first of them is there in each call. ``results``: whether each has
    rows, ``False`` if it is a sum over them, ``None`` if each call has its own. ``counts``:
    arguments that are the number of rows. ``refused``: an argument with which it works otherwise,
    and the value that is none."""

    rows: tuple[str, ...]
    results: tuple[bool | None, ...]
    lead: Callable[[Mapping[str, Any]], int]
    counts: tuple[str, ...] = ()
    refused: Mapping[str, object] = field(default_factory=dict[str, object])


def _first(args: Mapping[str, Any]) -> int:
    return 1


def _all_of(name: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda args: type_of(args[name]).ndim


def _before_normalized(args: Mapping[str, Any]) -> int:
    return type_of(args["input"]).ndim - len(args["normalized_shape"])


def _before_images(args: Mapping[str, Any]) -> int:
    return type_of(args["self"]).ndim - 3


_ATTENTION = ("query", "key", "value")
_DERIVATIVE = (*_ATTENTION, "grad_out", "out", "logsumexp")
_PLAIN = {"dropout_p": 0.0}
_STATE = (True, True, *(None,) * 7)
"""Rows, sums of scores, and what flash and cuDNN attention pass on to their derivatives."""
ALIGNED: Mapping[object, Aligned] = {
    aten.embedding.default: Aligned(
        ("indices",), (True,), _all_of("indices"), refused={"scale_grad_by_freq": False}
    ),
    aten.embedding_dense_backward.default: Aligned(
        ("indices", "grad_output"),
        (False,),
        _all_of("indices"),
        refused={"scale_grad_by_freq": False},
    ),
    aten.native_layer_norm.default: Aligned(("input",), (True, True, True), _before_normalized),
    aten.native_layer_norm_backward.default: Aligned(
        ("input", "grad_out", "mean", "rstd"), (True, False, False), _before_normalized
    ),
    aten._fused_rms_norm.default: Aligned(("input",), (True, True), _before_normalized),
    aten._fused_rms_norm_backward.default: Aligned(
        ("input", "grad_out", "rstd"), (True, False), _before_normalized
    ),
    aten.native_group_norm.default: Aligned(("input",), (True, True, True), _first, ("N",)),
    aten.native_group_norm_backward.default: Aligned(
        ("input", "grad_out", "mean", "rstd"), (True, False, False), _first, ("N",)
    ),
    aten.convolution.default: Aligned(("input",), (True,), _first),
    aten.convolution_backward.default: Aligned(
        ("input", "grad_output"), (True, False, False), _first
    ),
    aten.max_pool2d_with_indices.default: Aligned(("self",), (True, True), _before_images),
    aten.max_pool2d_with_indices_backward.default: Aligned(
        ("self", "grad_output", "indices"), (True,), _before_images
    ),
    aten.avg_pool2d.default: Aligned(("self",), (True,), _before_images),
    aten.avg_pool2d_backward.default: Aligned(("self", "grad_output"), (True,), _before_images),
    aten._adaptive_avg_pool2d.default: Aligned(("self",), (True,), _before_images),
    aten._adaptive_avg_pool2d_backward.default: Aligned(
        ("self", "grad_output"), (True,), _before_images
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Aligned(
        _ATTENTION, (True, True), _first, refused=_PLAIN
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Aligned(
        _DERIVATIVE, (True, True, True), _first, refused=_PLAIN
    ),
    aten._scaled_dot_product_flash_attention.default: Aligned(
        _ATTENTION, _STATE, _first, refused=_PLAIN
    ),
    aten._scaled_dot_product_flash_attention_backward.default: Aligned(
        _DERIVATIVE, (True, True, True), _first, refused=_PLAIN
    ),
    aten._scaled_dot_product_cudnn_attention.default: Aligned(
        _ATTENTION, _STATE, _first, refused=_PLAIN
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: Aligned(
        _DERIVATIVE, (True, True, True), _first, refused=_PLAIN
    ),
    aten._scaled_dot_product_efficient_attention.default: Aligned(
        _ATTENTION, (True, True, None, None), _first, refused=_PLAIN
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: Aligned(
        (*_ATTENTION, "grad_out_", "out", "logsumexp"),
        (True, True, True, None),
        _first,
        refused=_PLAIN | {"grad_input_mask": [True, True, True, False]},
    ),
    aten.nll_loss_backward.default: Aligned(("self", "target"), (True,), _first),
}
