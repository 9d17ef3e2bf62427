"""Attention by the kernel that was measured to be the fastest, independent of PyTorch's choice."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import fx

from treadle.graph.core.operators import arguments
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.node_rewrite import NodeRewrite
from treadle.graph.rewrite.passes import Contract
from treadle.passes.attention.exchange import (
    OPERANDS,
    exchange,
    gradients_of,
    require_exchangeable,
    require_masks_after_scaling,
)
from treadle.passes.attention.kernels import Cudnn
from treadle.targets.registry import target_for
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

_FLASH = aten._scaled_dot_product_flash_attention.default
_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_MEASURED = (9, 0)


@final
@dataclass(frozen=True, slots=True)
class _Flash:
    """A call of the flash kernel, and those of its gradients."""

    forward: fx.Node
    backward: Sequence[fx.Node]
    kernel: Cudnn


@dataclass(frozen=True)
class CallFastestAttention(NodeRewrite[_Flash]):
    """Call cuDNN's kernel where PyTorch called the flash kernel, forward and backward.

    before:  y, l, ... = flash_attention(q, k, v, is_causal=True)
             dq, dk, dv = flash_attention_backward(dy, q, k, v, y, l, ..., is_causal=True)
    after:   y, l, ... = cudnn_attention(q, k, v, is_causal=True)
             dq, dk, dv = cudnn_attention_backward(dy, q, k, v, y, l, ..., is_causal=True)

    On Hopper and later, where forward and backward took 0.6 to 0.8 of the time
    (``benchmarks/attention_kernels.py``). Both keep scores and sums in f32; they round in other
    places. Not with dropout, whose numbers are the kernel's own.
    """

    contract: ClassVar[Contract] = Contract()

    def find(self, node: fx.Node) -> _Flash:
        require(node.target is _FLASH, NoMatch, f"{node} is not a call of the flash kernel")
        args = arguments(node)
        drawn = f"{node} has dropout, with the kernel's own random numbers"
        require(not args["dropout_p"] and not args["return_debug_mask"], NoMatch, drawn)
        query, key, value = (type_of(args[name]) for name in OPERANDS)
        sizes = (query.shape[2], key.shape[2], query.shape[3])
        fixed = all(type(size) is int for size in sizes) and value.shape[3] == query.shape[3]
        require(fixed, NoMatch, f"{node} has dynamic sizes, or values of another width")
        corner = f"{node} is causal, of other queries than keys: kernels begin at different corners"
        require(not args["is_causal"] or sizes[0] == sizes[1], NoMatch, corner)
        if args["is_causal"]:
            require_masks_after_scaling(node)
        target = target_for(query.device)
        words = f"cuDNN's kernel was not measured on {query.device.type}"
        require("cudnn" in target.libraries, NoMatch, words)
        kernel = Cudnn(target)
        kernel.require_fits(query, sizes)
        capability = target.driver.capability(query.device)
        older = f"cuDNN's kernel was not measured at compute capability {capability}"
        require(capability is None or capability >= _MEASURED, NoMatch, older)
        backward = gradients_of(node, (_BACKWARD,))
        require_exchangeable(node, backward, ("is_causal", "dropout_p", "scale"))
        return _Flash(node, backward, kernel)

    def replace(self, found: _Flash) -> Iterable[fx.Node]:
        args = arguments(found.forward)
        query, key, value = (args[name] for name in OPERANDS)
        make, causal = ReplacementBuilder(found.forward), bool(args["is_causal"])
        call = found.kernel.call(make, (query, key, value), None, args["scale"], causal=causal)
        for backward in found.backward:
            behind = ReplacementBuilder(backward)
            exchange(
                backward, found.kernel.gradients(behind, arguments(backward)["grad_out"], call)
            )
        exchange(found.forward, [call.result])
        return ()
