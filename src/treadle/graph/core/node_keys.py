"""Values and arguments as keys: nodes whose keys are equal give results of one type.

::

    x: f32[4, 8]            ->  (torch.float32, ((4, 8), (8, 1)), 0, device("cpu"))
    1  1.0  True  -0.0      ->  keys that differ, as the operations on them do

``NoKey`` for whatever these do not say all of: then a node is looked at by itself.
"""

from collections.abc import Hashable

import torch

from treadle.graph.analysis.dynamic import layout_of, offset_of

_STATIC = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class NoKey(Exception):
    """A value or an argument of a kind that cannot be compared."""


def value_key(value: object) -> Hashable:
    """What the type of a value of the trace is."""
    if isinstance(value, torch.Tensor):
        numbers = *value.shape, *value.stride(), value.storage_offset()
        if any(isinstance(n, torch.SymInt) for n in numbers):
            raise NoKey  # before the symbols of a trace have their dims
        return value.dtype, layout_of(value), offset_of(value), value.device
    if value is None:
        return None
    raise NoKey


def plain_key(leaf: object) -> Hashable:
    """An argument that is no value of the graph."""
    if isinstance(leaf, int | float | complex):
        return type(leaf), repr(leaf)
    if isinstance(leaf, _STATIC):
        return leaf
    raise NoKey
