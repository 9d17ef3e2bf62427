"""The meaning of a step: its operations, one after another, by PyTorch."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treadle.graph.arguments import given_of
from treadle.graph.signature import StepGraph


def run_step(step: StepGraph, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The step's outputs, in signature order; write-backs are returned, never done.

    Values are dropped after their last use, so that the peak is that of the order.
    """
    last_use = {each: node for node in step.graph.nodes for each in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(zip(step.placeholders, inputs, strict=True))
    with torch.no_grad():
        for node in step.graph.nodes:
            match node.op:
                case "placeholder":
                    pass
                case "output":
                    return [None if each is None else values[each] for each in step.returned]
                case "get_attr":
                    values[node] = operator.attrgetter(str(node.target))(step.graph.owning_module)
                case "call_function":
                    values[node] = _call(node, values)
                    for each in node.all_input_nodes:
                        if last_use[each] is node:
                            del values[each]
                case other:
                    raise ValueError(f"{node} is a {other}, not an operation")
    raise ValueError("the graph does not end in a return")


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = given_of(node, values.__getitem__)
    assert callable(node.target), node
    return node.target(*args, **kwargs)
