"""The meaning of a step: its operations, one after another, by PyTorch."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treadle.graph.analysis.data_dependent import DataDependentOp
from treadle.graph.core.arguments import given_of
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
    for."""
    last_use = {operand: node for node in step.graph.nodes for operand in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(zip(step.placeholders, inputs, strict=True))
    yield from values.items()
    for node in step.graph.nodes:
        match node.op:
            case "placeholder" | "output":
                continue
            case "get_attr":
                values[node] = operator.attrgetter(str(node.target))(step.graph.owning_module)
            case "call_function":
                with torch.no_grad():
                    values[node] = _call(node, values)
                for operand in node.all_input_nodes:
                    if last_use[operand] is node:
                        del values[operand]
            case other:
                raise ValueError(f"{node} is a {other}, not an operation")
        yield node, values[node]
        if node not in last_use:
            del values[node]


def _call(node: fx.Node, values: dict[fx.Node, object]) -> object:
    args, kwargs = given_of(node, values.__getitem__)
    target = node.target.op if isinstance(node.target, DataDependentOp) else node.target
    assert callable(target), node
    return target(*args, **kwargs)
