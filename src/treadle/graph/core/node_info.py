"""The facts about a node besides its operation: its value, and where it belongs.

::

    node.meta  =  {"val": value, "treadle": NodeInfo(phase="forward", where="net.py:7", ...)}

The value is under FX's key, where users' and PyTorch's passes find it; everything else is one
record. No other module uses a key of ``node.meta``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from torch import SymBool, SymFloat, SymInt, Tensor, fx

Value: TypeAlias = (
    Tensor | SymInt | SymFloat | SymBool | float | tuple["Value", ...] | list["Value"] | None
)
"""What a node gives, as far as it is known without running it: fake tensors, and numbers."""

_VALUE = "val"
_INFO = "treadle"


@final
@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Where a node belongs, and what a pass may do with it.

    ``phase``: ``forward``, ``backward`` or ``optimizer``. ``where``: the user's line. ``module``:
    the path of the module that called it. ``name``: of an input, for words about it.
    ``region``: of the checkpointed region that is computed again, for the nodes that do it.
    ``asked``: what a checkpoint policy says of it (``must_save``). ``checkpoint``: of the region
    that a node of the forward pass is in, where regions are not traced twice. ``recomputed``:
    whether the memory plan computes it a second time. ``asked_at``: for a condition, which place
    of the user's code asks it. ``draw``: which draw of random numbers it is; negative if none.
    ``lost``: whether it stands for what code outside the graph leaves in a parameter.
    ``chunk``: of the rows that it is computed for, where others of the same kind are computed for
    other rows before and after.
    ``gathered``: of a node that gathers parameters which their modules drop after a forward
    (``fully_shard``): a number, equal for those that are gathered together.
    ``piece``: for a piece of a collective that was split, its number from 0: a piece is not
    joined with others again.
    ``own_rows``: of a slice that takes what this rank updates: how many ranks divide the rows.
    ``eager``: the reason why it runs as PyTorch's kernel whatever rules there are; empty if none
    was given.
    """

    phase: str = ""
    where: str = ""
    module: str = ""
    name: str = ""
    region: int | str | None = None
    asked: str = ""
    checkpoint: int | None = None
    recomputed: bool = False
    asked_at: tuple[object, ...] | None = None
    draw: int = -1
    lost: bool = False
    chunk: int | None = None
    gathered: int | None = None
    piece: int | None = None
    own_rows: int | None = None
    eager: str = ""


_NOTHING = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    """The record of ``node``; an empty record if it has none."""
    return node.meta.get(_INFO, _NOTHING)


def with_info(node: fx.Node, **changes: object) -> None:
    """``with_info(node, phase="backward")``: the node's record with other fields."""
    node.meta[_INFO] = replace(info(node), **changes)


def belong(node: fx.Node, root: fx.Node) -> None:
    """``node`` is of the phase, source line, module, regions and chunk of ``root``."""
    old = info(root)
    with_info(
        node,
        phase=old.phase,
        where=old.where,
        module=old.module,
        region=old.region,
        checkpoint=old.checkpoint,
        asked=old.asked,
        chunk=old.chunk,
        gathered=old.gathered,
        piece=old.piece,
        eager=old.eager,
    )


def value_of(node: fx.Node) -> Any:
    """What ``node`` gives; ``KeyError`` if that is not known."""
    return node.meta[_VALUE]


def known_value(node: fx.Node) -> Value:
    """What ``node`` gives; ``None`` also if that is not known."""
    return node.meta.get(_VALUE)


def has_value(node: fx.Node) -> bool:
    """Whether it is known what ``node`` gives."""
    return _VALUE in node.meta


def tensor_of(node: fx.Node) -> Tensor:
    """The one tensor that ``node`` gives; ``TypeError`` for any other."""
    value = node.meta[_VALUE]
    if not isinstance(value, Tensor):
        raise TypeError(f"{node} is not one tensor: {value!r}")
    return value


def set_value(node: fx.Node, value: Value) -> None:
    """From now on ``node`` gives ``value``."""
    node.meta[_VALUE] = value


def describe(node: fx.Node, value: Value, known: NodeInfo) -> None:
    """Value and record of ``node``; whatever else was noted of it is forgotten."""
    node.meta = {_VALUE: value, _INFO: known}


def copy_notes(node: fx.Node, original: fx.Node) -> None:
    """All that is noted of ``original``, the notes of others included, is noted of ``node``."""
    node.meta = dict(original.meta)


def forget(node: fx.Node) -> None:
    """Nothing is noted of ``node``."""
    node.meta = {}


def notes(node: fx.Node) -> dict[str, object]:
    """What others noted of ``node`` besides its value: PyTorch, and passes of users."""
    return {key: value for key, value in node.meta.items() if key not in (_VALUE, _INFO)}


def drop_notes(node: fx.Node, keys: Iterable[str]) -> None:
    """Some of ``notes`` are not known any more."""
    for key in keys:
        del node.meta[key]
