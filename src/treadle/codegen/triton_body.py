"""One device function: positions, masks, definitions and stores; and pointwise kernels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treadle.codegen.triton_expr import TYPES, Named, Writer
from treadle.codegen.triton_kernel import indices, is_wide, loaded, stored
from treadle.codegen.triton_reduce import Partial, Tile, collapse, fill, finish
from treadle.loop.expr import Reduce, ReduceKind
from treadle.loop.index import Axis
from treadle.loop.kernel import Definition, Kernel, Store

BLOCK = 1024
"""Elements of a pointwise program."""


@dataclass(frozen=True, slots=True)
class DeviceFunction:
    """One device function: ``programs`` of it run, or one per ``block`` elements of ``n``."""

    lines: tuple[str, ...]
    programs: int
    block: int
    warps: int


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


@dataclass
class Body:
    """Emission state of one stage."""

    kernel: Kernel
    writer: Writer
    in_place: bool = False

    def stores(self, items: Sequence[Store]) -> None:
        """Stores whose bytes this program may have read: after every read of every thread."""
        if items:
            self.writer.line("tl.debug_barrier()")
        for item in items:
            self.store(item)

    def define(self, item: Definition, tile: Tile | None) -> None:
        """``%name = expr``, in registers."""
        if isinstance(item.expr, Reduce):
            value = self._reduce(item.expr, tile)
        else:
            value = self.writer.evaluate(item.expr)
        self.writer.locals[item.name] = value

    def _reduce(self, reduce: Reduce, tile: Tile | None) -> Named:
        if tile is None:  # the reduced axis has one element
            value = self.writer.evaluate(reduce.body)
            if reduce.kind in (ReduceKind.ARGMAX, ReduceKind.ARGMIN):
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
        done = {id(node): writer.evaluate(node) for node in item.index.values}
        index = writer.index(item.index, done)
        offset = index.text
        for axis in ("r", "c"):
            if axis in (value.axes - index.axes) & writer.blocks:
                offset = f"{offset} + 0 * {axis}"
        masks = writer.lanes(index.axes | value.axes) + ([only] if only else [])
        guard = f", mask={' & '.join(masks)}" if masks else ""
        pointer = writer.buffers[item.buffer]
        writer.line(f"tl.store({pointer} + ({offset}), {value.text}{guard})")


def arguments_of(kernel: Kernel) -> dict[str, str]:
    """By the buffer the name of its pointer argument: those that are loaded first, then stored."""
    names = dict.fromkeys([*loaded(kernel.body), *stored(kernel.body)])
    return {name: f"b{i}" for i, name in enumerate(names)}


def new_writer(kernel: Kernel, buffers: Mapping[str, str], blocks: Iterable[str]) -> Writer:
    names = {kernel.rows: "r", kernel.cols: "c"}
    return Writer(names, buffers, {}, frozenset(blocks), wide=is_wide(kernel))


def positions(writer: Writer, axis: str, first: str, block: int, both: bool) -> None:
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


def pointwise(
    kernel: Kernel, buffers: Mapping[str, str], in_place: bool
) -> tuple[DeviceFunction, tuple[int, ...]]:
    rows, cols = kernel.rows.extent, kernel.cols.extent
    if rows == 1 or cols == 1:
        return _flat(kernel, buffers, in_place), (max(rows, cols),) if rows * cols > 1 else ()
    block_r, block_c = _pointwise_tile(kernel)
    writer = new_writer(kernel, buffers, [a for a, b in (("r", block_r), ("c", block_c)) if b > 1])
    across = math.ceil(cols / block_c)
    both = block_r > 1 and block_c > 1
    writer.line(
        "pid = tl.program_id(0)" if not writer.wide else "pid = tl.program_id(0).to(tl.int64)"
    )
    positions(writer, "r", f"pid // {across} * {block_r}", block_r, both)
    positions(writer, "c", f"pid % {across} * {block_c}", block_c, both)
    bound(writer, "r", rows, block_r)
    bound(writer, "c", cols, block_c)
    straight(Body(kernel, writer, in_place), None)
    programs = math.ceil(rows / block_r) * across
    return DeviceFunction(tuple(writer.lines), programs, 0, warps(block_r * block_c)), ()


def _flat(kernel: Kernel, buffers: Mapping[str, str], in_place: bool) -> DeviceFunction:
    axis = "c" if kernel.rows.extent == 1 else "r"
    scalar = kernel.rows.extent == kernel.cols.extent == 1
    writer = new_writer(kernel, buffers, [] if scalar else [axis])
    writer.line(f"{'r' if axis == 'c' else 'c'} = 0")
    if scalar:
        writer.line("c = 0")
    else:
        first = f"tl.program_id(0){'.to(tl.int64)' if writer.wide else ''} * {BLOCK}"
        positions(writer, axis, first, BLOCK, False)
        writer.line(f"m{axis} = {axis} < n")
        writer.masks[axis] = f"m{axis}"
    straight(Body(kernel, writer, in_place), None)
    if scalar:
        return DeviceFunction(tuple(writer.lines), 1, 0, 1)
    return DeviceFunction(tuple(writer.lines), 0, BLOCK, 4)


def _pointwise_tile(kernel: Kernel) -> tuple[int, int]:
    """Long along the contiguous axis; square when some accesses run along each."""
    rows, cols = power_of_two(kernel.rows.extent), power_of_two(kernel.cols.extent)
    contiguous: set[Axis] = set()
    for index in indices(kernel.body):
        contiguous |= {atom for atom, scale in index.terms if scale == 1 and isinstance(atom, Axis)}
    if kernel.rows not in contiguous:
        block_c = min(cols, BLOCK)
        return min(rows, BLOCK // block_c), block_c
    if kernel.cols not in contiguous:
        block_r = min(rows, BLOCK)
        return block_r, min(cols, BLOCK // block_r)
    block_c = min(cols, 32)
    return min(rows, BLOCK // block_c), block_c


def bound(writer: Writer, axis: str, extent: int, block: int) -> None:
    """Mask the lanes past the end, if blocks of this size do not cover it exactly."""
    if extent % block:
        writer.line(f"m{axis} = {axis} < {extent}")
        writer.masks[axis] = f"m{axis}"


def straight(body: Body, tile: Tile | None) -> None:
    """Every item in order: all values stay in registers."""
    late: list[Store] = []
    for item in body.kernel.body:
        if isinstance(item, Definition):
            body.define(item, tile)
        elif body.in_place:
            late.append(item)
        else:
            body.store(item)
    body.stores(late)


def warps(elements: int) -> int:
    return 4 if elements <= 2048 else 8 if elements <= 4096 else 16
