"""Kernels of attention for GPUs in graphs that run on CPUs: attention written out in their place,
in the numbers of the operands' dtype or more."""

import math

import torch
from torch import Tensor, fx

from treadle.compat.operators.schemas import schema_of
from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.passes.attention.proved_masks import ProveAttentionMasks, reports

aten = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
WINDOWS = aten._flash_attention_forward.default
WINDOWS_BACKWARD = aten._flash_attention_backward.default
FORWARD = {CUDNN: 9, EFFICIENT: 4, FLASH: 9, WINDOWS: 5}
"""How many results each has."""
BACKWARD = {CUDNN_BACKWARD, EFFICIENT_BACKWARD, FLASH_BACKWARD, WINDOWS_BACKWARD}


def attention(query: Tensor, key: Tensor, value: Tensor, options: dict) -> Tensor:
    """``[B, H, T, D]``; ``options`` as the kernels have them."""
    times = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
    scale = options.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    bias = options.get("attn_bias")
    if bias is not None:
        scores = scores + bias
    i, j = (torch.arange(n) for n in scores.shape[-2:])
    apart = j[None] - i[:, None]
    left, right = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
    right = 0 if options.get("is_causal") else right
    hidden = (apart > right if right >= 0 else apart > math.inf) | (
        apart < -left if left >= 0 else apart < -math.inf
    )
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


class WrittenOut(fx.Interpreter):
    """Runs a graph with attention written out in the place of kernels for GPUs, and their results
    laid out as those of the kernels."""

    def run_node(self, n):
        found = super().run_node(n)
        if n.target not in FORWARD and n.target not in BACKWARD:
            return found
        pairs = zip(found, value_of(n), strict=False)
        return tuple([_laid_out(each, like) for each, like in pairs])

    def call_function(self, target, args, kwargs):
        if target not in FORWARD and target not in BACKWARD:
            return super().call_function(target, args, kwargs)
        names = [each.name for each in schema_of(target).arguments]
        options = dict(zip(names, args, strict=False)) | kwargs
        assert not options.get("dropout_p")
        operands = [options[name] for name in ("query", "key", "value")]
        turns = target in (WINDOWS, WINDOWS_BACKWARD)
        if turns:
            operands = [each.transpose(1, 2) for each in operands]
        if target in FORWARD:
            result = attention(*operands, options)
            rest = [torch.zeros(())] * (FORWARD[target] - 1)
            return (result.transpose(1, 2) if turns else result, *rest)
        operands = [each.detach().requires_grad_() for each in operands]
        given = options["grad_out_" if target is EFFICIENT_BACKWARD else "grad_out"]
        result = attention(*operands, options)
        found = torch.autograd.grad(result, operands, given.transpose(1, 2) if turns else given)
        return tuple(each.transpose(1, 2) for each in found) if turns else found


def _laid_out(value, like):
    if not isinstance(like, Tensor) or value.shape != like.shape:
        return value  # what nobody here computes
    made = torch.empty_strided(value.shape, like.stride(), dtype=value.dtype)
    return made.copy_(value)


def run(graph: fx.Graph, *inputs: Tensor) -> list[Tensor]:
    """The results of ``graph``."""
    with torch.enable_grad():
        return WrittenOut(fx.GraphModule({}, graph)).run(*inputs)


def layouts(step):
    """Dtypes, shapes and strides of what is returned; strides of dims of size 1 do not count."""
    found = []
    for kind in map(type_of, step.returned):
        pairs = zip(kind.strides, kind.shape, strict=True)
        found.append((kind.dtype, kind.shape, [stride for stride, size in pairs if size > 1]))
    return found


def mask_words(step: StepGraph, node: fx.Node, by: ProveAttentionMasks) -> str:
    """What ``by`` says of the call of attention ``node``."""
    (report,) = [each for each in reports(step, by) if each.call.split()[0] == node.name]
    return str(report)
