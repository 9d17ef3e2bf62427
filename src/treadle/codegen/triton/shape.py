"""Reducing kernels: their shape, and partial results that pass through scratch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.algebra.extents import ceil_div, divides, same
from treadle.codegen.triton.body import TritonBody, bound, new_writer, positions
from treadle.codegen.triton.expr import TritonWriter, number
from treadle.codegen.triton.reduce import Partial, Tile, collapse, identities
from treadle.loop.expr import Reduce
from treadle.loop.kernel import Definition, Kernel, KernelKind, KernelSchedule, Store


@dataclass(frozen=True)
class Shape:
    """A reducing kernel by its parallel and its reduced axis: extents and blocks."""

    how: KernelSchedule
    along: str  # the reduced axis: "c" for rows kernels, "r" for columns kernels
    parallel: int
    reduced: int
    block_p: int
    block_q: int

    @staticmethod
    def of(kernel: Kernel) -> "Shape":
        """The shape of a kernel as it is scheduled."""
        how, rows, cols = kernel.scheduled, kernel.rows.extent, kernel.cols.extent
        if kernel.kind is not KernelKind.COLUMNS:
            return Shape(how, "c", rows, cols, how.rows, how.cols)
        return Shape(how, "r", cols, rows, how.cols, how.rows)

    @property
    def splits(self) -> int:
        """Into how many parts the reduced axis is cut."""
        return self.how.parts

    @property
    def other(self) -> str:
        """The parallel axis."""
        return "r" if self.along == "c" else "c"

    @property
    def both(self) -> bool:
        """Whether positions are those of tiles of both axes."""
        return self.block_p > 1

    def tile(self, block_q: int) -> Tile:
        """The tile with ``block_q`` places along the reduced axis."""
        if self.block_p == 1:
            return Tile(f"[{block_q}]", self.along, 0, False)
        sizes = [self.block_p, block_q] if self.along == "c" else [block_q, self.block_p]
        return Tile(f"[{sizes[0]}, {sizes[1]}]", self.along, int(self.along == "c"), True)

    def pieces(self, unrolled: int) -> "list[LoopRange]":
        """The loops over the reduced axis, or over the part of it that a program takes. Those of
        rows are two if blocks do not fill them, so that whole blocks have no mask: it costs two
        comparisons an element, and vectors of elements where it ends within one."""
        if self.splits > 1:
            filled = same(self.part * self.splits, self.reduced)
            return [LoopRange(0, self.part, 1, filled)]
        taken = self.block_q * unrolled
        if divides(taken, self.reduced):
            return [LoopRange(0, self.reduced, unrolled, True)]
        whole = self.reduced - self.reduced % taken
        rest = LoopRange(whole, self.reduced, 1, divides(self.block_q, self.reduced))
        if self.along == "r" or same(whole, 0):
            return [replace(rest, begin=0)]
        return [LoopRange(0, whole, unrolled, True), rest]

    @property
    def part(self) -> int:
        """Elements of the reduced axis in each part, in whole blocks."""
        return ceil_div(ceil_div(self.reduced, self.block_q), self.splits) * self.block_q

    @property
    def programs(self) -> int:
        """Programs that cover the parallel axis."""
        return ceil_div(self.parallel, self.block_p)


@dataclass(frozen=True, slots=True)
class LoopRange:
    """A loop over a stretch of the reduced axis that takes ``blocks`` at once. ``filled``: every
    place of them exists."""

    begin: int
    end: int
    blocks: int
    filled: bool


def reducing_writer(
    kernel: Kernel, buffers: Mapping[str, str], shape: Shape, *, contract: bool
) -> TritonWriter:
    """Prints formulas over the blocks of that shape."""
    blocks = {shape.other: shape.block_p, shape.along: shape.block_q}
    taken = [axis for axis, block in blocks.items() if block > 1]
    return new_writer(kernel, buffers, taken, contract=contract)


def parallel_positions(writer: TritonWriter, shape: Shape, program: str) -> None:
    """Where along the parallel axis a program stands."""
    first = program if shape.block_p == 1 else f"{program} * {shape.block_p}"
    positions(writer, shape.other, first, shape.block_p, shape.both)
    bound(writer, shape.other, shape.parallel, shape.block_p)


def scatter(
    body: TritonBody, shape: Shape, item: Definition, partial: Partial, scratch: Sequence[str]
) -> None:
    """scratch[part, p] = this part's value"""
    tile = shape.tile(shape.block_q)
    value = collapse(body.writer, as_reduce(item), partial, tile)
    leave(
        body.writer, value, scratch, f"part * {number(shape.parallel)} + {shape.other}", shape.other
    )


def leave(
    writer: TritonWriter, value: Partial, scratch: Sequence[str], place: str, axis: str
) -> None:
    """scratch[place] = value, along ``axis``"""
    mask = writer.masks.get(axis)
    guard = f", mask={mask}" if mask else ""
    for pointer, text in zip(scratch, value.parts, strict=True):
        writer.line(f"tl.store({pointer} + ({place}), {text}{guard})")


def gather(body: TritonBody, shape: Shape, item: Definition, scratch: Sequence[str]) -> None:
    """The reduction over all parts of scratch[part, p], in one fixed order."""
    writer, reduce = body.writer, as_reduce(item)
    count = 1 << (shape.splits - 1).bit_length()
    parts = writer.name(f"tl.arange(0, {count})" + _suffix(shape))
    offset = f"{parts} * {number(shape.parallel)} + {shape.other}"
    masks = [f"({parts} < {shape.splits})", *writer.lanes(frozenset({shape.other}))]
    loads: list[str] = []
    for pointer, other in zip(scratch, identities(reduce), strict=True):
        guard = f"mask={' & '.join(masks)}, other={other}"
        loads.append(writer.name(f"tl.load({pointer} + ({offset}), {guard})"))
    tile = shape.tile(count)
    value = collapse(writer, reduce, Partial(tuple(loads)), tile)
    writer.locals[item.name] = body.result(reduce, value, tile)


def as_reduce(item: Definition | Store) -> Reduce:
    """The reduction that an item is."""
    assert isinstance(item, Definition)
    assert isinstance(item.expr, Reduce)
    return item.expr


def _suffix(shape: Shape) -> str:
    if shape.block_p == 1:
        return ""
    return "[None, :]" if shape.along == "c" else "[:, None]"
