"""Products that sum into each other, that add a bias, and that are no work for a library."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treadle.algebra.extents import same, sample_of
from treadle.compat.operators.operator_facts import facts_of
from treadle.graph.analysis.dataflow import readers_of
from treadle.graph.core.dim_maps import RESHAPES, SWAPS, with_columns
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import OpOverload, arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import TensorType, is_tensor, type_of
from treadle.graph.core.values import inherit, refresh
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.graph.rewrite.rules import NoMatch, Rewrite, Rule, any_of
from treadle.targets.registry import target_for
from treadle.util.errors import require

aten = torch.ops.aten

_ADDING: Mapping[object, OpOverload] = {
    aten.mm.default: aten.addmm.default,
    aten.bmm.default: aten.baddbmm.default,
}
"""Products, and those that add something to them."""
_VIEWS = frozenset((*RESHAPES, *SWAPS))
_NARROW = frozenset({torch.bfloat16, torch.float16})

View = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operation, and what it is given besides its operand."""


@dataclass(frozen=True)
class AccumulateProducts(GraphPass):
    """Sum two products in the output of the second.

    before:  p = mm(a, b); q = mm(c, d); s = add(p, q)
    after:   p = mm(a, b); s = addmm(p, c, d)

    Also of ``addmm`` and ``mm``, of batches of products, and through equal views of both: what
    several uses of one parameter, or of one value, give its gradient. The product is added where
    it is made, before it is rounded: with bfloat16 that is one rounding less than in eager. One
    buffer less, and one pass over both less, since the sum takes over the buffer of ``p``. Both
    products must have no other reader, and ``s`` adds nothing else.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        order = _Order(step)
        changed: list[fx.Node] = []
        for node in list(step.graph.nodes):
            try:
                found = _sum_of(node, order)
            except NoMatch:
                continue
            changed.append(_accumulate(found, order))
        refresh(step.graph, changed)
        return len(changed)


def explain(step: StepGraph, node: fx.Node) -> str:
    """Why the sum ``node`` does or does not become a part of a product, in words."""
    try:
        _sum_of(node, _Order(step))
    except NoMatch as miss:
        return miss.message
    return "goes"


class _Order:
    """Which of two nodes stands first; a new one stands in the place of an old one."""

    def __init__(self, step: StepGraph) -> None:
        self._places = {node: at for at, node in enumerate(step.graph.nodes)}

    def before(self, left: fx.Node, right: fx.Node) -> bool:
        return self._places[left] < self._places[right]

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        self._places[new] = self._places[old]


@dataclass(frozen=True, slots=True)
class _Operand:
    """``seen`` is ``product`` through ``views``, the last of them first."""

    seen: fx.Node
    product: fx.Node
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class _Sum:
    """``add(first, last)``."""

    add: fx.Node
    first: _Operand
    last: _Operand


def _sum_of(node: fx.Node, order: _Order) -> _Sum:
    require(node.target is aten.add.Tensor, NoMatch, f"{node} is no sum")
    given = arguments(node)
    left, right = given["self"], given["other"]
    require(is_tensor(left) and is_tensor(right), NoMatch, f"{node} adds a number")
    require(left is not right, NoMatch, f"{node} adds {left} to itself")
    require(given["alpha"] == 1, NoMatch, f"{node} has alpha={given['alpha']}")
    first, last = _operand(left), _operand(right)
    if order.before(last.product, first.product):
        first, last = last, first
    _require_fits(node, first, last)
    return _Sum(node, first, last)


def _operand(node: fx.Node) -> _Operand:
    views: list[View] = []
    product = node
    while _is_view(product):
        _require_lone(product)
        again = product.target is aten._unsafe_view.default  # of what need not be new
        target = aten.view.default if again else product.target
        views.append((target, product.args[1:], product.kwargs))
        above = product.args[0]
        assert isinstance(above, fx.Node), product
        product = above
    kinds = (*_ADDING, *_ADDING.values())
    require(product.target in kinds, NoMatch, f"{product} is no product")
    _require_lone(product)
    return _Operand(node, product, tuple(views))


def _require_lone(node: fx.Node) -> None:
    require(len(node.users) == 1, NoMatch, f"{node} is used outside the sum")


def _require_fits(node: fx.Node, first: _Operand, last: _Operand) -> None:
    p, q = first.product, last.product
    adding = _ADDING.get(q.target)
    require(adding is not None, NoMatch, f"{q} adds something already")
    require(p.target in (q.target, adding), NoMatch, f"{p} and {q} are products of two kinds")
    require(type_of(p) == type_of(q), NoMatch, f"{p} is {type_of(p)}, {q} is {type_of(q)}")
    require(first.views == last.views, NoMatch, f"{first.seen} and {last.seen} are other views")
    kept = type_of(node) == type_of(first.seen) == type_of(last.seen)
    require(kept, NoMatch, f"{node} converts, stretches or lays out what it adds")
    require(type_of(q).dtype.is_floating_point, NoMatch, f"{q} is {type_of(q)}")
    known = [info(each) for each in (node, p, q)]
    regions = {(each.region, each.checkpoint, each.asked) for each in known}
    require(len(regions) == 1, NoMatch, f"{p}, {q} and {node} are of several regions")


def _accumulate(found: _Sum, order: _Order) -> fx.Node:
    """The product of both, where the last one stood; its views, where the sum stood."""
    add, last = found.add, found.last.product
    graph = add.graph
    with graph.inserting_before(last):
        args = (found.first.product, *last.args)
        product = graph.call_function(_ADDING[last.target], args)
    inherit(product, last)
    order.replace(last, product)
    result = product
    with graph.inserting_before(add):
        for target, rest, kwargs in reversed(found.last.views):
            result = graph.call_function(target, (result, *rest), kwargs)
            inherit(result, add)
            order.replace(add, result)
    add.replace_all_uses_with(result)
    graph.erase_node(add)
    for operand in (found.first, found.last):
        _erase(operand, product)
    return product


def _erase(operand: _Operand, product: fx.Node) -> None:
    """What only the sum read goes: the views of it, and the product that became ``product``."""
    node = operand.seen
    while not node.users and node is not product:
        above = node.args[0]
        node.graph.erase_node(node)
        if node is operand.product:
            return
        assert isinstance(above, fx.Node), node
        node = above


# --- a bias ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddBiasInProduct(GraphPass):
    """Let the library add a bias, where the sum would be a pass of its own.

    before:  p = mm(x, w); s = add(p, b); y = mm(s, v)      b: one number a column
    after:   s = addmm(b, x, w); y = mm(s, v)

    Also through views that keep the columns. Where a formula reads the sum, the addition is a part
    of its kernel and costs nothing: then it stays.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        changed: list[fx.Node] = []
        for node in list(step.graph.nodes):
            try:
                operand, bias = _biased(node)
            except NoMatch:
                continue
            changed.append(_add_bias(node, operand, bias))
        refresh(step.graph, changed)
        return len(changed)


