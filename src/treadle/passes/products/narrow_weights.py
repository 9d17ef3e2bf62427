"""Weights in few bits that a product reads as they are, without a wide copy of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treadle.algebra.extents import divides, same, sample_of, surely_less
from treadle.compat.operators.operator_facts import CostClass, facts_of
from treadle.graph.core.dim_maps import JOINS, MOVES, RESHAPES, SWAPS, with_columns
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import OpOverload, arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import TensorType, is_tensor, type_of
from treadle.graph.core.values import inherit, refresh
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.targets.registry import target_for
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

_FEW = 2
"""Rows of a product up to which one formula over the weight was faster in every case measured: it
reads the weight once for each row (decision 0012)."""
_SOME = 8
"""Rows up to which PyTorch's product with an int8 weight was faster in every case measured."""
_LANES = 64
"""PyTorch's kernel reads the rows of the weight in whole vectors, past their end if need be."""
_HALVES = (torch.bfloat16, torch.float16)
_BYTES = (torch.int8, torch.uint8)
_FREE = MOVES | {*JOINS, aten.slice.Tensor}
"""What only says where a formula reads."""


@dataclass(frozen=True)
class ScaleInProduct(GraphPass):
    """Multiply by an int8 weight as it is stored, and scale the columns in the same kernel.

    before:  v = _to_copy(w, dtype=bf16); p = mm(x, t(v)); y = mul(p, s)     w: i8[n, k], s: bf16[n]
    after:   y = _weight_int8pack_mm(x, w, s)

    Few rows of bfloat16 on CPUs. The sum is scaled in float32 and rounded once, where eager rounds
    it before as well. Equal for finite scales: of an infinite one the kernel makes NaN where eager
    has infinity. Also through views of the product that keep its columns.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        changed: list[fx.Node] = []
        for node in list(step.graph.nodes):
            try:
                found = _scaled(node)
            except NoMatch:
                continue
            changed.append(_scale(found))
        refresh(step.graph, changed)
        return len(changed)


@dataclass(frozen=True)
class FoldWeightCast(GraphPass):
    """Sum the products of few rows in a formula, where that reads less than half of the weight.

    before:  v = _to_copy(w, dtype=f32); y = mm(x, v)        x: f32[1, k], w: i8[k, n]
    after:   y = sum(mul(unsqueeze(x, 2), unsqueeze(v, 0)), [1])

    One kernel then reads ``w`` and makes ``v`` as it goes; a library would find ``v`` stored. So
    too if ``v`` is packed numbers of 4 bits, masked, shifted, joined, moved and scaled, and with a
    bias. Half precision is summed in float32 and rounded once, as by libraries; on CPUs.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        changed: list[fx.Node] = []
        for node in list(step.graph.nodes):
            try:
                found = _folded(node)
            except NoMatch:
                continue
            changed.append(_fold(found))
        refresh(step.graph, changed)
        return len(changed)


def explain_scale(node: fx.Node) -> str:
    """Why ``node`` does or does not become a part of a product with an int8 weight, in words."""
    try:
        _scaled(node)
    except NoMatch as miss:
        return miss.message
    return "goes"


def explain_cast(node: fx.Node) -> str:
    """Why the product ``node`` does or does not read a narrow weight by itself, in words."""
    try:
        _folded(node)
    except NoMatch as miss:
        return miss.message
    return "goes"


def _require_host(x: TensorType) -> None:
    require(target_for(x.device).on_host, NoMatch, f"{x} is on a device that was not measured")


def _require_rows(x: fx.Node, most: int) -> None:
    rows = type_of(x).shape[0]
    require(surely_less(rows, most + 1), NoMatch, f"{x} has {rows} rows, more than {most}")


def _require_one_region(nodes: Sequence[fx.Node]) -> None:
    known = {(info(each).region, info(each).checkpoint, info(each).asked) for each in nodes}
    require(len(known) == 1, NoMatch, f"{nodes[0]} and {nodes[-1]} are of several regions")


