"""Collectives and neighbouring products that can be computed chunk by chunk.

::

    gather      w = wait(all_gather(x)); o = moves of w; y = mm(o, a); z = addmm(b, o, c)
    scatter     y = mm(x, a); o = moves of y; w = wait(reduce_scatter(o))

Each row of a product needs one row of its left factor. So a part of the rows that every rank sends
can be gathered and multiplied separately, and a part of the rows that every rank receives can be
multiplied and reduced separately. The summed dim of a product is never split, because that would
round differently.
"""

from abc import ABC
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, final

import torch
from torch import fx

from treadle.algebra.extents import dims_in
from treadle.graph.core.collectives import Collective, CollectiveKind, collectives_in
from treadle.graph.core.dim_maps import CASTS, Dims, Factors, FactorTable, dim_map
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, is_item, operand_of, operation_name
from treadle.graph.core.types import TensorType, is_tensor, type_of
from treadle.passes.comm.overlap.kept_order import is_fence
from treadle.passes.comm.sharding.dim_moves import moved, rejoined, split_behind
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten

LEFT: Mapping[object, str] = {
    aten.mm.default: "self",
    aten.addmm.default: "mat1",
    aten._scaled_mm.default: "self",
}
"""Products of matrices, and what their left factor is called."""


@dataclass(frozen=True, slots=True, eq=False)
class _CollectiveSite(ABC):
    """``chain``: the moves between the ``products`` and the collective. ``rows`` and ``columns``:
    the factors of what the products read of a gather, or give to a scatter; ``local``: those of
    what this rank gives, or gets."""

    collective: Collective
    wait: fx.Node
    chain: tuple[fx.Node, ...]
    products: tuple[fx.Node, ...]
    moves: FactorTable
    local: Factors
    ranks: Factors
    rows: Factors
    columns: Factors


@final
@dataclass(frozen=True, slots=True, eq=False)
class GatherSite(_CollectiveSite):
    """Products of what is gathered."""

    @property
    def operand(self) -> fx.Node:
        """What the products have as their left factor."""
        return self.chain[-1] if self.chain else self.wait

    @property
    def others(self) -> list[fx.Node]:
        """Who else reads that: it is put together for them."""
        return [user for user in self.operand.users if user not in self.products]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScatterSite(_CollectiveSite):
    """One product that is scattered, or several of which each adds the one before it to its own."""


PipelineSite: TypeAlias = GatherSite | ScatterSite


def nodes_of(site: PipelineSite) -> tuple[fx.Node, ...]:
    """All that goes when it is cut."""
    return site.collective.node, site.wait, *site.chain, *site.products


def casts_of(site: PipelineSite) -> list[fx.Node]:
    """What gives elements another dtype on the way."""
    return [node for node in site.chain if node.target in CASTS]


def likeness(site: PipelineSite) -> Hashable:
    """Equal for sites of which each takes as long as the other: layers of one kind."""
    collective = site.collective
    types = [str(type_of(operand)) for p in site.products for operand in p.all_input_nodes]
    names = [operation_name(p.target) for p in site.products]
    moves, others = site.moves, len(site.others) if isinstance(site, GatherSite) else 0
    sizes = [tuple(moves.sizes(part)) for part in (site.rows, site.columns, site.local)]
    places = tuple(map(site.rows.index, site.ranks))
    phase = info(collective.node).phase
    return collective.agreement, phase, tuple(names), tuple(types), tuple(sizes), places, others


def cut_factor(site: PipelineSite, pieces: int, smallest_rows: int) -> int:
    """Which factor of the rows is cut in ``pieces`` of equal size: the slowest that can be, so that
    the rows of a piece lie as near to each other as may be. ``NoMatch`` if none can be."""
    start, sizes = site.collective.node, site.moves.sizes
    rows = prod(sizes(site.rows))
    enough = rows // pieces >= smallest_rows
    require(enough, NoMatch, f"{start}: {pieces} chunks of {rows} rows are smaller products than "
            f"of {smallest_rows}")  # fmt: skip
    for row in site.rows:
        (size,) = sizes([row])
        if row not in site.ranks and size % pieces == 0:
            return row
    own = " x ".join(str(size) for size in sizes(f for f in site.rows if f not in site.ranks))
    raise NoMatch(f"{start}: the {own} rows of a rank are not {pieces} equal parts")


