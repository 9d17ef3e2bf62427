"""Rows kernels in C++: each thread takes rows, and a row runs one loop per pass.

::

    looped  for r: { for c: pass 0 }  { for c: pass 1 } ...
    split   threads share each pass of a row; their partial results are joined in order
    tiled   some reads lie apart: blocks of both axes, such reads go through small buffers
    flat    one row, nothing reduced: threads share the columns, whose number is an argument
"""

from collections.abc import Mapping, Sequence

from treadle.algebra.extents import Size, ceil_div, sample_of
from treadle.algebra.index import Axis, Index
from treadle.codegen.cpp.body import CppBody, simd
from treadle.codegen.cpp.expr import STORED_TYPES, VALUE_TYPES, CppWriter, Scope, stored, wide
from treadle.codegen.cpp.reduce import Accumulator, fold_of
from treadle.loop.expr import Expr, Load, Local, Reduce, ReduceKind
from treadle.loop.kernel import Definition, LoopForm, Store
from treadle.loop.nest import apart_loads, is_position, transposed_loads


class RowLoops(CppBody):
    """The loops of one rows kernel."""

    @property
    def is_shared(self) -> bool:
        """Whether threads share a row."""
        return self.schedule.form is LoopForm.SPLIT

    def local_depth(self, name: str) -> int:
        """Values that vary along a row change in the inner loop, others not."""
        return self._inner if name in self.levels.varying else 0

    @property
    def _inner(self) -> int:
        return 1 if self.split is None else 2

    def _new_writer(self) -> CppWriter:
        if self.split is None:
            depths: dict[Axis, int] = {self.kernel.rows: 0, self.kernel.cols: 1}
            names = {self.kernel.rows: "r", self.kernel.cols: "c"}
        else:
            depths = {self.kernel.rows: 0, self.split.outer: 1, self.split.inner: 2}
            names = {self.kernel.rows: "r", self.split.outer: "co", self.split.inner: "ci"}
        return self.writer(depths, names)

    # -- flat ----------------------------------------------------------------------------------

    def flat(self) -> list[str]:
        """One loop over columns, for a kernel of one row; in pieces where reads are apart."""
        writer = self._new_writer()
        writer.names = {**writer.names, self.kernel.rows: "0LL"}
        lanes = self._read_apart(writer, self.schedule.cols) if self.schedule.cols else []
        self._straight(writer)
        outside, share = writer.scopes[0].lines, "schedule(static) nowait"
        if not lanes:
            loop = ["for (int64_t c = 0; c < n; ++c) {", *writer.inner, "}"]
            return [*outside, f"#pragma omp for simd {share}", *loop]
        return [
            *outside,
            f"#pragma omp for {share}",
            f"for (int64_t cb = 0; cb < n; cb += {self.schedule.cols}) {{",
            f"const int64_t ce = lesser(cb + {self.schedule.cols}, n);",
            *lanes,
            *self._lanes(writer.inner),
            "}",
        ]

    @staticmethod
    def _lanes(lines: Sequence[str]) -> list[str]:
        return ["#pragma omp simd", "for (int64_t c = cb; c < ce; ++c) {", *lines, "}"]

    def _read_apart(self, writer: CppWriter, count: int) -> list[str]:
        """A scalar loop that reads what lies apart, of ``count`` places at most."""
        found = [
            load
            for load in apart_loads(self.kernel)
            if (load.buffer, load.index) not in writer.staged
        ]
        inner, writer.scopes[-1] = writer.scopes[-1], Scope()
        arrays: list[str] = []
        lanes: dict[Load, str] = {}
        places: dict[str, str] = {}
        for load in found:
            value = writer.value(load)
            if value not in places:
                places[value] = f"lane{len(places)}"
                writer.inner.append(f"{places[value]}[c - cb] = {value};")
                arrays.append(f"{VALUE_TYPES[load.dtype]} {places[value]}[{count}];")
            lanes[load] = f"{places[value]}[c - cb]"
        lines, writer.scopes[-1] = writer.inner, inner
        writer.lanes.update(lanes)
        loop = ["for (int64_t c = cb; c < ce; ++c) {", *lines, "}"]
        return [*arrays, *loop] if found else []

    def _straight(self, writer: CppWriter) -> None:
        """Definitions and stores in the order of the kernel, in one loop."""
        for item in self.kernel.body:
            if isinstance(item, Definition):
                self.current[item.name] = writer.value(item.expr)
            else:
                writer.inner.append(self.store(item, writer))

    # -- tiled ---------------------------------------------------------------------------------

    def tiled(self) -> list[str]:
        """Tiles of both axes. Transposed reads are staged where they are plain; others that lie
        apart are read row by row, and find their neighbours in the cache."""
        writer = self._new_writer()
        rows, cols = self.schedule.rows, self.schedule.cols
        fill = self._stage(writer)
        lanes = self._read_apart(writer, cols)
        self._straight(writer)
        return [
            "#pragma omp for collapse(2) schedule(static) nowait",
            f"for (int64_t rb = 0; rb < {self.rows}; rb += {rows})",
            f"for (int64_t cb = 0; cb < {self.cols}; cb += {cols}) {{",
            f"const int64_t re = lesser(rb + {rows}, {self.rows});",
            f"const int64_t ce = lesser(cb + {cols}, {self.cols});",
            *fill,
            "for (int64_t r = rb; r < re; ++r) {",
            *writer.scopes[0].lines,
            *lanes,
            *self._lanes(writer.inner),
            "}",
            "}",
        ]

    def _stage(self, writer: CppWriter) -> list[str]:
        """Copies what is read down the rows into small arrays, from which the loops read."""
        fill: list[str] = []
        staged: dict[tuple[str, Index], str] = {}
        for n, load in enumerate(transposed_loads(self.kernel)):
            staged[load.buffer, load.index] = f"tile{n}[c - cb][r - rb]"
            fill += [
                f"{STORED_TYPES[load.dtype]} tile{n}"
                f"[{self.schedule.cols}][{self.schedule.rows} + 1];",
                "for (int64_t c = cb; c < ce; ++c)",
                "for (int64_t r = rb; r < re; ++r)",
                f"{staged[load.buffer, load.index]} = "
                f"{self.names[load.buffer]}[{_plain(load.index, writer)}];",
            ]
        writer.staged = staged
        return fill

    # -- passes --------------------------------------------------------------------------------

    def passes(self) -> list[str]:
        """A loop over rows, and in it a loop over columns for each level."""
        writer = self._new_writer()
        wide = self.is_shared
        kept = self.schedule.kept
        lines = [
            f"{VALUE_TYPES[self.levels.definitions[name].expr.dtype]} keep_{name}[{self.cols}];"
            for name in kept
        ]
        lines += self._narrow(0, writer, wide)
        for level in range(self.last + 1):
            lines += self._pass(level, writer, kept, wide)
            lines += self._narrow(level + 1, writer, wide)
        share = [] if wide else ["#pragma omp for schedule(static) nowait"]
        end = ["#pragma omp barrier"] if wide else []
        return [*share, f"for (int64_t r = 0; r < {self.rows}; ++r) {{", *lines, *end, "}"]

    def shared(self) -> list[str]:
        """Arrays that all threads see, declared before they start."""
        if not self.is_shared:
            return []
        folds = [
            (name, fold_of(d.expr))
            for name, d in self.levels.definitions.items()
            if isinstance(d.expr, Reduce)
        ]
        return [f"{fold.total} part_{name}[{self.schedule.parts}];" for name, fold in folds]

    def _pass(self, level: int, writer: CppWriter, kept: Sequence[str], wide: bool) -> list[str]:
        """One loop over the columns: values, reductions, stores."""
        known = self.levels
        writer.scopes[1:] = [Scope() for _ in writer.scopes[1:]]
        self.current = {}
        begin = len(writer.scopes[0].lines)
        roots = known.roots(level)
        held = frozenset(name for name in kept if known.of[name] < level)
        needed = set(known.closure([*known.wanted(level), *self._to_keep(level, kept)], held))
        folds: dict[str, Accumulator] = {}
        for item in self.kernel.body:
            if isinstance(item, Store):
                if item in roots:
                    writer.inner.append(self.store(item, writer))
            elif item in roots and isinstance(item.expr, Reduce):
                folds[item.name] = self._fold(item.name, item.expr, writer)
            elif item.name in held and item.name in needed:
                self.current[item.name] = f"keep_{item.name}[c]"
            elif item.name in needed:
                self.current[item.name] = value = writer.value(item.expr)
                if item.name in kept:
                    writer.inner.append(f"keep_{item.name}[c] = {value};")
        outside = writer.scopes[0].lines[begin:]
        loop = self._shared_loop(writer, folds) if wide else self._own_loop(writer, folds)
        return [*outside, *loop]

    def _to_keep(self, level: int, kept: Sequence[str]) -> list[Expr]:
        known = self.levels
        return [
            Local(name, known.definitions[name].expr.dtype)
            for name in kept
            if known.of[name] == level
        ]

    def _fold(self, name: str, reduce: Reduce, writer: CppWriter) -> Accumulator:
        """Adds the step of a reduction to the loop and names its result."""
        fold = fold_of(reduce)
        value = writer.value(reduce.body)
        if is_position(reduce):
            better = "first_above" if reduce.kind is ReduceKind.ARGMAX else "first_below"
            writer.inner.append(
                f"if (at_{name} < 0 || {better}(({fold.type}){value}, a_{name})) "
                f"{{ a_{name} = {value}; at_{name} = c; }}"
            )
            self.outer[name] = f"at_{name}"
        else:
            writer.inner.append(fold.step(f"a_{name}", value))
            self.outer[name] = f"y_{name}"
        return fold

    def _own_loop(self, writer: CppWriter, folds: Mapping[str, Accumulator]) -> list[str]:
        """The loop of a pass, run by one thread."""
        lines = [f"{fold.type} a_{name} = {fold.start};" for name, fold in folds.items()]
        lines += [f"int64_t at_{name} = -1;" for name, fold in folds.items() if fold.is_position]
        long = self._long(folds, self.cols)
        lines += [f"double t_{name} = 0;" for name in long]
        pragma = simd([(f"a_{name}", fold) for name, fold in folds.items()])
        add = [f"t_{name} += a_{name}; a_{name} = 0;" for name in long]
        if self.split is None:
            lines += self._columns("0", f"{self.cols}", pragma, writer.inner, add)
        else:
            width = self.split.inner.extent
            every = max(1, self.schedule.piece // sample_of(width))
            often = [f"if (co % {every} == {every - 1}) {{ {' '.join(add)} }}"] if add else []
            lines += [
                f"for (int64_t co = 0; co < {self.split.outer.extent}; ++co) {{",
                *writer.scopes[1].lines,
                *pragma,
                f"for (int64_t ci = 0; ci < {width}; ++ci) {{",
                f"const int64_t c = co * {width} + ci; (void)c;",
                *writer.inner,
                "}",
                *often,
                "}",
                *add,
            ]
        return [*lines, *self._finished(folds, long)]

    def _long(self, folds: Mapping[str, Accumulator], cols: int) -> list[str]:
        """Sums of so many columns that partial sums of pieces are added up first."""
        return [
            name
            for name, fold in folds.items()
            if fold.long and sample_of(cols) > self.schedule.piece
        ]

    def _columns(
        self, begin: str, end: str, pragma: list[str], inner: list[str], add: list[str]
    ) -> list[str]:
        """The loop over columns; ``add`` is done after each piece of them."""
        if not add:
            return [*pragma, f"for (int64_t c = {begin}; c < {end}; ++c) {{", *inner, "}"]
        return [
            f"for (int64_t cb = {begin}; cb < {end}; cb += {self.schedule.piece}) {{",
            f"const int64_t cp = lesser(cb + {self.schedule.piece}, {end});",
            *pragma,
            "for (int64_t c = cb; c < cp; ++c) {",
            *inner,
            "}",
            *add,
            "}",
        ]

    def _finished(self, folds: Mapping[str, Accumulator], long: Sequence[str]) -> list[str]:
        return [
            f"const {VALUE_TYPES[fold.dtype]} y_{name} = "
            f"{fold.finish(f't_{name}' if name in long else f'a_{name}')};"
            for name, fold in folds.items()
            if not fold.is_position
        ]

    def _shared_loop(self, writer: CppWriter, folds: Mapping[str, Accumulator]) -> list[str]:
        """The loop of a pass in pieces that threads share, joined in the order of the pieces."""
        parts = self.schedule.parts
        size = ceil_div(self.cols, parts)
        count = parts if isinstance(size, Size) else ceil_div(self.cols, size)
        long = self._long(folds, size)
        start = [f"{fold.type} a_{name} = {fold.start};" for name, fold in folds.items()]
        start += [f"double t_{name} = 0;" for name in long]
        add = [f"t_{name} += a_{name}; a_{name} = 0;" for name in long]
        keep = [f"part_{name}[k] = {'t' if name in long else 'a'}_{name};" for name in folds]
        join = [
            line
            for name, fold in folds.items()
            for line in (
                f"{fold.total} a_{name} = {fold.start};",
                f"for (int64_t k = 0; k < {count}; ++k) "
                f"{{ {fold.join(f'a_{name}', f'part_{name}[k]')} }}",
            )
        ]
        pragma = simd([(f"a_{name}", fold) for name, fold in folds.items()])
        return [
            "#pragma omp for schedule(static)",
            f"for (int64_t k = 0; k < {count}; ++k) {{",
            f"const int64_t ce = (k + 1) * {size} < {self.cols} ? (k + 1) * {size} : {self.cols};",
            *start,
            *self._columns(f"k * {size}", "ce", pragma, writer.inner, add),
            *keep,
            "}",
            *join,
            *self._finished(folds, ()),
        ]

    def _narrow(self, level: int, writer: CppWriter, wide: bool) -> list[str]:
        """Values of the row and their stores, in the order of the kernel."""
        scope = writer.scopes[0]
        begin = len(scope.lines)
        for item in self.narrow(level):
            if isinstance(item, Definition):
                self.outer[item.name] = writer.value(item.expr)
            else:
                value = stored(self.outer[item.value.name], item.value.dtype)
                if wide and item in self.updates[:1]:
                    scope.lines.append("#pragma omp barrier")  # every thread has read it
                once = "if (omp_get_thread_num() == 0) " if wide else ""
                scope.lines.append(f"{once}{self.target(item, writer)} = {value};")
        return scope.lines[begin:]


def _plain(index: Index, writer: CppWriter) -> str:
    """An index of plain axes without naming parts of it."""
    terms = [f"{wide(k)}*{writer.names[a]}" for a, k in index.terms if isinstance(a, Axis)]
    return " + ".join([*terms, wide(index.const)])


def rows_text(body: RowLoops) -> list[str]:
    """The loops that the kernel's schedule asks for."""
    match body.schedule.form:
        case LoopForm.FLAT:
            return body.flat()
        case LoopForm.TILED:
            return body.tiled()
        case _:
            return body.passes()
