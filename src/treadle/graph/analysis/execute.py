"""The meaning of a step: its operations, one after another, by PyTorch."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treadle.algebra.dims import Sizes
from treadle.algebra.extents import Size, at, size_of
from treadle.graph.analysis.data_dependent import DataDependentOp
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.arguments import given_of
from treadle.graph.core.node_info import known_value
from treadle.graph.core.signature import StepGraph


def run_step(step: StepGraph, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The step's outputs, in signature order; write-backs are returned, never done.

    Values are dropped after their last use, so that the peak is that of the order.
    """
    returned = set(step.returned)
    values = {node: value for node, value in values_of(step, inputs) if node in returned}
    return [None if node is None else values[node] for node in step.returned]


def values_of(step: StepGraph, inputs: Sequence[Tensor]) -> Iterator[tuple[fx.Node, Any]]:
    """Each node with its value, in order; those of operations are computed when they are asked
    for. Sizes that each call decides are those of ``inputs``."""
    last_use = {operand: node for node in step.graph.nodes for operand in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(zip(step.placeholders, inputs, strict=True))
    sizes = _sizes_of(step, inputs)
    yield from values.items()
    for node in step.graph.nodes:
        match node.op:
            case "placeholder" | "output":
                continue
            case "get_attr":
                values[node] = operator.attrgetter(str(node.target))(step.graph.owning_module)
            case "call_function":
                with torch.no_grad():
                    values[node] = _call(node, values, sizes)
                for operand in node.all_input_nodes:
                    if last_use[operand] is node:
                        del values[operand]
            case other:
                raise ValueError(f"{node} is a {other}, not an operation")
        yield node, values[node]
        if node not in last_use:
            del values[node]


def _call(node: fx.Node, values: dict[fx.Node, object], sizes: Sizes) -> object:
    def told(leaf: object) -> object:
        return at(leaf, sizes) if isinstance(leaf, Size) else leaf

    args, kwargs = given_of(node, values.__getitem__, told if sizes else None)
    target = node.target.op if isinstance(node.target, DataDependentOp) else node.target
    assert callable(target), node
    return target(*args, **kwargs)


def _sizes_of(step: StepGraph, inputs: Sequence[Tensor]) -> Sizes:
    """Of each dim of an input that calls change, by name."""
    sizes: dict[str, int] = {}
    for node, tensor in zip(step.placeholders, inputs, strict=True):
        value = known_value(node)
        shape = layout_of(value)[0] if isinstance(value, Tensor) else ()
        for size, actual in zip(shape, tensor.shape, strict=False):
            if isinstance(size, Size) and len(size.formula.dims) == 1:
                (dim,) = size.formula.dims
                if size.formula == size_of(dim).formula:
                    sizes[dim.name] = actual
    return sizes
