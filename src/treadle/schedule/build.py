"""From a group of steps to one kernel: definitions, stores, and the shape of a pointwise nest.

::

    before:  t[i] <- exp(x[i]);  y[i] <- t[i] + 1        (t is read nowhere else)
    after:   for r < 1, c < N:  %v0 = exp(x[c]);  %v1 = %v0 + 1;  y[c] = %v1
"""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

from treadle.algebra.extents import sample_of
from treadle.algebra.index import Axis, FloorDiv, Index, Mod
from treadle.loop.expr import Apply, Expr, Load, Local, ReduceKind, identity
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.nest import kernel_loads, live, stored
from treadle.loop.program import Origin, Step
from treadle.loop.traverse import map_expr
from treadle.schedule.fuse import Group
from treadle.schedule.loop_nest import LoopNest, LoopNests, ScheduledOp, storage_order
from treadle.schedule.normalize import Split
from treadle.schedule.workers import Workers

_NAME = "kernel"
"""Of a kernel until it is known at which number it stands."""


@final
@dataclass(frozen=True, slots=True)
class GroupKernels:
    """What a group becomes: the kernels that run, with their schedules, and the buffers that it
    reads and writes, also for values that nobody stores."""

    reads: frozenset[str]
    writes: frozenset[str]
    kernels: tuple[Kernel, ...]

    def at(self, number: int, origins: tuple[Origin, ...]) -> tuple[Kernel, ...]:
        """The kernels of the group at a position, of steps with these origins."""
        start, name = len(_NAME), f"{_NAME}_{number}"
        return tuple(
            [
                replace(
                    kernel,
                    name=name + kernel.name[start:],
                    origins=origins,
                    scratch=tuple([name + part[start:] for part in kernel.scratch]),
                )
                for kernel in self.kernels
            ]
        )


@final
class KnownKernels:
    """Nests, and what groups become, for all programs of one step: candidates for its plan have
    most of their groups in common."""

    def __init__(self) -> None:
        self.nests = LoopNests()
        self.split: dict[Hashable, Split] = {}
        """Steps in their two forms."""
        self._made: dict[Hashable, GroupKernels] = {}

    def of(
        self, group: Group, leaving: frozenset[int], steps: tuple[Step, ...], workers: Workers
    ) -> GroupKernels:
        """What ``group`` becomes; ``leaving``: the members whose value leaves it. A placement says
        what a step computes, but for the names of its buffers."""
        ops = [(op.place, op.buffer, op.compute.reads, op.step in leaving) for op in group.placed]
        key = workers, group.nest, tuple(ops)
        if key not in self._made:
            self._made[key] = self._kernels(group, leaving, steps, workers)
        return self._made[key]

    def _kernels(
        self, group: Group, leaving: frozenset[int], steps: tuple[Step, ...], workers: Workers
    ) -> GroupKernels:
        kernel = build_kernel(group, leaving, steps, self.nests)
        reads = frozenset(load.buffer for load in kernel_loads(kernel))
        body = live(kernel.body)
        parts = workers.prepared(replace(kernel, body=body)) if body else ()
        return GroupKernels(
            reads, frozenset(stored(kernel.body)), tuple(map(workers.scheduled, parts))
        )


def build_kernel(
    group: Group, leaving: frozenset[int], steps: tuple[Step, ...], nests: LoopNests
) -> Kernel:
    """The kernel of ``group``; ``leaving`` are the members whose value leaves it."""
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
        if op.step in leaving:
            body.append(Store(op.buffer, op.index, local, axes))
        values[op.buffer] = local
    return Kernel(_NAME, nest.kind, nest.rows, nest.cols, tuple(body), origins_of(group, steps))


def origins_of(group: Group, steps: tuple[Step, ...]) -> tuple[Origin, ...]:
    """Where each member came from."""
    return tuple([steps[op.step].origin for op in group.placed])


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
