"""What the call of a node does, by the table of facts; and its arguments by name."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from treadle.compat.operators.operator_facts import (
    IN_ORDER,
    MATTERS,
    Effect,
    call_effects,
    facts_of,
    written_names,
)
from treadle.compat.operators.schemas import OpOverload, schema_of
from treadle.graph.analysis.data_dependent import DataDependentOp

WITH_EFFECTS = torch.ops.higher_order.with_effects


def _operator_of(node: fx.Node) -> OpOverload | None:
    """PyTorch's operator that the node calls, with sizes that are known or not."""
    target: object = node.target
    if not isinstance(target, OpOverload) and isinstance(target, DataDependentOp):
        target = target.op
    return target if isinstance(target, OpOverload) else None


def _ordered_operator(node: fx.Node) -> OpOverload | None:
    """The operator that a token orders: ``with_effects(token, op, x)``."""
    ordered: object = node.args[1] if node.target is WITH_EFFECTS else None
    return ordered if isinstance(ordered, OpOverload) else None


def effects_of(node: fx.Node) -> Effect:
    """What the call of a node does besides its results; nothing for what is not a call.

    ``native_dropout(x, 0.1, True)``  ->  ``DRAWS``;  ``native_dropout(x, 0.1, False)``  ->  nothing
    """
    if node.op != "call_function":
        return Effect.NONE
    op = _ordered_operator(node) or _operator_of(node)
    if op is None:  # a function of Python's: FX knows of those that do something
        return Effect.RAISES if node.is_impure(impure_random=False) else Effect.NONE
    _, certain = _CERTAIN.get(id(op)) or _note_certain(op)
    if certain is not None:
        return certain
    if node.target is WITH_EFFECTS:
        return facts_of(op).effects
    return call_effects(op, arguments_of(op, node.args, node.kwargs))


_CERTAIN: dict[int, tuple[OpOverload, Effect | None]] = {}
"""What every call of an operator does, by its id, since hashing one runs Python; ``None`` where
arguments decide."""


def _note_certain(op: OpOverload) -> tuple[OpOverload, Effect | None]:
    effects = facts_of(op).effects
    certain = None if effects & (Effect.DRAWS | Effect.WRITES) else effects
    return _CERTAIN.setdefault(id(op), (op, certain))


def _does(node: fx.Node, effects: Effect) -> bool:
    """Whether the call of a node does one of these. Most do nothing: no flags are combined."""
    found = effects_of(node)
    return found is not Effect.NONE and bool(found & effects)


def is_random(node: fx.Node) -> bool:
    """Whether the node advances a random number generator: its order and count matter."""
    return _does(node, Effect.DRAWS)


def is_mutable(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    return _does(node, Effect.WRITES)


def has_effect(node: fx.Node) -> bool:
    """Whether the node matters even if nobody reads it, random numbers aside: a check, a print, a
    user's operator."""
    return _does(node, MATTERS)


def is_in_order(node: fx.Node) -> bool:
    """Whether the node keeps its place among all others of which this is true: it draws, or is a
    user's operator, which may."""
    return _does(node, IN_ORDER)


def may_recompute(node: fx.Node) -> bool:
    """Whether a second call gives the same and does nothing else: equal ones may become one, and
    one may become two."""
    return node.op in ("call_function", "get_attr") and effects_of(node) is Effect.NONE


def may_drop(node: fx.Node, *, keep_random: bool = True) -> bool:
    """Whether nothing is lost without a node that nobody reads. ``keep_random``: eager would have
    advanced the generator, and the numbers drawn after it depend on that."""
    needed = MATTERS | Effect.DRAWS if keep_random else MATTERS
    return node.op in ("call_function", "get_attr") and not _does(node, needed)


def is_known(node: fx.Node) -> bool:
    """Whether the table says what the node does: it calls no function of Python's or a library's
    that is not an operator."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    return isinstance(node.target, DataDependentOp) or _operator_of(node) is not None


def may_draw(graph: fx.Graph) -> bool:
    """Whether a run may advance PyTorch's random generators: a user's operator may."""
    return any(is_in_order(node) or not is_known(node) for node in graph.nodes)


def draw_reads_values(node: fx.Node) -> bool:
    """Whether the elements of operands decide what the node draws, besides the generator; operands
    of the others give a shape alone."""
    op = _operator_of(node)
    return op is not None and facts_of(op).draw_reads_values


def operation_name(target: object) -> str:
    """``aten.add.Tensor`` -> ``"add.Tensor"``, ``aten.mm.default`` -> ``"mm"``."""
    if isinstance(target, OpOverload):
        return _overload_name(target)
    return getattr(target, "__name__", str(target)) if callable(target) else str(target)


@functools.cache
def _overload_name(target: OpOverload) -> str:
    name = str(target).removeprefix("aten.").removeprefix("_c10d_functional.")
    return name.removesuffix(".default")


@functools.cache
def _parameters(target: object) -> tuple[tuple[str, ...], dict[str, object]]:
    arguments = schema_of(target).arguments
    defaults = {
        argument.name: argument.default_value
        for argument in arguments
        if argument.has_default_value()
    }
    return tuple(argument.name for argument in arguments), defaults


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by name, defaults filled in: two spellings of a call look the same.

    ``sum(x, [1])``  ->  ``{"self": x, "dim": [1], "keepdim": False, "dtype": None}``
    """
    if not isinstance(node.target, OpOverload):
        return {str(i): argument for i, argument in enumerate(node.args)} | dict(node.kwargs)
    return arguments_of(node.target, node.args, node.kwargs)


def arguments_of(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """``arguments`` of a call that is not a node."""
    names, defaults = _parameters(op)
    named_args = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: named_args[name] if name in named_args else defaults.get(name) for name in names}


def written_values(node: fx.Node) -> list[object]:
    """The arguments that the node writes to, in the order of its schema.

    ``add_(x, y)``  ->  ``[x]``
    """
    op = _operator_of(node)
    if op is None or not facts_of(op).writes:
        return []
    args = arguments_of(op, node.args, node.kwargs)
    return [args[name] for name in written_names(op, args)]


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give an argument of the node's operation another value, wherever it stands."""
    names = _parameters(node.target)[0]
    at = names.index(name)
    if at < len(node.args):
        node.update_arg(at, value)
    else:
        node.update_kwarg(name, value)


def operand_of(node: fx.Node) -> fx.Node:
    """The one value that a node reads: what a view is of, or a copy, or a conversion."""
    (operand,) = node.all_input_nodes
    return operand


def is_item(node: fx.Node) -> bool:
    """Whether the node picks one result of an operation with several."""
    return node.target is operator.getitem
