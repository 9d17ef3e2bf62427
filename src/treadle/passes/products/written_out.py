"""Contractions: products that a program writes as multiplications and sums, without ``einsum``."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import fx

from treadle.algebra.extents import same, sample_of
from treadle.compat.switches import rounds_products
from treadle.graph.analysis.dataflow import unexpanded
from treadle.graph.core.operators import OpOverload
from treadle.graph.core.types import TensorType, is_tensor, type_of
from treadle.graph.custom_ops.full_products import FULL_BMM
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.rules import Rewrite, Rule, anything, lowering
from treadle.targets.model import DeviceModel
from treadle.targets.registry import target_for
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

_FROM_CACHE = 2.0
"""How many factors a generated kernel is thought to read again from caches while memory delivers
one: as one CPU core does. GPUs manage fewer, so there the formula is thought faster than it is."""


_LAUNCHES = 8
"""What a call of the library costs, with copies of its factors and a kernel that reads its result
by itself, in launches."""


@dataclass(frozen=True, slots=True)
class _Dims:
    """The dims of a multiplication: kept ones of both factors and of each, and those summed."""

    both: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """The dims of the product, in its order."""
        return self.both + self.left + self.right

    @property
    def swapped(self) -> "_Dims":
        return _Dims(self.both, self.right, self.left, self.summed)


def _multiplied(build: ReplacementBuilder, x: fx.Node, y: fx.Node, dims: Sequence[int]) -> fx.Node:
    total = build.root
    for each in (x, y):
        require(is_tensor(each), NoMatch, f"{each} is a number")
    (multiplied,) = total.all_input_nodes
    known, result = type_of(multiplied), type_of(total)
    _check_types(total, known, [type_of(x), type_of(y)])
    x, y = unexpanded(x), unexpanded(y)
    parts = _classified(total, known.shape, _has(x, known.ndim), _has(y, known.ndim), dims)
    if _is_ordered(parts.swapped.kept) and not _is_ordered(parts.kept):
        x, y, parts = y, x, parts.swapped
    _require_gain(total, known, parts)
    left = _matrix(build, x, known, (parts.both, parts.left, parts.summed))
    right = _matrix(build, y, known, (parts.both, parts.summed, parts.right))
    factors = (build.converted(each, result.dtype) for each in (left, right))
    product = build.call(_product_of(result.dtype), *factors)
    product = build.viewed(product, [known.shape[dim] for dim in parts.kept])
    if not _is_ordered(parts.kept):
        order = [parts.kept.index(dim) for dim in sorted(parts.kept)]
        product = build.call(aten.permute.default, product, order)
        product = build.dense(product) if result.is_contiguous else product
    return build.viewed(product, list(result.shape))


def _check_types(total: fx.Node, product: TensorType, factors: Sequence[TensorType]) -> None:
    result, dtype = type_of(total), product.dtype
    alike = all(each.dtype is dtype for each in factors)
    require(alike, NoMatch, f"{total} sums what was converted to {product}")
    known = dtype.is_floating_point and result.dtype.is_floating_point and dtype.itemsize > 1
    require(known, NoMatch, f"{total} is {result}, of {product}")
    wide = result.dtype is dtype or result.dtype.itemsize > dtype.itemsize
    require(wide, NoMatch, f"{total} rounds {product} to {result}")


def _product_of(dtype: torch.dtype) -> OpOverload:
    """A product that keeps all digits, as the multiplication does."""
    return FULL_BMM.op if dtype is torch.float32 and rounds_products() else aten.bmm.default


def _has(factor: fx.Node, ndim: int) -> list[bool]:
    """For each of ``ndim`` dims, whether elements of ``factor`` differ along it."""
    known = type_of(factor)
    own = [
        not same(size, 1) and not same(stride, 0)
        for size, stride in zip(known.shape, known.strides, strict=True)
    ]
    return [False] * (ndim - known.ndim) + own


def _classified(
    total: fx.Node, shape: Sequence[int], x: Sequence[bool], y: Sequence[bool], dims: Sequence[int]
) -> _Dims:
    summed = {dim % len(shape) for dim in dims}
    groups: dict[tuple[bool, bool, bool], list[int]] = {}
    for dim, size in enumerate(shape):
        if not same(size, 1):
            groups.setdefault((x[dim], y[dim], dim in summed), []).append(dim)

    wanted = (True, True, False), (True, False, False), (False, True, False), (True, True, True)
    found = _Dims(*(tuple(groups.pop(key, ())) for key in wanted))
    others = [dim for group in groups.values() for dim in group]
    require(not others, NoMatch, f"{total} has dims {others} that no product has")
    whole = bool(found.left and found.right and found.summed)
    require(whole, NoMatch, f"{total} is no product of matrices")
    return found


def _is_ordered(dims: Sequence[int]) -> bool:
    return list(dims) == sorted(dims)


def _require_gain(total: fx.Node, product: TensorType, dims: _Dims) -> None:
    model = target_for(product.device).model
    groups = (dims.both, dims.left, dims.right, dims.summed)
    sizes = [sample_of(prod(product.shape[dim] for dim in group)) for group in groups]
    formula, library = _seconds(model, type_of(total).dtype, *sizes)
    words = f"{total} takes {formula:.1e} s as a formula and {library:.1e} as a product"
    require(library < formula, NoMatch, words)


def _seconds(
    model: DeviceModel, dtype: torch.dtype, batch: int, rows: int, columns: int, inner: int
) -> tuple[float, float]:
    """As a formula, and as a product whose factors are copied and whose result is read again."""
    elements = batch * rows * columns * inner
    outside = batch * (2 * inner * (rows + columns) + 2 * rows * columns)
    memory = dtype.itemsize / model.bandwidth
    product = 2 * elements / model.rate(dtype) + outside * memory + _LAUNCHES * model.launch
    return elements * memory / _FROM_CACHE, product


def _matrix(
    build: ReplacementBuilder, factor: fx.Node, product: TensorType, groups: Sequence[Sequence[int]]
) -> fx.Node:
    """``factor`` as a batch of matrices: each of its dims joins a group of those of ``product``."""
    batch, rows, columns = groups
    factor = _without_others(build, factor, product.ndim, [*batch, *rows, *columns])
    order = sorted([*batch, *rows, *columns])
    straight, turned = (batch, rows, columns), (batch, columns, rows)
    known = type_of(factor)
    if not _joins(known, order, straight) and _joins(known, order, turned):
        matrix = _joined(build, factor, product, order, turned)
        return build.call(aten.transpose.int, matrix, 1, 2)
    return _joined(build, factor, product, order, straight)


def _joined(
    build: ReplacementBuilder,
    factor: fx.Node,
    product: TensorType,
    order: Sequence[int],
    groups: Sequence[Sequence[int]],
) -> fx.Node:
    wanted = [dim for group in groups for dim in group]
    if not _is_ordered(wanted):
        moved = [order.index(dim) for dim in wanted]
        factor = build.call(aten.permute.default, factor, moved)
    sizes = [prod(product.shape[dim] for dim in group) for group in groups]
    return build.viewed(factor, sizes)


def _without_others(
    build: ReplacementBuilder, factor: fx.Node, ndim: int, dims: Sequence[int]
) -> fx.Node:
    """``factor`` with these dims of a product of ``ndim`` dims alone: along others all of its
    elements are equal."""
    missing = ndim - type_of(factor).ndim
    for dim in reversed(range(missing, ndim)):
        if dim not in dims:
            factor = build.call(aten.select.int, factor, dim - missing, 0)
    return factor


def _joins(known: TensorType, order: Sequence[int], groups: Sequence[Sequence[int]]) -> bool:
    """Whether a value with dims ``order`` is a batch of matrices as it lies, the last dim dense."""
    for group in groups:
        places = [order.index(dim) for dim in group]
        for outer, inner in pairwise(places):
            step = known.strides[inner] * known.shape[inner]
            if not same(known.strides[outer], step):
                return False
    return same(known.strides[order.index(groups[-1][-1])], 1)


MULTIPLY_WRITTEN_OUT = Rewrite((
    Rule(
        "written-out-product",
        lambda x, y, dims: aten.sum.dim_IntList(
            aten.mul.Tensor(x, y), dims, anything, dtype=anything
        ),
        lowering(_multiplied),
        one_region=True,
    ),
))  # fmt: skip
"""Products of matrices that are written as multiplications and sums are products.

::

    before:  m = mul(x, y); s = sum(m, [2])         x: f32[64, 1, 32], y: f32[1, 48, 32]
    after:   s = bmm(x, y)                          with views, and copies where no view does

Also with dims that both factors have and keep, and of values that are repeated along dims. Where
the ceilings of the device say that it wins: a generated kernel reads both factors once for each
element of the multiplication. The digits are those of the dtype: where PyTorch may round the
factors of ``bmm`` (``torch.set_float32_matmul_precision("high")``), ``treadle::full_bmm`` does not.
The opposite of ``DECOMPOSE_VECTORS``, which has the products with one row or column.
"""
