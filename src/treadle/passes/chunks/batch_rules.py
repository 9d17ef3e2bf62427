"""Where the rows of a batch are after an operation, and the operation on some of them.

::

    view(x, [48, 16])        x: f32[6, 8, 16], rows in dim 0     ->  rows in dim 0, 8 elements each
    t(x)                     x: f32[48, 16]                      ->  rows in dim 1
    mm(t(g), x)              rows in dim 1, rows in dim 0        ->  a sum over rows
    layer_norm_backward(..)  rows in dim 0                       ->  rows; sums; sums

What operators do to dims says ``dim_maps``. The table of ``Aligned`` has operators that keep rows
where they are and are not in it. ``NoMatch`` says why an operation needs all rows at once.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import Any, cast, final

import torch
from torch import fx

from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.arguments import map_argument
from treadle.graph.core.dim_maps import EXPANDS, RESHAPES, Dims, Factors, FactorTable, dim_map
from treadle.graph.core.node_info import tensor_of, value_of
from treadle.graph.core.operators import arguments, is_item, may_recompute, operation_name
from treadle.graph.core.types import is_tensor, type_of
from treadle.passes.chunks.aligned import ALIGNED, Aligned
from treadle.passes.chunks.rows import (
    BatchCount,
    BatchDim,
    BatchMember,
    BatchSlice,
    Contraction,
    Exit,
    MadeRows,
    Rowless,
    RowPart,
    Total,
)
from treadle.passes.chunks.rules import rows_of_call
from treadle.passes.chunks.templates import wide_dtype
from treadle.util.errors import require
from treadle.util.nested import leaves
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten

Places = BatchDim | Rowless | tuple[BatchDim | Rowless | None, ...]
_MASKS = ("attn_mask", "attn_bias")
_SUM = 2
"""PyTorch's number of ``reduction="sum"``, after none and mean."""


@final
@dataclass(frozen=True)
class BatchContext:
    """An operation that may work on rows. ``count``: rows of the batch; ``places``: where values
    have them; ``given``: those of them that are there before; ``late``: what is known only after
    all rows."""

    node: fx.Node
    count: int
    places: Mapping[fx.Node, Places]
    given: AbstractSet[fx.Node]
    late: Mapping[fx.Node, str]

    @property
    def args(self) -> dict[str, Any]:
        """The node's arguments by name."""
        return arguments(self.node)

    @property
    def name(self) -> str:
        """The operation, for messages."""
        return operation_name(self.node.target)

    def call(self, args: Mapping[str, object]) -> MadeRows:
        """The operation of the node on a micro-batch, with arguments by name."""
        assert isinstance(self.node.target, OpOverload)
        return rows_of_call(self.node.target, args)

    def place(self, operand: fx.Node) -> BatchDim | None:
        """Where the operand, one tensor, has rows."""
        place = self.places.get(operand)
        assert not isinstance(place, tuple), f"{operand} is several tensors"
        require(not isinstance(place, Rowless), NoMatch, f"{self.name} reads {operand}")
        return cast("BatchDim | None", place)

    def part(self, operand: fx.Node, at: BatchDim) -> RowPart | BatchSlice:
        """The rows of an operand that has them at ``at``."""
        self.whole_or_part(operand)
        place = self.place(operand)
        if place is None:
            shape = tensor_of(operand).shape
            fits = at.dim < len(shape) and shape[at.dim] == self.count * at.inner
            fits = fits and at.outer == 1
            require(fits, NoMatch, f"{self.name} reads a value that has other rows")
            return BatchSlice(operand, at)
        require(place == at, NoMatch, f"{self.name} meets rows with other dims")
        return BatchSlice(operand, at) if operand in self.given else RowPart(operand)

    def whole(self, operand: fx.Node) -> fx.Node:
        """An operand that is the same for all rows."""
        self.whole_or_part(operand)
        require(operand not in self.places, NoMatch, f"{self.name} needs all rows of {operand}")
        return operand

    def whole_or_part(self, operand: fx.Node) -> None:
        """``NoMatch`` if the operand is known only after all rows."""
        require(operand not in self.late, NoMatch, f"{operand} is known only after all rows")


_STATISTICS = frozenset({
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default,
})  # fmt: skip


def of_rows(site: BatchContext) -> BatchMember | Exit:
    """The node on a micro-batch; ``NoMatch`` says why it needs all rows."""
    node = site.node
    if is_item(node):
        return _item(site)
    require(node.target not in _STATISTICS, NoMatch, f"{site.name} uses statistics of all rows")
    known = isinstance(node.target, OpOverload)
    require(known, NoMatch, f"{site.name} is not known to compute row by row")
    require(may_recompute(node), NoMatch, f"{site.name} draws, or has other effects")
    if node.target in ALIGNED:
        return _aligned(site, ALIGNED[node.target])
    rule = _RULES.get(node.target, _by_dims)
    return rule(site)


def _item(site: BatchContext) -> BatchMember | Exit:
    source, index = cast("tuple[fx.Node, int]", site.node.args)
    site.whole_or_part(source)
    places = site.places[source]
    assert isinstance(places, tuple)
    form, at = MadeRows(site.node.target, (RowPart(source), index)), places[index]
    return _total(site.node, form) if at is None else BatchMember(site.node, at, form)


