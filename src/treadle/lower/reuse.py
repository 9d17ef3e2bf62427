"""What nodes became in one graph, for the next graph that has most of its nodes in common.

Planning within a budget lowers several candidates of one step: nine in ten of their nodes are the
same, under the same names, on the same operands. A node of a later candidate is what it was::

    (name, operation, arguments, operands as lowered, layout)  ->  (value, steps, buffers)

Known are nodes with one result whose operands are all on the device of the program. What a node
becomes may not depend on anything else then but the names that are taken: a node whose buffers got
a number is not kept, and one that finds a name taken is lowered anew.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import fx

from treadle.graph.dynamic import layout_of, offset_of
from treadle.graph.node_info import known_value
from treadle.loop.expr import Array
from treadle.loop.program import Buffer, Step, TensorRef
from treadle.lower.context import Builder
from treadle.lower.node import Environment, lower_node, origin_of
from treadle.lower.registry import Lowered
from treadle.util.nested import map_leaves

_STATIC = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@final
@dataclass(frozen=True, slots=True)
class _Lowered:
    value: Lowered
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]


class _Unknown(Exception):
    """An argument that two graphs cannot be compared by."""


@dataclass(frozen=True, slots=True)
class LoweredNodes:
    """The nodes of graphs that were lowered; all of one step, for one device."""

    _known: dict[Hashable, _Lowered] = field(default_factory=dict[Hashable, _Lowered])

    def lower(self, builder: Builder, node: fx.Node, env: Environment) -> Lowered:
        """``lower_node``, or what it gave for this node before."""
        try:
            key = _key_of(builder, node, env)
        except _Unknown:
            return lower_node(builder, node, env)
        found = self._known.get(key)
        if found is not None and builder.buffers.keys().isdisjoint(b.name for b in found.buffers):
            builder.steps.extend(found.steps)
            builder.buffers.update((each.name, each) for each in found.buffers)
            return found.value
        mark, constants = builder.mark(), len(builder.constants)
        value = lower_node(builder, node, env)
        made = tuple(list(builder.buffers.values())[mark.buffers :])
        plain = len(builder.constants) == constants and not builder.moved
        if plain and not any(map(_is_numbered, made, (node.name,) * len(made))):
            self._known[key] = _Lowered(value, tuple(builder.since(mark)), made)
        return value


def _is_numbered(buffer: Buffer, name: str) -> bool:
    """Whether the buffer may have got its number because its name was taken."""
    return buffer.name != name and buffer.name.rpartition("_")[2].isdecimal()


def _key_of(builder: Builder, node: fx.Node, env: Environment) -> Hashable:
    """All that decides what a node becomes; ``_Unknown`` where that is more than is known."""
    val = known_value(node)
    if not isinstance(val, torch.Tensor) or builder.moved:
        raise _Unknown
    layouts = builder.layouts

    def fixed(leaf: object) -> Hashable:
        return _fixed(builder, leaf, env)

    return (
        origin_of(node),
        node.target,
        map_leaves(fixed, node.args),
        tuple([(name, map_leaves(fixed, each)) for name, each in node.kwargs.items()]),
        (val.dtype, layout_of(val), offset_of(val), val.device),
        layouts.buffers.get(node),
        layouts.factors.get(node),
    )


def _fixed(builder: Builder, leaf: object, env: Environment) -> Hashable:
    """An argument by value, with the operands that it names as they were lowered."""
    match leaf:
        case fx.Node():
            return _operand(builder, env.get(leaf))
        case bool() | int() | float() | complex():
            return type(leaf), repr(leaf)
        case _ if isinstance(leaf, _STATIC):
            return leaf
        case _:
            raise _Unknown


def _operand(builder: Builder, value: object) -> Hashable:
    match value:
        case TensorRef(buffer=name) if builder.buffers[name].device == builder.device:
            return value, builder.buffers[name]
        case Array():
            return value
        case _:
            raise _Unknown
