"""Attention masks that are proved to equal a flag of the kernel, or to have no effect."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch import fx

from treadle.algebra.extents import size_key
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, is_item, operation_name, set_argument
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import is_tensor
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.attention import blocks, windows
from treadle.passes.attention.blocks import BlockedCall, blocked
from treadle.passes.attention.exchange import gradients_of, require_masks_after_scaling
from treadle.passes.attention.mask_patterns import (
    Blocks,
    ElementReader,
    Mask,
    Pairs,
    Window,
    mask_of,
)
from treadle.passes.attention.windows import WindowedCall
from treadle.util.errors import VerifyError, require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A kernel of attention, forward or backward: how it calls its mask, whether it ``rounds`` in
    another place without one, up to which number a mask stands for ``never``, and whether the
    kernel with ``windows`` may take its place. All take ``query``, ``key`` and ``is_causal``."""

    mask: str
    is_backward: bool
    rounds: bool
    never: float = -math.inf
    windows: bool = False


_CUDNN_NEVER = -65504.0
"""What PyTorch hands cuDNN's kernel where a mask of booleans is false, in all dtypes."""


KERNELS: Mapping[object, AttentionKernel] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: AttentionKernel(
        "attn_mask", False, False
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: AttentionKernel(
        "attn_mask", True, False
    ),
    aten._scaled_dot_product_efficient_attention.default: AttentionKernel(
        "attn_bias", False, True, windows=True
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: AttentionKernel(
        "attn_bias", True, True, windows=True
    ),
    aten._scaled_dot_product_cudnn_attention.default: AttentionKernel(
        "attn_bias", False, True, _CUDNN_NEVER, windows=True
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: AttentionKernel(
        "attn_bias", True, True, _CUDNN_NEVER, windows=True
    ),
}
"""The calls that are looked at."""


@dataclass(frozen=True)
class ProveAttentionMasks(GraphPass):
    """Let attention skip what a mask of positions hides, forward and backward alike.

    before:  m = where(arange(9)[None] <= arange(9)[:, None], 0, -inf); y = attention(q, k, v, m)
    after:   y = attention(q, k, v, is_causal=True)

    A mask that is proved to let every pair through goes; one that is proved to be causal, of as
    many queries as keys, becomes the flag; one that is proved to be a window becomes, on GPUs, the
    two bounds of a kernel that skips what is outside it; one that is proved to be of blocks of
    positions goes, and each block is a batch of its own. The function is the same while scores are
    finite (and smaller than half of the number that a mask adds, where that is not -inf: 32,752
    is the least such half, since PyTorch gives cuDNN -65504 for a mask of booleans). CPUs give
    the same bits, but for blocks. On GPUs the kernel rounds in another place, so there nothing
    changes where rounding is to be ``eager``'s.
    """

    contract: ClassVar[Contract] = Contract()

    read: Callable[[], ElementReader] = field(repr=False)
    eager: bool = False

    def run(self, step: StepGraph) -> int:
        proved = _proved(step, self)
        for node, becomes in proved.items():
            if not isinstance(becomes, Window):
                continue
            set_argument(node, KERNELS[node.target].mask, None)
            if becomes.is_causal:
                set_argument(node, "is_causal", True)
        for call in dict.fromkeys(proved.values()):
            if isinstance(call, WindowedCall):
                windows.replace(call)
            elif isinstance(call, BlockedCall):
                blocks.replace(call)
        return len(proved)


@final
@dataclass(frozen=True, slots=True)
class MaskReport:
    """One call of attention. ``mask``: what it is proved to be, empty if it is not; ``becomes``:
    what the pass does with the call; ``reason``: why not more."""

    call: str
    where: str
    mask: str
    becomes: str
    reason: str

    def __str__(self) -> str:
        return "; ".join(part for part in (self.mask, self.becomes, self.reason) if part)


_Becomes: TypeAlias = Window | WindowedCall | BlockedCall
"""A window that is a flag, or nothing; or other calls."""


def reports(step: StepGraph, by: ProveAttentionMasks) -> tuple[MaskReport, ...]:
    """What the pass ``by`` finds, one report for each call of attention. Changes nothing."""
    decisions = _Decisions(by)
    return tuple(_report(decisions, node) for node in _calls(step))


def _calls(step: StepGraph) -> Iterator[fx.Node]:
    for node in step.graph.nodes:
        if node.target in KERNELS:
            yield node


def _proved(step: StepGraph, by: ProveAttentionMasks) -> dict[fx.Node, _Becomes]:
    """The calls whose mask is a flag, or nothing, or two bounds."""
    decisions = _Decisions(by)
    decided = {node: attempt(decisions.becomes, node) for node in _calls(step)}
    return {node: becomes for node, becomes in decided.items() if not isinstance(becomes, NoMatch)}


def _report(decisions: "_Decisions", node: fx.Node) -> MaskReport:
    mask, becomes = attempt(decisions.mask, node), attempt(decisions.becomes, node)
    refused = isinstance(becomes, NoMatch)
    return MaskReport(
        call=f"{node} ({operation_name(node.target)})",
        where=info(node).where,
        mask="" if isinstance(mask, NoMatch) else str(mask.pattern),
        becomes="stays" if refused else _words(becomes),
        reason=becomes.message if refused else "",
    )


def _words(becomes: _Becomes) -> str:
    match becomes:
        case WindowedCall():
            return f"a window of {becomes.left} before and {becomes.right} after"
        case BlockedCall():
            return f"batches of {becomes.size}, {'is_causal' if becomes.causal else 'no mask'}"
        case Window():
            return "is_causal" if becomes.is_causal else "no mask"


@dataclass(frozen=True)
class _Decisions:
    """What masks were found to be so far; layers of a model share theirs."""

    by: ProveAttentionMasks
    known: dict[tuple[object, ...], Mask | NoMatch] = field(
        default_factory=dict[tuple[object, ...], Mask | NoMatch]
    )

    def mask(self, node: fx.Node) -> Mask:
        """The pattern of the mask of a call; ``NoMatch`` in words."""
        args = arguments(node)
        bias, query, key = args[KERNELS[node.target].mask], args["query"], args["key"]
        require(bias is not None, NoMatch, f"{node} has no mask")
        require(is_tensor(bias), NoMatch, f"the mask of {node} is not a tensor")
        pairs = Pairs.of(query, key)
        never = KERNELS[node.target].never
        at = (bias, never, *(size_key(axis.extent) for axis in pairs.axes))
        if at not in self.known:
            self.known[at] = _tried(bias, pairs, self.by.read(), never)
        proved = self.known[at]
        if isinstance(proved, NoMatch):
            raise proved
        return proved

    def becomes(self, node: fx.Node) -> _Becomes:
        """The window that the kernel has a flag for, or the call of the kernel that takes its
        bounds; ``NoMatch`` in words."""
        pattern = self.mask(node).pattern
        args = arguments(node)
        kernel = KERNELS[node.target]
        bias = args[kernel.mask]
        if isinstance(pattern, Blocks):
            return self._blocks(node, bias, pattern)
        message = f"{bias} is {pattern}: no kernel to call takes that"
        require(isinstance(pattern, Window), NoMatch, message)
        assert isinstance(pattern, Window)
        flag = pattern.is_everything or pattern.is_causal
        require(flag or kernel.windows, NoMatch, message)
        square = pattern.is_everything or Pairs.of(args["query"], args["key"]).is_square
        require(square, NoMatch, f"{bias} is {pattern}, of another number of keys than queries")
        self._check(node, bias)
        if not pattern.is_everything:
            require_masks_after_scaling(node)
        if flag:
            return pattern
        forward = _forward(node)
        return windows.windowed(forward, _backward(forward), pattern)

    def _blocks(self, node: fx.Node, bias: fx.Node, pattern: Blocks) -> BlockedCall:
        args = arguments(node)
        square = Pairs.of(args["query"], args["key"]).is_square
        require(square, NoMatch, f"{bias} is {pattern}, of another number of keys than queries")
        require(not self.by.eager, NoMatch, f"in blocks {node} rounds elsewhere")
        self._check(node, bias)
        if not pattern.within.is_everything:
            require_masks_after_scaling(node)
        forward = _forward(node)
        return blocked(forward, _backward(forward), KERNELS[node.target].mask, pattern)

    def _check(self, node: fx.Node, bias: fx.Node) -> None:
        """The conditions under which the mask of a call may be removed."""
        args, rounds = arguments(node), KERNELS[node.target].rounds
        require(not (rounds and self.by.eager), NoMatch, f"without {bias} {node} rounds elsewhere")
        drawn = f"{node} has dropout, and might draw other numbers without {bias}"
        require(not (rounds and args["dropout_p"]), NoMatch, drawn)
        for call in (node, *_backward(node)):
            require(not _wants_bias(call), NoMatch, f"{call} gives a gradient of {bias}")


def _tried(bias: fx.Node, pairs: Pairs, reader: ElementReader, never: float) -> Mask | NoMatch:
    try:
        return attempt(mask_of, bias, pairs, reader, never)
    except VerifyError as fault:  # sizes whose signs nobody knows
        return NoMatch(fault.message)
    except RecursionError:
        return NoMatch(f"{bias} is made in too many steps")


def _forward(node: fx.Node) -> fx.Node:
    """The call of which ``node`` computes the gradients, or ``node`` itself."""
    if not KERNELS[node.target].is_backward:
        return node
    result = arguments(node)["out"]
    is_kernel_result = is_item(result) and result.args[0].target in KERNELS
    require(
        is_kernel_result, NoMatch, f"the result whose gradients {node} computes is made elsewhere"
    )
    return result.args[0]


def _backward(node: fx.Node) -> tuple[fx.Node, ...]:
    """The calls that compute the gradients of ``node``."""
    return gradients_of(node, (target for target, kernel in KERNELS.items() if kernel.is_backward))


def _wants_bias(node: fx.Node) -> bool:
    """Whether a gradient of the mask is computed."""
    wanted: Any = arguments(node).get("grad_input_mask")  # cuDNN's kernel never computes one
    return wanted is not None and bool(wanted[3])