def _total(node: fx.Node, part: object, divisor: int | None = None) -> Total:
    """``part`` of each micro-batch, added up."""
    dtype, kept = type_of(node).dtype, wide_dtype(type_of(node).dtype)
    if kept != dtype:
        part = MadeRows(aten._to_copy.default, (part,), (("dtype", kept),))
    assert isinstance(part, MadeRows)
    return Total(node, part, divisor)


# Operators that say what they do to dims.


def _by_dims(site: BatchContext) -> BatchMember | Exit:
    """By the factors of its dims, of which the rows are one."""
    node, args = site.node, site.args
    found = attempt(dim_map, node)
    if isinstance(found, NoMatch):
        raise NoMatch(f"{site.name} is not known to compute row by row")
    operands = [leaf for value in args.values() for leaf in leaves(value) if is_tensor(leaf)]
    pairs = list(zip(operands, (dims for _, dims in found.operands), strict=True))
    factor = _factor_of_rows(site, found.table, pairs)

    def place(dims: Dims) -> BatchDim | None:
        return _place_of(found.table, factor, found.table.refined(dims))

    results = [place(dims) for dims in found.results]
    added = args["self"] if node.target is aten.addmm.default and None in results else None
    forms: list[fx.Node | RowPart | BatchSlice] = []
    for operand, dims in pairs:
        at = place(dims)
        if operand is added and at is None:
            forms.append(operand)  # to the finished sum
        else:
            forms.append(site.whole(operand) if at is None else site.part(operand, at))
    templates = iter(forms)

    def on_rows(leaf: Any) -> Any:
        return next(templates) if is_tensor(leaf) else leaf

    named: dict[str, object] = {n: map_argument(on_rows, value) for n, value in args.items()}
    if None in results:
        return _sum(site, named)
    places = cast("tuple[BatchDim, ...]", tuple(results))
    if not is_tensor(node):
        return BatchMember(node, places, site.call(named))
    return BatchMember(node, places[0], _sized(site, named, places[0]))


def _factor_of_rows(
    site: BatchContext, table: FactorTable, pairs: Sequence[tuple[fx.Node, Dims]]
) -> int:
    """The factor that counts rows, in all operands that have any."""

    def factors_of_rows() -> list[Factors]:
        found: list[Factors] = []
        for operand, dims in pairs:
            at = site.place(operand)
            if at is not None:
                sizes = [at.outer, site.count, at.inner]
                found.append(table.grouped(site.node, [dims[at.dim]], sizes)[1])
        return found

    factors_of_rows()  # divides factors: those of the first operands are known after it
    rows = {*factors_of_rows()}
    require(len(rows) == 1, NoMatch, f"{site.name} combines rows with other rows")
    (factors,) = rows
    require(len(factors) == 1, NoMatch, f"{site.name} splits the batch")
    return factors[0]


