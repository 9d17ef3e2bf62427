"""Kernels that reduce rows and columns: one row after another, and then the columns of all partial
sums.

::

    a = 0                                      one value a column, in registers
    for q in range(first, last, block):
        load, reduce along c, use, store       as a persistent kernel does at one block of rows
        a = a + what is summed over the rows
    scratch[part, c] = a
    --- another launch ---
    total[c] = sum of scratch[:, c];  values of columns that are made of it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from treadle.algebra.extents import ceil_div, same
from treadle.codegen.triton.body import (
    GridFunction,
    TritonBody,
    bound,
    mask,
    positions,
    program,
)
from treadle.codegen.triton.expr import TritonWriter, number
from treadle.codegen.triton.reduce import Partial, Tile, collapse, combine, fill, start
from treadle.codegen.triton.shape import (
    Shape,
    as_reduce,
    gather,
    leave,
    parallel_positions,
    reducing_writer,
)
from treadle.loop.expr import Reduce
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.nest import accumulators, after_rows, hoisted, is_over, locals_of, roots
from treadle.util.reach import reached

_COLUMNS = 8  # of a program that joins parts: 32 bytes of each, which is what memory is read in
_WARPS = 8


def swept(
    kernel: Kernel, buffers: Mapping[str, str], shape: Shape, *, contract: bool
) -> list[GridFunction]:
    """The two device functions of a kernel of both."""
    names = iter(kernel.scratch)
    scratch = {
        item.name: tuple(buffers[next(names)] for _ in accumulators(as_reduce(item)))
        for item in kernel.body
        if isinstance(item, Definition) and is_over(item, kernel.rows)
    }
    sweep = _Sweep(kernel, buffers, shape, scratch, contract)
    return [sweep.rows(), sweep.columns()]


@dataclass(frozen=True)
class _Sweep:
    """``scratch``: by the name of what is reduced over the rows."""

    kernel: Kernel
    buffers: Mapping[str, str]
    shape: Shape
    scratch: Mapping[str, tuple[str, ...]]
    contract: bool

    def rows(self) -> GridFunction:
        """One program for each part of the rows."""
        shape = self.shape
        writer = reducing_writer(self.kernel, self.buffers, shape, contract=self.contract)
        body = TritonBody(self.kernel, writer)
        down = replace(shape.tile(shape.block_q), along="r", axis=0)
        positions(writer, "c", "0", shape.block_q, shape.both)
        bound(writer, "c", shape.reduced, shape.block_q)
        items = self._of_rows()
        self._hoist(body, items)
        sums = {
            item.name: start(writer, as_reduce(item), down)
            for item in items
            if isinstance(item, Definition) and item.name in self.scratch
        }
        outside = dict(writer.locals), dict(writer.known), dict(writer.masks), writer.indent
        self._turn(writer)
        self._block(body, items, sums, down)
        writer.locals, writer.known, writer.masks, writer.indent = outside
        for item in items:
            if isinstance(item, Definition) and item.name in sums:
                value = sums[item.name]
                if down.keep:
                    value = collapse(writer, as_reduce(item), value, down)
                place = f"program * {number(shape.reduced)} + c"
                leave(writer, value, self.scratch[item.name], place, "c")
        return GridFunction(tuple(writer.lines), str(shape.splits), shape.how)

    def columns(self) -> GridFunction:
        """One program for a few columns of all parts."""
        few = min(_COLUMNS, self.shape.block_q)
        cols, rows = self.shape.reduced, self.shape.parallel
        parts = 2  # or any number above one: the parts of a column are a block beside its columns
        shape = Shape(self.shape.how, "r", cols, rows, few, parts)
        writer = reducing_writer(self.kernel, self.buffers, shape, contract=self.contract)
        body = TritonBody(self.kernel, writer)
        parallel_positions(body.writer, shape, "program")
        items = self._of_columns()
        for item in items:
            if isinstance(item, Store):
                if item not in body.updates:
                    body.store(item)
            elif item.name in self.scratch:
                gather(body, shape, item, self.scratch[item.name])
            else:
                body.define(item, None)
        body.stores([item for item in body.updates if item in items])
        how = replace(self.shape.how, warps=_WARPS)
        return GridFunction(tuple(body.writer.lines), number(shape.programs), how)

    def _turn(self, writer: TritonWriter) -> None:
        """The loop over blocks of rows. Programs take them in turn, so that those which run at the
        same time are neighbours in memory."""
        shape = self.shape
        turns = ceil_div(shape.parallel, shape.block_p * shape.splits)
        writer.line(f"for q in range({number(turns)}):")
        writer.indent += 1
        first = f"(q * {shape.splits} + {program(writer)})"
        positions(writer, "r", f"{first} * {shape.block_p}", shape.block_p, shape.both)
        if same(turns * shape.splits * shape.block_p, shape.parallel):
            return
        if shape.block_p > 1:
            mask(writer, "r", shape.parallel)
        else:
            writer.line(f"if r < {number(shape.parallel)}:")
            writer.indent += 1

    def _of_rows(self) -> list[Definition | Store]:
        """What there is to do at each row."""
        late = after_rows(self.kernel)
        return self._needed(
            item
            for item in self.kernel.body
            if (
                item.name in self.scratch
                if isinstance(item, Definition)
                else item.value.name not in late
            )
        )

    def _of_columns(self) -> list[Definition | Store]:
        """What there is to do after the last row."""
        late = after_rows(self.kernel)
        stores = (item for item in self.kernel.body if isinstance(item, Store))
        return self._needed(item for item in stores if item.value.name in late)

    def _needed(self, aims: Iterable[Definition | Store]) -> list[Definition | Store]:
        """``aims`` and the values that they need, but not what sums over the rows among these
        need: in the order of the body."""
        kept = list(aims)
        definitions = {item.name: item for item in self.kernel.body if isinstance(item, Definition)}
        start = [name for item in kept for root in roots(item) for name in locals_of(root)]

        def operands(name: str) -> list[str]:
            return [] if name in self.scratch else locals_of(definitions[name].expr)

        kept += [definitions[name] for name in reached(start, operands)]
        return [item for item in self.kernel.body if item in kept]

    def _hoist(self, body: TritonBody, items: Iterable[Definition | Store]) -> None:
        """Compute before the loop what is the same for all rows; equal text finds it again."""
        varying: set[str] = set()
        for item in items:
            if not isinstance(item, Definition):
                continue
            if self.kernel.rows not in item.axes and not isinstance(item.expr, Reduce):
                body.define(item, None)
                continue
            varying.add(item.name)
            inside = item.expr.body if isinstance(item.expr, Reduce) else item.expr
            for part in hoisted([inside], self.kernel.rows, frozenset(varying)):
                body.writer.evaluate(part)

    def _block(
        self,
        body: TritonBody,
        items: Iterable[Definition | Store],
        sums: Mapping[str, Partial],
        down: Tile,
    ) -> None:
        """What a program does at one block of rows."""
        writer, across = body.writer, self.shape.tile(self.shape.block_q)
        stores: list[Store] = []
        for item in items:
            if isinstance(item, Store):
                if body.is_late(item):
                    stores.append(item)
                else:
                    body.store(item)
            elif item.name in sums:
                reduce = as_reduce(item)
                combine(writer, reduce, sums[item.name], fill(writer, reduce, down))
            elif item.name not in writer.locals:
                body.define(item, across)
        body.stores(stores)