def explain_bias(node: fx.Node) -> str:
    """Why the sum ``node`` does or does not become the bias of a product, in words."""
    try:
        _biased(node)
    except NoMatch as miss:
        return miss.message
    return "goes"


def _biased(node: fx.Node) -> tuple[_Operand, fx.Node]:
    require(node.target is aten.add.Tensor, NoMatch, f"{node} is no sum")
    given = arguments(node)
    left, right = given["self"], given["other"]
    require(is_tensor(left) and is_tensor(right), NoMatch, f"{node} adds a number")
    require(given["alpha"] == 1, NoMatch, f"{node} has alpha={given['alpha']}")
    product, bias = (left, right) if type_of(right).ndim == 1 else (right, left)
    operand = _operand(product)
    wide, row, result = type_of(operand.product), type_of(bias), type_of(product)
    require(operand.product.target is aten.mm.default, NoMatch, f"{operand.product} is no mm")
    fits = row.ndim == 1 and same(row.shape[0], wide.shape[1]) and row.dtype is wide.dtype
    require(fits, NoMatch, f"{bias} is {row}, no row of {wide}")
    require(type_of(node) == result, NoMatch, f"{node} converts, stretches or lays out {result}")
    with_columns(product)
    kinds = {info(each).region for each in (node, operand.product)}
    require(len(kinds) == 1, NoMatch, f"{operand.product} and {node} are of several regions")
    for reader in readers_of(node, _is_view):
        require(_is_call(reader), NoMatch, f"{reader} adds the bias by itself")
    return operand, bias


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS


def _is_call(node: fx.Node) -> bool:
    """Whether it reads stored values: a call of a library, or the end of the step."""
    if node.op == "output":
        return True
    return isinstance(node.target, OpOverload) and facts_of(node.target).cost.is_expensive


