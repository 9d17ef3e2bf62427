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
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast, final

import torch
from torch import fx

from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.arguments import map_argument
from treadle.graph.core.dim_maps import EXPANDS, RESHAPES, Factors, dim_map
from treadle.graph.core.node_info import tensor_of, value_of
from treadle.graph.core.operators import arguments, is_item, may_recompute, operation_name
from treadle.graph.core.types import is_tensor, type_of
from treadle.passes.chunks.rows import (
    BatchCount,
    BatchDim,
    BatchMember,
    BatchSlice,
    Contraction,
    Exit,
    MadeRows,
    RowPart,
    Total,
)
from treadle.passes.chunks.rules import rows_of_call
from treadle.passes.chunks.templates import wide_dtype
from treadle.util.errors import require
from treadle.util.nested import leaves
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

Places = BatchDim | tuple[BatchDim | None, ...]
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
        return place

    def part(self, operand: fx.Node, at: BatchDim) -> RowPart | BatchSlice:
        """The rows of an operand that has them at ``at``."""
        self.whole_or_part(operand)
        place = self.place(operand)
        if place is None:
            shape = tensor_of(operand).shape
            fits = at.dim < len(shape) and shape[at.dim] == self.count * at.inner
            require(fits, NoMatch, f"{self.name} meets {operand}, which has other rows")
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


def of_rows(site: BatchContext) -> BatchMember | Exit:
    """The node on a micro-batch; ``NoMatch`` says why it needs all rows."""
    node = site.node
    if is_item(node):
        return _item(site)
    require(isinstance(node.target, OpOverload), NoMatch, f"{site.name} is not known")
    require(may_recompute(node), NoMatch, f"{site.name} has effects")
    if node.target in _ALIGNED:
        return _aligned(site, _ALIGNED[node.target])
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
    """By the factors of its dims: rows are one factor, the slowest of its dim."""
    node, args = site.node, site.args
    known = dim_map(node)
    operands = [leaf for value in args.values() for leaf in leaves(value) if is_tensor(leaf)]
    for operand, (_, dims) in zip(operands, known.operands, strict=True):
        at = site.place(operand)
        if at is not None:
            known.table.grouped(node, [dims[at.dim]], [site.count, at.inner])
    factors: set[int] = set()
    for operand, (_, dims) in zip(operands, known.operands, strict=True):
        at = site.place(operand)
        if at is not None:
            rows, _ = known.table.grouped(node, [dims[at.dim]], [site.count, at.inner])
            require(len(rows) == 1, NoMatch, f"{site.name} splits the batch")
            factors |= {*rows}
    require(len(factors) == 1, NoMatch, f"{site.name} combines rows with other rows")
    (factor,) = factors
    forms: dict[int, object] = {}
    for at_operand, (operand, (_, dims)) in enumerate(zip(operands, known.operands, strict=True)):
        at = _place_of(site, factor, known.table.refined(dims), known.table.shape)
        forms[at_operand] = site.whole(operand) if at is None else site.part(operand, at)
    results = [
        _place_of(site, factor, known.table.refined(dims), known.table.shape)
        for dims in known.results
    ]
    templates = iter(forms.values())

    def on_rows(leaf: Any) -> Any:
        return next(templates) if is_tensor(leaf) else leaf

    named: dict[str, object] = {n: map_argument(on_rows, value) for n, value in args.items()}
    if None in results:
        return _sum(site, named)
    places = cast("tuple[BatchDim, ...]", tuple(results))
    if not is_tensor(node):
        return BatchMember(node, places, site.call(named))
    return BatchMember(node, places[0], _sized(site, named, places[0]))


