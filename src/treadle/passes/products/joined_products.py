"""Products that are only joined, as one product of joined factors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treadle.algebra.extents import sample_of
from treadle.graph.analysis.pieces import joined_of
from treadle.graph.core.dim_maps import RESHAPES, with_columns
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.core.values import inherit, refresh
from treadle.graph.rewrite.passes import Contract, GraphPass, until_settled
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten


@dataclass(frozen=True)
class JoinProducts(GraphPass):
    """Join the smaller side of products that a cat joins.

    before:  c = cat([mm(x, v), mm(x, w)], 1)
    after:   c = mm(x, cat([v, w], 1))
    before:  c = cat([mm(x, w), mm(y, w)])
    after:   c = mm(cat([x, y]), w)

    One call writes all of the result, which nobody copies; the factors are copied instead, so only
    where they are fewer elements than the result. The first form also through views that keep the
    last dim. The products must have no other reader.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        return until_settled(self._once, step)

    def _once(self, step: StepGraph) -> int:
        changed: list[fx.Node] = []
        for node in list(step.graph.nodes):
            try:
                found = _joined_products(node)
            except NoMatch:
                continue
            changed.append(_join(found))
        refresh(step.graph, changed)
        return len(changed)


def explain(node: fx.Node) -> str:
    """Why the cat ``node`` does or does not become a product, in words."""
    try:
        _joined_products(node)
    except NoMatch as miss:
        return miss.message
    return "goes"


@dataclass(frozen=True, slots=True)
class _JoinedProducts:
    """``node`` joins ``products``, which share a factor: their columns, or else their rows."""

    node: fx.Node
    products: tuple[fx.Node, ...]
    columns: bool


def _joined_products(node: fx.Node) -> _JoinedProducts:
    joined = joined_of(node)
    require(joined is not None, NoMatch, f"{node} is no cat")
    assert joined is not None
    result = type_of(node)
    columns = joined.dim == result.ndim - 1
    products = tuple(_product(each, columns=columns) for each in joined.operands)
    require(len(products) > 1, NoMatch, f"{node} joins one value")
    require(columns or result.ndim == 2, NoMatch, f"{node} joins neither rows nor columns")
    shared, other = ("self", "mat2") if columns else ("mat2", "self")
    factors = {arguments(each)[shared] for each in products}
    require(len(factors) == 1, NoMatch, "the products share no factor")
    regions = {info(each).region for each in (node, *products)}
    require(len(regions) == 1, NoMatch, f"{node} and its products are of several regions")
    copied = sum(sample_of(type_of(arguments(each)[other]).numel) for each in products)
    fewer = copied < sample_of(result.numel)
    require(fewer, NoMatch, f"the factors are {copied} elements, the result {result.numel}")
    require(result.is_contiguous, NoMatch, f"{node} is not laid out row by row")
    return _JoinedProducts(node, products, columns)


def _product(node: fx.Node, *, columns: bool) -> fx.Node:
    chain = with_columns(node) if columns else [node]
    for each in chain:
        require(len(each.users) == 1, NoMatch, f"{each} is used outside the cat")
    require(chain[-1].target is aten.mm.default, NoMatch, f"{chain[-1]} is no mm")
    return chain[-1]


def _join(found: _JoinedProducts) -> fx.Node:
    node, graph = found.node, found.node.graph
    left, right = ([arguments(each)[name] for each in found.products] for name in ("self", "mat2"))
    with graph.inserting_before(node):
        if found.columns:
            product = _call(node, aten.mm.default, left[0], _cat(node, right, 1))
        else:
            product = _call(node, aten.mm.default, _cat(node, left, 0), right[0])
        result = product
        if type_of(node).ndim != 2:
            result = _call(node, aten.view.default, product, list(type_of(node).shape))
    node.replace_all_uses_with(result)
    _erase(node)
    return product


def _cat(like: fx.Node, factors: Sequence[fx.Node], dim: int) -> fx.Node:
    return _call(like, aten.cat.default, list(factors), dim)


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    made = like.graph.call_function(target, args)
    inherit(made, like)
    return made


def _erase(node: fx.Node) -> None:
    """The cat goes, with the views and products that only it read."""
    graph, operands = node.graph, node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        each = operand
        while each.target in RESHAPES:
            above = each.all_input_nodes[0]
            graph.erase_node(each)
            each = above
        graph.erase_node(each)
