"""Capturing a step for many sizes at once: arguments with symbols among their sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treadle.algebra.dims import Dim
from treadle.algebra.extents import (
    Size,
    as_int,
    dim_of,
    dims_in,
    largest,
    least,
    size_of,
    with_dims,
)
from treadle.algebra.guards import GuardSet
from treadle.capture.captured import Captured
from treadle.capture.input_sources import Dims
from treadle.capture.sources import Batch, Source
from treadle.compat.fake import symbolic_mode
from treadle.graph.analysis.dynamic import (
    SampleMode,
    Symbols,
    resampled,
    sampled,
    symbols_of_graph,
)
from treadle.graph.core.signature import StepGraph


def with_symbols(
    sources: Sequence[Source], inputs: Sequence[Tensor], dims: Dims
) -> tuple[list[Tensor], Symbols]:
    """The inputs as fake tensors; those in ``dims`` have symbolic sizes."""
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
    """Add guards, so that a trace for a part of the sizes serves only that part."""
    for leaf in dims.values():
        for whole in dims_in(leaf.shape):
            part = leaf.part.get(dim_of(whole).name, whole)
            if least(part) > least(whole):
                guards.less(whole, least(part))
            if largest(part) < largest(whole):
                guards.less(largest(part), whole)


def take_samples(captured: Captured, symbols: Symbols, dims: Dims) -> None:
    """Replace symbols by samples with twins; the conditions that the trace checked on sizes become
    guards."""
    sampled(captured.step.graph, SampleMode(symbols))
    symbols.note()
    captured.guards, captured.dims = symbols.guards, dims


def in_part(captured: Captured, dims: Dims) -> Captured | None:
    """The same step for fewer sizes, given by ``dims``: a trace for all sizes is valid for each of
    them. ``None`` if it has to be traced again."""
    symbols = symbols_of_graph(captured.step.graph)
    if symbols is None:
        return None
    sizes = _sizes_in(symbols, dims)
    if sizes is None:
        return None
    graph = resampled(captured.step.graph, symbols, sizes)
    parts = symbols_of_graph(graph)
    assert parts is not None, "values of the graph have symbols"
    _guard_parts(parts.guards, dims)
    for guard in captured.guards.guards:
        value = with_dims(as_int(guard.formula), sizes)
        parts.guards.less(value, 0) if guard.sign == "<" else parts.guards.equal(value, 0)
    parts.note()
    step = StepGraph(graph, captured.step.signature, captured.step.history)
    return replace(captured, step=step, guards=parts.guards, dims=dims)


def _sizes_in(symbols: Symbols, dims: Dims) -> Mapping[str, Size] | None:
    """All dims of a trace in that part, by name; ``None`` if one of them does not vary there."""
    roots = {dim.name: dim for leaf in dims.values() for dim in map(dim_of, dims_in(leaf.traced))}
    parts: dict[str, Dim | None] = dict(roots)
    for dim in symbols.dims:
        if dim.of is not None:
            part = dim.of.over(roots).dim()
            parts[dim.name] = None if part is None else replace(part, name=dim.name)
    known = {name: size_of(dim) for name, dim in parts.items() if dim is not None}
    return known if len(known) == len(parts) else None
