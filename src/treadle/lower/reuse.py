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
from treadle.loop.program import Buffer, Compute, Origin, Step, TensorRef, renamed_ref
from treadle.loop.traverse import buffers_in
from treadle.lower.context import Builder
from treadle.lower.node import Environment, lower_node, origin_of
from treadle.lower.registry import Lowered
from treadle.util.nested import leaves, map_leaves


@final
@dataclass(frozen=True, slots=True)
class _Lowered:
    """What a node called ``name`` became, whose operands are in ``operands``. ``alike``: what its
    like became, by their names and operands; candidates of a plan share most of them."""

    name: str
    operands: tuple[str, ...]
    origin: Origin
    value: Lowered
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    alike: "dict[tuple[str, tuple[str, ...]], _Lowered]" = field(
        default_factory=dict["tuple[str, tuple[str, ...]]", "_Lowered"], compare=False
    )

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
    _types: "_Types" = field(default_factory=lambda: _Types())
    copies: dict[Hashable, Compute] = field(default_factory=dict[Hashable, Compute])
    """Into inputs, by what is copied into what."""

    def lower(self, builder: Builder, node: fx.Node, env: Environment) -> Lowered:
        """``lower_node``, or what it gave for a node like this one."""
        operands: dict[str, int] = {}
        try:
            key = _key_of(builder, node, env, operands, self._types)
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


class _Types:
    """Numbers of types, equal for equal ones. Each value is looked at once, and kept: another one
    would have its identity."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[int, tuple[object, int]] = {}
        self._refs: dict[int, tuple[TensorRef, Buffer, int]] = {}

    def of_value(self, value: object) -> int:
        """Of a value of the trace; ``NoKey`` where its type does not say all of it."""
        known = self._values.get(id(value))
        if known is None:
            known = self._values[id(value)] = value, self._number(value_key(value))
        return known[1]

    def of_ref(self, ref: TensorRef, buffer: Buffer) -> int:
        """Of a view and of the buffer that it shows, but for their names."""
        known = self._refs.get(id(ref))
        if known is None or known[1] is not buffer:
            layout = ref.dtype, ref.shape, ref.strides, ref.offset
            kind = buffer.dtype, buffer.shape, buffer.strides, buffer.kind, buffer.unsized
            known = self._refs[id(ref)] = ref, buffer, self._number((layout, kind))
        return known[2]

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _fits(builder: Builder, node: fx.Node, found: _Lowered) -> bool:
    """Whether the names that ``node`` would take are free."""
    start = len(found.name)
    return not any(node.name + buffer.name[start:] in builder.buffers for buffer in found.buffers)


def _again(builder: Builder, node: fx.Node, found: _Lowered, operands: tuple[str, ...]) -> Lowered:
    """The value of ``node``, whose steps are those of ``found`` on other buffers."""
    origin = origin_of(node)
    same = found.alike.get((node.name, operands))
    if same is None or same.origin != origin:
        same = found.alike[node.name, operands] = _on_others(found, node.name, operands, origin)
    builder.buffers.update([(buffer.name, buffer) for buffer in same.buffers])
    builder.steps.extend(same.steps)
    return same.value


def _on_others(found: _Lowered, name: str, operands: tuple[str, ...], origin: Origin) -> _Lowered:
    """What ``found`` is for a node of another name and other operands."""
    names = dict(zip(found.operands, operands, strict=True))
    own = {buffer.name: name + buffer.name[len(found.name) :] for buffer in found.buffers}
    names |= own
    if origin == found.origin and all(old == new for old, new in names.items()):
        return found
    buffers = tuple(
        [
            buffer if own[buffer.name] == buffer.name else replace(buffer, name=own[buffer.name])
            for buffer in found.buffers
        ]
    )
    steps = tuple([step.renamed(names, origin) for step in found.steps])
    return _Lowered(name, operands, origin, _renamed(found.value, names), steps, buffers)


def _renamed(value: Lowered, names: dict[str, str]) -> Lowered:
    if isinstance(value, tuple):
        return tuple([_renamed(part, names) for part in value])
    return renamed_ref(value, names) if isinstance(value, TensorRef) else value


def _is_numbered(buffer: str, node: str, taken: Container[str]) -> bool:
    """Whether the buffer may have got its number because its name was taken."""
    wanted, _, number = buffer.rpartition("_")
    return buffer != node and number.isdecimal() and wanted in taken


def _key_of(
    builder: Builder, node: fx.Node, env: Environment, operands: dict[str, int], types: _Types
) -> Hashable:
    """All that decides what a node becomes but names; ``NoKey`` where that is more than is
    known. ``operands``: gets the number of each buffer that is an operand."""
    if builder.moved:
        raise NoKey
    layouts = builder.layouts

    def fixed(leaf: object) -> Hashable:
        """An argument by value, with the operands that it names as they were lowered."""
        if isinstance(leaf, fx.Node):
            operand = _operand(builder, env.get(leaf), operands, types)
            return operand, types.of_value(known_value(leaf))
        return plain_key(leaf)

    return (
        node.target,
        tuple([map_leaves(fixed, value) for value in node.args]),
        tuple([(name, map_leaves(fixed, value)) for name, value in node.kwargs.items()]),
        _results(node, types),
        layouts.buffers.get(node),
        layouts.factors.get(node),
    )


def _results(node: fx.Node, types: _Types) -> Hashable:
    """The types of the results, and of several those that are read."""
    val = known_value(node)
    if isinstance(val, torch.Tensor):
        return types.of_value(val)
    if not isinstance(val, tuple | list):
        raise NoKey
    items = [user.args[1] for user in node.users if user.target is operator.getitem]
    read = frozenset(map(str, items)), len(items) == len(node.users)
    return tuple(map(types.of_value, val)), *read


def _operand(builder: Builder, value: object, operands: dict[str, int], types: _Types) -> Hashable:
    match value:
        case TensorRef() if builder.buffers[value.buffer].device == builder.device:
            number = operands.setdefault(value.buffer, len(operands))
            return number, types.of_ref(value, builder.buffers[value.buffer])
        case Array() if not buffers_in(value.body):
            return value
        case _:
            raise NoKey