def _add_bias(node: fx.Node, operand: _Operand, bias: fx.Node) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(aten.addmm.default, (bias, *operand.product.args))
        inherit(new, operand.product)
        result = new
        for target, rest, kwargs in reversed(operand.views):
            result = graph.call_function(target, (result, *rest), kwargs)
            inherit(result, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    _erase(operand, new)
    return new


@dataclass(frozen=True)
class SplitBias(GraphPass):
    """Let the kernel that reads a product add its bias.

    before:  s = addmm(b, x, w); y = relu(s)
    after:   p = mm(x, w); s = add(p, b); y = relu(s)

    Only where every reader is a formula, and of float32 and wider: of narrower ones the sum would
    be rounded twice. The opposite of ``AddBiasInProduct``, which takes the other sums.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        matches = [node for node in step.graph.nodes if split_refusal(node) == ""]
        changed = [_split(node) for node in matches]
        refresh(step.graph, changed)
        return len(changed)


def split_refusal(node: fx.Node) -> str:
    """Why the bias of ``node`` stays in the product; empty if it does not."""
    if node.target is not aten.addmm.default:
        return f"{node} is no addmm"
    given, result = arguments(node), type_of(node)
    if given["beta"] != 1 or given["alpha"] != 1:
        return f"{node} scales what it adds"
    if result.dtype in _NARROW or not result.dtype.is_floating_point:
        return f"{node} is {result}: its sum is rounded once"
    if isinstance(given["self"], fx.Node) and given["self"].target in (
        *_ADDING,
        *_ADDING.values(),
    ):
        return f"{node} adds to a product"
    readers = readers_of(node, _is_view)
    calls = [each for each in readers if _is_call(each)]
    if calls or not readers:
        return f"{calls[0] if calls else 'nobody'} reads what is stored"
    return ""


def _split(node: fx.Node) -> fx.Node:
    graph, given = node.graph, arguments(node)
    with graph.inserting_before(node):
        product = graph.call_function(aten.mm.default, (given["mat1"], given["mat2"]))
        inherit(product, node)
        total = graph.call_function(aten.add.Tensor, (product, given["self"]))
        inherit(total, node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return total


# --- no work for a library ------------------------------------------------------------------


def _check_outer(x: TensorType, y: TensorType) -> None:
    require(same(x.shape[-1], 1), NoMatch, f"sums {x.shape[-1]} products")
    require(x.dtype.is_floating_point, NoMatch, f"{x} is not floating point")
    require(x.is_contiguous and y.is_contiguous, NoMatch, f"{x} or {y} is not laid out in rows")


def _is_memory_bound(x: TensorType, y: TensorType) -> bool:
    """Whether reading and writing takes longer than multiplying, by the ceilings of the device."""
    model = target_for(x.device).model
    m, k, n = (sample_of(each) for each in (*x.shape, y.shape[1]))
    bytes_ = (m * k + k * n + m * n) * x.dtype.itemsize
    return 2 * m * k * n / model.rate(x.dtype) <= bytes_ / model.bandwidth


def _check_vector(x: TensorType, y: TensorType) -> None:
    narrow = x.dtype in _NARROW or not x.dtype.is_floating_point
    require(not narrow, NoMatch, f"{x} is summed in wider numbers")
    require(_is_memory_bound(x, y), NoMatch, f"{x} times {y} is bound by its multiplications")


def _check_column(x: TensorType, y: TensorType) -> None:
    require(same(y.shape[1], 1), NoMatch, f"{y} is no column")
    _check_vector(x, y)


def _check_row(x: TensorType, y: TensorType) -> None:
    require(same(x.shape[0], 1), NoMatch, f"{x} is no row")
    _check_vector(x, y)


OUTER = (
    Rule(
        "outer-product",
        pattern=lambda x, y: any_of(aten.mm.default, aten.bmm.default)(x, y),
        replacement=lambda x, y: aten.mul.Tensor(x, y),
        check=_check_outer,
    ),
)
VECTORS = (
    Rule(
        "column-of-dots",
        pattern=lambda x, y: aten.mm.default(x, y),
        replacement=lambda x, y: aten.sum.dim_IntList(
            aten.mul.Tensor(x, aten.t.default(y)), [1], True
        ),
        check=_check_column,
    ),
    Rule(
        "row-of-dots",
        pattern=lambda x, y: aten.mm.default(x, y),
        replacement=lambda x, y: aten.sum.dim_IntList(
            aten.mul.Tensor(aten.t.default(x), y), [0], True
        ),
        check=_check_row,
    ),
)

DECOMPOSE_OUTER = Rewrite(OUTER)
"""Outer products are formulas: one multiplication for each element, no sum, and no pass."""
DECOMPOSE_VECTORS = Rewrite(VECTORS)
"""Products with one vector, where the ceilings of the device say that memory decides."""
