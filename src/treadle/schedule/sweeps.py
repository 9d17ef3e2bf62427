"""One kernel reduces the rows and the columns of the same values, rather than one kernel each.

::

    before:  one kernel:  dx = f(rows of dy, x)        another:  dw = sum over rows of dy * x
    after:   one kernel:  dx = f(rows of dy, x);  dw = sum over rows of dy * x

This occurs in the backward pass of every norm, and for biases after one. A program holds one row,
or a few, at a time; it goes through its part of the rows and accumulates column sums
(``LoopForm.SWEPT``). Sums over the rows are complete at the end: only values of columns may use
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from treadle.algebra.extents import same, sample_of
from treadle.loop.expr import Reduce
from treadle.loop.kernel import KernelKind
from treadle.loop.nest import is_position
from treadle.loop.program import Buffer
from treadle.schedule.fuse import Fuser, Group, Sweeps
from treadle.schedule.loop_nest import LoopNest

_SHARE = 0.5
"""Of the bytes that a columns kernel reads: from which share on it joins the one that has them at
hand anyway."""


def reduce_both_ways(fuser: Fuser, buffers: Mapping[str, Buffer], sweeps: Sweeps) -> list[Group]:
    """The groups, those of columns together with those of rows where a kernel ``sweeps`` so many
    rows, columns and sums over the rows."""
    sizes = {name: sample_of(buffer.nbytes) for name, buffer in buffers.items()}
    of_rows: dict[LoopNest, list[Group]] = {}  # by the nest of both, in which they stand as well
    groups = fuser.groups
    for group in groups:
        if group.nest is not None and _is(group, KernelKind.ROWS):
            of_rows.setdefault(_both(group.nest), []).append(group)
    for columns in groups:
        if columns.nest is None or not _is(columns, KernelKind.COLUMNS):
            continue
        nest = _both(columns.nest)
        others = of_rows.get(nest, [])
        for other in _by_share(columns, others, sizes, sweeps):
            joined = fuser.join(other, columns, nest)
            if joined is not None:
                others[others.index(other)] = joined
                break
    return fuser.groups


def _both(nest: LoopNest) -> LoopNest:
    return replace(nest, kind=KernelKind.BOTH)


def _by_share(
    columns: Group, others: Sequence[Group], sizes: Mapping[str, int], sweeps: Sweeps
) -> list[Group]:
    """Those of ``others`` that one kernel may hold with ``columns``: first with which it shares
    most bytes."""
    assert columns.nest is not None
    mine = sum(sizes[name] for name in columns.loaded)
    own = _over_rows(columns)
    shared: list[tuple[int, int, Group]] = []
    for other in others:
        both = sum([sizes[name] for name in columns.buffers & other.buffers])
        if both < _SHARE * mine:  # as most do: the rest is looked at only then
            continue
        sums = [*own, *_over_rows(other)]
        fits = sweeps(columns.nest.rows.extent, columns.nest.cols.extent, len(sums))
        if fits and not any(map(is_position, sums)):
            shared.append((both, -other.members[0], other))
    return [
        other
        for _, _, other in sorted(shared, key=lambda found_group: found_group[:2], reverse=True)
    ]


def _is(group: Group, kind: KernelKind) -> bool:
    """Whether a group reduces that way; values that do not vary are no axis to go along."""
    nest = group.nest
    if nest is None or nest.kind is not kind or group.pointwise:
        return False
    return not same(nest.rows.extent, 1) and not same(nest.cols.extent, 1)


def _over_rows(group: Group) -> list[Reduce]:
    """What a group reduces over the rows."""
    assert group.nest is not None
    exprs = [op.place.expr for op in group.placed if op.over(group.nest.rows)]
    return [expr for expr in exprs if isinstance(expr, Reduce)]
