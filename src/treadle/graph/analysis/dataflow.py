"""The operands of a value, seen through operations on lists.

::

    r = _foreach_mul([a, b], [x, y]); p = r[0]; q = r[1]        operands(p) = a, x

FX's operands of ``p`` are ``r``, and of ``r`` all four.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from treadle.compat.operators.operator_facts import works_on_each
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.operators import is_item
from treadle.util.reach import reached

aten = torch.ops.aten


def list_call(node: fx.Node) -> fx.Node | None:
    """The operation on lists whose result ``node`` is an element of; ``None`` for all else."""
    if not is_item(node):
        return None
    call = node.args[0]
    return call if isinstance(call, fx.Node) and is_list_call(call) else None


def is_list_call(node: fx.Node) -> bool:
    """Whether the node does one thing to each element of its lists."""
    return isinstance(node.target, OpOverload) and works_on_each(node.target)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that ``node`` is made of; of an element of lists the elements at its place."""
    call = list_call(node)
    if call is None:
        return tuple(node.all_input_nodes)
    at: Any = node.args[1]
    args = (*call.args, *call.kwargs.values())
    arguments = [
        argument[at] if isinstance(argument, list | tuple) else argument for argument in args
    ]
    return tuple(dict.fromkeys(argument for argument in arguments if isinstance(argument, fx.Node)))


def readers_of(node: fx.Node, through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Who computes with elements of ``node``: its users, and instead of one that they are shown
    ``through``, a view, its users."""
    shown = reached([node], lambda current: filter(through, current.users))
    outside = (user for item in shown for user in item.users if not through(user))
    return list(dict.fromkeys(outside))


def unexpanded(node: fx.Node) -> fx.Node:
    """What ``expand`` repeats, if ``node`` is a repetition; else ``node``."""
    while node.target is aten.expand.default:
        (node,) = node.all_input_nodes
    return node


def ancestors(
    roots: Iterable[fx.Node], enters: Callable[[fx.Node], bool] = lambda _: True
) -> dict[fx.Node, None]:
    """``roots`` and what they are made of, nearest first; nothing behind a node that is not
    entered."""
    return reached(roots, lambda node: operands(node) if enters(node) else ())


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads ``node``: of an operation on lists those that read its element."""
    for user in node.users:
        if not is_list_call(user):
            yield user
            continue
        yield from (reader for reader in user.users if node in operands(reader))
