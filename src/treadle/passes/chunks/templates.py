"""What templates of chunks read, and the sums that chunks add up."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

from treadle.graph.core.types import type_of
from treadle.passes.chunks.rows import (
    BatchMember,
    Contraction,
    Exit,
    MadeRows,
    Member,
    Resliced,
    RowPart,
    RowSlice,
    Total,
)
from treadle.util.nested import leaves
from treadle.util.reach import reached

aten = torch.ops.aten


def summed(part: object, dims: list[int], node: fx.Node) -> MadeRows:
    """The sum of a chunk, in the dtype that sums of chunks are added up in."""
    dtype = wide_dtype(type_of(node).dtype)
    return MadeRows(aten.sum.dim_IntList, (part, dims, False), (("dtype", dtype),))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are added up in: 16 bits lose what 32 keep."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow else dtype


def leaves_of(template: object) -> Iterator[object]:
    """The leaves of a template, including those of calls inside it."""
    for leaf in leaves(template):
        if isinstance(leaf, MadeRows):
            yield from leaves_of((leaf.args, dict(leaf.kwargs)))
        else:
            yield leaf


def read_by_kernels(template: object) -> Iterator[RowSlice]:
    """What a template reads of values that are there before, besides factors of products."""
    if isinstance(template, MadeRows) and template.target not in (
        aten.mm.default,
        aten.addmm.default,
    ):
        for leaf in leaves_of((template.args, dict(template.kwargs))):
            if isinstance(leaf, RowSlice):
                yield leaf


def parts_of(template: object) -> list[fx.Node]:
    """The members that a template reads."""
    return [leaf.node for leaf in leaves_of(template) if isinstance(leaf, RowPart | Resliced)]


def nodes_of(template: object) -> list[fx.Node]:
    """What a template reads that is there before the chunks."""
    nodes: list[fx.Node] = []
    for leaf in leaves_of(template):
        if isinstance(leaf, RowSlice):
            nodes.append(leaf.node)
        elif isinstance(leaf, fx.Node):
            nodes.append(leaf)
    return nodes


def template_of(exit_: Exit) -> object:
    """What a chunk adds to a sum."""
    match exit_:
        case Total(partial=partial):
            return partial
        case Contraction(left=left, right=right, start=start):
            return (left, right, start)


def needed_members(
    seeds: Iterable[fx.Node],
    members: Mapping[fx.Node, Member] | Mapping[fx.Node, BatchMember],
    exits: Mapping[fx.Node, Exit],
) -> set[fx.Node]:
    """The members that ``seeds`` are made of, themselves included."""

    def parts(node: fx.Node) -> Iterator[fx.Node]:
        if node in members:
            yield from parts_of(members[node].form)
        if node in exits:
            yield from parts_of(template_of(exits[node]))

    return {node for node in reached(seeds, parts) if node in members}