def _require_lone(node: fx.Node) -> None:
    require(len(node.users) == 1, NoMatch, f"{node} is read elsewhere as well")


def _above(node: fx.Node) -> fx.Node:
    above = node.args[0]
    assert isinstance(above, fx.Node), node
    return above


# --- a scaled product with an int8 weight ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scaled:
    """``node = product(x, weight) * scale``; ``chain``: what goes, readers first."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    scale: fx.Node
    chain: tuple[fx.Node, ...]


def _scaled(node: fx.Node) -> _Scaled:
    require(node.target is aten.mul.Tensor, NoMatch, f"{node} is no mul")
    given = arguments(node)
    sides = given["self"], given["other"]
    require(all(map(is_tensor, sides)), NoMatch, f"{node} scales by a number")
    seen, scale = sides if _ends_in_product(sides[0]) else sides[::-1]
    chain = [node, *with_columns(seen)]
    product = chain[-1]
    require(product.target is aten.mm.default, NoMatch, f"{product} is no mm")
    x, wide = arguments(product)["self"], arguments(product)["mat2"]
    require(wide.target in SWAPS, NoMatch, f"{wide} is not a weight by rows, transposed")
    cast = _above(wide)
    require(cast.target is aten._to_copy.default, NoMatch, f"{cast} is no conversion")
    chain += [wide, cast]
    for each in chain[1:]:
        _require_lone(each)
    _require_one_region(chain)
    weight = _above(cast)
    _require_int8(node, seen, x, weight)
    _require_scale(scale, type_of(weight).shape[0])
    return _Scaled(node, x, weight, scale, tuple(chain))


def _ends_in_product(node: fx.Node) -> bool:
    while node.target in RESHAPES:
        node = _above(node)
    return node.target is aten.mm.default


def _require_int8(node: fx.Node, seen: fx.Node, x: fx.Node, weight: fx.Node) -> None:
    left, right = type_of(x), type_of(weight)
    _require_host(left)
    require(left.dtype is torch.bfloat16, NoMatch, f"{x} is {left}, which was not faster")
    require(right.dtype is torch.int8, NoMatch, f"{weight} is {right}")
    require(left.is_contiguous, NoMatch, f"{x} is not laid out row by row")
    require(right.is_contiguous, NoMatch, f"{weight} is not laid out row by row")
    require(divides(_LANES, right.shape[1]), NoMatch, f"{weight} has rows of {right.shape[1]}")
    require(type_of(node) == type_of(seen), NoMatch, f"{node} converts or stretches {seen}")
    _require_rows(x, _SOME)


def _require_scale(scale: fx.Node, columns: int) -> None:
    known = type_of(scale)
    is_row = known.ndim > 0 and same(known.shape[-1], columns) and same(known.numel, columns)
    fits = is_row and known.dtype is torch.bfloat16 and known.is_contiguous
    require(fits, NoMatch, f"{scale} is {known}, not one number a column")


def _scale(found: _Scaled) -> fx.Node:
    node, graph = found.node, found.node.graph
    product, scale = next(n for n in found.chain if n.target is aten.mm.default), found.scale
    with graph.inserting_before(node):
        if type_of(scale).ndim != 1:
            scale = _call(node, aten.view.default, scale, [type_of(scale).numel])
        made = graph.call_function(aten._weight_int8pack_mm.default, (found.x, found.weight, scale))
        inherit(made, product)
        result = made
        if type_of(node).ndim != 2:
            result = _call(node, aten.view.default, made, list(type_of(node).shape))
    node.replace_all_uses_with(result)
    for each in found.chain:
        graph.erase_node(each)
    return made


def _call(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = like.graph.call_function(target, args, kwargs)
    inherit(made, like)
    return made


# --- a product with a formula ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Folded:
    """``node = mm(x, wide) + bias``."""

    node: fx.Node
    x: fx.Node
    wide: fx.Node
    bias: fx.Node | None


def _folded(node: fx.Node) -> _Folded:
    is_sum = node.target is aten.addmm.default
    require(is_sum or node.target is aten.mm.default, NoMatch, f"{node} is no product of matrices")
    given = arguments(node)
    if is_sum:
        plain = given["beta"] == 1 and given["alpha"] == 1
        require(plain, NoMatch, f"{node} scales what it adds")
    x, wide = given["mat1" if is_sum else "self"], given["mat2"]
    known = type_of(wide)
    _require_host(known)
    require(known.dtype.is_floating_point, NoMatch, f"{wide} is {known}")
    _require_rows(x, _FEW)
    _require_narrow(node, wide)
    return _Folded(node, x, wide, given["self"] if is_sum else None)


def _require_narrow(node: fx.Node, wide: fx.Node) -> None:
    """What the formula of ``wide`` reads is less than half of it, and nobody else wants it."""
    read: dict[fx.Node, None] = {}
    formula: list[fx.Node] = []
    _collect(wide, read, formula)
    known = type_of(wide)
    size = sum(sample_of(type_of(each).nbytes) for each in read)
    narrow = 2 * size <= sample_of(known.nbytes)
    require(narrow, NoMatch, f"{wide} is {sample_of(known.nbytes)} bytes, made of {size}")
    dense = known.is_contiguous or _is_transposed(known)
    require(dense, NoMatch, f"{wide} is not laid out in rows or columns")
    _require_one_region([node, *formula])


def _collect(node: fx.Node, read: dict[fx.Node, None], formula: list[fx.Node]) -> None:
    """The nodes of the formula that makes ``node``, and what it reads."""
    if len(node.users) != 1 or not _is_formula(node):
        read[node] = None
        return
    if node.target in JOINS:
        dim = arguments(node)["dim"] % type_of(node).ndim
        inner = dim == type_of(node).ndim - 1
        require(not inner, NoMatch, f"{node} joins inside of rows: it is read by leaps")
    formula.append(node)
    for each in node.all_input_nodes:
        _collect(each, read, formula)


def _is_formula(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in _FREE:
        return True
    if node.target is aten.view.dtype:
        return all(type_of(each).dtype in _BYTES for each in (node, _above(node)))
    facts = facts_of(node.target)
    return facts.cost is CostClass.POINTWISE and not facts.draws and not facts.slow_elements


def _is_transposed(known: TensorType) -> bool:
    rows, columns = known.shape
    flipped = TensorType(known.dtype, (columns, rows), known.strides[::-1], known.device)
    return flipped.is_contiguous


_SUMS: Mapping[bool, tuple[int, int]] = {False: (2, 1), True: (1, 2)}
"""By whether the weight is transposed: the dim that ``x`` gets, and the one that is summed, so that
numbers which are neighbours in the weight are neighbours in what is summed."""


def _fold(found: _Folded) -> fx.Node:
    node, graph = found.node, found.node.graph
    known = type_of(found.wide)
    dtype = torch.float32 if known.dtype in _HALVES else known.dtype
    turned = not known.is_contiguous
    new, summed = _SUMS[turned]
    with graph.inserting_before(node):
        x = _as(node, found.x, dtype)
        wide = _as(node, found.wide, dtype)
        if turned:
            wide = _call(node, aten.t.default, wide)
        x = _call(node, aten.unsqueeze.default, x, new)
        wide = _call(node, aten.unsqueeze.default, wide, 0)
        products = _call(node, aten.mul.Tensor, x, wide)
        total = _call(node, aten.sum.dim_IntList, products, [summed])
        if found.bias is not None:
            total = _call(node, aten.add.Tensor, total, _as(node, found.bias, dtype))
        result = _as(node, total, known.dtype)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result


def _as(like: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if type_of(value).dtype is dtype:
        return value
    return _call(like, aten._to_copy.default, value, dtype=dtype)
