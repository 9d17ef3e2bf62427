"""The data that one collective sends for several, and the position of each result.

::

    all_reduce, broadcast     cat([a, b])                      f32[n + m]      gives f32[n + m]
    reduce_scatter            view(cat([rows(a), rows(b)], 1)) f32[R * (n+m)]  gives f32[n + m]
    all_gather                cat([a, b])                      f32[n + m]      gives f32[R * (n+m)]

Each is flat. Of ``R`` ranks, row ``r`` of ``rows(a): f32[R, n]`` is what rank ``r`` gets of ``a``,
and a result of an all-gather has the rows of all ranks. The result of each is its columns, in its
own shape. Columns of one row are a view. Columns of several rows (an all-gather) are not contiguous
and are copied together: this copy is the cost of joining all-gathers.

One buffer, and no ``all_reduce_coalesced``. A functional collective copies its inputs: the
coalesced form makes one copy per input, in separate kernels, while the copy into the buffer is part
of the kernel that computes the input. One message uses the network fully, while each of several
small ones has its own ring or tree. And a bucket costs as much as one collective of its size, which
can be measured.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from treadle.graph.analysis.alias import read_by_strides, storages, views_of
from treadle.graph.core.collectives import Collective, CollectiveKind
from treadle.graph.core.node_info import tensor_of, value_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import tensors_in, type_of
from treadle.graph.core.values import emit_ahead
from treadle.passes.comm.blocks import reshaped_ahead
from treadle.passes.comm.bucketing.candidates import JoinCandidate

aten = torch.ops.aten


def packed(members: Sequence[JoinCandidate]) -> fx.Node:
    """What one collective sends for ``members``, right ahead of the last of them."""
    last = members[-1].start
    rows = _rows_to_send(members[-1].collective)
    pieces = [_row_by_row(member, rows, last) for member in members]
    joined = emit_ahead(last, last, aten.cat.default, pieces, len(rows))
    return reshaped_ahead(last, last, joined, [type_of(joined).numel])


def unpacked(
    members: Sequence[JoinCandidate], waited: fx.Node, given_away: frozenset[int]
) -> list[fx.Node]:
    """The result of each of ``members`` in that of the one collective, all of them right behind
    ``waited``. ``given_away``: the storages of which the caller gets views."""
    rows = _rows_received(members[-1].collective)
    place = waited.next
    table = reshaped_ahead(place, waited, waited, [*rows, type_of(waited).numel // prod(rows)])
    results: list[fx.Node] = []
    start = 0
    for member in members:
        kind = type_of(member.wait)
        stop = start + kind.numel // prod(rows)
        piece = emit_ahead(place, member.wait, aten.slice.Tensor, table, len(rows), start, stop)
        if rows or _needs_own_memory(member.wait, given_away):
            form = {"memory_format": torch.contiguous_format}
            piece = emit_ahead(place, member.wait, aten.clone.default, piece, **form)
        results.append(reshaped_ahead(place, member.wait, piece, list(kind.shape)))
        start = stop
    return results


def _rows_to_send(member: Collective) -> list[int]:
    """As many as there are ranks if each gets another part, in a list; else none."""
    return [member.ranks or 1] if member.kind is CollectiveKind.REDUCE_SCATTER else []


def _rows_received(member: Collective) -> list[int]:
    """As many as there are ranks if each gives another part, in a list; none if there is one."""
    ranks = (member.ranks or 1) if member.kind is CollectiveKind.ALL_GATHER else 1
    return [ranks] if ranks > 1 else []


def _row_by_row(member: JoinCandidate, rows: Sequence[int], place: fx.Node) -> fx.Node:
    """Its input in the shape ``[*rows, n]``, a view where it can be one. What that is may have
    changed since ``member`` was found: another bucket may have replaced it."""
    tensor = arguments(member.start)["input"]
    shape = [*rows, type_of(tensor).numel // prod(rows)]
    return reshaped_ahead(place, member.start, tensor, shape)


def _needs_own_memory(node: fx.Node, given_away: frozenset[int]) -> bool:
    """Whether the result that is ``node`` may not be a part of a larger value: the caller gets a
    view of it, and would hold all of that; or somebody counts in its storage, which begins
    elsewhere then, or sees its bytes as another dtype, which has to fit where it begins."""
    if storages(value_of(node)) & given_away or read_by_strides(node):
        return True
    shown = (tensor for view in views_of(node) for tensor in tensors_in(value_of(view)))
    return any(tensor.dtype is not tensor_of(node).dtype for tensor in shown)
