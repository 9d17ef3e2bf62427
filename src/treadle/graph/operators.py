"""What an operation's schema says about it: randomness, mutation, arguments by name."""

import functools
import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload


def is_random(node: fx.Node) -> bool:
    """Whether the node advances a random number generator: its order and count matter.

    Attention draws for its dropout alone; with ``dropout_p=0.0`` it gives the same every time.
    """
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return arguments(node).get("dropout_p") != 0


def is_mutable(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    target = node.target
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)  # pyright: ignore[reportPrivateUsage]


def has_effect(node: fx.Node) -> bool:
    """Whether the node matters even if nobody reads it, randomness aside."""
    if isinstance(node.target, OpOverload) and not node.target._schema.returns:  # pyright: ignore[reportPrivateUsage]
        return True  # an assertion, a print: it can only have been called for its effect
    return node.is_impure(impure_random=False)


def operation_name(target: object) -> str:
    """``aten.add.Tensor`` -> ``"add.Tensor"``, ``aten.mm.default`` -> ``"mm"``."""
    if isinstance(target, OpOverload):
        name = str(target).removeprefix("aten.").removeprefix("_c10d_functional.")
        return name.removesuffix(".default")
    return getattr(target, "__name__", str(target)) if callable(target) else str(target)


@functools.cache
def _parameters(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = target._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return tuple(each.name for each in arguments), defaults


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by name, defaults filled in: two spellings of a call look the same.

    ``sum(x, [1])``  ->  ``{"self": x, "dim": [1], "keepdim": False, "dtype": None}``
    """
    if not isinstance(node.target, OpOverload):
        return {str(i): each for i, each in enumerate(node.args)} | dict(node.kwargs)
    names, defaults = _parameters(node.target)
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {name: given[name] if name in given else defaults.get(name) for name in names}


def is_item(node: fx.Node) -> bool:
    """Whether the node picks one result of an operation with several."""
    return node.target is operator.getitem
