"""Which chunks the logits of a step are computed in: the one place that chooses."""

from dataclasses import replace

from treadle.compiler.cleaning import rewritten
from treadle.compiler.request import Target
from treadle.graph.signature import StepGraph
from treadle.options import Options
from treadle.passes.chunked_loss import ChunkLoss, Logits, largest_logits
from treadle.passes.memory.choose import Version
from treadle.targets.model import DeviceModel

_WORTH = 64 << 20
"""Bytes of logits below which a chunk is not cut: of the order of what else a small step holds."""
_OVERHEAD = 1 / 60
"""Share of the time of a chunk's products that cutting it may cost, by bytes and rates. Products
themselves lose more in short pieces: on an H200 in bfloat16 19 % in four of 4,096 rows (768 wide,
50,257 classes), 2.7 % in four of 8,192 rows (2,048 wide, 128,256 classes; PyTorch 2.11,
``benchmarks/loss_products.py``)."""
_PIECES = (4, 16)
"""In how many chunks a budget may want the logits, besides what is chosen without one."""
_LEAST_ROWS = 16
"""Rows that a chunk has at least where a budget wants it small."""


def versions_of(step: StepGraph, target: Target) -> tuple[Version, ...]:
    """The step with the chunks that are the fastest; with a budget, with smaller ones as well."""
    options = target.options
    plain = Version(step)
    if options.chunk_bytes == 0 or options.numerics == "eager":  # eager rounds sums of all rows
        return (plain,)
    if options.chunk_bytes is not None:
        return (_cut(step, options.chunk_bytes, target),)
    logits = largest_logits(step)
    if logits is None:
        return (plain,)
    most = fastest_chunk(logits, target.hardware)
    smaller = _smaller(logits, most) if options.budget is not None else ()
    return tuple(_cut(step, each, target) for each in (most, *smaller))


def fastest_chunk(logits: Logits, device: DeviceModel) -> int:
    """Bytes of the smallest chunk that costs next to nothing.

    Each chunk reads the weights twice again and reads and writes their gradient in 32 bits, ``24``
    or so bytes an element of them, and has three products of ``2 * rows`` operations an element::

        (8 + 2 * itemsize) / bandwidth  <=  overhead * 6 * rows / rate
    """
    traffic = (8 + 2 * logits.dtype.itemsize) / device.bandwidth
    rows = traffic * device.rate(logits.dtype) / (6 * _OVERHEAD)
    return max(_WORTH, round(rows) * logits.row_bytes)


def _smaller(logits: Logits, most: int) -> tuple[int, ...]:
    """Bytes of smaller chunks, for a budget that is not met otherwise."""
    least = max(_LEAST_ROWS * logits.row_bytes, 1)
    sizes = (-(-logits.rows // pieces) * logits.row_bytes for pieces in _PIECES)
    return tuple(size for size in sizes if least <= size < min(most, logits.nbytes))


def _cut(step: StepGraph, most: int, target: Target) -> Version:
    """The step with chunks of at most that many bytes; itself where none is needed."""
    cut = ChunkLoss(most, target.record.wide_products)
    made = rewritten(step, (cut,))
    changed = len(made.graph.nodes) != len(step.graph.nodes)
    return Version(made, (cut,)) if changed else Version(step)


def without_chunks(options: Options) -> Options:
    """For steps whose loss is read by another graph: it must stay in the forward pass."""
    return replace(options, chunk_logits=0)


__all__ = ["fastest_chunk", "versions_of", "without_chunks"]
