"""Reads an element of a value as a formula of its indices: ``Reader().at(node, (i, j))``.

What has no rule here, or no exact one, is an element that only a run knows; ``reasons`` tells why.
Rules hold for every index within the value, whatever they say of others. Those of values that are
made or move are in ``graph/index_moves.py``, those that compute in ``graph/index_arithmetic.py``.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import fx

from treadle.algebra.extents import same
from treadle.graph import index_arithmetic, index_moves
from treadle.graph.constants import constant_of
from treadle.graph.index_formulas import (
    Condition,
    Element,
    Linear,
    Term,
    Unread,
    at_most,
    variable,
)
from treadle.graph.index_proofs import Prover
from treadle.graph.index_rules import WHOLE, At, constant, joined, shape_of, stored
from treadle.graph.operators import arguments, operation_name
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import type_of
from treadle.util.errors import require

_DEPTH = 60  # operations between a value and what it is made of
_RULES = joined(index_moves.RULES, index_arithmetic.RULES)


@final
class Reader:
    """Formulas for the elements of the values of one graph, which does not change meanwhile.

    ``reasons``: why a node is read as elements that only a run knows. ``prover``: what is asked
    whether an index is within a value.
    """

    def __init__(self) -> None:
        self.reasons: dict[fx.Node, str] = {}
        self.prover = Prover()
        self._known: dict[tuple[fx.Node, At], Term] = {}
        self._depth = 0

    def at(self, node: fx.Node, index: Sequence[Linear]) -> Term:
        """The element of ``node`` at ``index``; along a dim of size 1 there is one place."""
        shape = shape_of(node)
        require(len(shape) == len(index), NoMatch, f"{node} has {len(shape)} dims")
        place = tuple(Linear(0) if same(n, 1) else i for n, i in zip(shape, index, strict=True))
        key = node, place
        if key not in self._known:
            self._known[key] = self._read(node, place)
        return self._known[key]

    def settled(self, condition: Condition) -> Condition:
        """The condition, or what it is everywhere if that is proved."""
        if self.prover.impossible(condition):
            return False
        return True if self.prover.holds(condition) else condition

    def _read(self, node: fx.Node, at: At) -> Term:
        dtype = type_of(node).dtype
        self._depth += 1
        try:
            if node.op == "get_attr":
                return stored(_number(node), dtype)
            rule = _RULES.get(node.target)
            what = operation_name(node.target) if node.op == "call_function" else "an input"
            require(rule is not None, NoMatch, f"{node} ({what}) has no formula of its indices")
            require(self._depth < _DEPTH, NoMatch, f"{node} is made in too many steps")
            assert rule is not None
            return stored(rule(self, node, arguments(node), at), dtype)
        except NoMatch as miss:
            self.reasons.setdefault(node, miss.message)
            return _unknown(node, at, dtype)
        finally:
            self._depth -= 1


def _number(node: fx.Node) -> Term:
    """The one number of a tensor that the graph has by itself."""
    held = constant_of(node)
    alone = held is not None and held.numel() == 1
    require(alone, NoMatch, f"{node} (a constant) is not one number")
    assert held is not None
    return constant(held.item())


def _unknown(node: fx.Node, at: At, dtype: torch.dtype) -> Term:
    if dtype is torch.bool:
        return at_most(Linear(1).plus(variable(Element(node, at, 0, 1)), -1))
    if dtype in WHOLE:
        known = torch.iinfo(dtype)
        return variable(Element(node, at, known.min, known.max))
    return Unread(node)


__all__ = ["Reader", "shape_of"]
