"""Reducing kernels: their shape, and partial results that pass through scratch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.codegen.triton.body import TritonBody, bound, new_writer, positions
from treadle.codegen.triton.expr import TritonWriter
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
        """Whether both axes are blocks of positions."""
        return self.block_p > 1 and self.block_q > 1

    def tile(self, block_q: int) -> Tile:
        """The tile with ``block_q`` places along the reduced axis."""
        if self.block_p == 1:
            return Tile(f"[{block_q}]", self.along, 0, False)
        sizes = [self.block_p, block_q] if self.along == "c" else [block_q, self.block_p]
        return Tile(f"[{sizes[0]}, {sizes[1]}]", self.along, int(self.along == "c"), True)

    def pieces(self, span: int, unrolled: int) -> list[tuple[int, int, int]]:
        """Where the loops over ``span`` elements begin and end, and how many blocks each takes at
        once. Those of rows are two if blocks do not fill them, so that whole blocks have no mask:
        it costs two comparisons an element, and vectors of elements where it ends within one."""
        taken = self.block_q * unrolled
        whole = span - span % taken
        if self.along == "r" or self.splits > 1 or whole in (0, span):
            return [(0, span, unrolled if whole == span else 1)]
        return [(0, whole, unrolled), (whole, span, 1)]

    @property
    def programs(self) -> int:
        """Programs that cover the parallel axis."""
        return math.ceil(self.parallel / self.block_p)


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
    leave(body.writer, value, scratch, f"part * {shape.parallel} + {shape.other}", shape.other)


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
    offset = f"{parts} * {shape.parallel} + {shape.other}"
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
