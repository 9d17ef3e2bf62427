"""Reducing kernels: in registers, in loops, or cut into parts. See ``schedule/programs.py``."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from treadle.algebra.extents import ceil_div, largest
from treadle.algebra.index import Index
from treadle.codegen.triton.body import (
    GridFunction,
    TritonBody,
    bound,
    mask,
    positions,
    straight,
)
from treadle.codegen.triton.expr import Named, TritonWriter, number
from treadle.codegen.triton.reduce import (
    Partial,
    collapse,
    combine,
    fill,
    rescale,
    scaled,
    start,
)
from treadle.codegen.triton.shape import (
    LoopRange,
    Shape,
    as_reduce,
    gather,
    parallel_positions,
    reducing_writer,
    scatter,
)
from treadle.codegen.triton.sweeps import swept
from treadle.loop.expr import Load, Reduce
from treadle.loop.kernel import Definition, Kernel, LoopForm, Store
from treadle.loop.nest import Levels, accumulators, levels, roots, updates
from treadle.loop.traverse import walk_all


def reducing(kernel: Kernel, buffers: Mapping[str, str], *, contract: bool) -> list[GridFunction]:
    """The device functions of a kernel with reductions, one after another."""
    shape = Shape.of(kernel)
    if shape.how.form is LoopForm.SWEPT:
        return swept(kernel, buffers, shape, contract=contract)
    if shape.how.form is LoopForm.PERSISTENT:
        return [_persistent(kernel, buffers, shape, contract=contract)]
    looped = Looped(kernel, buffers, shape, levels(kernel), contract)
    return looped.split() if shape.how.form is LoopForm.SPLIT else [looped.whole()]


def _persistent(
    kernel: Kernel, buffers: Mapping[str, str], shape: Shape, *, contract: bool
) -> GridFunction:
    writer = reducing_writer(kernel, buffers, shape, contract=contract)
    parallel_positions(writer, shape, "program")
    positions(writer, shape.along, "0", shape.block_q, shape.both)
    bound(writer, shape.along, shape.reduced, shape.block_q)
    straight(TritonBody(kernel, writer), shape.tile(shape.block_q) if shape.block_q > 1 else None)
    return GridFunction(tuple(writer.lines), number(shape.programs), shape.how)


@dataclass
class Looped:
    """Renders a looped kernel, in one stage or in one stage per level."""

    kernel: Kernel
    buffers: Mapping[str, str]
    shape: Shape
    levels: Levels
    contract: bool
    scratch: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def whole(self) -> GridFunction:
        """All loops in one program."""
        body = self._begin("program")
        for level in range(self.levels.last + 1):
            self._fixed(body, level)
            self._collapse(body, self._loop(body, level))
        self._finish(body)
        return self._stage(body, self.shape.programs)

    def _finish(self, body: TritonBody, only: str = "") -> None:
        """Store the values that do not vary along the reduced axis."""
        for item in self.levels.final_stores:
            if item not in body.updates:
                body.store(item, only)
        body.stores(body.updates)

    def _collapse(self, body: TritonBody, sums: Sequence[tuple[Definition, Partial]]) -> None:
        """The values of reductions, after their loop."""
        tile = self.shape.tile(self.shape.block_q)
        partials = {item.name: partial for item, partial in sums}
        whole: dict[str, Partial] = {}
        for item, partial in sums:
            reduce = as_reduce(item)
            if item.name in self.levels.running:
                top = self.levels.running[item.name]
                partial = scaled(body.writer, partial, partials[top], whole[top])
            whole[item.name] = collapse(body.writer, reduce, partial, tile)
            body.writer.locals[item.name] = body.result(reduce, whole[item.name], tile)

    def split(self) -> list[GridFunction]:
        """One stage per level; partial results pass through scratch. Updates of what every part
        reads have a stage of their own."""
        self._name_scratch()
        stages: list[GridFunction] = []
        for level in range(self.levels.last + 1):
            is_last = level == self.levels.last
            has_loop = bool(self.levels.reduced_in(level) or self.levels.stored_in(level))
            if not has_loop and not (is_last and self.levels.final_stores):
                continue
            splits = self.shape.splits if has_loop else 1
            apart = is_last and splits > 1 and bool(updates(self.kernel))
            stages.append(self._one(level, splits, ends=is_last and not apart))
            stages += [self._one(level, 1, ends=True)] if apart else []
        return stages

    def _one(self, level: int, splits: int, *, ends: bool) -> GridFunction:
        body = self._begin(f"(program // {splits})")
        if splits > 1:
            body.writer.line(f"part = program % {splits}")
        for below in range(level + 1):
            self._fixed(body, below)
            for item in self.levels.reduced_in(below) if below < level else []:
                gather(body, self.shape, item, self.scratch[item.name])
        for item, partial in self._loop(body, level) if splits > 1 else []:
            scatter(body, self.shape, item, partial, self.scratch[item.name])
        if ends:
            self._finish(body, "(part == 0)" if splits > 1 else "")
        return self._stage(body, self.shape.programs * splits)

    def _stage(self, body: TritonBody, programs: int) -> GridFunction:
        return GridFunction(tuple(body.writer.lines), number(programs), self.shape.how)

    def _begin(self, program: str) -> TritonBody:
        writer = reducing_writer(self.kernel, self.buffers, self.shape, contract=self.contract)
        parallel_positions(writer, self.shape, program)
        return TritonBody(self.kernel, writer)

    def _fixed(self, body: TritonBody, level: int) -> None:
        """Formulas that do not vary along the reduced axis, known at this level."""
        for item in self.levels.fixed_in(level):
            body.define(item, None)

    def _loop(self, body: TritonBody, level: int) -> list[tuple[Definition, Partial]]:
        """The loop of one level; gives its reductions' accumulators."""
        writer, levels = body.writer, self.levels
        reductions, stores = levels.reduced_in(level), levels.stored_in(level)
        if not reductions and not stores:
            return []
        tile = self.shape.tile(self.shape.block_q)
        read = [item for item in reductions if item.name not in levels.running]
        wanted = levels.closure(
            [i.expr for i in read] + [root for item in stores for root in roots(item)]
        )
        self._hoist(body, [item for item in self.kernel.body if _name(item) in wanted])
        self._hoist(body, [*read, *stores])
        sums = [(item, start(writer, as_reduce(item), tile)) for item in reductions]
        ordered = body.in_place and not reductions and self._reads_before_it_writes(stores)
        if ordered:
            writer.line("tl.debug_barrier()")  # after what other threads read before the loop
        is_running = any(item.name in levels.running for item in reductions)
        unrolled = self.shape.how.unrolled if is_running else 1
        pieces = self.shape.pieces(unrolled)
        for piece in reversed(pieces) if level % 2 else pieces:
            outside = _state(writer)
            self._head(writer, piece, backwards=level % 2 == 1)
            new = {item.name: list[Partial]() for item in read}
            for block in range(piece.blocks):
                _restore(writer, outside)
                first = f"q + {block * self.shape.block_q}" if block else "q"
                if self.shape.splits > 1:
                    first = f"part * {number(self.shape.part)} + {first}"
                positions(writer, self.shape.along, first, self.shape.block_q, self.shape.both)
                if not piece.filled:
                    mask(writer, self.shape.along, self.shape.reduced)
                self._pass(body, wanted, new, stores, ordered=ordered)
            self._combine(writer, sums, new)
            writer.indent -= 1
            _restore(writer, outside)
        return sums

    def _head(self, writer: TritonWriter, piece: LoopRange, *, backwards: bool) -> None:
        """The head of a loop; ``q``: where its block begins. Every other pass goes back, since what
        was read last is what a cache still has."""
        step = self.shape.block_q * piece.blocks
        places = f"{number(piece.begin)}, {number(piece.end)}, {step}"
        stages = self.shape.how.stages
        span = f"tl.range({places}, num_stages={stages})" if stages else f"range({places})"
        if self.shape.block_q == 1:  # a few places, whose reads are all on their way at once
            span = f"tl.range({places}, loop_unroll_factor={largest(self.shape.reduced)})"
        writer.line(f"for {'p' if backwards else 'q'} in {span}:")
        writer.indent += 1
        if backwards:
            last = piece.begin + (ceil_div(piece.end - piece.begin, step) - 1) * step
            writer.line(f"q = {number(piece.begin + last)} - p")

    def _pass(
        self,
        body: TritonBody,
        wanted: Collection[str],
        new: dict[str, list[Partial]],
        stores: Sequence[Store],
        *,
        ordered: bool,
    ) -> None:
        """What a loop does at one block of the reduced axis; what is to be reduced goes to ``new``,
        by the names of its reductions."""
        writer, tile = body.writer, self.shape.tile(self.shape.block_q)
        for item in self.kernel.body:
            if isinstance(item, Store):
                if item in stores and not body.in_place:
                    body.store(item)
            elif item.name in wanted:
                body.define(item, None)
            elif item.name in new:
                new[item.name].append(fill(writer, as_reduce(item), tile))
        if ordered:
            body.store(stores[0])
        else:
            body.stores(stores if body.in_place else [])

    def _combine(
        self,
        writer: TritonWriter,
        sums: Sequence[tuple[Definition, Partial]],
        new: Mapping[str, Sequence[Partial]],
    ) -> None:
        """Add the blocks that were read to the accumulators."""
        running, partials = self.levels.running, {item.name: partial for item, partial in sums}
        for item, into in sums:
            behind = [partials[name] for name, top in running.items() if top == item.name]
            if behind:
                rescale(writer, as_reduce(item), into, new[item.name], behind)
                continue
            for product in new.get(item.name, ()):
                combine(writer, as_reduce(item), into, product)

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
        return all(len(group) == 1 for group in places.values())

    def _hoist(self, body: TritonBody, items: Iterable[Definition | Store]) -> None:
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


_State = tuple[dict[str, Named], dict[str, str], dict[str, str]]


def _state(writer: TritonWriter) -> _State:
    """What is known where a loop begins."""
    return dict(writer.locals), dict(writer.known), dict(writer.masks)


def _restore(writer: TritonWriter, state: _State) -> None:
    known, texts, masks = state
    writer.locals, writer.known, writer.masks = dict(known), dict(texts), dict(masks)


def _name(item: Definition | Store) -> str:
    return item.name if isinstance(item, Definition) else ""
