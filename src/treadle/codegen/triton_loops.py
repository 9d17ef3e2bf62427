"""Reducing kernels: in registers, in loops, or cut into parts. See ``schedule/programs.py``."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from treadle.codegen.triton_body import (
    Body,
    GridFunction,
    bound,
    new_writer,
    positions,
    straight,
)
from treadle.codegen.triton_expr import Writer
from treadle.codegen.triton_reduce import (
    Partial,
    Tile,
    collapse,
    combine,
    fill,
    identities,
    start,
)
from treadle.loop.expr import Load, Reduce
from treadle.loop.index import Index
from treadle.loop.kernel import Definition, Kernel, KernelKind, KernelSchedule, LoopForm, Store
from treadle.loop.nest import Levels, accumulators, levels, roots
from treadle.loop.traverse import walk_all

_VECTOR = 16  # elements; of one byte, what a thread loads at once


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
        if kernel.kind is KernelKind.ROWS:
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

    def pieces(self, span: int) -> list[tuple[int, int]]:
        """Where the loops over ``span`` elements begin and end: one, or two where only the last
        block needs a mask. A mask that ends within a vector of elements keeps loads of all blocks
        from being vectors."""
        whole = span - span % self.block_q
        ragged = self.along == "c" and self.splits == 1 and span % _VECTOR and whole
        return [(0, whole), (whole, span)] if ragged else [(0, span)]

    @property
    def programs(self) -> int:
        """Programs that cover the parallel axis."""
        return math.ceil(self.parallel / self.block_p)


def reducing(kernel: Kernel, buffers: Mapping[str, str]) -> list[GridFunction]:
    """The device functions of a kernel with reductions, one after another."""
    shape = Shape.of(kernel)
    if shape.how.form is LoopForm.PERSISTENT:
        return [_persistent(kernel, buffers, shape)]
    looped = Looped(kernel, buffers, shape, levels(kernel))
    return looped.split() if shape.how.form is LoopForm.SPLIT else [looped.whole()]


def _persistent(kernel: Kernel, buffers: Mapping[str, str], shape: Shape) -> GridFunction:
    writer = _reducing_writer(kernel, buffers, shape)
    _parallel_positions(writer, shape, "program")
    positions(writer, shape.along, "0", shape.block_q, shape.both)
    bound(writer, shape.along, shape.reduced, shape.block_q)
    straight(Body(kernel, writer), shape.tile(shape.block_q) if shape.block_q > 1 else None)
    return GridFunction(tuple(writer.lines), shape.programs, 0, shape.how)


def _reducing_writer(kernel: Kernel, buffers: Mapping[str, str], shape: Shape) -> Writer:
    blocks = {shape.other: shape.block_p, shape.along: shape.block_q}
    return new_writer(kernel, buffers, [axis for axis, block in blocks.items() if block > 1])


def _parallel_positions(writer: Writer, shape: Shape, program: str) -> None:
    first = program if shape.block_p == 1 else f"{program} * {shape.block_p}"
    positions(writer, shape.other, first, shape.block_p, shape.both)
    bound(writer, shape.other, shape.parallel, shape.block_p)


@dataclass
class Looped:
    """Renders a looped kernel, in one stage or in one stage per level."""

    kernel: Kernel
    buffers: Mapping[str, str]
    shape: Shape
    levels: Levels
    scratch: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def whole(self) -> GridFunction:
        """All loops in one program."""
        body = self._begin("program")
        for level in range(self.levels.last + 1):
            self._fixed(body, level)
            partials = self._loop(body, level, self.shape.reduced, 1)
            for item, partial in partials:
                assert isinstance(item.expr, Reduce)
                tile = self.shape.tile(self.shape.block_q)
                value = collapse(body.writer, item.expr, partial, tile)
                body.writer.locals[item.name] = body.result(item.expr, value, tile)
        for item in self.levels.final_stores:
            body.store(item)
        return self._stage(body, self.shape.programs)

    def split(self) -> list[GridFunction]:
        """One stage per level; partial results pass through scratch."""
        self._name_scratch()
        stages: list[GridFunction] = []
        for level in range(self.levels.last + 1):
            is_last = level == self.levels.last
            has_loop = bool(self.levels.reduced_in(level) or self.levels.stored_in(level))
            if not has_loop and not (is_last and self.levels.final_stores):
                continue
            splits = self.shape.splits if has_loop else 1
            stages.append(self._one(level, splits, is_last))
        return stages

    def _one(self, level: int, splits: int, is_last: bool) -> GridFunction:
        body = self._begin(f"(program // {splits})")
        if splits > 1:
            body.writer.line(f"part = program % {splits}")
        for below in range(level + 1):
            self._fixed(body, below)
            for item in self.levels.reduced_in(below) if below < level else []:
                self._gather(body, item)
        chunk = math.ceil(self.shape.reduced / self.shape.block_q / self.shape.splits)
        chunk *= self.shape.block_q
        for item, partial in self._loop(body, level, chunk, splits) if splits > 1 else []:
            self._scatter(body, item, partial)
        for item in self.levels.final_stores if is_last else []:
            body.store(item, "(part == 0)" if splits > 1 else "")
        return self._stage(body, self.shape.programs * splits)

    def _stage(self, body: Body, programs: int) -> GridFunction:
        return GridFunction(tuple(body.writer.lines), programs, 0, self.shape.how)

    def _begin(self, program: str) -> Body:
        writer = _reducing_writer(self.kernel, self.buffers, self.shape)
        _parallel_positions(writer, self.shape, program)
        return Body(self.kernel, writer)

    def _fixed(self, body: Body, level: int) -> None:
        """Formulas that do not vary along the reduced axis, known at this level."""
        for item in self.levels.fixed_in(level):
            body.define(item, None)

    def _loop(
        self, body: Body, level: int, span: int, splits: int
    ) -> list[tuple[Definition, Partial]]:
        """The loop of one level over ``span`` elements; gives its reductions' accumulators."""
        writer, levels = body.writer, self.levels
        reductions, stores = levels.reduced_in(level), levels.stored_in(level)
        if not reductions and not stores:
            return []
        tile = self.shape.tile(self.shape.block_q)
        wanted = levels.closure(
            [i.expr for i in reductions] + [root for item in stores for root in roots(item)]
        )
        self._hoist(body, [item for item in self.kernel.body if _name(item) in wanted])
        self._hoist(body, [*reductions, *stores])
        sums = [(item, start(writer, _as_reduce(item), tile)) for item in reductions]
        ordered = body.in_place and not reductions and self._reads_before_it_writes(stores)
        if ordered:
            writer.line("tl.debug_barrier()")  # after what other threads read before the loop
        for begin, end in self.shape.pieces(span):
            outside = dict(writer.locals), dict(writer.known), dict(writer.masks)
            writer.line(f"for q in range({begin}, {end}, {self.shape.block_q}):")
            writer.indent += 1
            first = f"part * {span} + q" if splits > 1 else "q"
            positions(writer, self.shape.along, first, self.shape.block_q, self.shape.both)
            covered = math.ceil(end / self.shape.block_q) * self.shape.block_q * splits
            if covered > self.shape.reduced:
                bound(writer, self.shape.along, self.shape.reduced, covered)
            self._pass(body, wanted, sums, stores, ordered=ordered)
            writer.indent -= 1
            writer.locals, writer.known, writer.masks = outside
        return sums

    def _pass(
        self,
        body: Body,
        wanted: Collection[str],
        sums: Sequence[tuple[Definition, Partial]],
        stores: Sequence[Store],
        *,
        ordered: bool,
    ) -> None:
        """What a loop does at one block of the reduced axis."""
        writer, tile = body.writer, self.shape.tile(self.shape.block_q)
        partials = {item.name: partial for item, partial in sums}
        for item in self.kernel.body:
            if isinstance(item, Store):
                if item in stores and not body.in_place:
                    body.store(item)
            elif item.name in wanted:
                body.define(item, None)
            elif item.name in partials:
                reduce = _as_reduce(item)
                combine(writer, reduce, partials[item.name], fill(writer, reduce, tile))
        if ordered:
            body.store(stores[0])
        else:
            body.stores(stores if body.in_place else [])

    def _reads_before_it_writes(self, stores: Sequence[Store]) -> bool:
        """Whether each element is read once and what is written there depends on it, so that no
        thread can write what another has yet to read: one store, and one load of each buffer."""
        if len(stores) != 1:
            return False
        wanted = self.levels.closure(roots(stores[0]))
        exprs = [self.levels.definitions[name].expr for name in wanted] + roots(stores[0])
        places: dict[str, set[tuple[Index, int]]] = {}
        for node in walk_all(exprs):
            if isinstance(node, Load):
                places.setdefault(node.buffer, set()).add((node.index, id(node.mask)))
        return all(len(each) == 1 for each in places.values())

    def _hoist(self, body: Body, items: Iterable[Definition | Store]) -> None:
        """Compute before the loop what does not change in it; equal text finds it again."""
        for item in items:
            inside = [root.body if isinstance(root, Reduce) else root for root in roots(item)]
            for part in self.levels.hoisted(inside):
                body.writer.evaluate(part)

    def _name_scratch(self) -> None:
        """Which scratch holds the accumulators of each reduction."""
        names = iter(self.kernel.scratch)
        for item in self.levels.definitions.values():
            if isinstance(item.expr, Reduce):
                count = len(accumulators(item.expr))
                self.scratch[item.name] = tuple(self.buffers[next(names)] for _ in range(count))

    def _scatter(self, body: Body, item: Definition, partial: Partial) -> None:
        """scratch[part, p] = this part's value"""
        tile = self.shape.tile(self.shape.block_q)
        value = collapse(body.writer, _as_reduce(item), partial, tile)
        mask = body.writer.masks.get(self.shape.other)
        guard = f", mask={mask}" if mask else ""
        for pointer, text in zip(self.scratch[item.name], value.parts, strict=True):
            offset = f"part * {self.shape.parallel} + {self.shape.other}"
            body.writer.line(f"tl.store({pointer} + ({offset}), {text}{guard})")

    def _gather(self, body: Body, item: Definition) -> None:
        """The reduction over all parts of scratch[part, p], in one fixed order."""
        writer, shape, reduce = body.writer, self.shape, _as_reduce(item)
        count = 1 << (shape.splits - 1).bit_length()
        parts = writer.name(f"tl.arange(0, {count})" + _suffix(shape))
        offset = f"{parts} * {shape.parallel} + {shape.other}"
        masks = [f"({parts} < {shape.splits})", *writer.lanes(frozenset({shape.other}))]
        loads: list[str] = []
        for pointer, other in zip(self.scratch[item.name], identities(reduce), strict=True):
            guard = f"mask={' & '.join(masks)}, other={other}"
            loads.append(writer.name(f"tl.load({pointer} + ({offset}), {guard})"))
        tile = shape.tile(count)
        value = collapse(writer, reduce, Partial(tuple(loads)), tile)
        writer.locals[item.name] = body.result(reduce, value, tile)


def _name(item: Definition | Store) -> str:
    return item.name if isinstance(item, Definition) else ""


def _suffix(shape: Shape) -> str:
    if shape.block_p == 1:
        return ""
    return "[None, :]" if shape.along == "c" else "[:, None]"


def _as_reduce(item: Definition | Store) -> Reduce:
    assert isinstance(item, Definition)
    assert isinstance(item.expr, Reduce)
    return item.expr
