"""Readers of a value of which a rank has only its rows, and how they are computed from these.

::

    mul(w, c)                  element by element             mul(own rows of w, c)
    norm(w, 3)                 one number                     (sum over ranks sum |own rows|^3)^1/3
    slice(w, 0, 2, 4)          what this rank updates         own rows of w
    t(w), mm(w, x), return w   anything else                  needs all of w: ``NoMatch`` says why
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.compat.operators.operator_facts import elementwise_on_each, facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dataflow import is_list_call, list_call
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, may_recompute
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.rules import NoMatch
from treadle.passes.comm.sharding.row_parts import PARTS, Combined
from treadle.util.errors import require

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class OwnRows:
    """Of a value of some rows: which of them this rank has. ``ranks`` divide them in chunks of
    equal size, of which the last ones are smaller, or empty."""

    ranks: int
    begin: int
    end: int

    @property
    def count(self) -> int:
        """How many rows that are."""
        return self.end - self.begin


@final
@dataclass(frozen=True, slots=True)
class ByElement:
    """The reader has a row for each of what it reads, made of that row alone."""


Use = OwnRows | ByElement | Combined
Rule = Callable[[fx.Node, fx.Node], Use]


def use_of(reader: fx.Node, whole: fx.Node) -> Use:
    """How ``reader`` is computed of rows of ``whole``; ``NoMatch`` says why it needs all of it.
    It says the same on all ranks, whichever rows they have."""
    require(reader.op != "output", NoMatch, f"{whole} leaves the step")
    call = list_call(reader) or reader
    if info(reader).own_rows is not None and call.target is aten.slice.Tensor:
        return _own_rows(reader)
    combined = PARTS.get(call.target)
    if combined is not None:
        return combined(reader)
    require(_is_by_element(call), NoMatch, f"{reader} ({call.target}) reads all of {whole}")
    same = type_of(reader).shape == type_of(whole).shape
    require(same, NoMatch, f"{reader} has other dims than {whole}: {type_of(reader)}")
    return ByElement()


def _own_rows(reader: fx.Node) -> OwnRows:
    args, ranks = arguments(reader), info(reader).own_rows
    assert ranks is not None
    return OwnRows(ranks, args["start"], args["end"])


def _is_by_element(call: fx.Node) -> bool:
    if not isinstance(call.target, OpOverload) or not may_recompute(call):
        return False
    if is_list_call(call):
        return elementwise_on_each(call.target)
    return facts_of(call.target).elementwise or call.target is aten.copy.default
