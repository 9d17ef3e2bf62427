"""Which operations work row by row, and their form in a chunk: one rule for each family.

::

    _log_softmax(x, -1)        x: f32[2, 7, 97], rows in two dims     ->  _log_softmax(part, 1)
    expand(y, [2, 7, 97])                                             ->  expand(part, [rows, 97])
    view(x, [14, 97])                                                 ->  part

A rule sees one node, and the facts about the rows of its operands; ``NoMatch`` says why the node
does not work row by row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import fx

from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import schema_of
from treadle.graph.analysis.pieces import first_of
from treadle.graph.core.arguments import map_argument
from treadle.graph.core.dim_maps import (
    ALONG_DIM,
    EXPANDS,
    REDUCTIONS,
    RESHAPES,
    SWAPS,
    dim_map,
    permutation,
)
from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.operators import OpOverload, arguments, is_item, may_recompute
from treadle.graph.core.types import is_tensor
from treadle.graph.rewrite.rules import NoMatch
from treadle.passes.chunks.rows import (
    ChunkValue,
    Grid,
    MadeRows,
    Member,
    Resliced,
    RowCount,
    RowPart,
    RowRange,
    RowSlice,
)
from treadle.util.errors import require

aten = torch.ops.aten

Shape = tuple[int, ...]
Fetch = Callable[[fx.Node, RowRange, Shape], RowPart | None]
"""The chunk's part of an operand, ``None`` where the operand has no rows of its own."""


@final
@dataclass(frozen=True)
class RowContext:
    """A node that may work on rows. ``rows`` and ``row_dims``: of its operands; ``fetch``: finds
    out whether an operand is computed in chunks, and refuses one with other rows."""

    node: fx.Node
    rows: RowRange
    row_dims: Shape
    grid: Grid
    fetch: Fetch

    def rows_of_call(self, args: Mapping[str, object]) -> MadeRows:
        """The operation of the node in the chunk, with arguments by name."""
        assert isinstance(self.node.target, OpOverload)
        return rows_of_call(self.node.target, args)

    @property
    def lead(self) -> int:
        """How many dims count rows."""
        return self.rows.lead

    @property
    def args(self) -> dict[str, Any]:
        """The node's arguments by name."""
        return arguments(self.node)

    def shape(self, node: fx.Node | None = None) -> Shape:
        """Of the value of the node itself, or of another."""
        return tuple(tensor_of(node or self.node).shape)

    def member(self, form: ChunkValue, rows: RowRange | None = None) -> Member:
        """The node in chunks, with the rows of its operands or others."""
        return Member(self.node, rows or self.rows, form)

    def aligned(self, operand: fx.Node) -> RowPart | RowSlice:
        """An operand whose leading dims are the rows."""
        part = self.fetch(operand, self.rows, self.row_dims)
        if part is not None:
            return part
        shape = self.shape(operand)
        is_aligned = shape[: self.lead] == self.row_dims
        require(is_aligned, NoMatch, f"{self.node}: {operand} has other rows")
        return RowSlice(operand, self.rows, self.row_dims, shape[self.lead :])

    def broadcast(self, operand: fx.Node, ndim: int) -> RowPart | RowSlice | fx.Node:
        """An operand of elementwise work on values of ``ndim`` dims; one without rows is the same
        for every chunk."""
        shape, behind = self.shape(operand), ndim - self.lead
        if len(shape) == ndim:
            part = self.fetch(operand, self.rows, self.row_dims)
            if part is not None:
                return part
        else:
            whole = self.fetch(operand, self.rows, self.row_dims) is None
            require(whole, NoMatch, f"{self.node}: rows of {operand} meet other dims")
        if len(shape) <= behind:
            return operand
        return RowSlice(operand, self.rows, self.row_dims, shape[len(shape) - behind :])

    def behind(self, dim: int, ndim: int) -> int:
        """Where ``dim`` of a value of ``ndim`` dims is in a chunk; it must not be one of rows."""
        at = dim % ndim if ndim else 0
        require(at >= self.lead, NoMatch, f"{self.node} mixes rows: dim {dim}")
        return at - self.lead + 1

    def sizes(self, shape: Shape) -> list[object]:
        """The shape of a chunk of a value."""
        require(shape[: self.lead] == self.row_dims, NoMatch, f"{self.node} changes rows")
        return [RowCount(self.rows), *shape[self.lead :]]


