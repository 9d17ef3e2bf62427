"""Rows kernels in C++: each thread takes rows, and a row runs one loop per pass.

::

    plain   for r: { for c: pass 0 }  { for c: pass 1 } ...
    wide    few long rows: threads share each pass; their partial results are joined in order
    tiled   reads run down the rows: blocks of both axes, such reads go through a small buffer
    flat    one row, nothing reduced: threads share the columns, whose number is an argument
"""

from collections.abc import Mapping, Sequence

from treadle.codegen.cpp_body import Body, simd
from treadle.codegen.cpp_expr import DEAR, STORED_TYPES, VALUE_TYPES, Scope, Writer, stored, wide
from treadle.codegen.cpp_reduce import Fold, fold_of, is_position
from treadle.loop.expr import Apply, Expr, Load, Local, Reduce
from treadle.loop.index import Axis, Index
from treadle.loop.kernel import Definition, Store
from treadle.loop.traverse import walk
from treadle.util.extents import Size, ceil_div, largest, sample_of

_SCRATCH = 1 << 16  # longest row that is kept between passes
_WIDE = 1 << 15  # columns from which few rows are shared by all threads
_CHUNKS = 64  # pieces of a wide row; fixed, so that sums do not depend on the threads
_TILE = 32
_PIECE = 256  # columns that are added up in float32