def sites_in(graph: fx.Graph) -> tuple[list[PipelineSite], dict[fx.Node, str]]:
    """The sites in the order of their collectives; why other gathers and scatters are none."""
    sites: list[PipelineSite] = []
    reasons: dict[fx.Node, str] = {}
    for collective in collectives_in(graph):
        if collective.kind not in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
            continue
        gathers = collective.kind is CollectiveKind.ALL_GATHER
        site = attempt(_gather if gathers else _scatter, collective)
        if isinstance(site, NoMatch):
            reasons[collective.node] = site.message
        else:
            sites.append(site)
    return sites, reasons


def row_arguments(product: fx.Node) -> list[str]:
    """The arguments of which a row of the result needs one row: the left factor, and what is added
    to each row or scales it by another number. ``NoMatch`` where that is not known."""
    known = dim_map(product)
    return [name for name, dims in known.operands if dims[:1] == known.result[:1]]


# --- gathers --------------------------------------------------------------------------------


def _gather(collective: Collective) -> GatherSite:
    wait = _only_wait(collective)
    tensor_type, moves = type_of(collective.inputs[0]), FactorTable()
    own = moves.dims_of(tensor_type.shape)
    (ranks,) = moves.dims_of([collective.ranks or 1])
    require(tensor_type.ndim > 0, NoMatch, f"{collective.node} gathers numbers")
    chain, dims = _to_products(wait, moves, ((*ranks, *own[0]), *own[1:]))
    operand = chain[-1] if chain else wait
    products = _products_ahead(wait, _readers(operand))
    rows, columns = (moves.factors([dim]) for dim in dims)
    ranks = moves.factors([ranks])
    summed = not rows or not set(ranks) <= set(rows)
    require(not summed, NoMatch, f"{products[0]} sums over what is gathered")
    require(type_of(operand).is_contiguous, NoMatch, f"{operand} is not in row-major order")
    for product in products:
        row_arguments(product)
    return GatherSite(
        collective, wait, tuple(chain), products, moves, moves.factors(own), ranks, rows, columns
    )


def _to_products(wait: fx.Node, moves: FactorTable, dims: Dims) -> tuple[list[fx.Node], Dims]:
    """The moves from ``wait`` to the first node that is the left factor of a product."""
    chain: list[fx.Node] = []
    at = wait
    while not _readers(at):
        users = list(at.users)
        words = ", ".join(map(str, users)) or "nobody"
        lone = len(users) == 1
        require(lone, NoMatch, f"{at} is the left factor of no product: {words} read it")
        join = _join_behind(users[0])
        if join is not None:
            dims = rejoined(moves, join, dims)
            chain += [users[0], *arguments(join)["tensors"], join]
        else:
            dims = moved(moves, users[0], dims)
            chain.append(users[0])
        at = chain[-1]
    return chain, dims


def _join_behind(split: fx.Node) -> fx.Node | None:
    """What puts all pieces of ``split`` together again."""
    readers = {join for piece in split.users if is_item(piece) for join in piece.users}
    join = readers.pop() if len(readers) == 1 else None
    return join if join is not None and split_behind(join) is split else None


def _readers(node: fx.Node) -> list[fx.Node]:
    """The products of which ``node`` is the left factor, and nothing else."""
    return [
        user
        for user in node.users
        if user.target in LEFT
        and [k for k, argument in arguments(user).items() if argument is node]
        == [LEFT[user.target]]
    ]


