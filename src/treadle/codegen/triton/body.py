"""One device function: positions, masks, definitions and stores; and pointwise kernels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from treadle.algebra.extents import ceil_div, divides
from treadle.codegen.contraction import only_summed
from treadle.codegen.triton.expr import TYPES, Named, TritonWriter, number
from treadle.codegen.triton.reduce import Partial, Tile, collapse, fill, finish
from treadle.loop.expr import FLOAT8, Expr, Reduce, values_of
from treadle.loop.kernel import Definition, Kernel, KernelSchedule, LoopForm, Store
from treadle.loop.nest import is_position, is_wide, updates
from treadle.loop.traverse import loads


@dataclass(frozen=True, slots=True)
class GridFunction:
    """One device function. ``programs``: how many of it run, a formula of the sizes that it is
    told. The lines call the number of the program at hand ``program``."""

    lines: tuple[str, ...]
    programs: str
    how: KernelSchedule


_VECTOR = 16
"""Bytes that a thread loads or stores at once."""


@dataclass
class TritonBody:
    """Emission state of one stage."""

    kernel: Kernel
    writer: TritonWriter
    updates: tuple[Store, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.updates = updates(self.kernel)

    @property
    def in_place(self) -> bool:
        """Whether every read comes before the first write."""
        return self.kernel.scheduled.in_place

    def is_late(self, item: Store) -> bool:
        """Whether this program may have read the bytes that a store writes."""
        return self.in_place or item in self.updates

    def stores(self, items: Sequence[Store]) -> None:
        """Stores whose bytes this program may have read: after every read of every thread."""
        if items:
            self.writer.line("tl.debug_barrier()")
        for item in items:
            self.store(item)

    def define(self, item: Definition, tile: Tile | None) -> None:
        """``%name = expr``, in registers."""
        if isinstance(item.expr, Reduce):
            self.writer.locals[item.name] = self._reduce(item.expr, tile)
        else:
            self.writer.define(item.name, item.expr)

    def _reduce(self, reduce: Reduce, tile: Tile | None) -> Named:
        if tile is None:  # the reduced axis has one element
            value = self.writer.evaluate(reduce.body)
            if is_position(reduce):
                return Named(self.writer.name(f"tl.full((), 0, {TYPES[reduce.dtype]})"))
            return value
        partial = collapse(self.writer, reduce, fill(self.writer, reduce, tile), tile)
        return self.result(reduce, partial, tile)

    def result(self, reduce: Reduce, partial: Partial, tile: Tile) -> Named:
        """A collapsed reduction as a value over the parallel axis."""
        other = "c" if tile.along == "r" else "r"
        return Named(finish(self.writer, reduce, partial), frozenset({other} & self.writer.blocks))

    def store(self, item: Store, only: str = "") -> None:
        """``buffer[index] = value`` on the lanes that exist (and where ``only`` holds)."""
        writer = self.writer
        value = writer.evaluate(item.value)
        done = {id(node): writer.evaluate(node) for node in values_of(item.index)}
        index = writer.index(item.index, done)
        offset = index.text
        for axis in ("r", "c"):
            if axis in (value.axes - index.axes) & writer.blocks:
                offset = f"{offset} + 0 * {axis}"
        masks = writer.lanes(index.axes | value.axes) + ([only] if only else [])
        guard = f", mask={' & '.join(masks)}" if masks else ""
        pointer = writer.buffers[item.buffer]
        if item.value.dtype in FLOAT8 and len(value.axes) == 1:
            offset = f"tl.max_contiguous({offset}, {self._of_a_thread()})"
        writer.line(f"tl.store({pointer} + ({offset}), {value.text}{guard})")

    def _of_a_thread(self) -> int:
        """Elements beside each other that a thread has of the widest values. Of bytes alone Triton
        would give it 16, and lay out all others so: threads then read four bytes of each 64."""
        reads = (
            load
            for item in self.kernel.body
            if isinstance(item, Definition)
            for load in loads(item.expr)
        )
        widest = max((load.dtype.itemsize for load in reads), default=1)
        return _VECTOR // widest


def new_writer(
    kernel: Kernel, buffers: Mapping[str, str], blocks: Iterable[str], *, contract: bool
) -> TritonWriter:
    """Prints formulas over ``r`` and ``c``; ``blocks``: which of them are blocks of positions.
    ``contract``: whether a product and a sum may round once."""
    names = {kernel.rows: "r", kernel.cols: "c"}
    summed = only_summed(kernel) if contract else frozenset[Expr]()
    return TritonWriter(names, buffers, {}, frozenset(blocks), wide=is_wide(kernel), summed=summed)


def positions(writer: TritonWriter, axis: str, first: str, block: int, both: bool) -> None:
    """Define ``r`` or ``c``: a block of positions from ``first``, or the one position."""
    if block == 1:
        text = first
    else:
        text = f"tl.arange(0, {block})"
        if both:
            text += "[:, None]" if axis == "r" else "[None, :]"
        text = f"{first} + {text}"
    writer.line(
        f"{axis} = ({text}).to(tl.int64)" if writer.wide and first != "0" else f"{axis} = {text}"
    )


def pointwise(kernel: Kernel, buffers: Mapping[str, str], *, contract: bool) -> GridFunction:
    """A kernel without reductions."""
    how = kernel.scheduled
    if how.form is LoopForm.FLAT:
        return _flat(kernel, buffers, contract=contract)
    rows, cols = kernel.rows.extent, kernel.cols.extent
    blocks = [axis for axis, block in (("r", how.rows), ("c", how.cols)) if block > 1]
    writer = new_writer(kernel, buffers, blocks, contract=contract)
    across = number(ceil_div(cols, how.cols))
    both = how.rows > 1 and how.cols > 1
    writer.line(f"pid = {program(writer)}")
    positions(writer, "r", f"pid // {across} * {how.rows}", how.rows, both)
    positions(writer, "c", f"pid % {across} * {how.cols}", how.cols, both)
    bound(writer, "r", rows, how.rows)
    bound(writer, "c", cols, how.cols)
    straight(TritonBody(kernel, writer), None)
    programs = number(ceil_div(rows, how.rows) * ceil_div(cols, how.cols))
    return GridFunction(tuple(writer.lines), programs, how)


def program(writer: TritonWriter) -> str:
    """The number of the program at hand, wide enough for what is computed from it."""
    return f"program{'.to(tl.int64)' if writer.wide else ''}"


def _flat(kernel: Kernel, buffers: Mapping[str, str], *, contract: bool) -> GridFunction:
    how = kernel.scheduled
    axis = "r" if how.rows > 1 else "c"
    block = how.rows * how.cols
    writer = new_writer(kernel, buffers, [axis] if block > 1 else [], contract=contract)
    writer.line(f"{'r' if axis == 'c' else 'c'} = 0")
    if block == 1:
        writer.line("c = 0")
    else:
        positions(writer, axis, f"{program(writer)} * {block}", block, False)
        writer.line(f"m{axis} = {axis} < n")
        writer.masks[axis] = f"m{axis}"
    straight(TritonBody(kernel, writer), None)
    programs = "1" if block == 1 else f"(n + {block - 1}) // {block}"
    return GridFunction(tuple(writer.lines), programs, how)


def bound(writer: TritonWriter, axis: str, extent: int, block: int) -> None:
    """Mask the lanes past the end, if blocks of this size do not cover it exactly."""
    if not divides(block, extent):
        mask(writer, axis, extent)


def mask(writer: TritonWriter, axis: str, extent: int) -> None:
    """Mask the lanes past the end."""
    writer.line(f"m{axis} = {axis} < {number(extent)}")
    writer.masks[axis] = f"m{axis}"


def straight(body: TritonBody, tile: Tile | None) -> None:
    """Every item in order: all values stay in registers."""
    late: list[Store] = []
    for item in body.kernel.body:
        if isinstance(item, Definition):
            body.define(item, tile)
        elif body.is_late(item):
            late.append(item)
        else:
            body.store(item)
    body.stores(late)
