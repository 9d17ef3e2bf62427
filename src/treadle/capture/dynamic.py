"""Capturing a step for many sizes at once: arguments with symbols among their sizes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.algebra.extents import Size, dim_of, dims_in, largest, least
from treadle.algebra.guards import GuardSet
from treadle.capture.captured import Captured
from treadle.capture.input_sources import Dims
from treadle.capture.sources import Batch, Source
from treadle.compat.fake import symbolic_mode
from treadle.graph.analysis.dynamic import SampleMode, Symbols, sampled


def with_symbols(
    sources: Sequence[Source], inputs: Sequence[Tensor], dims: Dims
) -> tuple[list[Tensor], Symbols]:
    """The inputs as fake tensors; those of ``dims`` with symbols."""
    shapes = (leaf.traced for leaf in dims.values())
    names = {size: size for shape in shapes for size in shape if isinstance(size, Size)}
    mode, known = symbolic_mode(names)
    symbols = Symbols(mode, known)
    _guard_parts(symbols.guards, dims)
    tensors: list[Tensor] = []
    with mode:
        for source, tensor in zip(sources, inputs, strict=True):
            if isinstance(source, Batch) and source.at in dims:
                leaf = dims[source.at]
                shape, strides = (list(map(symbols.symint, e)) for e in (leaf.traced, leaf.strides))
            else:
                shape, strides = list(tensor.shape), list(tensor.stride())
            dtype, device = tensor.dtype, tensor.device
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
    return tensors, symbols


def _guard_parts(guards: GuardSet, dims: Dims) -> None:
    """What is traced for a part of the sizes serves that part."""
    for leaf in dims.values():
        for whole in dims_in(leaf.shape):
            part = leaf.part.get(dim_of(whole).name, whole)
            if least(part) > least(whole):
                guards.less(whole, least(part))
            if largest(part) < largest(whole):
                guards.less(largest(part), whole)


def take_samples(captured: Captured, symbols: Symbols) -> None:
    """From symbols to samples with twins; what the trace asked of sizes is guarded."""
    sampled(captured.step.graph, SampleMode(symbols))
    symbols.note()
    captured.guards = symbols.guards