def _place_of(
    site: BatchContext,
    factor: int,
    dims: Sequence[Factors],
    shape: Callable[[tuple[Factors, ...]], Sequence[int]],
) -> BatchDim | None:
    """Where the factor is; ``NoMatch`` if it is not the slowest of its dim."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            require(factors[0] == factor, NoMatch, f"{site.name} puts rows behind other dims")
            return BatchDim(dim, shape((factors[1:],))[0])
    return None


def _sized(site: BatchContext, named: dict[str, object], at: BatchDim) -> MadeRows:
    """The call; where it says the shape of its result, that of a micro-batch."""
    sizes: list[object] = list(type_of(site.node).shape)
    sizes[at.dim] = BatchCount(at.inner)
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
            return Contraction(node, named["mat1"], named["mat2"], site.args["self"])
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


_RULES: Mapping[object, Callable[[BatchContext], BatchMember | Exit]] = {
    aten.sum.default: _sum_all,
    aten.mean.default: _sum_all,
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


@final
@dataclass(frozen=True)
class Aligned:
    """An operator whose ``rows`` have the batch in one of their first dims, all in the same, as
    many as ``lead`` says; the first of them is there in each call. ``results``: whether each has
    rows, ``False`` if it is a sum over them. ``counts``: arguments that are the number of rows.
    ``refused``: an argument with which it works otherwise, and the value that is none."""

    rows: tuple[str, ...]
    results: tuple[bool, ...]
    lead: Callable[[Mapping[str, Any]], int]
    counts: tuple[str, ...] = ()
    refused: Mapping[str, object] = field(default_factory=dict[str, object])


def _first(args: Mapping[str, Any]) -> int:
    return 1


def _all_of(name: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda args: type_of(args[name]).ndim


def _before_normalized(args: Mapping[str, Any]) -> int:
    return type_of(args["input"]).ndim - len(args["normalized_shape"])


def _before_images(args: Mapping[str, Any]) -> int:
    return type_of(args["self"]).ndim - 3


_ATTENTION = ("query", "key", "value")
_ALIGNED: Mapping[object, Aligned] = {
    aten.embedding.default: Aligned(
        ("indices",), (True,), _all_of("indices"), refused={"scale_grad_by_freq": False}
    ),
    aten.embedding_dense_backward.default: Aligned(
        ("indices", "grad_output"),
        (False,),
        _all_of("indices"),
        refused={"scale_grad_by_freq": False},
    ),
    aten.native_layer_norm.default: Aligned(("input",), (True, True, True), _before_normalized),
    aten.native_layer_norm_backward.default: Aligned(
        ("input", "grad_out", "mean", "rstd"), (True, False, False), _before_normalized
    ),
    aten._fused_rms_norm.default: Aligned(("input",), (True, True), _before_normalized),
    aten._fused_rms_norm_backward.default: Aligned(
        ("input", "grad_out", "rstd"), (True, False), _before_normalized
    ),
    aten.native_group_norm.default: Aligned(("input",), (True, True, True), _first, ("N",)),
    aten.native_group_norm_backward.default: Aligned(
        ("input", "grad_out", "mean", "rstd"), (True, False, False), _first, ("N",)
    ),
    aten.convolution.default: Aligned(("input",), (True,), _first),
    aten.convolution_backward.default: Aligned(
        ("input", "grad_output"), (True, False, False), _first
    ),
    aten.max_pool2d_with_indices.default: Aligned(("self",), (True, True), _before_images),
    aten.max_pool2d_with_indices_backward.default: Aligned(
        ("self", "grad_output", "indices"), (True,), _before_images
    ),
    aten.avg_pool2d.default: Aligned(("self",), (True,), _before_images),
    aten.avg_pool2d_backward.default: Aligned(("self", "grad_output"), (True,), _before_images),
    aten._adaptive_avg_pool2d.default: Aligned(("self",), (True,), _before_images),
    aten._adaptive_avg_pool2d_backward.default: Aligned(
        ("self", "grad_output"), (True,), _before_images
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Aligned(
        _ATTENTION, (True, True), _first, refused={"dropout_p": 0.0}
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Aligned(
        (*_ATTENTION, "grad_out", "out", "logsumexp"),
        (True, True, True),
        _first,
        refused={"dropout_p": 0.0},
    ),
    aten.nll_loss_backward.default: Aligned(("self", "target"), (True,), _first),
}


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
        elif name == "attn_mask" and is_tensor(value):
            named[name] = _mask(site, value, at)
        elif name in aligned.counts:
            named[name] = BatchCount(at.inner)
        else:
            named[name] = map_argument(lambda leaf: _whole(site, leaf), value)
    form = site.call(named)
    if not isinstance(value_of(node), torch.Tensor):
        return BatchMember(node, tuple(at if has else None for has in aligned.results), form)
    return BatchMember(node, at, form) if aligned.results[0] else _total(node, form)


def _whole(site: BatchContext, leaf: Any) -> Any:
    return site.whole(leaf) if isinstance(leaf, fx.Node) else leaf


def _mask(site: BatchContext, mask: fx.Node, at: BatchDim) -> object:
    """A mask of each row, or one for all of them."""
    kind = type_of(mask)
    if site.place(mask) is None and (kind.ndim < 4 or kind.shape[0] == 1):
        return site.whole(mask)
    return site.part(mask, at)
