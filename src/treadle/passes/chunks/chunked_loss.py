"""A product over a large vocabulary and the loss on it, forward and backward, in chunks of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.graph.analysis.dynamic import dims_of_graph
from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.chunks.region import LossRegion, region_of
from treadle.passes.chunks.rows import Box, boxes_of
from treadle.passes.chunks.write import write_chunks
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt
from treadle.util.sizes import format_bytes

aten = torch.ops.aten

SMALLEST_VOCABULARY = 4096
"""Columns from which a product is looked at: below, what is saved is of the order of the model."""
_WIDER = 4
"""How many times as wide as its rows' factor the product is. A narrower one is a layer's."""
_PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class ChunkLoss(GraphPass):
    """Never let the logits of a step exist as a whole, nor their gradient.

    before:  x = mm(h, w); l = loss(x, t); g = loss_backward(x, t); d = mm(g, v); e = mm(t(g), h)
    after:   for each chunk of rows:  x' = mm(h', w); l += loss(x', t'); g' = loss_backward(x', t')
                                      d' = mm(g', v); e += mm(t(g'), h')

    ``most``: bytes of the logits of a chunk. ``wide_products``: a library adds products of 16-bit
    factors up into 32 bits, so that nothing has to be converted for it. The loss is not known by
    name: everything computed from the logits must work row by row, or sum over rows, and nothing
    that sums over rows may be needed row by row again. Equal to rounding: sums are added up in
    another order, those of 16 bits in 32. ``explain`` says what is in the way.
    """

    contract = Contract()

    most: int
    wide_products: bool = False

    def run(self, step: StepGraph) -> int:
        changed = 0
        seen: set[fx.Node] = set()
        while True:  # a region may hold another wide product, which is gone then
            root = next((node for node in _wide_products(step) if node not in seen), None)
            if root is None:
                return changed
            seen.add(root)
            result = attempt(_found, root, self.most)
            if not isinstance(result, NoMatch) and result.region is not None:
                write_chunks(step, result.region, result.boxes, self.wide_products)
                changed += 1


@final
@dataclass(frozen=True)
class Finding:
    """What becomes of a wide product: ``chunks`` of at most ``rows`` rows each, or ``reason`` why
    it is left alone."""

    product: str
    chunks: int
    rows: int
    reason: str


@dataclass(frozen=True)
class _Found:
    root: fx.Node
    region: LossRegion | None
    boxes: tuple[Box, ...]
    reason: str


def findings(step: StepGraph, most: int) -> tuple[Finding, ...]:
    """What becomes of each wide product of the step."""
    return tuple(
        Finding(finding.root.name, len(finding.boxes), _most_rows(finding), finding.reason)
        for finding in _findings(step, most)
    )


@final
@dataclass(frozen=True)
class Logits:
    """The largest product that can be cut in chunks. ``weights``: elements of its second factor.
    ``times``: how often it is there, once for each micro-batch."""

    rows: int
    row_bytes: int
    weights: int
    dtype: torch.dtype
    times: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


def largest_logits(step: StepGraph) -> Logits | None:
    """The largest product that can be cut in chunks, if there is one. Of equal micro-batches, the
    first stands for all."""
    candidates: list[Logits] = []
    roots = list(_wide_products(step))
    chunks = {info(root).chunk for root in roots} - {None}
    for root in roots:
        if info(root).chunk not in (None, 0):
            continue
        region = attempt(region_of, root)
        if isinstance(region, NoMatch):
            continue
        logits, weights = tensor_of(root), _left(root).shape[1] * tensor_of(root).shape[1]
        times = len(chunks) if info(root).chunk is not None else 1
        size = region.grid.count, region.row_bytes
        candidates.append(Logits(*size, weights, logits.dtype, times))
    return max(candidates, key=lambda candidate: candidate.nbytes, default=None)


def _most_rows(fitting: _Found) -> int:
    if fitting.region is None:
        return 0
    inner = fitting.region.grid.inner
    return max((b.last - b.first) * (b.high - b.low) * inner for b in fitting.boxes)


def _findings(step: StepGraph, most: int) -> Iterator[_Found]:
    for node in _wide_products(step):
        result = attempt(_found, node, most)
        refused = isinstance(result, NoMatch)
        yield _Found(node, None, (), result.message) if refused else result


def _wide_products(step: StepGraph) -> Iterator[fx.Node]:
    if dims_of_graph(step.graph):
        return  # each call decides how many rows there are
    for node in step.graph.nodes:
        known = info(node)
        forward = known.phase == "forward" or known.region is not None  # no gradient of a layer
        if node.target in _PRODUCTS and forward and _is_wide(node):
            yield node


def _is_wide(node: fx.Node) -> bool:
    columns, width = tensor_of(node).shape[1], _left(node).shape[1]
    return columns >= SMALLEST_VOCABULARY and columns >= _WIDER * width


def _left(node: fx.Node) -> torch.Tensor:
    """The factor with the rows."""
    args = arguments(node)
    return tensor_of(args["self" if node.target is aten.mm.default else "mat1"])


def _found(root: fx.Node, most: int) -> _Found:
    """``NoMatch`` where the product stays whole."""
    count, columns = tensor_of(root).shape
    row = columns * tensor_of(root).dtype.itemsize
    size = format_bytes(row * count)
    require(count > 1 and row * count > most, NoMatch, f"{root} has {size}: one chunk")
    region = region_of(root)
    boxes = boxes_of(region.grid, max(most // row, 1))
    spans = {member.rows for member in region.members}
    empty = any(low >= high for box in boxes for low, high in map(box.inside, spans))
    require(not empty, NoMatch, f"{root}: a chunk would have no rows")
    return _Found(root, region, boxes, "")
