"""A step in micro-batches: forward and backward of some rows after the others, then one update."""

from dataclasses import dataclass

from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.chunks.batch_region import BatchRegion, batch_region_of
from treadle.passes.chunks.rows import boxes_of
from treadle.passes.chunks.write import write_chunks
from treadle.util.refusals import NoMatch, attempt

MOST_PARTS = 16
"""Micro-batches of a step, each of which is written out in its graph."""


def parts_of_batch(region: BatchRegion, rows: int) -> int:
    """How many micro-batches of at most ``rows`` rows the batch is."""
    return len(boxes_of(region.grid, rows))


@dataclass(frozen=True)
class MicroBatch(GraphPass):
    """Compute the gradients of at most ``rows`` rows of the batch at a time, and add them up.

    before:  h = mm(x, w); l = mean(h); g = mean_backward(); d = mm(t(x), g); w' = sub(w, d)
    after:   for each micro-batch:  h' = mm(x', w); l += sum(h'); g' = ..; d += mm(t(x'), g')
             l = l / n; w' = sub(w, d)

    Loss and gradients are those of the whole batch, to rounding: means are sums over the number of
    all elements or labels, whatever rows are in a micro-batch. What is drawn is drawn for all rows,
    and is what it was. ``wide_products``: as of ``ChunkLoss``. A step that needs all rows at once
    is left alone; ``batch_region_of`` says why.
    """

    contract = Contract()

    rows: int
    wide_products: bool = False

    def run(self, step: StepGraph) -> int:
        region = attempt(batch_region_of, step)
        if isinstance(region, NoMatch):
            return 0
        boxes = boxes_of(region.grid, self.rows)
        if len(boxes) < 2:
            return 0
        write_chunks(step, region, boxes, self.wide_products)
        return 1
