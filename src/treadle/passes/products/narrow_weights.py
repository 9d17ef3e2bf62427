"""Weights in few bits that a product reads directly, without a wide copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from treadle.algebra.extents import divides, same, sample_of, surely_less
from treadle.compat.operators.operator_facts import CostClass, facts_of
from treadle.graph.core.dim_maps import JOINS, MOVES, RESHAPES, SWAPS, with_columns
from treadle.graph.core.operators import OpOverload, arguments
from treadle.graph.core.types import TensorType, is_tensor, type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.matching import require_one_region
from treadle.graph.rewrite.passes import Contract
from treadle.graph.rewrite.rules import (
    Rule,
    RulePass,
    any_of,
    commuting,
    lowering,
    named,
    through,
)
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
"""Operations that change only where a formula reads."""


def _require_host(x: TensorType) -> None:
    require(target_for(x.device).on_host, NoMatch, f"{x} is on a device that was not measured")


def _require_rows(x: TensorType, most: int) -> None:
    rows = x.shape[0]
    require(surely_less(rows, most + 1), NoMatch, f"{x} has {rows} rows, more than {most}")


# --- a scaled product with an int8 weight ---------------------------------------------------


def _scaled_product(
    x: fx.Node, weight: fx.Node, scale: fx.Node, product: fx.Node, views: object
) -> object:
    by_rows = any_of(*SWAPS)(aten._to_copy.default(weight, ...), ...)
    bindings = named(product, aten.mm.default(x, by_rows))
    return commuting(aten.mul.Tensor)(through(RESHAPES, bindings, views), scale)


def _check_int8(
    x: TensorType, weight: TensorType, scale: TensorType, product: object, views: object
) -> None:
    _require_host(x)
    require(x.dtype is torch.bfloat16, NoMatch, f"{x} was not faster")
    require(weight.dtype is torch.int8, NoMatch, f"{weight} is not int8")
    require(x.is_contiguous, NoMatch, f"{x} is not in row-major order")
    require(weight.is_contiguous, NoMatch, f"{weight} is not in row-major order")
    require(divides(_LANES, weight.shape[1]), NoMatch, f"{weight} has rows of {weight.shape[1]}")
    _require_rows(x, _SOME)


def _require_row(scale: fx.Node, columns: int) -> None:
    known = type_of(scale)
    is_row = known.ndim > 0 and same(known.shape[-1], columns) and same(known.numel, columns)
    fits = is_row and known.dtype is torch.bfloat16 and known.is_contiguous
    require(fits, NoMatch, f"{scale} is {known}, not one number a column")


def _scaled(
    build: ReplacementBuilder,
    x: fx.Node,
    weight: fx.Node,
    scale: fx.Node,
    product: fx.Node,
    views: Sequence[fx.Node],
) -> fx.Node:
    mul, seen = build.root, [*views, product][0]
    require(is_tensor(scale), NoMatch, f"{mul} scales by a number")
    with_columns(seen)
    require(type_of(mul) == type_of(seen), NoMatch, f"{mul} converts or stretches {seen}")
    _require_row(scale, type_of(weight).shape[0])
    row = build.viewed(scale, [type_of(scale).numel])
    scaled = build.belonging(product).call(aten._weight_int8pack_mm.default, x, weight, row)
    return build.viewed(scaled, type_of(mul).shape)


@dataclass(frozen=True)
class ScaleInProduct(RulePass):
    """Multiply by an int8 weight as it is stored, and scale the columns in the same kernel.

    before:  v = _to_copy(w, dtype=bf16); p = mm(x, t(v)); y = mul(p, s)     w: i8[n, k], s: bf16[n]
    after:   y = _weight_int8pack_mm(x, w, s)

    Few rows of bfloat16 on CPUs. The sum is scaled in float32 and rounded once, where eager rounds
    it before as well. Equal for finite scales: of an infinite one the kernel makes NaN where eager
    has infinity. Also through views of the product that keep its columns.
    """

    contract: ClassVar[Contract] = Contract()

    rules: ClassVar = (
        Rule("scale-in-product", _scaled_product, lowering(_scaled), _check_int8, one_region=True),
    )


# --- a product with a formula ---------------------------------------------------------------


def _check_wide(x: TensorType, wide: TensorType, bias: object = None) -> None:
    _require_host(wide)
    require(wide.dtype.is_floating_point, NoMatch, f"{wide} is not floating-point")
    _require_rows(x, _FEW)


def _require_narrow(node: fx.Node, wide: fx.Node) -> None:
    """What the formula of ``wide`` reads is less than half of it, and nobody else wants it."""
    read: dict[fx.Node, None] = {}
    formula: list[fx.Node] = []
    _collect(wide, read, formula)
    known = type_of(wide)
    size = sum(sample_of(type_of(operand).nbytes) for operand in read)
    narrow = 2 * size <= sample_of(known.nbytes)
    require(narrow, NoMatch, f"{wide} is {sample_of(known.nbytes)} bytes, made of {size}")
    dense = known.is_contiguous or _is_transposed(known)
    require(dense, NoMatch, f"{wide} is not laid out in rows or columns")
    require_one_region([node, *formula])


def _collect(node: fx.Node, read: dict[fx.Node, None], formula: list[fx.Node]) -> None:
    """The nodes of the formula that makes ``node``, and what it reads."""
    if len(node.users) != 1 or not _is_formula(node):
        read[node] = None
        return
    if node.target in JOINS:
        dim = arguments(node)["dim"] % type_of(node).ndim
        inner = dim == type_of(node).ndim - 1
        require(not inner, NoMatch, f"{node} concatenates inside rows: it is read with gaps")
    formula.append(node)
    for operand in node.all_input_nodes:
        _collect(operand, read, formula)


def _is_formula(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in _FREE:
        return True
    if node.target is aten.view.dtype:
        return all(type_of(operand).dtype in _BYTES for operand in (node, *node.all_input_nodes))
    facts = facts_of(node.target)
    return facts.cost is CostClass.POINTWISE and not facts.draws and not facts.slow_elements


def _is_transposed(known: TensorType) -> bool:
    rows, columns = known.shape
    flipped = TensorType(known.dtype, (columns, rows), known.strides[::-1], known.device)
    return flipped.is_contiguous


_SUMS: Mapping[bool, tuple[int, int]] = {False: (2, 1), True: (1, 2)}
"""By whether the weight is transposed: the dim that ``x`` gets, and the one that is summed, so that
numbers which are neighbours in the weight are neighbours in what is summed."""


def _folded(
    build: ReplacementBuilder, x: fx.Node, wide: fx.Node, bias: fx.Node | None = None
) -> fx.Node:
    _require_narrow(build.root, wide)
    known = type_of(wide)
    dtype = torch.float32 if known.dtype in _HALVES else known.dtype
    turned = not known.is_contiguous
    new, summed = _SUMS[turned]
    rows, columns = build.converted(x, dtype), build.converted(wide, dtype)
    if turned:
        columns = build.call(aten.t.default, columns)
    rows = build.call(aten.unsqueeze.default, rows, new)
    columns = build.call(aten.unsqueeze.default, columns, 0)
    products = build.call(aten.mul.Tensor, rows, columns)
    total = build.call(aten.sum.dim_IntList, products, [summed])
    if bias is not None:
        total = build.call(aten.add.Tensor, total, build.converted(bias, dtype))
    return build.converted(total, known.dtype)


@dataclass(frozen=True)
class FoldWeightCast(RulePass):
    """Sum the products of few rows in a formula, where that reads less than half of the weight.

    before:  v = _to_copy(w, dtype=f32); y = mm(x, v)        x: f32[1, k], w: i8[k, n]
    after:   y = sum(mul(unsqueeze(x, 2), unsqueeze(v, 0)), [1])

    One kernel then reads ``w`` and makes ``v`` as it goes; a library would find ``v`` stored. So
    too if ``v`` is packed numbers of 4 bits, masked, shifted, joined, moved and scaled, and with a
    bias. Half precision is summed in float32 and rounded once, as by libraries; on CPUs.
    """

    contract: ClassVar[Contract] = Contract()

    rules: ClassVar = (
        Rule(
            "cast-into-product",
            lambda x, wide: aten.mm.default(x, wide),
            lowering(_folded),
            _check_wide,
        ),
        Rule(
            "cast-into-product-and-bias",
            lambda x, wide, bias: aten.addmm.default(bias, x, wide),
            lowering(_folded),
            _check_wide,
        ),
    )
