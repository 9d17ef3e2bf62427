"""What an operation's schema says about it: randomness, mutation, arguments by name."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from treadle.compat.operators import OpOverload, schema_of
from treadle.graph.at_run_time import AtRunTime
from treadle.graph.operator_facts import call_draws, facts_of


def _operator_of(node: fx.Node) -> OpOverload | None:
    """PyTorch's operator that the node calls, with sizes that are known or not."""
    target = node.target.op if isinstance(node.target, AtRunTime) else node.target
    return target if isinstance(target, OpOverload) else None


def is_random(node: fx.Node) -> bool:
    """Whether the node advances a random number generator: its order and count matter."""
    op = _operator_of(node)
    return op is not None and call_draws(op, arguments_of(op, node.args, node.kwargs))


def is_mutable(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    op = _operator_of(node)
    return op is not None and facts_of(op).mutates


def has_effect(node: fx.Node) -> bool:
    """Whether the node matters even if nobody reads it, random numbers aside."""
    op = _operator_of(node)
    if op is not None and facts_of(op).has_effect:
        return True  # a check, a print, a user's operator: nothing says that it can be left out
    return node.is_impure(impure_random=False)


def is_in_order(node: fx.Node) -> bool:
    """Whether the node keeps its place among all others of which this is true: it draws, or is a
    user's operator, which may."""
    op = _operator_of(node)
    return op is not None and (facts_of(op).opaque or is_random(node))


def operation_name(target: object) -> str:
    """``aten.add.Tensor`` -> ``"add.Tensor"``, ``aten.mm.default`` -> ``"mm"``."""
    if isinstance(target, OpOverload):
        name = str(target).removeprefix("aten.").removeprefix("_c10d_functional.")
        return name.removesuffix(".default")
    return getattr(target, "__name__", str(target)) if callable(target) else str(target)


@functools.cache
def _parameters(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = schema_of(target).arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return tuple(each.name for each in arguments), defaults


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by name, defaults filled in: two spellings of a call look the same.

    ``sum(x, [1])``  ->  ``{"self": x, "dim": [1], "keepdim": False, "dtype": None}``
    """
    if not isinstance(node.target, OpOverload):
        return {str(i): each for i, each in enumerate(node.args)} | dict(node.kwargs)
    return arguments_of(node.target, node.args, node.kwargs)


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` of a call that is no node."""
    names, defaults = _parameters(op)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: given[name] if name in given else defaults.get(name) for name in names}


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give an argument of the node's operation another value, wherever it stands."""
    names = _parameters(node.target)[0]
    at = names.index(name)
    if at < len(node.args):
        node.update_arg(at, value)
    else:
        node.update_kwarg(name, value)


def is_item(node: fx.Node) -> bool:
    """Whether the node picks one result of an operation with several."""
    return node.target is operator.getitem
