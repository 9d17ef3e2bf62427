"""From a group of steps to one kernel: definitions, stores, and the shape of a pointwise nest.

::

    before:  t[i] <- exp(x[i]);  y[i] <- t[i] + 1        (t is read nowhere else)
    after:   for r < 1, c < N:  %v0 = exp(x[c]);  %v1 = %v0 + 1;  y[c] = %v1
"""

import math
from collections.abc import Iterator, Mapping

from treadle.algebra.extents import sample_of
from treadle.algebra.index import Axis, FloorDiv, Index, Mod
from treadle.loop.expr import Apply, Expr, Load, Local, ReduceKind, identity
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.program import Step
from treadle.loop.traverse import map_expr
from treadle.schedule.fuse import Group
from treadle.schedule.loop_nest import LoopNest, LoopNests, ScheduledOp, storage_order


def build_kernel(
    number: int,
    group: Group,
    stored: frozenset[int],
    steps: tuple[Step, ...],
    nests: LoopNests,
) -> Kernel:
    """The kernel of ``group``; ``stored`` are the members whose value leaves it."""
    assert group.nest is not None
    nest, placed = group.nest, group.placed
    if group.pointwise:
        nest, placed = pointwise_nest(group, steps, nests)
    body: list[Definition | Store] = []
    values: dict[str, Local] = {}
    for n, op in enumerate(placed):
        expr = localise(op.place.expr, op.compute.names, values)
        local = Local(f"v{n}", expr.dtype)
        axes = nest.axes(op.level)
        body.append(Definition(local.name, expr, axes))
        if op.step in stored:
            body.append(Store(op.buffer, op.index, local, axes))
        values[op.buffer] = local
    origins = tuple(steps[op.step].origin for op in placed)
    name = f"kernel_{number}"
    return Kernel(name, nest.kind, nest.rows, nest.cols, tuple(body), origins)


def localise(expr: Expr, names: Mapping[str, str], values: Mapping[str, Local]) -> Expr:
    """``load t[...]`` becomes ``%t`` where the kernel itself computes ``t``; ``names``: what the
    buffers of ``expr`` are called there."""

    def rewrite(node: Expr) -> Expr:
        if not isinstance(node, Load):
            return node
        name = names[node.buffer]
        value = values.get(name)
        if value is None:
            return node if name == node.buffer else Load(name, node.index, node.dtype, node.mask)
        if node.mask is None:
            return value
        zero = identity(ReduceKind.SUM, value.dtype)
        return Apply("where", (node.mask, value, zero), value.dtype)

    return map_expr(expr, rewrite)


def pointwise_nest(
    group: Group, steps: tuple[Step, ...], nests: LoopNests
) -> tuple[LoopNest, tuple[ScheduledOp, ...]]:
    """One flat loop where every read is plain; else the split that leaves the fewest divisions.

    ``y[i, j] = x[i, j] + b[j]`` flat reads ``b[c % J]``; as I rows of J columns it reads ``b[c]``.
    """
    assert group.nest is not None
    best = (group.nest, group.placed)
    best_cost = nest_cost(*best)
    total = group.nest.elements
    for cols in _splits(group):
        if best_cost == 0:
            break
        nest = nests.plain(total // cols, cols)
        placed = _place(group, steps, nest, nests)
        if placed is None:
            continue
        cost = nest_cost(nest, placed)
        if cost < best_cost:
            best, best_cost = (nest, placed), cost
    return best


def _splits(group: Group) -> list[int]:
    """Column counts to try: the products of the inner dims of each member, largest first."""
    found: set[int] = set()
    for step in (op.compute for op in group.placed):
        extents = [axis.extent for axis in storage_order(step)]
        found.update(math.prod(extents[d:]) for d in range(1, len(extents)))
    return sorted(found - {1}, key=sample_of, reverse=True)


def _place(
    group: Group, steps: tuple[Step, ...], nest: LoopNest, nests: LoopNests
) -> tuple[ScheduledOp, ...] | None:
    placed: list[ScheduledOp] = []
    for other in group.placed:
        op = nests.place(other.step, other.compute, nest)
        if op is None or len(op.level) != len("full"):
            return None
        placed.append(op)
    return tuple(placed)


def nest_cost(nest: LoopNest, placed: tuple[ScheduledOp, ...]) -> int:
    """Divisions by column in all indices, and reads that jump from column to column."""
    cost = 0
    for op in placed:
        for index in (op.index, *(index for _, index in op.reads if index is not None)):
            cost += 4 * sum(1 for _ in _divisions(index, nest.cols))
            jump = abs(sample_of(index.coefficient(nest.cols)))
            cost += 2 * (jump > 1)
    return cost


def _divisions(index: Index, axis: Axis) -> Iterator[None]:
    for atom, _ in index.terms:
        if isinstance(atom, FloorDiv | Mod) and axis in atom.index.axes:
            yield None
            yield from _divisions(atom.index, axis)
