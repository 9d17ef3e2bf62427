"""Products that sum into each other, products with a bias, and products that are too small for a
library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from treadle.algebra.extents import same, sample_of
from treadle.compat.operators.operator_facts import facts_of
from treadle.graph.analysis.dataflow import readers_of
from treadle.graph.core.dim_maps import RESHAPES, SWAPS, with_columns
from treadle.graph.core.operators import OpOverload
from treadle.graph.core.types import TensorType, is_tensor, type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract
from treadle.graph.rewrite.rules import (
    Rewrite,
    Rule,
    RulePass,
    any_of,
    call_of,
    commuting,
    lowering,
    through,
)
from treadle.targets.registry import target_for
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

_ADDING: Mapping[object, OpOverload] = {
    aten.mm.default: aten.addmm.default,
    aten.bmm.default: aten.baddbmm.default,
}
"""Products, and those that add something to them."""
_PRODUCTS = (*_ADDING, *_ADDING.values())
_VIEWS = frozenset((*RESHAPES, *SWAPS))
_NARROW = frozenset({torch.bfloat16, torch.float16})


# --- products that sum ----------------------------------------------------------------------


def _accumulated(
    build: ReplacementBuilder,
    one: fx.Node,
    other: fx.Node,
    views: Sequence[fx.Node],
    others: Sequence[fx.Node],
) -> fx.Node:
    """The product of both, where the last one stood; its views, where the sum stood."""
    require(one is not other, NoMatch, f"{build.root} adds {one} to itself")
    first, last = min(one, other), max(one, other)
    adding = _ADDING.get(last.target)
    require(adding is not None, NoMatch, f"{last} adds something already")
    assert adding is not None
    kinds = f"{first} and {last} are products of two kinds"
    require(first.target in (last.target, adding), NoMatch, kinds)
    known = type_of(last)
    types = f"{first} is {type_of(first)}, {last} is {known}"
    require(type_of(first) == known, NoMatch, types)
    require(known.dtype.is_floating_point, NoMatch, f"{last} is {known}")
    _require_equal_views(build.root, [*views, one], [*others, other])
    product = build.at(last).call(adding, first, *last.args)
    return _seen(build, product, views)


def _require_equal_views(add: fx.Node, left: Sequence[fx.Node], right: Sequence[fx.Node]) -> None:
    """The same views of both products, and a sum of their type."""
    steps = (
        [(_view_of(view), view.args[1:], view.kwargs) for view in side[:-1]]
        for side in (left, right)
    )
    seen = f"{left[0]} and {right[0]} are other views"
    require(next(steps) == next(steps), NoMatch, seen)
    kept = type_of(add) == type_of(left[0]) == type_of(right[0])
    require(kept, NoMatch, f"{add} converts, stretches or lays out what it adds")


def _view_of(node: fx.Node) -> object:
    """The operation of a view, which is ``view`` for ``_unsafe_view``: a copy is not needed."""
    return aten.view.default if node.target is aten._unsafe_view.default else node.target


def _seen(build: ReplacementBuilder, product: fx.Node, views: Sequence[fx.Node]) -> fx.Node:
    """``product`` through ``views``, the last first."""
    for view in reversed(views):
        operation = _view_of(view)
        assert callable(operation), view
        product = build.call(operation, product, *view.args[1:], **view.kwargs)
    return product


@dataclass(frozen=True)
class AccumulateProducts(RulePass):
    """Sum two products in the output of the second.

    before:  p = mm(a, b); q = mm(c, d); s = add(p, q)
    after:   p = mm(a, b); s = addmm(p, c, d)

    Also of ``addmm`` and ``mm``, of batches of products, and through equal views of both: what
    several uses of one parameter, or of one value, give its gradient. The product is added where
    it is made, before it is rounded: with bfloat16 that is one rounding less than in eager. One
    buffer less, and one pass over both less, since the sum takes over the buffer of ``p``. Both
    products must have no other reader, and ``s`` adds nothing else.
    """

    contract: ClassVar[Contract] = Contract()

    rules: ClassVar = (
        Rule(
            "accumulated-products",
            lambda one, other, views, others: aten.add.Tensor(
                through(_VIEWS, call_of(one, *_PRODUCTS), views),
                through(_VIEWS, call_of(other, *_PRODUCTS), others),
            ),
            lowering(_accumulated),
            one_region=True,
        ),
    )


# --- a bias ---------------------------------------------------------------------------------


def _biased(
    build: ReplacementBuilder, product: fx.Node, bias: fx.Node, views: Sequence[fx.Node]
) -> fx.Node:
    add, seen = build.root, [*views, product][0]
    require(is_tensor(bias), NoMatch, f"{add} adds a number")
    wide, row, result = type_of(product), type_of(bias), type_of(seen)
    fits = row.ndim == 1 and same(row.shape[0], wide.shape[1]) and row.dtype is wide.dtype
    require(fits, NoMatch, f"{bias} is {row}, no row of {wide}")
    require(type_of(add) == result, NoMatch, f"{add} converts, stretches or lays out {result}")
    with_columns(seen)
    for reader in readers_of(add, _is_view):
        require(_is_call(reader), NoMatch, f"{reader} adds the bias by itself")
    total = build.belonging(product).call(aten.addmm.default, bias, *product.args)
    return _seen(build, total, views)


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS


def _is_call(node: fx.Node) -> bool:
    """Whether it reads stored values: a call of a library, or the end of the step."""
    if node.op == "output":
        return True
    return isinstance(node.target, OpOverload) and facts_of(node.target).cost.is_expensive


@dataclass(frozen=True)
class AddBiasInProduct(RulePass):
    """Let the library add a bias, where the sum would be a pass of its own.

    before:  p = mm(x, w); s = add(p, b); y = mm(s, v)      b: one number a column
    after:   s = addmm(b, x, w); y = mm(s, v)

    Also through views that keep the columns. Where a formula reads the sum, the addition is a part
    of its kernel and costs nothing: then it stays.
    """

    contract: ClassVar[Contract] = Contract()

    rules: ClassVar = (
        Rule(
            "bias-into-product",
            lambda product, bias, views: commuting(aten.add.Tensor)(
                through(_VIEWS, call_of(product, aten.mm.default), views), bias
            ),
            lowering(_biased),
        ),
    )


def _check_split(bias: object, x: TensorType, w: TensorType) -> None:
    rounded = x.dtype in _NARROW or not x.dtype.is_floating_point
    require(not rounded, NoMatch, f"{x} times {w} is summed in wider numbers, and rounded once")


def _split(build: ReplacementBuilder, bias: fx.Node, x: fx.Node, w: fx.Node) -> fx.Node:
    require(bias.target not in _PRODUCTS, NoMatch, f"{build.root} adds to a product")
    readers = readers_of(build.root, _is_view)
    calls = [str(reader) for reader in readers if _is_call(reader)]
    formulas = bool(readers) and not calls
    require(formulas, NoMatch, f"{next(iter(calls), 'nobody')} reads what is stored")
    return build.call(aten.add.Tensor, build.call(aten.mm.default, x, w), bias)


@dataclass(frozen=True)
class SplitBias(RulePass):
    """Let the kernel that reads a product add its bias.

    before:  s = addmm(b, x, w); y = relu(s)
    after:   p = mm(x, w); s = add(p, b); y = relu(s)

    Only where every reader is a formula, and of float32 and wider: of narrower ones the sum would
    be rounded twice. The opposite of ``AddBiasInProduct``, which takes the other sums.
    """

    contract: ClassVar[Contract] = Contract()

    rules: ClassVar = (
        Rule(
            "bias-out-of-product",
            lambda bias, x, w: aten.addmm.default(bias, x, w),
            lowering(_split),
            _check_split,
        ),
    )


# --- no work for a library ------------------------------------------------------------------


def _check_outer(x: TensorType, y: TensorType) -> None:
    require(same(x.shape[-1], 1), NoMatch, f"sums {x.shape[-1]} products")
    require(x.dtype.is_floating_point, NoMatch, f"{x} is not floating point")
    require(x.is_contiguous and y.is_contiguous, NoMatch, f"{x} or {y} is not laid out in rows")


def _is_memory_bound(x: TensorType, y: TensorType) -> bool:
    """Whether reading and writing takes longer than multiplying, by the ceilings of the device."""
    model = target_for(x.device).model
    columns = y.shape[1] if y.ndim > 1 else 1
    m, k, n = (sample_of(size) for size in (*x.shape, columns))
    bytes_ = (m * k + k * n + m * n) * x.dtype.itemsize
    return 2 * m * k * n / model.rate(x.dtype) <= bytes_ / model.bandwidth


def _check_vector(x: TensorType, y: TensorType) -> None:
    narrow = x.dtype in _NARROW or not x.dtype.is_floating_point
    require(not narrow, NoMatch, f"{x} is summed in wider numbers")
    require(_is_memory_bound(x, y), NoMatch, f"{x} times {y} is bound by its multiplications")


def _check_column(x: TensorType, y: TensorType) -> None:
    require(same(y.shape[1], 1), NoMatch, f"{y} is not a column")
    _check_vector(x, y)


def _check_biased_column(bias: TensorType, x: TensorType, y: TensorType) -> None:
    require(bias.dtype is x.dtype, NoMatch, f"{bias} would be converted")
    _check_column(x, y)


def _check_row(x: TensorType, y: TensorType) -> None:
    require(same(x.shape[0], 1), NoMatch, f"{x} is not a row")
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
        "column-of-dots-and-bias",
        pattern=lambda bias, x, y: aten.addmm.default(bias, x, y),
        replacement=lambda bias, x, y: aten.add.Tensor(
            aten.sum.dim_IntList(aten.mul.Tensor(x, aten.t.default(y)), [1], True), bias
        ),
        check=_check_biased_column,
    ),
    Rule(
        "vector-of-dots",
        pattern=lambda x, y: aten.mv.default(x, y),
        replacement=lambda x, y: aten.sum.dim_IntList(aten.mul.Tensor(x, y), [1]),
        check=_check_vector,
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
