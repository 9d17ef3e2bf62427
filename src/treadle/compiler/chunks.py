"""Which chunks the logits of a step are computed in: the one place that chooses."""

from dataclasses import replace

from treadle.compiler.cleaning import rewritten
from treadle.compiler.target import Target
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass
from treadle.options import Options
from treadle.passes.chunks.chunked_loss import ChunkLoss, Logits, largest_logits
from treadle.passes.memory.choose import Version
from treadle.passes.products.float8 import MultiplyInFloat8, multiplies_float8
from treadle.targets.model import DeviceModel
from treadle.util.errors import PlanError

_WORTH = 64 << 20
"""Bytes of logits below which a chunk is not cut: of the order of what else a small step holds."""
_OVERHEAD = 1 / 40
"""Share of the time of the products that cutting them may cost."""
_KERNELS = 100
"""Launches that one more chunk costs whatever its size: a dozen kernels, each of which ends with
most of the device idle (an H200, 2,048 wide and 128,256 classes; with small weights the first costs
more, up to 1 ms: ``benchmarks/chunked_loss.py``)."""
_MOST_CHUNKS = 64
"""Chunks, each of which is a dozen kernels to compile."""
_PIECES = (4, 16)
"""In how many chunks a budget may want the logits, besides what is chosen without one."""
_LEAST_ROWS = 16
"""Rows that a chunk has at least where a budget wants it small."""


def versions_of(
    step: StepGraph, target: Target, first: tuple[GraphPass, ...] = ()
) -> tuple[Version, ...]:
    """The step after the passes of ``first``, with the chunks that are the fastest; with a budget,
    with smaller ones as well. What is in float8 is decided last."""
    passes = _float8(target)
    versions = _chunked(step, target, first)
    return tuple(_followed(step, version, passes) for version in versions) if passes else versions


def _float8(target: Target) -> tuple[GraphPass, ...]:
    """With ``numerics="fp8"`` the pass for it: on what micro-batches and chunks have made."""
    if target.options.numerics != "fp8":
        return ()
    device = target.hardware
    if not multiplies_float8(device):
        raise PlanError(
            f'numerics="fp8" needs a GPU with products of float8, and {device.name} has none',
            code="TR-213",
            remedy="leave numerics out on this device, or use an NVIDIA GPU of compute capability "
            "8.9 or later",
        )
    return (MultiplyInFloat8(device),)


def _followed(step: StepGraph, version: Version, passes: tuple[GraphPass, ...]) -> Version:
    """A version after more passes. All run on one graph, as in ``_cut``."""
    first = (*version.first, *passes)
    return replace(version, step=rewritten(step, first), first=first)


def _chunked(step: StepGraph, target: Target, first: tuple[GraphPass, ...]) -> tuple[Version, ...]:
    options = target.options
    plain = Version(rewritten(step, first), first) if first else Version(step)
    if options.chunk_bytes == 0 or options.numerics == "eager":  # eager rounds sums of all rows
        return (plain,)
    if options.chunk_bytes is not None:
        return (_cut(step, options.chunk_bytes, target, plain),)
    logits = largest_logits(plain.step)
    if logits is None:
        return (plain,)
    most = fastest_chunk(logits, target.hardware)
    smaller = _smaller(logits, most) if options.budget is not None else ()
    return tuple(_cut(step, nbytes, target, plain) for nbytes in (most, *smaller))


def fastest_chunk(logits: Logits, device: DeviceModel) -> int:
    """Bytes of the smallest chunk that costs next to nothing.

    Each chunk but one reads the weights twice again and reads and writes their gradient in 32
    bits; all have three products of ``2 * rows`` operations an element of the weights together::

        again = (1 - hidden) * (8 + 2 * itemsize) * weights / bandwidth
        (chunks - 1) * (again + kernels * launch)  <=  overhead * 6 * rows * weights / rate

    The largest power of two of them, at most 64, so that tiles divide their rows as they do all;
    fewer where chunks would be smaller than 64 MiB.
    """
    moved = (8 + 2 * logits.dtype.itemsize) * logits.weights
    per_chunk = (1 - device.hidden) * moved / device.bandwidth + _KERNELS * device.launch
    products = 6 * logits.rows * logits.weights / device.rate(logits.dtype)
    most = max(_MOST_CHUNKS // logits.times, 1)
    chunks = min(1 << (int(1 + _OVERHEAD * products / per_chunk).bit_length() - 1), most)
    return max(_WORTH, -(-logits.rows // chunks) * logits.row_bytes)


def _smaller(logits: Logits, most: int) -> tuple[int, ...]:
    """Bytes of smaller chunks, for a budget that is not met otherwise."""
    least = max(_LEAST_ROWS * logits.row_bytes, 1)
    pieces_of_each = (n for n in _PIECES if n * logits.times <= _MOST_CHUNKS)
    sizes = (-(-logits.rows // pieces) * logits.row_bytes for pieces in pieces_of_each)
    return tuple(size for size in sizes if least <= size < min(most, logits.nbytes))


def _cut(step: StepGraph, most: int, target: Target, plain: Version) -> Version:
    """The step with chunks of at most that many bytes; ``plain`` where none is needed. All passes
    run on one graph, as they do once the plan is chosen: names depend on the nodes that were."""
    cut = ChunkLoss(most, target.record.wide_products)
    cut_step = rewritten(step, (*plain.first, cut))
    changed = len(cut_step.graph.nodes) != len(plain.step.graph.nodes)
    return Version(cut_step, (*plain.first, cut)) if changed else plain


def without_chunks(options: Options) -> Options:
    """For steps whose loss is read by another graph: it must stay in the forward pass."""
    return replace(options, chunk_logits=0)