def _place_of(table: FactorTable, factor: int, dims: Dims) -> BatchDim | None:
    """Where the factor is."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            at = factors.index(factor)
            outer, _, inner = table.shape((factors[:at], (factor,), factors[at + 1 :]))
            return BatchDim(dim, inner, outer)
    return None


def _sized(site: BatchContext, named: dict[str, object], at: BatchDim) -> MadeRows:
    """The call; where it says the shape of its result, that of a micro-batch."""
    sizes: list[object] = list(type_of(site.node).shape)
    sizes[at.dim] = BatchCount(at.per_row)
    target = site.node.target
    if target in RESHAPES:
        return MadeRows(aten.view.default, (named["self"], sizes))
    if target in EXPANDS:
        return MadeRows(target, (named["self"], sizes))
    if "input_sizes" in named:
        return site.call(named | {"input_sizes": sizes})
    return site.call(named)


def _sum(site: BatchContext, named: Mapping[str, Any]) -> Exit:
    """A sum or mean over dims with rows, or a product over rows."""
    node, target = site.node, site.node.target
    match target:
        case aten.sum.dim_IntList | aten.mean.dim:
            dims = named["dim"] or range(type_of(site.args["self"]).ndim)
            return _sum_over(site, named["self"], [*dims], keepdim=named["keepdim"])
        case aten.mm.default:
            return Contraction(node, named["self"], named["mat2"])
        case aten.addmm.default:
            plain = named["beta"] == named["alpha"] == 1
            require(plain, NoMatch, f"{site.name} scales a sum over rows")
            added = site.args["self"]
            alike = type_of(added).shape == type_of(node).shape
            where = "start" if alike and added not in site.late else "added"
            return Contraction(node, named["mat1"], named["mat2"], **{where: added})
        case _:
            raise NoMatch(f"{site.name} combines the rows of the batch")


def _sum_over(site: BatchContext, part: object, dims: list[int], *, keepdim: bool) -> Total:
    node = site.node
    shape = type_of(site.args["self"]).shape
    kept = (("dtype", wide_dtype(type_of(node).dtype)),)
    is_mean = node.target in (aten.mean.dim, aten.mean.default)
    partial = MadeRows(aten.sum.dim_IntList, (part, dims, keepdim), kept)
    return Total(node, partial, prod(shape[dim] for dim in dims) if is_mean else None)


def _sum_all(site: BatchContext) -> Total:
    """``sum(x)``, ``mean(x)``"""
    source = site.args["self"]
    at = site.place(source)
    assert at is not None
    dims = list(range(type_of(source).ndim))
    return _sum_over(site, site.part(source, at), dims, keepdim=False)


# Losses with a reduction of their own.


def _loss(site: BatchContext) -> BatchMember | Exit:
    """``loss(x, y, reduction)`` of equal shapes, element by element."""
    node, args = site.node, site.args
    at, rowwise = _both(site, args)
    if args["reduction"] == 0:
        return BatchMember(node, at, site.call(args | rowwise))
    part = site.call(args | rowwise | {"reduction": _SUM})
    return _total(node, part, prod(type_of(args["self"]).shape) if args["reduction"] == 1 else None)


def _loss_backward(site: BatchContext) -> BatchMember:
    """The gradient of a mean is that of the sum over the number of all elements."""
    args = site.args
    at, rowwise = _both(site, args)
    gradient = args["grad_output"]
    if args["reduction"] == 0:
        rowwise["grad_output"] = site.part(gradient, at)
        return BatchMember(site.node, at, site.call(args | rowwise))
    site.whole(gradient)
    form = site.call(args | rowwise | {"reduction": _SUM})
    if args["reduction"] == 1:
        form = MadeRows(aten.div.Scalar, (form, prod(type_of(args["self"]).shape)))
    return BatchMember(site.node, at, form)


def _both(site: BatchContext, args: Mapping[str, Any]) -> tuple[BatchDim, dict[str, object]]:
    """Both operands of a loss, which have rows at one place."""
    shapes = type_of(args["self"]).shape, type_of(args["target"]).shape
    plain = shapes[0] == shapes[1] and not any(args.get(name) for name in ("weight", "pos_weight"))
    require(plain, NoMatch, f"{site.name} has weights, or operands of two shapes")
    at = next(at for name in ("self", "target") if (at := site.place(args[name])))
    return at, {name: site.part(args[name], at) for name in ("self", "target")}


def _select_backward(site: BatchContext) -> BatchMember:
    """Zeros around one index of a dim, which the gradient lacks."""
    args = site.args
    at = site.place(args["grad_output"])
    assert at is not None
    dim = args["dim"] % type_of(site.node).ndim
    place = BatchDim(at.dim + (dim <= at.dim), at.inner, at.outer)
    named: dict[str, object] = {**args, "grad_output": site.part(args["grad_output"], at)}
    return BatchMember(site.node, place, _sized(site, named, place))


_RULES: Mapping[object, Callable[[BatchContext], BatchMember | Exit]] = {
    aten.sum.default: _sum_all,
    aten.mean.default: _sum_all,
    aten.select_backward.default: _select_backward,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
        ),
        _loss,
    ),
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.binary_cross_entropy_backward.default,
        ),
        _loss_backward,
    ),
}


# Operators that leave rows where they are.


def _aligned(site: BatchContext, aligned: Aligned) -> BatchMember | Exit:
    node, args = site.node, site.args
    for name, expected in aligned.refused.items():
        require(args[name] == expected, NoMatch, f"{site.name} with {name}={args[name]}")
    names = aligned.rows
    if node.target is aten.nll_loss_backward.default and args["reduction"] == 0:
        names = (*names, "grad_output")
    at = next((at for name in names if (at := site.place(args[name]))), None)
    require(at is not None, NoMatch, f"{site.name} combines the rows of the batch")
    assert at is not None
    kept = at.dim < aligned.lead(args)
    require(kept, NoMatch, f"{site.name} combines the rows of the batch")
    named: dict[str, object] = {}
    for name, value in args.items():
        if name in names:
            named[name] = site.part(value, at)
        elif name in _MASKS and is_tensor(value):
            named[name] = _mask(site, value, at)
        elif name in aligned.counts:
            named[name] = BatchCount(at.per_row)
        else:
            named[name] = map_argument(lambda leaf: _whole(site, leaf), value)
    form = site.call(named)
    if not isinstance(value_of(node), torch.Tensor):
        kinds: dict[bool | None, BatchDim | Rowless | None]
        kinds = {True: at, False: None, None: Rowless()}
        return BatchMember(node, tuple(kinds[has] for has in aligned.results), form)
    return BatchMember(node, at, form) if aligned.results[0] else _total(node, form)


def _whole(site: BatchContext, leaf: Any) -> Any:
    """What a micro-batch reads where there are no rows."""
    if not isinstance(leaf, fx.Node):
        return leaf
    own = isinstance(site.places.get(leaf), Rowless)
    return RowPart(leaf) if own else site.whole(leaf)


def _mask(site: BatchContext, mask: fx.Node, at: BatchDim) -> object:
    """A mask of each row, or one for all of them."""
    kind = type_of(mask)
    if site.place(mask) is None and (kind.ndim < 4 or kind.shape[0] == 1):
        return site.whole(mask)
    return site.part(mask, at)
