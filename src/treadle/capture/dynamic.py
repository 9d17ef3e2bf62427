"""Capturing a step for many sizes at once: arguments with symbols among their sizes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.algebra.extents import Size
from treadle.capture.captured import Captured
from treadle.capture.input_sources import Dims
from treadle.capture.sources import Batch, Source
from treadle.compat.fake import symbolic_mode
from treadle.graph.analysis.dynamic import SampleMode, Symbols, sampled


def with_symbols(
    sources: Sequence[Source], inputs: Sequence[Tensor], dims: Dims
) -> tuple[list[Tensor], Symbols]:
    """The inputs as fake tensors; those of ``dims`` with symbols."""
    shapes = (leaf.shape for leaf in dims.values())
    names = {size: size for shape in shapes for size in shape if isinstance(size, Size)}
    mode, known = symbolic_mode(names)
    symbols = Symbols(mode, known)
    tensors: list[Tensor] = []
    with mode:
        for source, tensor in zip(sources, inputs, strict=True):
            if isinstance(source, Batch) and source.at in dims:
                leaf = dims[source.at]
                shape, strides = (list(map(symbols.symint, e)) for e in (leaf.shape, leaf.strides))
            else:
                shape, strides = list(tensor.shape), list(tensor.stride())
            dtype, device = tensor.dtype, tensor.device
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
    return tensors, symbols


def take_samples(captured: Captured, symbols: Symbols) -> None:
    """From symbols to samples with twins; what the trace asked of sizes is guarded."""
    sampled(captured.step.graph, SampleMode(symbols))
    symbols.note()
    captured.guards = symbols.guards
