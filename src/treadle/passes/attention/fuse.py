"""Attention that is written out becomes one call of the library, forward and backward."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import fx

from treadle.graph.core.node_info import info
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.attention.additive import Additive
from treadle.passes.attention.backward import Backward, backward_of
from treadle.passes.attention.calls import FoundAttention, replace
from treadle.passes.attention.forward import Forward, forward_of
from treadle.passes.attention.kernels import kernel_for
from treadle.passes.attention.rows import (
    MaskedRows,
    ScoreMask,
    cannot_be_infinite,
    drops_of,
    leaves_something,
    stays_finite,
)
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseAttention(GraphPass):
    """Call the library's attention where a step multiplies, scales, masks, normalises, multiplies.

    before:  s = bmm(q, k); p = softmax(mul(s, 0.125) + mask); y = bmm(p, v)
             dv = bmm(p^T, dy); dp = bmm(dy, v^T); ds = mul(softmax_backward(dp, p), 0.125)
             dq = bmm(ds, k^T); dk = bmm(q^T, ds)
    after:   y, l = attention(q, k^T, v, attn_mask=mask, scale=0.125)
             dq, dk, dv = attention_backward(dy, q, k^T, v, y, l, attn_mask=mask, scale=0.125)

    The matrices of scores, and those of their gradients, never exist. A row that masks may leave
    empty is NaN as in eager, or the attention stays as it is.

    Equal to eager to rounding, for scores that are finite. Scores and sums are f32 inside, also for
    bf16 and f16, where eager rounds scores and probabilities to these. Against float64, for normal
    operands of 64 features, 512 long, scaled by 1/8, the root mean square error of f32 is 1.0
    (result) to 1.2 (gradients) times eager's, of bf16 0.5 to 1.3 times; of f32 where scores are
    three times as large, gradients are up to 5 times as far, for the logarithm of each sum is
    rounded.
    """

    contract: ClassVar[Contract] = Contract()

    everywhere: bool = False
    """Also where it was measured to be no faster, or less exact."""

    def run(self, step: StepGraph) -> int:
        attentions = [
            attention
            for _, attention in _attentions(step, self.everywhere)
            if isinstance(attention, FoundAttention)
        ]
        masks = Additive()
        for attention in attentions:
            replace(attention, masks)
        if attentions:  # the order of what a call gives makes copies needless
            RemoveNoOps().run(step)
            RemoveDeadCode().run(step)
        return len(attentions)


@final
@dataclass(frozen=True, slots=True)
class AttentionFinding:
    """What became of one softmax. ``refused``: why it is not a call of the library; empty if it is.

    ``shape``: of the probabilities. ``masks``: how many are on the scores. ``trained``: whether the
    step has its gradient.
    """

    softmax: str
    module: str
    where: str
    shape: tuple[int, ...]
    masks: int
    trained: bool
    refused: str

    @property
    def fused(self) -> bool:
        """Whether a call of the library takes its place."""
        return not self.refused


def findings(step: StepGraph, *, everywhere: bool = False) -> tuple[AttentionFinding, ...]:
    """Every softmax over rows of matrices in the order of the step, and what becomes of it."""
    return tuple(_finding(softmax, result) for softmax, result in _attentions(step, everywhere))


def _finding(softmax: fx.Node, result: FoundAttention | NoMatch) -> AttentionFinding:
    known = info(softmax)
    fused = isinstance(result, FoundAttention)
    return AttentionFinding(
        softmax=softmax.name,
        module=known.module,
        where=known.where,
        shape=type_of(softmax).shape,
        masks=len(result.forward.scores.masks) if fused else 0,
        trained=any(user.target is aten._softmax_backward_data.default for user in softmax.users),
        refused="" if fused else result.message,
    )


def _attentions(
    step: StepGraph, everywhere: bool
) -> list[tuple[fx.Node, FoundAttention | NoMatch]]:
    softmaxes = step.graph.find_nodes(op="call_function", target=aten._softmax.default)
    matrices = [softmax for softmax in softmaxes if type_of(softmax).ndim >= 3]
    proofs: dict[tuple[ScoreMask, ...], bool] = {}
    return [(softmax, attempt(_attention_of, softmax, proofs, everywhere)) for softmax in matrices]


def _attention_of(
    softmax: fx.Node, proofs: dict[tuple[ScoreMask, ...], bool], everywhere: bool
) -> FoundAttention:
    """The attention around ``softmax``; ``NoMatch`` where it stays."""
    forward = forward_of(softmax)
    backward = backward_of(forward)
    kernel = kernel_for(type_of(softmax).device)
    _check_masks(forward)
    kernel.check(forward, everywhere=everywhere)
    rows = _rows(forward, backward, proofs)
    masks = forward.scores.masks
    dtype = kernel.mask_dtype(forward, rows) if masks else type_of(softmax).dtype
    return FoundAttention(forward, backward, rows, kernel, dtype)


def _dtypes_behind(forward: Forward) -> set[torch.dtype]:
    """Of the scores from their first mask on, up to the probabilities."""
    masks = {mask.node for mask in forward.scores.masks}
    chain = (*forward.scores.inside, forward.scores.product)  # the last first
    first = max(i for i, node in enumerate(chain) if masks & set(node.all_input_nodes))
    return {type_of(node).dtype for node in (forward.softmax, *chain[: first + 1])}


def _check_masks(forward: Forward) -> None:
    """The call takes masks of four dims at most, and of the heads that the softmax has."""
    n, rows, columns, _ = forward.sizes
    for mask in forward.scores.masks:
        kind = type_of(mask.node)
        shape = (1,) * (len(mask.shape) - kind.ndim) + kind.shape
        *lead, down, along = shape
        batched = len(shape) == 4 and mask.shape[:2] == forward.heads
        batched |= len(shape) == 3 and forward.heads == (1, n)
        fits = (batched or set(lead) == {1}) and down in (1, rows) and along in (1, columns)
        require(fits, NoMatch, f"the mask {mask.node} is of other heads than the softmax")
        known = kind.dtype in (torch.bool, torch.float32, type_of(forward.result).dtype)
        require(known, NoMatch, f"the mask {mask.node} is of {kind.dtype}")


def _rows(
    forward: Forward, backward: Backward | None, proofs: dict[tuple[ScoreMask, ...], bool]
) -> MaskedRows:
    """What is known of rows that are masked whole; ``NoMatch`` if that is too little."""
    masks = forward.scores.masks
    if masks not in proofs:
        proofs[masks] = leaves_something(masks)
    if proofs[masks]:
        return MaskedRows(proved=True)
    inside = _dtypes_behind(forward)
    wide = stays_finite(torch.finfo(torch.float32).min, inside)
    if backward is None and wide and cannot_be_infinite(masks):
        return MaskedRows()
    drops, adds = drops_of(masks), {mask.add for mask in masks}
    finite = all(drop.fill == -math.inf or stays_finite(drop.fill, inside) for drop in drops)
    words = f"the mask {masks[0].node} may be a finite number in all of a row"
    require(bool(drops) and finite, NoMatch, words)
    zeroed = adds == {False}
    gradient = len(adds) == 1 and (backward is None or not zeroed or backward.filled)
    words = f"the mask {masks[0].node} may be all of a row, with a gradient that is not known there"
    require(gradient, NoMatch, words)
    return MaskedRows(drops=drops, zeroed=zeroed)
