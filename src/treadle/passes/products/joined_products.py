"""Products that are only concatenated, as one product of concatenated factors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from treadle.algebra.extents import sample_of
from treadle.graph.analysis.pieces import joined_of
from treadle.graph.core.dim_maps import RESHAPES, with_columns
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract
from treadle.graph.rewrite.rules import Rule, RulePass, call_of, list_of, lowering, through
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten


def _pattern(products: object, views: object, dim: object) -> object:
    product = list_of(
        lambda product, views: through(RESHAPES, call_of(product, aten.mm.default), views),
        products,
        views,
    )
    return aten.cat.default(product, dim)


def _joined(
    build: ReplacementBuilder,
    products: Sequence[fx.Node],
    views: Sequence[Sequence[fx.Node]],
    dim: int,
) -> fx.Node:
    node, result = build.root, type_of(build.root)
    require(len(products) > 1, NoMatch, f"{node} joins one value")
    require(joined_of(node) is not None, NoMatch, f"{node} converts an operand")
    columns = dim % result.ndim == result.ndim - 1
    require(columns or result.ndim == 2, NoMatch, f"{node} joins neither rows nor columns")
    for seen in (chain[0] for chain in views if chain):
        require(columns, NoMatch, f"{seen} is not mm")
        with_columns(seen)
    left, right = ([arguments(product)[name] for product in products] for name in ("self", "mat2"))
    shared, others = (left, right) if columns else (right, left)
    require(len(set(shared)) == 1, NoMatch, "the products share no factor")
    copied = sum(sample_of(type_of(other).numel) for other in others)
    fewer = copied < sample_of(result.numel)
    require(fewer, NoMatch, f"the factors are {copied} elements, the result {result.numel}")
    require(result.is_contiguous, NoMatch, f"{node} is not in row-major order")
    joined = build.call(aten.cat.default, others, int(columns))
    factors = (shared[0], joined) if columns else (joined, shared[0])
    return build.viewed(build.call(aten.mm.default, *factors), result.shape)


@dataclass(frozen=True)
class JoinProducts(RulePass):
    """Join the smaller side of products that a cat joins.

    before:  c = cat([mm(x, v), mm(x, w)], 1)
    after:   c = mm(x, cat([v, w], 1))
    before:  c = cat([mm(x, w), mm(y, w)])
    after:   c = mm(cat([x, y]), w)

    One call writes all of the result, which nobody copies; the factors are copied instead, so only
    where they are fewer elements than the result. The first form also through views that keep the
    last dim. The products must have no other reader.
    """

    contract: ClassVar[Contract] = Contract()

    rules: ClassVar = (Rule("joined-products", _pattern, lowering(_joined)),)

    def may_go_on(self, step: StepGraph) -> bool:
        return True  # what was joined may be joined again
