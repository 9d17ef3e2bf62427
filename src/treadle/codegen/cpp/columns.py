"""Columns kernels in C++: threads take blocks of columns and loop over the rows.

::

    looped    for each block:  for r: for c in block: fold;   then the columns' values
    split     for each part of the rows and block: fold into scratch;
              then for each block: join the parts in order, and the columns' values
"""

from collections.abc import Mapping, Sequence

from treadle.algebra.extents import ceil_div, divides, sample_of
from treadle.algebra.index import Axis
from treadle.codegen.cpp.body import CppBody
from treadle.codegen.cpp.expr import VALUE_TYPES, CppWriter
from treadle.codegen.cpp.reduce import Accumulator, fold_of
from treadle.loop.expr import Reduce, ReduceKind
from treadle.loop.kernel import Definition, LoopForm, Store
from treadle.loop.nest import is_position


class Columns(CppBody):
    """The loops of one columns kernel."""

    @property
    def block(self) -> int:
        """Columns that one thread works on at a time."""
        return self.schedule.cols or self.cols

    @property
    def blocks(self) -> int:
        """How many such blocks there are."""
        return ceil_div(self.cols, self.block)

    def local_depth(self, name: str) -> int:
        """Every value changes in the inner loop."""
        return 2

    @property
    def folds(self) -> Mapping[str, Accumulator]:
        """The accumulator of each reduction, by its name."""
        found = self.levels.definitions.items()
        return {name: fold_of(d.expr) for name, d in found if isinstance(d.expr, Reduce)}

    @property
    def part_rows(self) -> int:
        """Rows of a part."""
        return self.rows if self.parts == 1 else ceil_div(self.rows, self.parts)

    @property
    def parts(self) -> int:
        """Into how many parts the rows are cut."""
        return self.schedule.parts

    def _places(self) -> list[str]:
        """Where the threads put what they found in their parts."""
        return [
            f"{fold.total}* part_{name} = ({fold.total}*){self.names[scratch]};"
            for (name, fold), scratch in zip(self.folds.items(), self.kernel.scratch, strict=False)
        ]

    def text(self) -> list[str]:
        """The body of the function, line by line."""
        if self.schedule.form is LoopForm.SPLIT:
            return self._in_parts()
        lines = [*self._begin("nowait"), *self._narrow(0)]
        for level in range(self.last + 1):
            for name, fold in self.folds.items():
                if self.levels.of[name] == level:
                    lines += self._start(name, fold)
            long = [name for name in self._long(self.rows) if self.levels.of[name] == level]
            lines += self._down(level, "0", f"{self.rows}", long)
            for name, fold in self.folds.items():
                if self.levels.of[name] == level:
                    lines += self._finish(name, fold, "t" if name in long else "a")
            lines += self._narrow(level + 1)
        return [*lines, "}"]

    def _in_parts(self) -> list[str]:
        lines = [
            *self._places(),
            "#pragma omp for collapse(2) schedule(static)",
            f"for (int64_t k = 0; k < {self.parts}; ++k)",
            f"for (int64_t co = 0; co < {self.blocks}; ++co) {{",
            *self._bounds(),
            f"const int64_t rb = k * {self.part_rows};",
            f"const int64_t re = lesser(rb + {self.part_rows}, {self.rows});",
            *self._narrow(0),
        ]
        for name, fold in self.folds.items():
            lines += self._start(name, fold)
        long = self._long(self.part_rows)
        lines += self._down(0, "rb", "re", long)
        for name in self.folds:
            found = "t" if name in long else "a"
            lines.append(f"for (int64_t l = 0; l < w; ++l) {self._part(name)} = {found}_{name}[l];")
        lines += ["}", *self._begin("nowait")]
        lines += [line for line in self._narrow(0) if line]
        for name, fold in self.folds.items():
            lines += self._start(name, fold, fold.total)
            join = fold.join(f"a_{name}[l]", self._part(name))
            lines += [
                f"for (int64_t k = 0; k < {self.parts}; ++k) {{",
                "#pragma omp simd",
                f"for (int64_t l = 0; l < w; ++l) {{ {join} }}",
                "}",
                *self._finish(name, fold),
            ]
        return [*lines, *self._narrow(1), "}"]

    def _part(self, name: str) -> str:
        return f"part_{name}[k * {self.cols} + c0 + l]"

    def _begin(self, wait: str) -> list[str]:
        return [
            f"#pragma omp for schedule(static) {wait}",
            f"for (int64_t co = 0; co < {self.blocks}; ++co) {{",
            *self._bounds(),
        ]

    def _bounds(self) -> list[str]:
        size = self.block
        lines = [f"const int64_t c0 = co * {size};"]
        if not divides(size, self.cols):
            rest = f"{self.cols} - c0"
            return [*lines, f"const int64_t w = {rest} < {size} ? {rest} : {size};"]
        return [*lines, f"const int64_t w = {size};"]

    def _new_writer(self) -> CppWriter:
        rows = self.kernel.rows
        if self.split is None:
            names: dict[Axis, str] = {rows: "r", self.kernel.cols: "c"}
            return self.writer({rows: 1, self.kernel.cols: 2}, names)
        names = {rows: "r", self.split.outer: "co", self.split.inner: "l"}
        return self.writer({self.split.outer: 0, rows: 1, self.split.inner: 2}, names)

    def _across(self, lines: list[str]) -> list[str]:
        if not lines:
            return []
        return [
            "#pragma omp simd",
            "for (int64_t l = 0; l < w; ++l) {",
            "const int64_t c = c0 + l; (void)c;",
            *lines,
            "}",
        ]

    def _long(self, rows: int) -> list[str]:
        """Sums of so many rows that pieces of them are added up first."""
        many = sample_of(rows) > self.schedule.piece
        return [name for name, fold in self.folds.items() if many and fold.long]

    def _start(self, name: str, fold: Accumulator, kind: str = "") -> list[str]:
        lines = [f"{kind or fold.type} a_{name}[{self.block}];"]
        set_ = f"a_{name}[l] = {fold.start};"
        if fold.is_position:
            lines.append(f"int64_t at_{name}[{self.block}];")
            set_ += f" at_{name}[l] = -1;"
        return [*lines, f"for (int64_t l = 0; l < w; ++l) {{ {set_} }}"]

    def _finish(self, name: str, fold: Accumulator, found: str = "a") -> list[str]:
        if fold.is_position:
            self.outer[name] = f"at_{name}[l]"
            return []
        self.outer[name] = f"y_{name}[l]"
        return [
            f"{VALUE_TYPES[fold.dtype]} y_{name}[{self.block}];",
            *self._across([f"y_{name}[l] = {fold.finish(f'{found}_{name}[l]')};"]),
        ]

    def _down(self, level: int, begin: str, end: str, long: Sequence[str]) -> list[str]:
        """One loop down the rows, folding into arrays over the block; ``long`` sums in pieces."""
        writer = self._new_writer()
        self.current = {}
        roots = self.levels.roots(level)
        needed = self.levels.closure(self.levels.wanted(level))
        for item in self.kernel.body:
            if isinstance(item, Store):
                if item in roots:
                    writer.inner.append(self.store(item, writer))
            elif item in roots and isinstance(item.expr, Reduce):
                self._fold(item.name, item.expr, writer)
            elif item.name in needed:
                self.current[item.name] = writer.value(item.expr)
        loop = [*writer.scopes[1].lines, *self._across(writer.inner), "}"]
        if not long:
            plain = f"for (int64_t r = {begin}; r < {end}; ++r) {{"
            return [*writer.scopes[0].lines, plain, *loop]
        add = " ".join(f"t_{name}[l] += a_{name}[l]; a_{name}[l] = 0;" for name in long)
        return [
            *writer.scopes[0].lines,
            *(f"double t_{name}[{self.block}];" for name in long),
            *(f"for (int64_t l = 0; l < w; ++l) {{ t_{name}[l] = 0; }}" for name in long),
            f"for (int64_t rs = {begin}; rs < {end}; rs += {self.schedule.piece}) {{",
            f"const int64_t rt = lesser(rs + {self.schedule.piece}, {end});",
            "for (int64_t r = rs; r < rt; ++r) {",
            *loop,
            "#pragma omp simd",
            f"for (int64_t l = 0; l < w; ++l) {{ {add} }}",
            "}",
        ]

    def _fold(self, name: str, reduce: Reduce, writer: CppWriter) -> None:
        fold = fold_of(reduce)
        into = f"a_{name}[l]"
        value = writer.value(reduce.body)
        if not is_position(reduce):
            writer.inner.append(fold.step(into, value))
            return
        better = "first_above" if reduce.kind is ReduceKind.ARGMAX else "first_below"
        writer.inner.extend(
            [
                f"const bool go_{name} = at_{name}[l] < 0 "
                f"|| {better}(({fold.type}){value}, {into});",
                f"{into} = go_{name} ? ({fold.type}){value} : {into};",
                f"at_{name}[l] = go_{name} ? r : at_{name}[l];",
            ]
        )

    def _narrow(self, level: int) -> list[str]:
        """Values of the column, kept in arrays over the block, and their stores."""
        writer = self._new_writer()
        self.current = {}
        head: list[str] = []
        for item in self.narrow(level):
            if isinstance(item, Definition):
                value = writer.value(item.expr)
                head.append(f"{VALUE_TYPES[item.expr.dtype]} y_{item.name}[{self.block}];")
                writer.inner.append(f"y_{item.name}[l] = {value};")
                self.outer[item.name] = f"y_{item.name}[l]"
            else:
                writer.inner.append(self.store(item, writer))
        outside = [*writer.scopes[0].lines, *writer.scopes[1].lines]
        return [*head, *outside, *self._across(writer.inner)] if writer.inner else []
