"""Attention by the kernel that was measured to be the fastest, whichever PyTorch picked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import fx

from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.graph.rewrite.rules import NoMatch
from treadle.passes.attention.exchange import (
    OPERANDS,
    exchange,
    gradients_of,
    require_exchangeable,
    require_masks_after_scaling,
)
from treadle.passes.attention.kernels import Cudnn
from treadle.passes.attention.maker import Maker
from treadle.targets.registry import target_for
from treadle.util.errors import require

aten = torch.ops.aten

_FLASH = aten._scaled_dot_product_flash_attention.default
_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_MEASURED = (9, 0)


@dataclass(frozen=True)
class CallFastestAttention(GraphPass):
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

    def run(self, step: StepGraph) -> int:
        found: list[_Flash] = []
        for node in step.graph.find_nodes(op="call_function", target=_FLASH):
            try:
                found.append(_found(node))
            except NoMatch:
                continue
        for each in found:
            _replace(each)
        return len(found)


def explain(node: fx.Node) -> str:
    """What becomes of ``node``, a call of attention, and why, in words."""
    try:
        _found(node)
    except NoMatch as miss:
        return f"stays: {miss.message}"
    return "cuDNN's"


@final
@dataclass(frozen=True, slots=True)
class _Flash:
    """A call of the flash kernel, and those of its gradients."""

    forward: fx.Node
    backward: Sequence[fx.Node]
    kernel: Cudnn


def _found(node: fx.Node) -> _Flash:
    require(node.target is _FLASH, NoMatch, f"{node} is no call of the flash kernel")
    given = arguments(node)
    drawn = f"{node} drops out, by numbers of the kernel's own"
    require(not given["dropout_p"] and not given["return_debug_mask"], NoMatch, drawn)
    query, key, value = (type_of(given[name]) for name in OPERANDS)
    sizes = (query.shape[2], key.shape[2], query.shape[3])
    fixed = all(type(size) is int for size in sizes) and value.shape[3] == query.shape[3]
    require(fixed, NoMatch, f"{node} has sizes that the call decides, or values of another width")
    corner = f"{node} is causal, of other queries than keys: kernels begin at different corners"
    require(not given["is_causal"] or sizes[0] == sizes[1], NoMatch, corner)
    if given["is_causal"]:
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


def _replace(found: _Flash) -> None:
    given = arguments(found.forward)
    operands: Any = tuple(given[name] for name in OPERANDS)
    make, causal = Maker(found.forward), bool(given["is_causal"])
    call = found.kernel.call(make, operands, None, given["scale"], causal=causal)
    for each in found.backward:
        behind = Maker(each)
        exchange(each, found.kernel.gradients(behind, arguments(each)["grad_out"], call))
    exchange(found.forward, [call.result])


__all__ = ["CallFastestAttention", "explain"]
