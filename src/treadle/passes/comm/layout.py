"""What is sent by one collective for several, and where the result of each is.

::

    all_reduce, broadcast     cat([flat(a), flat(b)])                f32[n + m]      1 row
    reduce_scatter            cat([rows(a), rows(b)], 1)             f32[R, n + m]   row r: for rank r
    all_gather                cat([rows(a), rows(b)], 1)             f32[1, n + m]   row r: of rank r,
                                                                     then f32[R, n + m]

The result of each is its columns, in its own shape. Those of one row are a view. Those of several
(an all-gather) lie apart, and a copy brings them together: joining all-gathers costs that copy.

One buffer, and no ``all_reduce_coalesced``. A functional collective copies what it is given: the
coalesced form makes one copy for each input, in kernels of their own, where the copy into the buffer
is a part of the kernel that computes the input. One message fills the network where a group of
small ones has a ring, or a tree, for each. And what a size costs is then measured for one size.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from treadle.compat.operators import OpOverload
from treadle.graph.alias import read_by_strides, storages
from treadle.graph.arguments import Argument
from treadle.graph.collectives import Collective, CollectiveKind
from treadle.graph.node_info import tensor_of, value_of
from treadle.graph.operators import arguments
from treadle.graph.types import tensors_in, type_of
from treadle.graph.values import inherit
from treadle.passes.comm.blocks import is_view
from treadle.passes.comm.candidates import Candidate

aten = torch.ops.aten


def packed(members: Sequence[Candidate]) -> fx.Node:
    """What one collective sends for ``members``, right ahead of the last of them."""
    last = members[-1].start
    rows = _rows(members[-1].collective)
    with last.graph.inserting_before(last):
        pieces = [_row_by_row(each, rows) for each in members]
        joined = last.graph.call_function(aten.cat.default, (pieces, len(rows)))
    inherit(joined, last)
    return joined


def unpacked(
    members: Sequence[Candidate], waited: fx.Node, given_away: frozenset[int]
) -> list[fx.Node]:
    """The result of each of ``members`` in that of the one collective, all of them right behind
    ``waited``. ``given_away``: the storages of which the caller gets views."""
    *rows, _ = type_of(waited).shape
    results: list[fx.Node] = []
    behind, start = waited, 0
    for each in members:
        stop = start + type_of(each.wait).numel // prod(rows)
        made = _Made(each.wait, behind)
        made.call(aten.slice.Tensor, waited, len(rows), start, stop)
        shape = type_of(each.wait).shape
        if type_of(made.last).shape != shape:
            seen = type_of(made.last).is_contiguous
            made.call(aten.view.default if seen else aten.reshape.default, made.last, list(shape))
        shared = storages(value_of(made.last)) & storages(value_of(waited))
        if shared and _needs_own_memory(each.wait, given_away):
            made.call(aten.clone.default, made.last)
        results.append(made.last)
        behind, start = made.last, stop
    return results


class _Made:
    """Nodes one behind the other, which belong where ``root`` does."""

    def __init__(self, root: fx.Node, behind: fx.Node) -> None:
        self._root = root
        self.last = behind

    def call(self, target: OpOverload, *args: Argument) -> None:
        graph = self.last.graph
        with graph.inserting_after(self.last):
            self.last = graph.call_function(target, args)
        inherit(self.last, self._root)


def _rows(member: Collective) -> list[int]:
    """The sizes of what is sent, ahead of its last dim."""
    match member.kind:
        case CollectiveKind.REDUCE_SCATTER:
            assert member.ranks is not None, member
            return [member.ranks]
        case CollectiveKind.ALL_GATHER:
            return [1]
        case _:
            return []


def _row_by_row(member: Candidate, rows: Sequence[int]) -> fx.Node:
    """Its input in the shape ``[*rows, n]``, a view where it can be one. What that is may have
    changed since ``member`` was found: another bucket may have replaced it."""
    given = arguments(member.start)["input"]
    kind = type_of(given)
    shape = *rows, kind.numel // prod(rows)
    if kind.shape == shape:
        return given
    target = aten.view.default if kind.is_contiguous else aten.reshape.default
    made = given.graph.call_function(target, (given, list(shape)))
    inherit(made, member.start)
    return made


def _needs_own_memory(node: fx.Node, given_away: frozenset[int]) -> bool:
    """Whether the result that is ``node`` may not be a part of a larger value: the caller gets a
    view of it, and would hold all of that; or somebody counts in its storage, which begins
    elsewhere then, or sees its bytes as another dtype, which has to fit where it begins."""
    if storages(value_of(node)) & given_away or read_by_strides(node):
        return True
    return any(tensor.dtype is not tensor_of(node).dtype for tensor in _shown(node))


def _shown(node: fx.Node) -> list[torch.Tensor]:
    """What the views of ``node`` are."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        views = [user for user in pending.pop().users if user not in found and is_view(user)]
        found |= dict.fromkeys(views)
        pending += views
    return [tensor for each in found for tensor in tensors_in(value_of(each))]


__all__ = ["packed", "unpacked"]
