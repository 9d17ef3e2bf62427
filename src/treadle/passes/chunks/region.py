"""What can be computed in chunks of rows around one wide product, forward and backward.

::

    x = mm(h, w)                the root: wide rows
    y = _log_softmax(x, 1)      a member: row by row, wide
    l = nll_loss_forward(y, t)  an exit: a sum over rows
    g = nll_loss_backward(..)   a member
    d = mm(g, v)                a member that is collected: its rows, joined, are the whole
    e = mm(t(g), h)             an exit: a product over rows

From the root on, each node has one of these kinds, or is late: it needs a member or an exit as a
whole. If a wide value depends on something late, or is read as a whole, the region is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import final

import torch
from torch import fx

from treadle.graph.core.node_info import tensor_of, value_of
from treadle.graph.core.operators import arguments, effects_of, is_item, may_recompute, operand_of
from treadle.graph.core.types import is_tensor, tensors_in, type_of
from treadle.passes.chunks.rows import (
    Contraction,
    Exit,
    Filled,
    Grid,
    MadeRows,
    Member,
    Renewed,
    RowPart,
    RowRange,
    RowSlice,
    Total,
    TotalWeight,
)
from treadle.passes.chunks.rules import (
    OtherGrid,
    RowContext,
    Shape,
    in_chunks,
    nll_loss_of_rows,
    number_of,
)
from treadle.passes.chunks.templates import needed_members, nodes_of, summed, template_of
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten

_SUMS_OVER_ROWS = (aten.mm.default, aten.mm.dtype, aten.addmm.default, aten.addmm.dtype)


@final
@dataclass(frozen=True)
class LossRegion:
    """What is computed in chunks. ``members`` and ``exits`` in the order of the graph; those of
    ``collected`` are needed as a whole as well."""

    root: fx.Node
    grid: Grid
    members: tuple[Member, ...]
    exits: tuple[Exit, ...]
    collected: tuple[Member, ...]
    renewed: tuple[tuple[fx.Node, Renewed], ...]
    losses: tuple[fx.Node, ...]

    def is_narrow(self, trailing: Shape) -> bool:
        """Whether rows of this shape are small beside those of the product."""
        return 4 * prod(trailing) <= tensor_of(self.root).shape[1]

    @property
    def in_order(self) -> tuple[Member | Exit, ...]:
        """What a chunk computes: the members, then what it adds to the sums."""
        return (*self.members, *self.exits)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the product."""
        like = type_of(self.root)
        return like.shape[1] * like.dtype.itemsize


def region_of(root: fx.Node) -> LossRegion:
    """All that hangs on the product ``root``; ``NoMatch`` says what is in the way. A grid is found
    where rows are cut: with that one all is looked at anew."""
    count = tensor_of(root).shape[0]
    grid = Grid(1, count, 1)
    try:
        return _Finder(root, grid).region()
    except OtherGrid as other:
        return _Finder(root, other.grid).region()


