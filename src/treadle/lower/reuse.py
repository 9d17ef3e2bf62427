"""Equal nodes are lowered once: those of equal blocks, and those of the candidates of a plan.

Nodes are equal if they have the same operation and plain arguments, results and operands of equal
types, and operands that were lowered in the same way, apart from names::

    (operation, arguments, operands as lowered but for names, layout)  ->  (value, steps, buffers)

For an equal node, only the names of the buffers change: its formulas have the same templates
(``Compute.renamed``). Only nodes whose operands are all on the device of the program are reused.
Their lowering may depend on nothing else than which of their results are read and which names are
taken: a node whose buffers got a numbered name is not stored, and one that finds a name taken is
lowered again.
"""

import operator
from collections.abc import Container, Hashable
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import fx

from treadle.graph.core.node_info import known_value
from treadle.graph.core.node_keys import NoKey, plain_key, value_key
from treadle.loop.expr import Array
from treadle.loop.program import Buffer, Origin, Step, TensorRef, renamed_ref
from treadle.loop.traverse import buffers_in
from treadle.lower.context import Builder
from treadle.lower.node import Environment, lower_node, origin_of
from treadle.lower.registry import Lowered
from treadle.util.nested import leaves, map_leaves


@final
@dataclass(frozen=True, slots=True)
class _Lowered:
    """What a node called ``name`` became, whose operands are in ``operands``."""

    name: str
    operands: tuple[str, ...]
    origin: Origin
    value: Lowered
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]

    def is_closed(self, taken: Container[str]) -> bool:
        """Whether its buffers are those of the operands and those named after the node alone.
        ``taken``: all names there are."""
        own = {buffer.name for buffer in self.buffers}
        if not all(name.startswith(self.name) for name in own):
            return False
        if any(_is_numbered(name, self.name, taken) for name in own):
            return False
        if any(step.origin != self.origin for step in self.steps):
            return False
        return own.union(self.operands).issuperset(self._names())

    def _names(self) -> set[str]:
        """Every buffer that the value and the steps mention."""
        names: set[str] = set()
        for leaf in leaves(self.value):
            if isinstance(leaf, TensorRef):
                names.add(leaf.buffer)
            elif isinstance(leaf, Array):
                names.update(buffers_in(leaf.body))
        for step in self.steps:
            names.update(step.reads, step.writes)
        return names


@dataclass(frozen=True, slots=True)
class LoweredNodes:
    """The nodes of graphs that were lowered; all of one step, for one device."""

    _known: dict[Hashable, _Lowered] = field(default_factory=dict[Hashable, _Lowered])

    def lower(self, builder: Builder, node: fx.Node, env: Environment) -> Lowered:
        """``lower_node``, or what it gave for a node like this one."""
        operands: dict[str, int] = {}
        try:
            key = _key_of(builder, node, env, operands)
        except NoKey:
            return lower_node(builder, node, env)
        found = self._known.get(key)
        if found is not None and _fits(builder, node, found):
            return _again(builder, node, found, tuple(operands))
        mark, constants = builder.mark(), len(builder.constants)
        value = lower_node(builder, node, env)
        if len(builder.constants) == constants and not builder.moved:
            buffers = tuple(list(builder.buffers.values())[mark.buffers :])
            steps = tuple(builder.since(mark))
            made = _Lowered(node.name, tuple(operands), origin_of(node), value, steps, buffers)
            if made.is_closed(builder.buffers):
                self._known[key] = made
        return value


def _fits(builder: Builder, node: fx.Node, found: _Lowered) -> bool:
    """Whether the names that ``node`` would take are free."""
    start = len(found.name)
    return not any(node.name + buffer.name[start:] in builder.buffers for buffer in found.buffers)


def _again(builder: Builder, node: fx.Node, found: _Lowered, operands: tuple[str, ...]) -> Lowered:
    """The value of ``node``, whose steps are those of ``found`` on other buffers."""
    names = dict(zip(found.operands, operands, strict=True))
    for buffer in found.buffers:
        name = node.name + buffer.name[len(found.name) :]
        names[buffer.name] = name
        builder.buffers[name] = buffer if name == buffer.name else replace(buffer, name=name)
    origin = origin_of(node)
    if origin == found.origin and all(name == new for name, new in names.items()):
        builder.steps.extend(found.steps)
        return found.value
    builder.steps.extend([step.renamed(names, origin) for step in found.steps])
    return _renamed(found.value, names)


def _renamed(value: Lowered, names: dict[str, str]) -> Lowered:
    if isinstance(value, tuple):
        return tuple([_renamed(part, names) for part in value])
    return renamed_ref(value, names) if isinstance(value, TensorRef) else value


def _is_numbered(buffer: str, node: str, taken: Container[str]) -> bool:
    """Whether the buffer may have got its number because its name was taken."""
    wanted, _, number = buffer.rpartition("_")
    return buffer != node and number.isdecimal() and wanted in taken


def _key_of(
    builder: Builder, node: fx.Node, env: Environment, operands: dict[str, int]
) -> Hashable:
    """All that decides what a node becomes but names; ``NoKey`` where that is more than is
    known. ``operands``: gets the number of each buffer that is an operand."""
    if builder.moved:
        raise NoKey
    layouts = builder.layouts

    def fixed(leaf: object) -> Hashable:
        return _fixed(builder, leaf, env, operands)

    return (
        node.target,
        tuple([map_leaves(fixed, value) for value in node.args]),
        tuple([(name, map_leaves(fixed, value)) for name, value in node.kwargs.items()]),
        _results(node),
        layouts.buffers.get(node),
        layouts.factors.get(node),
    )


def _results(node: fx.Node) -> Hashable:
    """The types of the results, and of several those that are read."""
    val = known_value(node)
    if isinstance(val, torch.Tensor):
        return value_key(val)
    if not isinstance(val, tuple | list):
        raise NoKey
    items = [user.args[1] for user in node.users if user.target is operator.getitem]
    return tuple(map(value_key, val)), frozenset(map(str, items)), len(items) == len(node.users)


def _fixed(builder: Builder, leaf: object, env: Environment, operands: dict[str, int]) -> Hashable:
    """An argument by value, with the operands that it names as they were lowered."""
    if isinstance(leaf, fx.Node):
        return _operand(builder, env.get(leaf), operands), value_key(known_value(leaf))
    return plain_key(leaf)


def _operand(builder: Builder, value: object, operands: dict[str, int]) -> Hashable:
    match value:
        case TensorRef() if builder.buffers[value.buffer].device == builder.device:
            number = operands.setdefault(value.buffer, len(operands))
            buffer = builder.buffers[value.buffer]
            layout = value.dtype, value.shape, value.strides, value.offset
            kind = buffer.dtype, buffer.shape, buffer.strides, buffer.kind, buffer.unsized
            return number, layout, kind
        case Array() if not buffers_in(value.body):
            return value
        case _:
            raise NoKey