class RowLoops(Body):
    """The loops of one rows kernel."""

    @property
    def is_wide(self) -> bool:
        positions = any(
            isinstance(d.expr, Reduce) and is_position(d.expr)
            for d in self.levels.definitions.values()
        )
        few = sample_of(self.rows) < 16 and sample_of(self.cols) >= _WIDE
        return few and not positions and self.split is None

    def local_depth(self, name: str) -> int:
        return self._inner if name in self.levels.full else 0

    @property
    def _inner(self) -> int:
        return 1 if self.split is None else 2

    def _new_writer(self) -> Writer:
        if self.split is None:
            depths: dict[Axis, int] = {self.kernel.rows: 0, self.kernel.cols: 1}
            names = {self.kernel.rows: "r", self.kernel.cols: "c"}
        else:
            depths = {self.kernel.rows: 0, self.split.outer: 1, self.split.inner: 2}
            names = {self.kernel.rows: "r", self.split.outer: "co", self.split.inner: "ci"}
        return self.writer(depths, names)

    # -- flat ----------------------------------------------------------------------------------

    def flat(self) -> list[str]:
        writer = self._new_writer()
        writer.names = {**writer.names, self.kernel.rows: "0LL"}
        self._straight(writer)
        return [
            *writer.scopes[0].lines,
            "#pragma omp for simd schedule(static) nowait",
            "for (int64_t c = 0; c < n; ++c) {",
            *writer.inner,
            "}",
        ]

    def _straight(self, writer: Writer) -> None:
        """Definitions and stores in the order of the kernel, in one loop."""
        for item in self.kernel.body:
            if isinstance(item, Definition):
                self.current[item.name] = writer.value(item.expr)
            else:
                writer.inner.append(self.store(item, writer))

    # -- tiled ---------------------------------------------------------------------------------

    def crossing(self) -> list[Load]:
        """Reads whose neighbours in memory are neighbours by row, of kernels without passes."""
        full = (self.kernel.rows, self.kernel.cols)
        items = self.kernel.body
        plain = all(item.axes == full for item in items) and self.split is None
        reduced = any(isinstance(i, Definition) and isinstance(i.expr, Reduce) for i in items)
        if not plain or reduced or min(sample_of(self.rows), sample_of(self.cols)) < 8:
            return []
        return [load for load in self.loads() if self._crosses(load)]

    def _crosses(self, load: Load) -> bool:
        by_row = _coefficient(load.index, self.kernel.rows)
        by_col = _coefficient(load.index, self.kernel.cols)
        atoms = sum(1 for _ in load.index.terms)
        return by_row == 1 and by_col > 1 and atoms == 2 and load.mask is None

    def tiled(self, crossing: Sequence[Load]) -> list[str]:
        writer = self._new_writer()
        fill: list[str] = []
        staged: dict[tuple[str, Index], str] = {}
        for n, load in enumerate(crossing):
            staged[load.buffer, load.index] = f"tile{n}[c - cb][r - rb]"
            fill += [
                f"{STORED_TYPES[load.dtype]} tile{n}[{_TILE}][{_TILE} + 1];",
                "for (int64_t c = cb; c < ce; ++c)",
                "for (int64_t r = rb; r < re; ++r)",
                f"{staged[load.buffer, load.index]} = "
                f"{self.names[load.buffer]}[{_plain(load.index, writer)}];",
            ]
        writer.staged = staged
        self._straight(writer)
        return [
            "#pragma omp for collapse(2) schedule(static) nowait",
            f"for (int64_t rb = 0; rb < {self.rows}; rb += {_TILE})",
            f"for (int64_t cb = 0; cb < {self.cols}; cb += {_TILE}) {{",
            f"const int64_t re = rb + {_TILE} < {self.rows} ? rb + {_TILE} : {self.rows};",
            f"const int64_t ce = cb + {_TILE} < {self.cols} ? cb + {_TILE} : {self.cols};",
            *fill,
            "for (int64_t r = rb; r < re; ++r) {",
            *writer.scopes[0].lines,
            "#pragma omp simd",
            "for (int64_t c = cb; c < ce; ++c) {",
            *writer.inner,
            "}",
            "}",
            "}",
        ]

    # -- passes --------------------------------------------------------------------------------

    def passes(self) -> list[str]:
        writer = self._new_writer()
        wide = self.is_wide
        kept = [] if wide else self._kept()
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
        if not self.is_wide:
            return []
        folds = [
            (name, fold_of(d.expr))
            for name, d in self.levels.definitions.items()
            if isinstance(d.expr, Reduce)
        ]
        return [f"{fold.total} part_{name}[{_CHUNKS}];" for name, fold in folds]

    def _kept(self) -> list[str]:
        """Values of every element that a later pass wants again and that are dear to compute."""
        known = self.levels
        kept: list[str] = []
        if largest(self.cols) > _SCRATCH:
            return kept
        for level in range(self.last + 1):
            for name in known.closure(self.wanted(level), frozenset(kept)):
                again = known.of[name] < level
                if again and name not in kept and _is_dear(known.definitions[name].expr):
                    kept.append(name)
        return kept

    def _pass(self, level: int, writer: Writer, kept: Sequence[str], wide: bool) -> list[str]:
        """One loop over the columns: values, reductions, stores."""
        known = self.levels
        writer.scopes[1:] = [Scope() for _ in writer.scopes[1:]]
        self.current = {}
        begin = len(writer.scopes[0].lines)
        roots = self.roots(level)
        held = frozenset(name for name in kept if known.of[name] < level)
        needed = set(known.closure([*self.wanted(level), *self._to_keep(level, kept)], held))
        folds: dict[str, Fold] = {}
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

    def _fold(self, name: str, reduce: Reduce, writer: Writer) -> Fold:
        """Adds the step of a reduction to the loop and names its result."""
        fold = fold_of(reduce)
        value = writer.value(reduce.body)
        if is_position(reduce):
            better = "first_above" if "max" in reduce.kind else "first_below"
            writer.inner.append(
                f"if (at_{name} < 0 || {better}(({fold.type}){value}, a_{name})) "
                f"{{ a_{name} = {value}; at_{name} = c; }}"
            )
            self.outer[name] = f"at_{name}"
        else:
            writer.inner.append(fold.step(f"a_{name}", value))
            self.outer[name] = f"y_{name}"
        return fold

    def _own_loop(self, writer: Writer, folds: Mapping[str, Fold]) -> list[str]:
        """The loop of a pass, run by one thread."""
        lines = [f"{fold.type} a_{name} = {fold.start};" for name, fold in folds.items()]
        lines += [f"int64_t at_{name} = -1;" for name in folds if self.outer[name][0] == "a"]
        long = self._long(folds, self.cols)
        lines += [f"double t_{name} = 0;" for name in long]
        pragma = simd([(f"a_{name}", fold) for name, fold in folds.items()])
        add = [f"t_{name} += a_{name}; a_{name} = 0;" for name in long]
        if self.split is None:
            lines += self._columns("0", f"{self.cols}", pragma, writer.inner, add)
        else:
            width = self.split.inner.extent
            every = max(1, _PIECE // sample_of(width))
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

    def _long(self, folds: Mapping[str, Fold], cols: int) -> list[str]:
        """Sums of so many columns that pieces of them are added up first."""
        return [name for name, fold in folds.items() if fold.long and sample_of(cols) > _PIECE]

    def _columns(
        self, begin: str, end: str, pragma: list[str], inner: list[str], add: list[str]
    ) -> list[str]:
        """The loop over columns; ``add`` is done after each piece of them."""
        if not add:
            return [*pragma, f"for (int64_t c = {begin}; c < {end}; ++c) {{", *inner, "}"]
        return [
            f"for (int64_t cb = {begin}; cb < {end}; cb += {_PIECE}) {{",
            f"const int64_t cp = lesser(cb + {_PIECE}, {end});",
            *pragma,
            "for (int64_t c = cb; c < cp; ++c) {",
            *inner,
            "}",
            *add,
            "}",
        ]

    def _finished(self, folds: Mapping[str, Fold], long: Sequence[str]) -> list[str]:
        return [
            f"const {VALUE_TYPES[fold.dtype]} y_{name} = "
            f"{fold.finish(f't_{name}' if name in long else f'a_{name}')};"
            for name, fold in folds.items()
            if self.outer[name][0] == "y"
        ]

    def _shared_loop(self, writer: Writer, folds: Mapping[str, Fold]) -> list[str]:
        """The loop of a pass in pieces that threads share, joined in the order of the pieces."""
        size = ceil_div(self.cols, _CHUNKS)
        count = _CHUNKS if isinstance(size, Size) else ceil_div(self.cols, size)
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

    def _narrow(self, level: int, writer: Writer, wide: bool) -> list[str]:
        """Values of the row and their stores, in the order of the kernel."""
        scope = writer.scopes[0]
        begin = len(scope.lines)
        for item in self.narrow(level):
            if isinstance(item, Definition):
                self.outer[item.name] = writer.value(item.expr)
            else:
                value = stored(self.outer[item.value.name], item.value.dtype)
                once = "if (omp_get_thread_num() == 0) " if wide else ""
                scope.lines.append(f"{once}{self.target(item, writer)} = {value};")
        return scope.lines[begin:]


def _is_dear(expr: Expr) -> bool:
    return any(isinstance(node, Apply) and node.fn in DEAR for node in walk(expr))


def _coefficient(index: Index, axis: Axis) -> int:
    return sum(k for atom, k in index.terms if atom is axis)


def _plain(index: Index, writer: Writer) -> str:
    """An index of plain axes without naming parts of it."""
    terms = [f"{wide(k)}*{writer.names[a]}" for a, k in index.terms if isinstance(a, Axis)]
    return " + ".join([*terms, wide(index.const)])


def rows_text(body: RowLoops) -> list[str]:
    """The loops that suit the kernel."""
    crossing = body.crossing()
    return body.tiled(crossing) if crossing else body.passes()
