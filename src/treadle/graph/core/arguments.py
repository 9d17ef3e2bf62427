"""Arguments of a node, however deep they nest: one type, one map.

::

    Argument  =  node | plain | (Argument, ...) | [Argument, ...] | {name: Argument} | slice

    map_argument(f, ([x, 2], None))  ->  ([f(x), f(2)], f(None))

FX's own traversal keeps lists as lists. ``util/nested.py`` has the map for values outside graphs.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar, cast

from torch import fx
from torch.fx import node as fx_node
from torch.fx.node import map_aggregate, map_arg

from treadle.graph.core.node_info import value_of
from treadle.util.generators import GeneratorRef

Argument: TypeAlias = fx_node.Argument

A = TypeVar("A", bound=Argument)

Given: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
"""What a function is called with: arguments by position, and by name."""


def map_argument(f: Callable[[Argument], Argument], argument: A) -> A:
    """``f`` of each leaf, nodes among them."""
    return map_aggregate(argument, f)


def map_nodes(f: Callable[[fx.Node], Argument], argument: A) -> A:
    """``f`` of each node, and the rest as it is."""
    return map_arg(argument, f)


def given_of(
    node: fx.Node,
    operand: Callable[[fx.Node], object],
    other: Callable[[object], object] | None = None,
) -> Given:
    """The arguments of ``node`` for a call outside the graph: nodes among them as ``operand``
    gives them, all else as ``other`` does."""
    if other is None:
        replaced = cast(Callable[[fx.Node], Argument], operand)
        return cast(Given, map_arg((node.args, node.kwargs), replaced))

    def leaf(argument: Argument) -> Argument:
        return cast(
            Argument, operand(argument) if isinstance(argument, fx.Node) else other(argument)
        )

    return cast(Given, map_aggregate((node.args, node.kwargs), leaf))


def types_of(node: fx.Node) -> Given:
    """The arguments of ``node`` for a call that computes types alone: fake values of its operands,
    and no generator, which it would touch."""
    return given_of(node, value_of, without_generator)


def without_generator(leaf: object) -> object:
    """``None`` for a generator."""
    return None if isinstance(leaf, GeneratorRef) else leaf