@dataclass
class _Finder:
    root: fx.Node
    grid: Grid
    members: dict[fx.Node, Member] = field(default_factory=dict[fx.Node, Member])
    products: set[fx.Node] = field(default_factory=set[fx.Node])  # members, and late as a whole
    late: set[fx.Node] = field(default_factory=set[fx.Node])
    exits: dict[fx.Node, Exit] = field(default_factory=dict[fx.Node, Exit])
    adopted: set[fx.Node] = field(default_factory=set[fx.Node])  # members without the root
    renewed: dict[fx.Node, Renewed] = field(default_factory=dict[fx.Node, Renewed])
    losses: list[fx.Node] = field(default_factory=list[fx.Node])  # the pairs of sum and weight

    def region(self) -> LossRegion:
        nodes = list(self.root.graph.nodes)
        place = {node: at for at, node in enumerate(nodes)}
        self.members[self.root] = _root(self.root, self.grid)
        for node in nodes[place[self.root] + 1 :]:
            self._visit(node)
        require(bool(self.exits), NoMatch, f"nothing sums over the rows of {self.root}")
        seeds = {*self.exits, *filter(self._is_seed, self.members)}
        needed = needed_members(seeds, self.members, self.exits)
        self._require_quiet(nodes[place[self.root] : max(map(place.__getitem__, needed))])
        renewed = self._renewed_for(needed)
        inside = needed | self.exits.keys() | renewed.keys() | {*self.losses}
        chosen = sorted(needed, key=place.__getitem__)
        return LossRegion(
            self.root,
            self.grid,
            tuple(self.members[node] for node in chosen),
            tuple(self.exits[node] for node in sorted(self.exits, key=place.__getitem__)),
            tuple(self.members[node] for node in chosen if self._is_read(node, inside)),
            tuple(renewed.items()),
            tuple(self.losses),
        )

    def _visit(self, node: fx.Node) -> None:
        """Classify one node. A narrow value may also be needed as a whole."""
        operands = node.all_input_nodes
        late = [operand for operand in operands if operand in self.late]
        rows = [operand for operand in operands if operand in self.members]
        rows = [row for row in rows if row not in self.products | self.adopted]
        if not (rows or late) or node in self.late or self._renew(node):
            return
        wide = next((row for row in rows if self._is_wide(row)), None)
        if wide is not None:
            require(node.op == "call_function", NoMatch, f"{wide} is returned")
            require(not late, NoMatch, f"{node} reads {wide} and, known after all rows, {late}")
            self._take(node, wide)
        elif late:
            self.late.add(node)
        else:
            self._take_narrow(node, rows[0])

    def _take(self, node: fx.Node, wide: fx.Node) -> None:
        """A reader of a wide value: an exit, a product or a member."""
        args = arguments(node)
        if node.target is aten.nll_loss_forward.default and args["reduction"] != 0:
            self._take_loss(node)
            return
        exit_ = self._exit(node, self.members[wide].rows)
        if exit_ is not None:
            self.exits[node] = exit_
            self.late.add(node)
        elif node.target is aten.mm.default:
            self.members[node] = self._product(node)
            self.products.add(node)
            self.late.add(node)
        else:
            self.members[node] = in_chunks(self._site(node, wide))

    def _take_narrow(self, node: fx.Node, first: fx.Node) -> None:
        member = attempt(self._narrow, node, first)
        if isinstance(member, NoMatch):
            self.late.add(node)
        else:
            self.members[node] = member

    def _narrow(self, node: fx.Node, first: fx.Node) -> Member:
        require(node.op == "call_function", NoMatch, f"{first} is returned")
        return in_chunks(self._site(node, first))

    def _site(self, node: fx.Node, first: fx.Node) -> RowContext:
        rows = self.members[first].rows
        plain = not rows.transposed or node.target is aten._to_copy.default
        require(plain, NoMatch, f"{node} is not known to work on columns")
        return RowContext(node, rows, self._row_dims(first), self.grid, self._fetch)

    def _row_dims(self, node: fx.Node) -> Shape:
        value = tensors_in(value_of(node))[0]
        return tuple(value.shape[: self.members[node].rows.lead])

    def _fetch(self, operand: fx.Node, rows: RowRange, row_dims: Shape) -> RowPart | None:
        """The chunk's part of an operand: of a member, or of a wide value that may become one."""
        require(operand not in self.late, NoMatch, f"{operand} is known only after all rows")
        if operand not in self.members:
            self._adopt(operand, rows, row_dims)
        if operand not in self.members:
            return None
        same = self.members[operand].rows == rows and self._row_dims(operand) == row_dims
        require(same, NoMatch, f"{operand} has other rows")
        return RowPart(operand)

    def _adopt(self, operand: fx.Node, rows: RowRange, row_dims: Shape) -> None:
        """Compute a wide value that does not depend on the root in chunks as well, if that can be:
        as a whole it would be as large as the product."""
        if operand.op != "call_function" or not is_tensor(operand) or not may_recompute(operand):
            return
        shape = tuple(tensor_of(operand).shape)
        if shape[: rows.lead] != row_dims or not self._is_wide_row(shape[rows.lead :]):
            return
        try:
            site = RowContext(operand, rows, row_dims, self.grid, self._fetch)
            member = in_chunks(site)
        except (NoMatch, OtherGrid):
            return
        if member.rows == rows:
            self.members[operand] = member
            self.adopted.add(operand)

    def _is_wide(self, node: fx.Node) -> bool:
        """Whether a row is about as long as a row of the root."""
        lead = self.members[node].rows.lead
        if self.members[node].rows.transposed:
            return True
        shapes = [tuple(tensor.shape) for tensor in tensors_in(value_of(node))]
        return any(self._is_wide_row(shape[lead:]) for shape in shapes)

    def _is_wide_row(self, trailing: Shape) -> bool:
        return 4 * prod(trailing) > tensor_of(self.root).shape[1]

    def _is_seed(self, node: fx.Node) -> bool:
        """A product of rows, or a narrow value that is made of wide ones, or one of several."""
        if node in self.products:
            return True
        parts = [operand for operand in node.all_input_nodes if operand in self.members]
        is_seed = any(self._is_wide(part) or not is_tensor(part) for part in parts)
        return is_seed and not self._is_wide(node)

    def _is_read(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether something that is not ``inside`` reads a member that depends on the root."""
        if node in self.adopted:
            return False
        readers = [user for user in node.users if user not in inside]
        if readers:
            several = is_tensor(node) and not self._is_wide(node)
            require(several, NoMatch, f"{node} is read by {readers[0]} as a whole")
        return bool(readers)

    def _renewed_for(self, needed: set[fx.Node]) -> dict[fx.Node, Renewed]:
        """Of the nodes that need shapes alone, those that members are computed from or read."""
        sources = {
            source for source in self.renewed if not needed.isdisjoint(source.all_input_nodes)
        }
        templates = [self.members[node].form for node in needed]
        stack = [leaf for template in templates for leaf in nodes_of(template)]
        for value in self.exits.values():
            stack += nodes_of(template_of(value))
        seen = set(stack)
        while stack:
            node = stack.pop()
            if node in self.renewed:
                sources.add(node)
                continue
            new = set(node.all_input_nodes) - seen
            seen |= new
            stack.extend(new)
        return {node: renewal for node, renewal in self.renewed.items() if node in sources}

    def _require_quiet(self, nodes: Iterable[fx.Node]) -> None:
        """Nothing that moves behind the chunks may have an effect whose order matters."""
        for node in nodes:
            moved = node in self.late and node.op == "call_function" and effects_of(node)
            require(not moved, NoMatch, f"{node} has effects, and would move")

    # Other kinds of nodes.

    def _renew(self, node: fx.Node) -> bool:
        """Whether the node needs a shape alone."""
        number = number_of(node)
        if number is not None and type_of(node).is_contiguous:
            self.renewed[node] = Filled(number)
            return True
        if not is_item(node) or node.args[1] != 1:
            return False
        source = operand_of(node)
        if source.target is not aten.nll_loss_forward.default or source in self.late:
            return False
        self.renewed[node] = Filled(0)  # of losses that are not summed
        return True

    def _take_loss(self, node: fx.Node) -> None:
        """The sum of losses is an exit; their total weight depends on targets alone."""
        args = arguments(node)
        targets = [args["target"], *([args["weight"]] if args["weight"] else [])]
        known = any(target in self.members or target in self.late for target in targets)
        require(not known, NoMatch, f"{node} has targets that depend on the product")
        member = nll_loss_of_rows(self._site(node, args["self"]))
        self.losses.append(node)
        weight = TotalWeight(node, args["target"], args["weight"], args["ignore_index"])
        for item in node.users:
            require(is_item(item), NoMatch, f"{item} reads all results of {node}")
            if item.args[1] == 1:
                self.renewed[item] = weight
                continue
            losses = MadeRows(item.target, (member.form, 0))
            divisor = weight if args["reduction"] == 1 else None
            self.exits[item] = Total(item, summed(losses, [0], item), divisor)
            self.late.add(item)

    def _exit(self, node: fx.Node, rows: RowRange) -> Exit | None:
        if node.target in (aten.sum.default, aten.mean.default):
            return self._total(node, rows, None)
        if node.target in (aten.sum.dim_IntList, aten.mean.dim):
            shape = tensor_of(arguments(node)["self"]).shape
            dims = {dim % len(shape) for dim in arguments(node)["dim"] or range(len(shape))}
            if dims & set(range(rows.lead)):
                return self._total(node, rows, dims)
        if node.target in _SUMS_OVER_ROWS:
            return self._contraction(node)
        return None

    def _total(self, node: fx.Node, rows: RowRange, dims: set[int] | None) -> Total:
        """A sum or mean over rows, and over dims behind them or all."""
        source = arguments(node)["self"]
        shape = tensor_of(source).shape
        require(not rows.transposed, NoMatch, f"{node} sums columns")
        dims = set(range(len(shape))) if dims is None else dims
        require(set(range(rows.lead)) <= dims, NoMatch, f"{node} sums over some dims of rows alone")
        site = RowContext(node, rows, tuple(shape[: rows.lead]), self.grid, self._fetch)
        kept = [0, *(dim - rows.lead + 1 for dim in sorted(dims) if dim >= rows.lead)]
        partial = summed(site.aligned(source), kept, node)
        is_mean = node.target in (aten.mean.default, aten.mean.dim)
        return Total(node, partial, prod(shape[dim] for dim in dims) if is_mean else None)

    def _product(self, node: fx.Node) -> Member:
        """Rows times what is the same for all rows: rows."""
        left, right = node.args
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        known = left in self.members and right not in self.members
        require(known, NoMatch, f"{node} multiplies rows with rows")
        rows = self.members[left].rows
        require(not rows.transposed, NoMatch, f"{node} multiplies rows with rows")
        return Member(node, rows, MadeRows(aten.mm.default, (RowPart(left), right)))

    def _contraction(self, node: fx.Node) -> Contraction | None:
        """A product that sums over rows: columns of one factor, rows of the other. What it adds to
        is there before: the sum of other rows."""
        args = arguments(node)
        added = args["self"] if "mat1" in args else None
        left, right = args["self" if added is None else "mat1"], args["mat2"]
        of_left = self.members[left].rows if left in self.members else None
        of_right = self.members[right].rows if right in self.members else None
        over_left = of_left is not None and of_left.transposed
        over_right = of_right is not None and not of_right.transposed
        if not over_left and not (of_left is None and over_right):
            return None
        known = of_right if of_left is None else of_left
        assert known is not None
        rows = RowRange(1, *known.span)
        require(of_right is None or over_right, NoMatch, f"{node} multiplies rows with rows")
        same = of_left is None or of_right is None or of_left.span == of_right.span
        require(same, NoMatch, f"{node} multiplies other rows")
        if added is not None:
            plain = args["beta"] == args["alpha"] == 1 and added not in self.members
            alike = tensor_of(added).shape == tensor_of(node).shape
            require(plain and alike, NoMatch, f"{node} scales or stretches what it adds to")
        return Contraction(
            node,
            RowPart(left) if of_left else _columns(left, rows),
            RowPart(right) if of_right else _rows(right, rows),
            added,
        )


def _columns(node: fx.Node, rows: RowRange) -> RowSlice:
    size, count = tensor_of(node).shape
    return RowSlice(node, rows, (count,), (size,), dim=1)


def _rows(node: fx.Node, rows: RowRange) -> RowSlice:
    count, size = tensor_of(node).shape
    return RowSlice(node, rows, (count,), (size,))


def _root(node: fx.Node, grid: Grid) -> Member:
    """``mm(h, w)`` or ``addmm(b, h, w)`` of the rows of ``h``."""
    args = arguments(node)
    rows = RowRange(1, 0, grid.middle)
    if node.target is aten.mm.default:
        left = args["self"]
        return Member(node, rows, MadeRows(node.target, (_rows(left, rows), args["mat2"])))
    bias, left = args["self"], args["mat1"]
    plain = args["beta"] == 1 and args["alpha"] == 1
    shape = tensor_of(bias).shape
    alike = len(shape) < 2 or shape[0] == 1
    require(plain and alike, NoMatch, f"{node} adds another value to each row")
    return Member(node, rows, MadeRows(node.target, (bias, _rows(left, rows), args["mat2"])))