class OtherGrid(Exception):
    """Rows are cut for the first time, in a dim of ``grid``."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.grid = grid


Rule = Callable[[RowContext], Member]
_RULES: dict[object, Rule] = {}


def row_rule(node: fx.Node) -> Rule | None:
    """The rule for a node; ``None`` if there is none."""
    rule = _RULES.get(node.target)
    if rule is not None or not isinstance(node.target, OpOverload):
        return _item if is_item(node) else rule
    return _elementwise if facts_of(node.target).elementwise else None


def in_chunks(site: RowContext) -> Member:
    """The node as work on rows; ``NoMatch`` says why it is none."""
    node = site.node
    rule = row_rule(node)
    require(rule is not None, NoMatch, f"{node} ({node.target}) is not known to work row by row")
    assert rule is not None
    require(may_recompute(node) or is_item(node), NoMatch, f"{node} has effects")
    return rule(site)


def _for(*targets: object) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for target in targets:
            assert target not in _RULES, f"{target} is registered twice"
            _RULES[target] = rule
        return rule

    return register


def rows_of_call(target: OpOverload, named_args: Mapping[str, object]) -> MadeRows:
    """A call with arguments by name, each where the schema has it; defaults are left out."""
    args: list[object] = []
    kwargs: list[tuple[str, object]] = []
    for argument in schema_of(target).arguments:
        value = named_args[argument.name]
        if not argument.kwarg_only:
            args.append(value)
        elif not (argument.has_default_value() and value == argument.default_value):
            kwargs.append((argument.name, value))
    return MadeRows(target, tuple(args), tuple(kwargs))


def _mapped(args: Mapping[str, Any], f: Callable[[fx.Node], Any]) -> dict[str, object]:
    """The arguments with other operands."""
    return {
        name: map_argument(lambda leaf: f(leaf) if isinstance(leaf, fx.Node) else leaf, value)
        for name, value in args.items()
    }


def _result(site: RowContext) -> Shape:
    """The shape of the one result, which must have the rows of the operands."""
    require(is_tensor(site.node), NoMatch, f"{site.node} has several results")
    shape = site.shape()
    require(shape[: site.lead] == site.row_dims, NoMatch, f"{site.node} changes rows")
    return shape


def _elementwise(site: RowContext) -> Member:
    """``f(x, y)``: of each operand the rows of the chunk, or all of it if it has none."""
    ndim = len(_result(site))
    mapped = _mapped(site.args, lambda node: site.broadcast(node, ndim))
    return site.member(site.rows_of_call(mapped))


def _item(site: RowContext) -> Member:
    """One of several results."""
    source, at = site.node.args
    assert isinstance(source, fx.Node)
    _result(site)
    part = site.fetch(source, site.rows, site.row_dims)
    require(part is not None, NoMatch, f"{source} is not computed in chunks")
    return site.member(MadeRows(site.node.target, (part, at)))


def _all_aligned(site: RowContext, **changed: object) -> Member:
    """A call whose tensors all have the rows."""
    mapped = _mapped({**site.args, **changed}, site.aligned)
    return site.member(site.rows_of_call(mapped))


@_for(*REDUCTIONS, *ALONG_DIM, aten.cat.default)
def _across(site: RowContext) -> Member:
    """An operation over dims, or along one dim, that are no dims of rows."""
    known, dims = dim_map(site.node), site.args["dim"]
    listed = dims if isinstance(dims, Sequence) else [dims]
    require(bool(listed) and None not in listed, NoMatch, f"{site.node} mixes rows: all dims")
    (_, first), *_ = known.operands
    behind = [site.behind(dim, len(first)) for dim in listed]
    require(known.keeps(site.lead), NoMatch, f"{site.node} changes rows")
    return _all_aligned(site, dim=behind if isinstance(dims, Sequence) else behind[0])


@_for(*RESHAPES)
def _view(site: RowContext) -> Member:
    """Other row dims alone change nothing of a chunk, other dims behind them are a view of it."""
    source = site.args["self"]
    old, new = site.shape(source), site.shape()
    rows, lead = prod(old[: site.lead]), 0
    while lead < len(new) and prod(new[:lead]) != rows:
        lead += 1
    require(lead > 0 and prod(new[:lead]) == rows, NoMatch, f"{site.node} mixes rows: {new}")
    part, trailing = site.aligned(source), new[lead:]
    row_range = RowRange(lead, *site.rows.span)
    if trailing == old[site.lead :] and isinstance(part, RowPart):
        return site.member(part, row_range)
    return site.member(
        MadeRows(aten.view.default, (part, [RowCount(row_range), *trailing])), row_range
    )


@_for(aten.unsqueeze.default, aten.squeeze.dim)
def _thin_dim(site: RowContext) -> Member:
    """A dim of size 1 is added or removed: among the dims of rows, a chunk stays the same."""
    source = site.args["self"]
    old, new, part = len(site.shape(source)), len(site.shape()), site.aligned(source)
    at, lead = site.args["dim"] % max(old, new), site.lead + new - old
    if at >= site.lead:
        return site.member(MadeRows(site.node.target, (part, at - site.lead + 1)))
    require(isinstance(part, RowPart) and lead > 0, NoMatch, f"{site.node} is not of rows")
    assert isinstance(part, RowPart)
    return site.member(part, RowRange(lead, *site.rows.span))


@_for(*EXPANDS)
def _expand(site: RowContext) -> Member:
    """Expanded behind the rows; or along the rows, for a value that has none."""
    shape = site.shape()
    part = site.broadcast(site.args["self"], len(shape))
    return site.member(MadeRows(site.node.target, (part, site.sizes(shape))))


@_for(*SWAPS)
def _transpose(site: RowContext) -> Member:
    """Of two dims, for a product over rows; otherwise of dims behind the rows."""
    order, part = permutation(site.node), site.aligned(site.args["self"])
    if order[: site.lead] == list(range(site.lead)):
        behind = [0, *(dim - site.lead + 1 for dim in order[site.lead :])]
        return site.member(MadeRows(aten.permute.default, (part, behind)))
    turned = site.lead == 1 and order == [1, 0]
    require(turned, NoMatch, f"{site.node} moves rows behind other dims")
    flipped = RowRange(1, *site.rows.span, transposed=True)
    return site.member(MadeRows(aten.t.default, (part,)), flipped)


@_for(aten.slice.Tensor)
def _slice(site: RowContext) -> Member:
    """Part of a dim that is not one of rows; or fewer rows, the same of each outer."""
    args = site.args
    source = args["self"]
    shape, new = site.shape(source), site.shape()
    at = args["dim"] % len(shape)
    start = _start(site, shape[at])
    if at >= site.lead:
        behind = at - site.lead + 1
        end = start + new[at]
        return site.member(MadeRows(site.node.target, (site.aligned(source), behind, start, end)))
    _require_middle(site, shape, at)
    return _resliced(site, source, site.rows.start + start, new[at])


@_for(aten.slice_backward.default)
def _slice_backward(site: RowContext) -> Member:
    """Zeros around part of a dim that is not one of rows; or around some rows of each outer."""
    named_args = site.args
    source = named_args["grad_output"]
    shape, new = site.shape(source), site.shape()
    at = named_args["dim"] % len(new)
    start = _start(site, new[at])
    if at >= site.lead:
        behind, sizes = at - site.lead + 1, site.sizes(new)
        args = (site.aligned(source), sizes, behind, start, start + shape[at], 1)
        return site.member(MadeRows(site.node.target, args))
    _require_middle(site, shape, at)
    low = site.rows.start - start
    inside = low >= 0 and low + new[at] <= site.grid.middle
    require(inside, NoMatch, f"{site.node} adds rows that the product has not")
    return _resliced(site, source, low, new[at])


def _start(site: RowContext, length: int) -> int:
    """Where a slice of a dim of this length begins; the slice skips no element after that."""
    require(site.args["step"] == 1, NoMatch, f"{site.node} skips elements")
    return first_of(site.args["start"], length)


def _resliced(site: RowContext, source: fx.Node, low: int, count: int) -> Member:
    """``count`` rows of each outer, from ``low`` on, of what has others."""
    rows = RowRange(site.lead, low, low + count)
    return site.member(Resliced(source, site.rows, rows), rows)


def _require_middle(site: RowContext, shape: Shape, dim: int) -> None:
    """``dim`` of a value with rows is the grid's middle, as far as the value has it."""
    sizes = prod(shape[:dim]), shape[dim], prod(shape[dim + 1 : site.lead])
    wanted = site.grid.outer, site.rows.stop - site.rows.start, site.grid.inner
    if sizes != wanted and site.grid.is_flat and prod(sizes) == site.grid.count:
        raise OtherGrid(Grid(*sizes))
    require(sizes == wanted, NoMatch, f"{site.node} cuts rows where another does not")


