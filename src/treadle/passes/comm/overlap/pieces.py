"""A collective and its neighbouring products, computed in chunks of rows."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import final

import torch
from torch import fx

from treadle.compat.distributed.collectives import collective_op
from treadle.graph.core.arguments import Argument
from treadle.graph.core.node_info import with_info
from treadle.graph.core.operators import arguments, set_argument
from treadle.graph.core.types import type_of
from treadle.graph.core.values import emit_ahead, inherit
from treadle.passes.comm.blocks import reshaped_ahead, views_towards
from treadle.passes.comm.overlap.pipeline_sites import (
    LEFT,
    GatherSite,
    PipelineSite,
    ScatterSite,
    casts_of,
    row_arguments,
)

aten = torch.ops.aten


def cut(site: PipelineSite, factor: int, pieces: int) -> list[fx.Node]:
    """Put ``pieces`` in the place of the site, each with a part of the indices of ``factor``; what
    stands for its results now. Readers may stand ahead of that."""
    match site:
        case GatherSite():
            return _cut_gather(site, factor, pieces)
        case ScatterSite():
            return _cut_scatter(site, factor, pieces)


@final
class _Rows:
    """The rows of a matrix by their factors, of which one is cut."""

    def __init__(self, site: PipelineSite, factor: int, pieces: int) -> None:
        self._moves, self._factor, self.pieces = site.moves, factor, pieces
        self.factors, self.at = site.rows, site.rows.index(factor)

    def sizes(self, factors: Sequence[int]) -> list[int]:
        """How many indices each of ``factors`` has in a piece."""
        pairs = zip(factors, self._moves.sizes(factors), strict=True)
        return [size // self.pieces if factor == self._factor else size for factor, size in pairs]

    def whole(self) -> list[int]:
        """How many indices each factor has in all of them."""
        return self._moves.sizes(self.factors)


@final
class _Calls:
    """Nodes one behind the other, ahead of ``place``."""

    def __init__(self, place: fx.Node) -> None:
        self._place = place
        self._split: dict[fx.Node, fx.Node] = {}  # matrices by the factors of their rows

    def call(
        self, target: Callable[..., object], root: fx.Node, *args: Argument, **kwargs: Argument
    ) -> fx.Node:
        """``target(*args)``, which belongs where ``root`` does."""
        return emit_ahead(self._place, root, target, *args, **kwargs)

    def like(self, root: fx.Node, changes: Mapping[str, fx.Node]) -> fx.Node:
        """What ``root`` calls, with other arguments."""
        with self._place.graph.inserting_before(self._place):
            node = self._place.graph.node_copy(root)
        for name, value in changes.items():
            set_argument(node, name, value)
        inherit(node, root)
        return node

    def shaped(self, node: fx.Node, shape: Sequence[int], root: fx.Node) -> fx.Node:
        """``node`` in another shape, if it is another; a copy if it cannot be a view."""
        return reshaped_ahead(self._place, root, node, shape)

    def part(self, node: fx.Node, dim: int, piece: int, pieces: int, root: fx.Node) -> fx.Node:
        """One of so many equal parts of a dim."""
        size = type_of(node).shape[dim] // pieces
        return self.call(aten.slice.Tensor, root, node, dim, piece * size, (piece + 1) * size)

    def rows_of(self, node: fx.Node, rows: _Rows, piece: int, root: fx.Node) -> fx.Node:
        """The rows of one piece of a matrix, one below the other."""
        if not rows.at:
            return self.part(node, 0, piece, rows.pieces, root)
        columns = type_of(node).shape[1]
        if node not in self._split:
            shape = [*rows.whole(), columns]
            self._split[node] = self.call(aten.view.default, root, node, shape)
        rows_ = self.part(self._split[node], rows.at, piece, rows.pieces, root)
        return self.shaped(rows_, [prod(rows.sizes(rows.factors)), columns], root)

    def joined(self, parts: Sequence[fx.Node], rows: _Rows, root: fx.Node) -> fx.Node:
        """The matrix of which ``parts`` have the rows of each piece."""
        if not rows.at:
            return self.call(aten.cat.default, root, list(parts))
        columns = type_of(parts[0]).shape[1]
        shape = [*rows.sizes(rows.factors), columns]
        split = [self.shaped(piece, shape, root) for piece in parts]
        whole = self.call(aten.cat.default, root, split, rows.at)
        return self.shaped(whole, [prod(rows.whole()), columns], root)

    def permuted(
        self, node: fx.Node, has: Sequence[int], wanted: Sequence[int], root: fx.Node
    ) -> fx.Node:
        """``node``, whose dims are the factors ``has``, with its dims in another order."""
        order = [has.index(factor) for factor in wanted]
        if order == [*range(len(order))]:
            return node
        return self.call(aten.permute.default, root, node, order)

    def product(
        self, product: fx.Node, known: Mapping[str, fx.Node], rows: _Rows, piece: int
    ) -> fx.Node:
        """The rows of one piece of ``product``; ``known``: some of the arguments, cut."""
        args, changes = arguments(product), dict(known)
        for name in row_arguments(product):
            if name not in changes:
                changes[name] = self.rows_of(args[name], rows, piece, product)
        return self.like(product, changes)


def _cut_gather(site: GatherSite, factor: int, pieces: int) -> list[fx.Node]:
    """Pieces of the gather where it started, of the products where the first of them stood."""
    rows = _Rows(site, factor, pieces)
    starts = _started(site, rows, factor)
    _move_views_ahead(site)
    calls = _Calls(site.products[0])
    operands: list[fx.Node] = []
    parts_of: dict[fx.Node, list[fx.Node]] = {product: [] for product in site.products}
    for piece, start in enumerate(starts):
        operands.append(_received(site, calls, rows, start))
        for product, parts in parts_of.items():
            known = {LEFT[product.target]: operands[-1]}
            parts.append(calls.product(product, known, rows, piece))
    results = {product: calls.joined(parts, rows, product) for product, parts in parts_of.items()}
    if site.others:
        results[site.operand] = calls.joined(operands, rows, site.operand)
    for old, new in results.items():
        old.replace_all_uses_with(new)
    for product in (
        *reversed(site.products),
        *reversed(site.chain),
        site.wait,
        site.collective.node,
    ):
        product.graph.erase_node(product)
    return list(results.values())


def _started(site: GatherSite, rows: _Rows, factor: int) -> list[fx.Node]:
    """A gather of each part of what this rank gives."""
    start = site.collective.node
    args, calls = arguments(start), _Calls(start)
    whole = calls.shaped(args["input"], site.moves.sizes(site.local), start)
    nodes: list[fx.Node] = []
    for piece in range(rows.pieces):
        part = calls.part(whole, site.local.index(factor), piece, rows.pieces, start)
        if not type_of(part).is_contiguous:
            form = {"memory_format": torch.contiguous_format}
            part = calls.call(aten.clone.default, start, part, **form)
        nodes.append(calls.like(start, {"input": part}))
        with_info(nodes[-1], piece=piece)
    return nodes


def _received(site: GatherSite, calls: _Calls, rows: _Rows, start: fx.Node) -> fx.Node:
    """A piece as products read it."""
    wait, order = site.wait, (*site.ranks, *site.local)
    received = calls.call(collective_op("wait_tensor"), wait, start)
    wanted = (*site.rows, *site.columns)
    shape = [prod(rows.sizes(site.rows)), prod(rows.sizes(site.columns))]
    if wanted != order:
        received = calls.shaped(received, rows.sizes(order), wait)
        received = calls.permuted(received, order, wanted, wait)
    received = calls.shaped(received, shape, wait)
    for cast in casts_of(site):
        received = calls.like(cast, {"self": received})
    return received


def _move_views_ahead(site: GatherSite) -> None:
    """Views that later products read stand ahead of the first one, where they can be computed."""
    first, *later = site.products
    read = {operand for product in later for operand in product.all_input_nodes}
    views = views_towards(read - {site.operand})
    behind: set[fx.Node] = {first}
    node = first
    while later and node is not later[-1]:
        node, place = node.next, node
        if node not in views or behind.intersection(node.all_input_nodes):
            behind.add(node)
            continue
        first.prepend(node)
        node = place


def _cut_scatter(site: ScatterSite, factor: int, pieces: int) -> list[fx.Node]:
    """Pieces of the products and of the reduce-scatter where that one started."""
    rows, start = _Rows(site, factor, pieces), site.collective.node
    calls = _Calls(start)
    starts: list[fx.Node] = []
    for piece in range(pieces):
        node: fx.Node | None = None
        for product in site.products:
            known = {} if node is None else {"self": node}
            node = calls.product(product, known, rows, piece)
        assert node is not None, site
        starts.append(calls.like(start, {"input": _sent(site, calls, rows, node)}))
        with_info(starts[-1], piece=piece)
    behind = _Calls(site.wait)
    op = collective_op("wait_tensor")
    shape = rows.sizes(site.local)
    waits = [behind.shaped(behind.call(op, site.wait, s), shape, site.wait) for s in starts]
    call = behind.call(aten.cat.default, site.wait, waits, site.local.index(factor))
    call = behind.shaped(call, type_of(site.wait).shape, site.wait)
    site.wait.replace_all_uses_with(call)
    start.graph.erase_node(site.wait)
    start.graph.erase_node(start)
    for product in (*reversed(site.chain), *reversed(site.products)):
        product.graph.erase_node(product)
    return [call]


def _sent(site: ScatterSite, calls: _Calls, rows: _Rows, node: fx.Node) -> fx.Node:
    """A piece of a product as it is sent: the parts of the ranks, one after another."""
    start, has = site.collective.node, (*site.rows, *site.columns)
    for cast in casts_of(site):
        node = calls.like(cast, {"self": node})
    wanted = (*site.ranks, *site.local)
    if has != wanted:
        node = calls.shaped(node, rows.sizes(has), start)
        node = calls.permuted(node, has, wanted, start)
    first, *rest = rows.sizes(site.local)
    return calls.shaped(node, [prod(rows.sizes(site.ranks)) * first, *rest], start)
