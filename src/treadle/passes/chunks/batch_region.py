"""What of a step is computed for some rows of the batch after others: forward and backward.

::

    h = addmm(b, x, w)           a member: row by row
    l = mse_loss(h, y)           an exit: a sum over rows
    g = mse_loss_backward(..)    a member
    d = mm(t(g), x)              an exit: the gradient of the parameters
    w' = w - lr * d              late: known only after all rows

The rows are those of the arguments of the step. From these on each node is a member, an exit, or
late. Where a value that depends on parameters is read beside one that is late, rows depend on all
rows, and the step is refused. What depends on arguments alone (masks, how many labels count) is
computed for all rows first, where that is needed.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import fx

from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.operators import arguments, effects_of, is_item, operation_name
from treadle.graph.core.signature import Role, StepGraph
from treadle.graph.core.types import is_tensor, type_of
from treadle.passes.chunks.batch_rules import BatchContext, Places, of_rows
from treadle.passes.chunks.rows import (
    BatchDim,
    BatchMember,
    Contraction,
    Exit,
    Filled,
    Grid,
    MadeRows,
    Renewed,
    Total,
    TotalWeight,
    Unwritten,
)
from treadle.passes.chunks.rules import Shape, number_of
from treadle.passes.chunks.templates import needed_members, summed
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten

_GIVEN = (Role.BATCH, Role.SCALAR)
"""Inputs that no parameter decides."""


@final
@dataclass(frozen=True)
class BatchRegion:
    """What is computed micro-batch by micro-batch. ``in_order``: members and exits as they stand in
    the graph; those of ``collected`` are needed as a whole as well."""

    grid: Grid
    in_order: tuple[BatchMember | Exit, ...]
    collected: tuple[BatchMember, ...]
    renewed: tuple[tuple[fx.Node, Renewed], ...]
    losses: tuple[fx.Node, ...]

    @property
    def members(self) -> tuple[BatchMember, ...]:
        """What has rows."""
        return tuple(each for each in self.in_order if isinstance(each, BatchMember))

    @property
    def exits(self) -> tuple[Exit, ...]:
        """Sums over rows."""
        return tuple(each for each in self.in_order if not isinstance(each, BatchMember))

    def is_narrow(self, trailing: Shape) -> bool:
        """Rows of a batch are read where they are."""
        return False


def rows_of(step: StepGraph) -> int | None:
    """How many rows the batch has: the first dim of the first argument that has dims."""
    for node, given in step.inputs():
        if given.role is Role.BATCH and is_tensor(node) and type_of(node).ndim:
            return tensor_of(node).shape[0]
    return None


def batch_region_of(step: StepGraph) -> BatchRegion:
    """All that is computed from the rows of the batch; ``NoMatch`` says what is in the way."""
    count = rows_of(step)
    require(count is not None, NoMatch, "no argument of the step is a tensor with dims")
    assert count is not None
    return _Finder(step, count).region()


@dataclass
class _Finder:
    step: StepGraph
    count: int
    places: dict[fx.Node, Places] = field(default_factory=dict[fx.Node, Places])
    free: set[fx.Node] = field(default_factory=set[fx.Node])  # depend on no parameter
    late: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    members: dict[fx.Node, BatchMember] = field(default_factory=dict[fx.Node, BatchMember])
    exits: dict[fx.Node, Exit] = field(default_factory=dict[fx.Node, Exit])
    renewed: dict[fx.Node, Renewed] = field(default_factory=dict[fx.Node, Renewed])
    losses: list[fx.Node] = field(default_factory=list[fx.Node])
    given: set[fx.Node] = field(default_factory=set[fx.Node])
    mixed: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])  # late, no sum over rows
    reason: str = ""  # why the first node needs all rows

    def region(self) -> BatchRegion:
        self._place_inputs()
        nodes = list(self.step.graph.nodes)
        for node in nodes:
            if node.op == "call_function":
                self._visit(node)
        self._require_sums()
        read = [node for node in self.members if self._is_read(node)]
        needed = needed_members({*self.exits, *read}, self.members, self.exits)
        read = [node for node in nodes if node in needed and self._is_read(node)]
        for node in read:
            joined = self._may_be_joined(node)
            require(joined, NoMatch, f"all rows of {self._words(node)} are needed")
        self._require_quiet(nodes, needed)
        every: dict[fx.Node, BatchMember | Exit] = {**self.members, **self.exits}
        chosen = tuple(every[n] for n in nodes if n in needed or n in self.exits)
        collected = tuple(self.members[node] for node in read)
        renewed = tuple(self.renewed.items())
        return BatchRegion(Grid(self.count, 1, 1), chosen, collected, renewed, tuple(self.losses))

    def _require_sums(self) -> None:
        """Updates are made of sums over the batch."""
        if not self.exits:
            raise NoMatch(self.reason or "nothing is a sum over the rows of the batch")
        for node, output in self.step.outputs():
            if node in self.mixed and output.writes is not None:
                raise NoMatch(self.mixed[node])

    def _place_inputs(self) -> None:
        for node, given in self.step.inputs():
            if given.role in _GIVEN:
                self.free.add(node)
            has_rows = given.role is Role.BATCH and is_tensor(node) and type_of(node).ndim > 0
            if has_rows and tensor_of(node).shape[0] == self.count:
                self.places[node] = BatchDim(0, 1)
                self.given.add(node)

    def _visit(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        late = [operand for operand in operands if operand in self.late]
        rows = [operand for operand in operands if operand in self.places]
        is_free = all(operand in self.free for operand in operands)
        if is_free:
            self.free.add(node)
        if not (late or rows) or self._renew(node) or self._take_loss(node):
            return
        mixed = [operand for operand in operands if operand in self.mixed]
        if mixed:
            self.mixed[node] = self.mixed[mixed[0]]
        if not rows:
            self.late[node] = self.late[late[0]]
            return
        site = BatchContext(node, self.count, self.places, self.given, self.late)
        found = attempt(of_rows, site)
        if isinstance(found, BatchMember):
            self.members[node] = found
            self.places[node] = found.at
        elif is_free:
            if isinstance(found, NoMatch):
                self.reason = self.reason or f"{found.message}{self._line(node)}"
            return  # computed for all rows, like what has none
        elif isinstance(found, NoMatch):
            self._after_all_rows(node, late, rows, found.message)
        else:
            self.late[node] = f"{self._words(node)} is a sum over the batch"
            if isinstance(found, Contraction) or not self._is_larger_than_rows(node):
                self.exits[node] = found

    def _is_larger_than_rows(self, node: fx.Node) -> bool:
        """Whether all the rows that a sum is made of have fewer bytes than the sum: the gradient of
        an embedding. Then they are kept, and summed at once in the end: there is one such sum and
        not, for as long as micro-batches are computed, the one so far and that of the next."""
        rows = [each for each in node.all_input_nodes if each in self.places]
        rows = [each for each in rows if each not in self.free]  # those are there anyway
        kept = sum(tensor_of(each).nbytes for each in rows if self._may_be_joined(each))
        return all(map(self._may_be_joined, rows)) and 0 < kept < tensor_of(node).nbytes

    def _may_be_joined(self, node: fx.Node) -> bool:
        """Whether the rows of all micro-batches, one after the other, are those of the whole."""
        at = self.places[node]
        return isinstance(at, BatchDim) and at.outer == 1

    def _after_all_rows(
        self, node: fx.Node, late: list[fx.Node], rows: list[fx.Node], reason: str
    ) -> None:
        """A node that needs all rows: it may be computed after them if nothing row by row
        follows."""
        trained = [row for row in rows if row not in self.free]
        if late and trained:
            why = self.late[late[0]]
            raise NoMatch(f"{why}, and {self._words(node)} needs it row by row")
        if late:
            self.late[node] = self.late[late[0]]
            return
        self.late[node] = self.mixed[node] = f"{reason}{self._line(node)}"
        self.reason = self.reason or self.late[node]

    def _renew(self, node: fx.Node) -> bool:
        """Whether the node needs a shape alone."""
        number = number_of(node)
        if number is not None and type_of(node).is_contiguous:
            self.renewed[node] = Filled(number)
            return True
        if node.target is aten.empty_like.default:
            self.renewed[node] = Unwritten()
            return True
        return False

    def _take_loss(self, node: fx.Node) -> bool:
        """The sum of losses is an exit; their total weight depends on targets alone."""
        if node.target is not aten.nll_loss_forward.default:
            return False
        args = arguments(node)
        labels = [args["target"], *([args["weight"]] if args["weight"] else [])]
        mean = args["reduction"] == 1
        at = self.places.get(args["self"])
        if not isinstance(at, BatchDim) or at.dim:
            return False
        known = all(label in self.free or label not in self.places for label in labels)
        known = known and not any(label in self.late for label in labels)
        require(known, NoMatch, f"{self._words(node)} has targets that parameters decide")
        site = BatchContext(node, self.count, self.places, self.given, self.late)
        rowwise = {name: site.part(args[name], at) for name in ("self", "target")}
        form = site.call(args | rowwise | {"reduction": 0})
        weight = TotalWeight(node, args["target"], args["weight"], args["ignore_index"])
        self.losses.append(node)
        for item in list(node.users):
            require(is_item(item), NoMatch, f"all results of {self._words(node)} are needed")
            losses = MadeRows(item.target, (form, 0))
            if item.args[1] == 1:
                self.renewed[item] = weight if args["reduction"] else Filled(0)
            elif args["reduction"]:
                self.exits[item] = Total(item, summed(losses, [0], item), weight if mean else None)
                self.late[item] = f"{self._words(node)} is a sum over the batch"
            else:
                self.members[item] = BatchMember(item, at, losses)
                self.places[item] = at
        return True

    def _is_read(self, node: fx.Node) -> bool:
        """Whether something reads all rows of a member. One that no parameter decides is there."""
        if node in self.free or node not in self.members:
            return False
        inside = (self.members, self.exits, self.renewed, self.losses)
        return any(not any(user in group for group in inside) for user in node.users)

    def _require_quiet(self, nodes: list[fx.Node], needed: set[fx.Node]) -> None:
        """Nothing that moves behind the micro-batches may have an effect whose order matters."""
        last = max(at for at, node in enumerate(nodes) if node in needed or node in self.exits)
        for node in nodes[:last]:
            moved = node in self.late and node.op == "call_function" and effects_of(node)
            require(not moved, NoMatch, f"{self._words(node)} has effects, and would move")

    def _words(self, node: fx.Node) -> str:
        """The operation, and the user's line."""
        return f"{operation_name(node.target)}{self._line(node)}"

    def _line(self, node: fx.Node) -> str:
        where = info(node).where
        return f" ({where})" if where else ""
