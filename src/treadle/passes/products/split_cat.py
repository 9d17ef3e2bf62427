"""Values that were split and concatenated again, or concatenated and split again.

::

    cat(split(x))               x
    split(cat(a, b))            a, b
    cat(cat(a, b), slice(a))    cat(a, b, slice(a))

All of this is exact: the same elements, read from their origin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from treadle.algebra.extents import same, surely_less
from treadle.graph.analysis.alias import leaves_step, read_by_strides
from treadle.graph.analysis.pieces import Joined, Piece, is_empty, joined_of, piece_of, selected_of
from treadle.graph.core.dim_maps import SPLITS
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, set_argument
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of, type_of_tensor
from treadle.graph.core.values import compute, refresh
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract, GraphPass, until_settled
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten


@dataclass(frozen=True)
class SimplifySplitCat(GraphPass):
    """Read pieces of a cat from its operands, and join what was cut.

    before:  c = cat([a, b], 1); p = split(c, [2, 3], 1); y = relu(p[1])
    after:   y = relu(b)
    before:  c = cat([a, b]); s = slice(a, 0, 0, 2); d = cat([c, s])
    after:   s = slice(a, 0, 0, 2); d = cat([a, b, s])
    before:  c = cat([slice(x, 0, 0, 2), slice(x, 0, 2, 5), y])
    after:   c = cat([slice(x, 0, 0, 5), y])

    ``cuts``: pieces of cats, and what is selected from stacks; ``nested``: cats of cats; ``runs``:
    neighbours in a cat that are neighbours in another value. The cat or stack that is cut must not
    be needed any more afterwards: its operands would live beside it. No returned value becomes
    bytes of an operand. What a whole cat or stack of pieces equals is a no-op: ``noops.py``.
    """

    contract = Contract()

    cuts: bool = True
    nested: bool = True
    runs: bool = True

    def run(self, step: StepGraph) -> int:
        return until_settled(self._once, step)

    def _once(self, step: StepGraph) -> int:
        changed: list[fx.Node] = []
        for node in list(step.graph.nodes):
            if self.cuts and node.target in (aten.cat.default, aten.stack.default):
                changed += _uncut(node)
            if self.nested and joined_of(node) is not None:
                changed += _flattened(node)
            if self.runs and joined_of(node) is not None:
                changed += _merged(node)
        refresh(step.graph, changed)
        return len(changed)


# --- pieces of a cat ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    """``reader`` equals ``source``, or ``bounds`` of it along ``dim``."""

    reader: fx.Node
    source: fx.Node
    dim: int
    bounds: tuple[int, int] | None


def _uncut(node: fx.Node) -> list[fx.Node]:
    cuts = attempt(cuts_of, node)
    changed: list[fx.Node] = []
    for cut in () if isinstance(cuts, NoMatch) else cuts:
        new = cut.source
        if cut.bounds is not None:
            build = ReplacementBuilder(cut.reader)
            new = build.call(aten.slice.Tensor, cut.source, cut.dim, *cut.bounds)
        cut.reader.replace_all_uses_with(new)
        _erase(cut.reader, until=node)
        changed.append(new)
    return changed


def _erase(reader: fx.Node, *, until: fx.Node) -> None:
    """Erase the reader, and the split whose last result it was."""
    node = reader
    while node is not until and not node.users:
        above = node.args[0]
        assert isinstance(above, fx.Node), node
        node.graph.erase_node(node)
        node = above


def cuts_of(node: fx.Node) -> list[_Cut]:
    """Where each reader of a cat or stack finds its elements; ``NoMatch`` unless all of them can,
    cats of the cat aside."""
    require(type_of(node).is_contiguous, NoMatch, f"{node} is not in row-major order")
    readers = _pieces_among(node)
    require(bool(readers), NoMatch, f"{node} is not cut")
    joined = joined_of(node)
    if node.target is aten.stack.default:
        cuts = [_from_stack(node, reader) for reader in readers]
    else:
        require(joined is not None, NoMatch, f"{node} converts or skips an operand")
        assert joined is not None
        cuts = [_from_cat(joined, reader) for reader in readers]
    for cut in cuts:
        _require_same_bytes(node, cut)
    return cuts


def _pieces_among(node: fx.Node) -> list[fx.Node]:
    """The pieces that readers of ``node`` are or make; ``NoMatch`` if one reads the whole."""
    pieces: list[fx.Node] = []
    for user in node.users:
        if user.target in SPLITS or user.target is aten.unbind.int:
            pieces += user.users
        elif user.target in (aten.slice.Tensor, aten.select.int):
            pieces.append(user)
        else:
            along = _is_cat_along(user, node)
            require(along, NoMatch, f"{node} is read whole by {user}")
    return pieces


def _is_cat_along(user: fx.Node, node: fx.Node) -> bool:
    outer, inner = joined_of(user), joined_of(node)
    return outer is not None and inner is not None and outer.dim == inner.dim


def _from_cat(joined: Joined, reader: fx.Node) -> _Cut:
    piece = piece_of(reader)
    require(piece is not None, NoMatch, f"{reader} is not a slice")
    assert piece is not None
    require(piece.dim == joined.dim, NoMatch, f"{reader} cuts another dim")
    starts = joined.starts
    for operand, start, stop in zip(joined.operands, starts, starts[1:], strict=False):
        if not _is_ordered(start, piece, stop):
            continue
        whole = same(piece.start, start) and same(piece.stop, stop)
        bounds = None if whole else (piece.start - start, piece.stop - start)
        return _Cut(reader, operand, joined.dim, bounds)
    raise NoMatch(f"{reader} is not inside one operand of {joined.node}")


def _is_ordered(start: int, piece: Piece, stop: int) -> bool:
    """``start <= piece.start <= piece.stop <= stop`` for all sizes."""
    return surely_less(start, piece.start + 1) and surely_less(piece.stop, stop + 1)


def _from_stack(stack: fx.Node, reader: fx.Node) -> _Cut:
    chosen = selected_of(reader)
    require(chosen is not None, NoMatch, f"{reader} selects nothing")
    assert chosen is not None
    args = arguments(stack)
    dim = args["dim"] % type_of(stack).ndim
    require(chosen.dim == dim, NoMatch, f"{reader} cuts another dim")
    return _Cut(reader, args["tensors"][chosen.index], dim, None)


def _require_same_bytes(node: fx.Node, cut: _Cut) -> None:
    """The operand may replace its piece only if it has the same bytes for every view and reader."""
    reader, source = cut.reader, cut.source
    regions = {info(end).region for end in (node, reader)}
    require(len(regions) == 1, NoMatch, f"{reader} is in another region than {node}")
    new, old = type_of(source), type_of(reader)
    require(new.dtype is old.dtype, NoMatch, f"{node} converts {source}")
    require(new.is_contiguous, NoMatch, f"{source} is not in row-major order")
    require(not leaves_step(reader), NoMatch, f"{reader} is returned and would be {source}")
    require(not read_by_strides(reader), NoMatch, f"{reader} is read by its strides")


# --- operands of a cat ----------------------------------------------------------------------


def _flattened(node: fx.Node) -> list[fx.Node]:
    """``cat([cat([a, b]), c])`` reads a, b and c, if nobody else reads the inner one."""
    outer = joined_of(node)
    if outer is None:
        return []
    inner = [
        joined_of(operand) if _is_inside(operand, outer) else None for operand in outer.operands
    ]
    if not any(inner):
        return []
    operands: list[fx.Node] = []
    for operand, flattened in zip(outer.operands, inner, strict=True):
        operands += flattened.operands if flattened is not None else (operand,)
    if not _rewired(node, operands):
        return []
    for operand in dict.fromkeys(outer.operands):
        if not operand.users and operand.target is aten.cat.default:
            node.graph.erase_node(operand)
    return [node]


def _is_inside(node: fx.Node, outer: Joined) -> bool:
    inner = joined_of(node)
    lone = len(node.users) == 1 and info(node).region == info(outer.node).region
    return lone and inner is not None and inner.dim == outer.dim


def _merged(node: fx.Node) -> list[fx.Node]:
    """Neighbours that together are one piece of another value become that piece."""
    joined = joined_of(node)
    if joined is None:
        return []
    operands = [operand for operand in joined.operands if not is_empty(operand, joined.dim)]
    runs = _runs(operands, joined.dim)
    if len(runs) == len(operands):
        return []
    return [node] if _rewired(node, [_one(run, node) for run in runs]) else []


def _rewired(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Whether the cat has the same layout with other operands, which it then has."""
    old = arguments(node)["tensors"]
    set_argument(node, "tensors", list(operands))
    kept = type_of_tensor(compute(node)) == type_of(node)
    if not kept:
        set_argument(node, "tensors", old)
    return kept


def _runs(operands: Sequence[fx.Node], dim: int) -> list[list[fx.Node]]:
    """Operands, those that continue each other together."""
    runs: list[list[fx.Node]] = []
    previous: Piece | None = None
    for operand in operands:
        piece = piece_of(operand)
        piece = piece if piece is not None and piece.dim == dim else None
        if previous is not None and piece is not None and piece.continues(previous):
            runs[-1].append(operand)
        else:
            runs.append([operand])
        previous = piece
    return runs


def _one(run: Sequence[fx.Node], node: fx.Node) -> fx.Node:
    first, last = piece_of(run[0]), piece_of(run[-1])
    if len(run) == 1 or first is None or last is None:
        return run[0]
    whole = Piece(first.source, first.dim, first.start, last.stop)
    if whole.is_whole:
        return whole.source  # a cat of one operand may be left, which noops.py handles
    args = (whole.source, whole.dim, whole.start, whole.stop)
    return ReplacementBuilder(node).call(aten.slice.Tensor, *args)
