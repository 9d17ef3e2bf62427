"""A step with one size in the place of another, wherever the size is written.

::

    before:  x: f32[64, 1];  y: f32[64, 3] = expand(x, [64, 3])
    after:   x: f32[2, 1];   y: f32[2, 3] = expand(x, [2, 3])        64 -> 2
"""

from typing import Any

import torch

from treadle.compat.fake import without_words
from treadle.graph.core.arguments import map_argument
from treadle.graph.core.node_info import set_value, value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.core.values import compute


def sizes_of(step: StepGraph) -> list[int]:
    """The sizes of the inputs that are larger than one, the largest first."""
    sizes = {size for node in step.placeholders for size in type_of(node).shape}
    return sorted((size for size in sizes if size > 1), reverse=True)


def resized(step: StepGraph, old: int, new: int) -> StepGraph | None:
    """``new`` for ``old`` in the shapes of inputs and in lists of numbers among arguments, with
    every value computed again; ``None`` where some operation does not take that."""
    candidate = step.copy()
    for node in candidate.graph.nodes:
        if node.op == "get_attr":
            continue
        if node.op == "placeholder":
            set_value(node, _input(value_of(node), old, new))
        elif node.op == "call_function":
            node.args = tuple(_argument(argument, old, new) for argument in node.args)
            try:
                with without_words():
                    set_value(node, compute(node))
            except Exception:  # of any operation's: it does not take that, which is the answer
                return None
    return candidate


def _input(value: Any, old: int, new: int) -> Any:
    """An empty one of the new shape, whose dims lie in memory in the same order."""
    shape = [new if size == old else size for size in value.shape]
    order = sorted(range(len(shape)), key=lambda dim: -value.stride(dim))
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    with torch.no_grad():
        return value.new_empty_strided(shape, strides)


def _argument(value: object, old: int, new: int) -> object:
    if not isinstance(value, tuple | list):
        return value
    return map_argument(lambda leaf: new if type(leaf) is int and leaf == old else leaf, value)