def _products_ahead(wait: fx.Node, readers: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """Those of ``readers``, in their order, that are of one pass, and ahead of what no wait may
    pass."""
    wanted = set(readers)
    products: list[fx.Node] = []
    node = wait
    while node.op != "output" and wanted:
        if is_fence(node):
            require(bool(products), NoMatch, f"{node} stands between {wait} and its products")
            break
        if node in wanted:
            wanted.remove(node)
            products.append(node)
        node = node.next
    phase = info(products[0]).phase
    return tuple([product for product in products if info(product).phase == phase])


# --- scatters -------------------------------------------------------------------------------


def _scatter(collective: Collective) -> ScatterSite:
    wait = _only_wait(collective)
    chain = _from_product(collective)
    source = collective.inputs[0] if not chain else operand_of(chain[0])
    moves = FactorTable()
    dims = start = moves.dims_of(type_of(source).shape)
    at = 0
    while at < len(chain):
        node = chain[at]
        join = _join_behind(node)
        dims = moved(moves, node, dims) if join is None else rejoined(moves, join, dims)
        at = at + 1 if join is None else chain.index(join) + 1
    sent = list(moves.factors(dims))
    ranks = moves.taken(collective.node, sent, collective.ranks or 1)
    rows, columns = (moves.factors([dim]) for dim in start)
    require(set(ranks) <= set(rows), NoMatch, f"{collective.node} parts the columns of {source}")
    require(type_of(wait).is_contiguous, NoMatch, f"{wait} is not in row-major order")
    products = _summed(source)
    _require_no_fence(products[0], collective.node)
    for product in products:
        row_arguments(product)
    local = moves.factors([tuple(sent)])
    return ScatterSite(collective, wait, tuple(chain), products, moves, local, ranks, rows, columns)


def _from_product(collective: Collective) -> list[fx.Node]:
    """The moves from a product to what is sent, none of which anybody else reads."""
    chain: list[fx.Node] = []
    at = collective.inputs[0]
    while True:
        require(len(at.users) == 1, NoMatch, f"{at} is read by others, too")
        if at.target in LEFT:
            return chain
        split = split_behind(at)
        if split is not None:
            chain[:0] = [split, *arguments(at)["tensors"], at]
            at = split
        else:
            lone = at.op == "call_function" and len(at.all_input_nodes) == 1
            require(lone, NoMatch, f"{at} is neither a product nor a move of its elements")
            chain.insert(0, at)
        at = operand_of(at)


def _summed(last: fx.Node) -> tuple[fx.Node, ...]:
    """``last``, behind the products that it adds to its own, and that nobody else reads."""
    summed = [last]
    while summed[0].target is aten.addmm.default:
        before = arguments(summed[0])["self"]
        fits = is_tensor(before) and before.target in LEFT and len(before.users) == 1
        if not fits or type_of(before).shape != type_of(last).shape:
            break
        summed.insert(0, before)
    return tuple(summed)


def _require_no_fence(product: fx.Node, start: fx.Node) -> None:
    """Products move to where the collective starts: ahead of that, nothing may write."""
    node = product
    while node is not start:
        require(not is_fence(node), NoMatch, f"{node} stands between {product} and {start}")
        node = node.next


def _only_wait(collective: Collective) -> fx.Node:
    node, waits = collective.node, collective.waits
    require((collective.ranks or 1) > 1, NoMatch, f"{node} has a group of one rank")
    require(info(node).piece is None, NoMatch, f"{node} is a chunk already")
    require(info(node).gathered is None, NoMatch, f"{node} gathers parameters")
    require(not collective.coalesced, NoMatch, f"{node} is several")
    require(len(waits) == 1, NoMatch, f"{len(waits)} nodes wait for {node}")
    require(len(node.users) == 1, NoMatch, f"{node} is read before it is waited for")
    for tensor in map(type_of, (*collective.inputs, waits[0])):
        _require_plain(node, tensor)
    return waits[0]


def _require_plain(node: fx.Node, kind: TensorType) -> None:
    require(not dims_in(kind.shape), NoMatch, f"{node} has dynamic sizes")
    require(kind.numel > 0, NoMatch, f"{node} sends nothing")
