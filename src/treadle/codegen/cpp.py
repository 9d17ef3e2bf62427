"""Kernels to C++ text for OpenMP.

::

    rows kernel:     each thread takes rows; a row runs one loop over the columns per pass
    flat kernel:     (one row, nothing reduced) threads share the columns; the size is an argument
    columns kernel:  each thread takes blocks of columns and runs down the rows

Kernels of equal text share one function, and a launch runs many instances of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.codegen.common import Levels, bytes_moved, instances, levels, reads_of, writes_of
from treadle.codegen.cpp_expr import DEAR, STORED_TYPES, VALUE_TYPES, Scope, Writer, stored
from treadle.codegen.cpp_prelude import PRELUDE
from treadle.codegen.cpp_reduce import Fold, fold_of, is_position
from treadle.loop.expr import Apply, Expr, Local, Reduce
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.program import Buffer
from treadle.loop.traverse import walk
from treadle.runtime.artifact import Language, Launch, Source

_BLOCK = 64  # columns of a columns kernel that a thread runs down together
_SMALL = 1 << 14  # elements below which one thread is faster
_SCRATCH = 1 << 16  # longest row that is kept between passes
_UNITS = 4


@dataclass(frozen=True, slots=True)
class Rendered:
    """A kernel as text with ``NAME`` for its name, and how to call it."""

    text: str
    buffers: tuple[str, ...]
    sizes: tuple[int, ...]


def render_kernel(kernel: Kernel, buffers: Mapping[str, Buffer]) -> Rendered:
    """The function of one kernel. Kernels that differ in buffers alone give equal text."""
    names = tuple(dict.fromkeys((*reads_of(kernel), *writes_of(kernel))))
    flat = is_flat(kernel)
    body = _Body(kernel, {name: f"b{n}" for n, name in enumerate(names)})
    if flat:
        lines = body.flat()
    elif kernel.kind is KernelKind.ROWS:
        lines = body.rows()
    else:
        lines = body.columns()
    pointers = [
        f"{STORED_TYPES[buffers[name].dtype]}* b{n} = "
        f"({STORED_TYPES[buffers[name].dtype]}*)p[i * {len(names)} + {n}];"
        for n, name in enumerate(names)
    ]
    work = kernel.rows.extent * kernel.cols.extent
    condition = f"sizes[0] * instances > {_SMALL}" if flat else f"{work} * instances > {_SMALL}"
    head = [
        'extern "C" void NAME(void* const* p, const int64_t* sizes, int64_t instances) {',
        f"#pragma omp parallel if ({condition})",
        "for (int64_t i = 0; i < instances; ++i) {",
        *pointers,
    ]
    if flat:
        head.append("const int64_t n = sizes[i];")
    text = "\n".join([*head, *lines, "}", "}"])
    return Rendered(text, names, (kernel.cols.extent,) if flat else ())


def is_flat(kernel: Kernel) -> bool:
    """One row and nothing reduced: the number of columns can be an argument."""
    reduced = any(isinstance(d, Definition) and isinstance(d.expr, Reduce) for d in kernel.body)
    return kernel.kind is KernelKind.ROWS and kernel.rows.extent == 1 and not reduced


def render_cpp(
    runs: Sequence[Sequence[Kernel]],
    buffers: Mapping[str, Buffer],
    offsets: Mapping[str, int],
) -> tuple[tuple[Source, ...], tuple[tuple[Launch, ...], ...]]:
    """All units, and for each run of kernels its launches, in order.

    A run is a stretch of the plan without library calls.
    """
    names: dict[str, str] = {}
    launches: list[tuple[Launch, ...]] = []
    for run in runs:
        rendered = [render_kernel(kernel, buffers) for kernel in run]
        groups = instances(run, [each.text for each in rendered], buffers, offsets)
        made: list[Launch] = []
        for group in groups:
            text = rendered[group[0]].text
            name = names.setdefault(text, f"treadle_{len(names)}")
            kernels = [run[position] for position in group]
            made.append(
                Launch(
                    function=name,
                    buffers=tuple(rendered[position].buffers for position in group),
                    sizes=tuple(rendered[position].sizes for position in group),
                    kernels=tuple(kernel.name for kernel in kernels),
                    bytes_moved=sum(bytes_moved(kernel, buffers) for kernel in kernels),
                    origin=_origin(kernels[0]),
                )
            )
        launches.append(tuple(made))
    return sources_of({name: text for text, name in names.items()}), tuple(launches)


def _origin(kernel: Kernel) -> str:
    return next((origin.where or origin.module for origin in kernel.origins), "")


def sources_of(texts: Mapping[str, str]) -> tuple[Source, ...]:
    """Functions by name, spread over a few units of about equal length."""
    count = min(_UNITS, max(1, len(texts) // 4))
    units: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name, text in sorted(texts.items(), key=lambda item: (-len(item[1]), item[0])):
        least = sizes.index(min(sizes))
        units[least].append(name)
        sizes[least] += len(text)
    return tuple(
        Source(
            Language.CPP,
            "\n".join([PRELUDE, *(texts[name].replace("NAME", name, 1) for name in unit), ""]),
            tuple(unit),
        )
        for unit in units
        if unit
    )


class _Body:
    """The loops of one kernel."""

    def __init__(self, kernel: Kernel, names: Mapping[str, str]) -> None:
        self._kernel = kernel
        self._levels: Levels = levels(kernel)
        self._names = names
        self._current: dict[str, str] = {}  # values of this pass, by local
        self._outer_values: dict[str, str] = {}  # values of this row, by local
        self._named = 0
        self._writer = self._new_writer()
        self._by_value: dict[str, list[Store]] = {}
        for item in kernel.body:
            if isinstance(item, Store):
                self._by_value.setdefault(item.value.name, []).append(item)

    def _new_writer(self) -> Writer:
        return Writer(
            {self._kernel.rows: "r", self._kernel.cols: "c"},
            self._kernel.cols,
            self._names,
            self._local,
            self._varies,
            count=self._named,  # writers of one kernel share its block: no name twice
        )

    def _local(self, name: str) -> str:
        return self._current[name] if name in self._current else self._outer_values[name]

    def _varies(self, name: str) -> bool:
        if self._kernel.kind is KernelKind.COLUMNS:
            return True
        return name in self._levels.full

    # -- flat ----------------------------------------------------------------------------------

    def flat(self) -> list[str]:
        writer = self._writer
        writer.names = {**writer.names, self._kernel.rows: "0LL"}
        self._items(list(self._levels.definitions), writer, self._kernel.body)
        return [
            *writer.outer.lines,
            "#pragma omp for simd schedule(static) nowait",
            "for (int64_t c = 0; c < n; ++c) {",
            *writer.inner.lines,
            "}",
        ]

    def _items(
        self, names: Sequence[str], writer: Writer, body: Sequence[Definition | Store]
    ) -> None:
        """Definitions and their stores in the order of the kernel, all of one pass."""
        wanted = set(names)
        for item in body:
            if isinstance(item, Definition):
                if item.name in wanted:
                    self._current[item.name] = writer.value(item.expr)
            elif item.value.name in wanted:
                self._store(item, writer)

    def _store(self, item: Store, writer: Writer) -> None:
        value = self._current[item.value.name]
        target = f"{self._names[item.buffer]}[{writer.index(item.index)}]"
        writer.inner.lines.append(f"{target} = {stored(value, item.value.dtype)};")

    # -- rows ----------------------------------------------------------------------------------

    def rows(self) -> list[str]:
        lines: list[str] = []
        writer = self._writer
        known = self._levels
        last = max((known.of[name] for name in self._looped()), default=-1)
        kept = self._kept(last)
        for name in kept:
            dtype = known.definitions[name].expr.dtype
            lines.append(f"{VALUE_TYPES[dtype]} keep_{name}[{self._kernel.cols.extent}];")
        self._row_values(0, lines, first=True)
        for level in range(last + 1):
            lines += self._pass(level, kept)
            self._row_values(level + 1, lines, first=False)
        del writer
        return [
            "#pragma omp for schedule(static) nowait",
            f"for (int64_t r = 0; r < {self._kernel.rows.extent}; ++r) {{",
            *lines,
            "}",
        ]

    def _looped(self) -> list[str]:
        """Locals whose evaluation needs a loop over the columns."""
        known = self._levels
        return [
            name
            for name, d in known.definitions.items()
            if name in known.full or isinstance(d.expr, Reduce)
        ]

    def _roots(self, level: int) -> list[Definition | Store]:
        """What a pass is for: its reductions, and the stores of its values."""
        known = self._levels
        found: list[Definition | Store] = []
        for item in self._kernel.body:
            if isinstance(item, Definition):
                if isinstance(item.expr, Reduce) and known.of[item.name] == level:
                    found.append(item)
            elif item.value.name in known.full and known.of[item.value.name] == level:
                found.append(item)
        return found

    def _wanted(self, level: int) -> list[Expr]:
        return [root.value if isinstance(root, Store) else root.expr for root in self._roots(level)]

    def _kept(self, last: int) -> list[str]:
        """Values of every element that a later pass wants again and that are dear to compute."""
        known = self._levels
        if self._kernel.cols.extent > _SCRATCH:
            return []
        kept: list[str] = []
        for level in range(last + 1):
            for name in known.closure(self._wanted(level), frozenset(kept)):
                again = known.of[name] < level
                if again and name not in kept and self._is_dear(known.definitions[name].expr):
                    kept.append(name)
        return kept

    def _is_dear(self, expr: Expr) -> bool:
        return any(isinstance(node, Apply) and node.fn in DEAR for node in walk(expr))

    def _pass(self, level: int, kept: Sequence[str]) -> list[str]:
        """One loop over the columns: values, reductions, stores."""
        known, writer = self._levels, self._writer
        writer.inner = Scope()
        self._current = {}
        held = frozenset(name for name in kept if known.of[name] < level)
        begin = len(writer.outer.lines)
        roots = self._roots(level)
        first = [name for name in kept if known.of[name] == level]
        exprs = [*self._wanted(level), *(Local(n, known.definitions[n].expr.dtype) for n in first)]
        needed = known.closure(exprs, held)
        folds: list[tuple[str, Fold]] = []
        head: list[str] = []
        tail: list[str] = []
        for item in self._kernel.body:
            if isinstance(item, Store):
                if item in roots:
                    self._store(item, writer)
            elif item in roots and isinstance(item.expr, Reduce):
                self._fold(item.name, item.expr, writer, folds, head, tail)
            elif item.name in needed:
                self._define(item, writer, held, kept)
        outer = writer.outer.lines[begin:]
        pragma = _simd([f for f in folds])
        loop = [
            *outer,
            *head,
            *([pragma] if pragma else []),
            f"for (int64_t c = 0; c < {self._kernel.cols.extent}; ++c) {{",
            *writer.inner.lines,
            "}",
            *tail,
        ]
        return loop

    def _define(
        self, item: Definition, writer: Writer, held: frozenset[str], kept: Sequence[str]
    ) -> None:
        if item.name in held:
            self._current[item.name] = f"keep_{item.name}[c]"
            return
        value = writer.value(item.expr)
        self._current[item.name] = value
        if item.name in kept:
            writer.inner.lines.append(f"keep_{item.name}[c] = {value};")

    def _fold(
        self,
        name: str,
        reduce: Reduce,
        writer: Writer,
        folds: list[tuple[str, Fold]],
        head: list[str],
        tail: list[str],
    ) -> None:
        """Declares the accumulator, adds the step to the loop, and finishes after it."""
        fold = fold_of(reduce)
        into = f"a_{name}"
        value = writer.value(reduce.body)
        if is_position(reduce):
            better = "first_above" if "max" in reduce.kind else "first_below"
            head += [f"{fold.type} {into} = {fold.start};", f"int64_t at_{name} = -1;"]
            writer.inner.lines += [
                f"if (at_{name} < 0 || {better}(({fold.type}){value}, {into})) "
                f"{{ {into} = {value}; at_{name} = c; }}"
            ]
            folds.append((into, fold))
            self._outer_values[name] = f"at_{name}"
            return
        head.append(f"{fold.type} {into} = {fold.start};")
        writer.inner.lines.append(fold.step(into, value))
        folds.append((into, fold))
        kind = VALUE_TYPES[reduce.dtype]
        tail.append(f"const {kind} y_{name} = {fold.finish(into)};")
        self._outer_values[name] = f"y_{name}"

    def _row_values(self, level: int, lines: list[str], *, first: bool) -> None:
        """Values of the row that need nothing later than the passes before ``level``."""
        known, writer = self._levels, self._writer
        begin = len(writer.outer.lines)
        for item in self._kernel.body:
            if isinstance(item, Definition):
                mine = item.name not in known.full and not isinstance(item.expr, Reduce)
                if mine and known.of[item.name] == level:
                    self._outer_values[item.name] = writer.value(item.expr)
            elif item.value.name not in known.full:
                definition = known.definitions[item.value.name]
                after = isinstance(definition.expr, Reduce)
                if known.of[item.value.name] + after == level:
                    value = self._outer_values[item.value.name]
                    target = f"{self._names[item.buffer]}[{writer.index(item.index)}]"
                    writer.outer.lines.append(f"{target} = {stored(value, item.value.dtype)};")
        lines += writer.outer.lines[begin:]

    # -- columns -------------------------------------------------------------------------------

    def columns(self) -> list[str]:
        """Blocks of columns; each value of a column is an array over the block."""
        known = self._levels
        last = max((known.of[name] for name in self._looped()), default=-1)
        lines = [
            "#pragma omp for schedule(static) nowait",
            f"for (int64_t c0 = 0; c0 < {self._kernel.cols.extent}; c0 += {_BLOCK}) {{",
            f"const int64_t w = {self._kernel.cols.extent} - c0 < {_BLOCK} ? "
            f"{self._kernel.cols.extent} - c0 : {_BLOCK};",
        ]
        lines += self._column_values(0)
        for level in range(last + 1):
            lines += self._down(level)
            lines += self._column_values(level + 1)
        return [*lines, "}"]

    def _across(self, inner: Scope) -> list[str]:
        if not inner.lines:
            return []
        return [
            "#pragma omp simd",
            "for (int64_t l = 0; l < w; ++l) {",
            "const int64_t c = c0 + l;",
            *inner.lines,
            "}",
        ]

    def _down(self, level: int) -> list[str]:
        """One loop down the rows, folding into arrays over the block."""
        known = self._levels
        self._named = self._writer.count
        self._writer = writer = self._new_writer()
        self._current = {}
        roots = self._roots(level)
        needed = known.closure(self._wanted(level), frozenset())
        head: list[str] = []
        tail = Scope()
        for item in self._kernel.body:
            if isinstance(item, Store):
                if item in roots:
                    self._store(item, writer)
            elif item in roots and isinstance(item.expr, Reduce):
                self._fold_block(item.name, item.expr, writer, head, tail)
            elif item.name in needed:
                self._current[item.name] = writer.value(item.expr)
        return [
            *head,
            f"for (int64_t r = 0; r < {self._kernel.rows.extent}; ++r) {{",
            *writer.outer.lines,
            *self._across(writer.inner),
            "}",
            *self._across(tail),
        ]

    def _fold_block(
        self, name: str, reduce: Reduce, writer: Writer, head: list[str], tail: Scope
    ) -> None:
        fold = fold_of(reduce)
        into = f"a_{name}"
        value = writer.value(reduce.body)
        head.append(f"{fold.type} {into}[{_BLOCK}];")
        if is_position(reduce):
            better = "first_above" if "max" in reduce.kind else "first_below"
            head += [
                f"int64_t at_{name}[{_BLOCK}];",
                f"for (int64_t l = 0; l < w; ++l) {{ {into}[l] = {fold.start}; at_{name}[l] = -1; }}",
            ]
            writer.inner.lines += [
                f"const bool go_{name} = at_{name}[l] < 0 || "
                f"{better}(({fold.type}){value}, {into}[l]);",
                f"{into}[l] = go_{name} ? ({fold.type}){value} : {into}[l];",
                f"at_{name}[l] = go_{name} ? r : at_{name}[l];",
            ]
            self._outer_values[name] = f"at_{name}[l]"
            return
        head.append(f"for (int64_t l = 0; l < w; ++l) {into}[l] = {fold.start};")
        writer.inner.lines.append(fold.step(f"{into}[l]", value))
        kind = VALUE_TYPES[reduce.dtype]
        head.append(f"{kind} y_{name}[{_BLOCK}];")
        tail.lines.append(f"y_{name}[l] = {fold.finish(f'{into}[l]')};")
        self._outer_values[name] = f"y_{name}[l]"

    def _column_values(self, level: int) -> list[str]:
        """Values of the column, kept in arrays over the block, and their stores."""
        known = self._levels
        self._named = self._writer.count
        self._writer = writer = self._new_writer()
        self._current = {}
        head: list[str] = []
        for item in self._kernel.body:
            if isinstance(item, Definition):
                mine = item.name not in known.full and not isinstance(item.expr, Reduce)
                if mine and known.of[item.name] == level:
                    value = writer.value(item.expr)
                    kind = VALUE_TYPES[item.expr.dtype]
                    head.append(f"{kind} y_{item.name}[{_BLOCK}];")
                    writer.inner.lines.append(f"y_{item.name}[l] = {value};")
                    self._outer_values[item.name] = f"y_{item.name}[l]"
            elif item.value.name not in known.full:
                definition = known.definitions[item.value.name]
                after = isinstance(definition.expr, Reduce)
                if known.of[item.value.name] + after == level:
                    value = self._outer_values[item.value.name]
                    target = f"{self._names[item.buffer]}[{writer.index(item.index)}]"
                    writer.inner.lines.append(f"{target} = {stored(value, item.value.dtype)};")
        return [*head, *writer.outer.lines, *self._across(writer.inner)]


def _simd(folds: Sequence[tuple[str, Fold]]) -> str:
    """The pragma for a loop with these accumulators; none where one of them has an order."""
    if any(not fold.clause for _, fold in folds):
        return ""
    clauses = "".join(f" reduction({fold.clause}: {name})" for name, fold in folds)
    return f"#pragma omp simd{clauses}"
