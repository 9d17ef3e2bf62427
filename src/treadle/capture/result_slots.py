"""Places for the tensors of a call among what a step returns and leaves.

::

    {"loss": loss, "grad": p.grad, "n": 3}      of a step
    (ResultSlot, SparseLayout([V, D]), 3)       its leaves: one tensor, two tensors, none
    (a, b, c)                                   what the graph gives for them
    {"loss": a, "grad": sparse(b, c), "n": 3}   what a call returns
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from treadle.capture.external import Later
from treadle.capture.sparse_gradients import SparseLayout, sparse_layout_of
from treadle.compat.sharded_tensors import ShardedLayout, layout_of


class ResultSlot:
    """Marks the place of a tensor among the leaves of the user's result; that of a DTensor is
    marked by its layout, and so is that of a sparse one, which is two tensors of the graph."""


@final
@dataclass(frozen=True, slots=True)
class RunAgain:
    """Among the leaves of the user's result: the very object that leaf ``at`` is."""

    at: int


def slot_of(tensor: Tensor) -> Any:
    """What marks the place of ``tensor``."""
    return layout_of(tensor) or sparse_layout_of(tensor) or ResultSlot


def slots_in(leaves: Iterable[Any]) -> int:
    """How many tensors of the graph belong among the leaves."""
    found = 0
    for leaf in leaves:
        found += leaf is ResultSlot or isinstance(leaf, ShardedLayout)
        found += 2 * isinstance(leaf, SparseLayout)
    return found


def fill(leaves: Iterable[Any], tensors: Iterator[Any]) -> list[Any]:
    """Leaves with values: tensors of this call, numbers as they are computed now, and new copies
    of what a run made."""
    found: list[Any] = []
    for leaf in leaves:
        if leaf is ResultSlot:
            found.append(next(tensors))
        elif isinstance(leaf, ShardedLayout):
            found.append(leaf.around(next(tensors)))
        elif isinstance(leaf, SparseLayout):
            found.append(leaf.around(next(tensors), next(tensors)))
        elif isinstance(leaf, RunAgain):
            found.append(found[leaf.at])
        else:
            found.append(leaf.compute() if isinstance(leaf, Later) else leaf)
    return found


def named_once(leaves: list[Any]) -> list[Any]:
    """The leaves, with ``RunAgain`` for a tensor that was there before."""
    first: dict[int, int] = {}
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            first.setdefault(id(leaf), at)
    return [
        leaf if first.get(id(leaf), at) == at else RunAgain(first[id(leaf)])
        for at, leaf in enumerate(leaves)
    ]


__all__ = ["ResultSlot", "RunAgain", "fill", "named_once", "slot_of", "slots_in"]
