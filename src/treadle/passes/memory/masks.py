"""Read random masks of zeros and ones as one byte per element, in every phase."""

import functools
from dataclasses import dataclass

import torch
from torch import fx

from treadle.compat.operators.rng_operators import BERNOULLI
from treadle.graph.core.rng import is_zero_or_one, zero_one_draw
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.core.values import inherit
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.cleanup.memory_order import DrawInMemoryOrder
from treadle.targets.registry import target_for

aten = torch.ops.aten


@dataclass(frozen=True)
class ReadMasksAsBytes(GraphPass):
    """All readers of a drawn mask go through a bool copy of it.

    before:  m = bernoulli(e, 0.9); y = mul(x, m)
    after:   m = bernoulli(e, 0.9); b = bool(m); f = float(b); y = mul(x, f)
    on CPUs: b = bernoulli(bool e, 0.9); f = float(b); y = mul(x, f)

    Exact, since the only values are zero and one, and PyTorch was seen to draw bools as floats.
    The mask is the one thing that must be kept whatever the budget, and now it can be kept in a
    quarter of the bytes, also for what backward computes again.
    """

    contract = Contract(after=(DrawInMemoryOrder,))  # which tells draws by what they draw from

    def run(self, step: StepGraph) -> int:
        changes = 0
        for node in step.graph.nodes:
            if _is_mask(node):
                changed = _read_through_bool(node)
                if _same_as_bool(node):
                    _draw_bool(node)
                    changed = True
                changes += changed
        return changes


def with_byte_masks(step: StepGraph) -> StepGraph:
    """The step itself, or a copy if it has masks to read as bytes."""
    if not any(map(_is_mask, step.graph.nodes)):
        return step
    copy = step.copy()
    ReadMasksAsBytes().run(copy)
    return copy


def _is_mask(node: fx.Node) -> bool:
    return is_zero_or_one(node) and _is_float(node)


def _is_float(node: fx.Node) -> bool:
    return type_of(node).dtype.is_floating_point


def _read_through_bool(draw: fx.Node) -> bool:
    """Whether there was a reader that did not."""
    readers = [user for user in draw.users if not _converts_to_bool(user)]
    if not readers:
        return False
    graph = draw.graph
    with graph.inserting_after(draw):
        mask = graph.call_function(aten._to_copy.default, (draw,), {"dtype": torch.bool})
    inherit(mask, draw)
    with graph.inserting_after(mask):
        back = graph.call_function(aten._to_copy.default, (mask,), {"dtype": type_of(draw).dtype})
    inherit(back, draw)
    for reader in readers:
        reader.replace_input_with(draw, back)
    return True


def _same_as_bool(draw: fx.Node) -> bool:
    like = type_of(draw)
    sequential = target_for(like.device).sequential_rng
    return zero_one_draw(draw) is not None and sequential and _draws_alike(like.dtype)


@functools.cache
def _draws_alike(dtype: torch.dtype) -> bool:
    """Whether this PyTorch draws the same as ``dtype`` and as bool, and leaves one state."""
    generators = [torch.Generator("cpu").manual_seed(4357) for _ in range(2)]
    numbers, mask = (
        torch.empty(1259, dtype=kind).bernoulli_(0.3, generator=generator)
        for kind, generator in zip((dtype, torch.bool), generators, strict=True)
    )
    states = [generator.get_state() for generator in generators]
    return torch.equal(numbers, mask.to(dtype)) and torch.equal(*states)


def _draw_bool(draw: fx.Node) -> None:
    """All readers of ``draw`` convert it to bool: draw that."""
    masks = list(draw.users)
    graph = draw.graph
    with graph.inserting_before(draw):
        if draw.target is BERNOULLI:
            size, stride, _, *rest = draw.args
            drawn = graph.call_function(BERNOULLI, (size, stride, torch.bool, *rest), draw.kwargs)
        else:
            like, *rest = draw.args
            empty = graph.call_function(aten.empty_like.default, (like,), {"dtype": torch.bool})
            inherit(empty, draw)
            drawn = graph.call_function(aten.bernoulli.p, (empty, *rest), draw.kwargs)
        inherit(drawn, draw)
    for mask in masks:
        mask.replace_all_uses_with(drawn)
        graph.erase_node(mask)
    graph.erase_node(draw)


def _converts_to_bool(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and type_of(node).dtype is torch.bool