@_for(aten.nll_loss_backward.default)
def _nll_loss_backward(site: RowContext) -> Member:
    """The gradient of all rows is the same, or one of each row where losses are not summed."""
    args = site.args
    require(site.lead == 1, NoMatch, f"{site.node} has rows in several dims")
    _result(site)
    rowwise = {name: site.aligned(args[name]) for name in ("self", "target")}
    if args["reduction"] == 0:
        rowwise["grad_output"] = site.aligned(args["grad_output"])
    return site.member(site.rows_of_call(args | rowwise))


@_for(aten.nll_loss_forward.default)
def nll_loss_of_rows(site: RowContext) -> Member:
    """The losses of single rows; their sum is not row by row."""
    args = site.args
    require(site.lead == 1, NoMatch, f"{site.node} has rows in several dims")
    rowwise = {name: site.aligned(args[name]) for name in ("self", "target")}
    return site.member(site.rows_of_call(args | rowwise | {"reduction": 0}))


@_for(aten.full.default, aten.zeros.default, aten.ones.default)
def _filled(site: RowContext) -> Member:
    return site.member(site.rows_of_call(site.args | {"size": site.sizes(site.shape())}))


_NUMBERS: Mapping[object, int] = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
}
"""Operations that fill the shape of an operand, with the number that they fill it with."""


def number_of(node: fx.Node) -> int | None:
    """The number that the node is filled with, whatever its operand is."""
    return _NUMBERS.get(node.target)


@_for(*_NUMBERS)
def _one_number(site: RowContext) -> Member:
    like, number = tensor_of(site.node), _NUMBERS[site.node.target]
    value = bool(number) if like.dtype is torch.bool else number
    kwargs = (("dtype", like.dtype), ("device", like.device))
    return site.member(MadeRows(aten.full.default, (site.sizes(site.shape()), value), kwargs))
