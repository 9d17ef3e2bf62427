"""Rows of a few columns, written out: a reduction becomes a chain, and a row becomes one place.

::

    before:  for r < R: for c < 3:  %v0 = x[3*r + c];  %v1 = sum{c} %v0;  y[3*r + c] = %v0 / %v1
    after:   for r < R:  %v0_0 = x[3*r];  %v0_1 = x[3*r + 1];  %v0_2 = x[3*r + 2]
                         %v1 = (%v0_0 + %v0_1) + %v0_2;  y[3*r] = %v0_0 / %v1;  ...
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from treadle.algebra.index import Axis, Index
from treadle.loop.expr import Apply, Const, Expr, Local, Reduce, ReduceKind
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.nest import is_position, reductions_of, updates
from treadle.loop.simplify import simplify
from treadle.loop.traverse import loads, map_expr, substitute, substitute_index, walk

_CHAINS: Mapping[ReduceKind, str] = {
    ReduceKind.SUM: "add",
    ReduceKind.PROD: "mul",
    ReduceKind.MAX: "maximum",
    ReduceKind.MIN: "minimum",
    ReduceKind.ANY: "or",
}
_HALF = (torch.bfloat16, torch.float16)


def can_unroll(kernel: Kernel) -> bool:
    """Whether the columns of a rows kernel can be written out: their number is known, and no chain
    rounds where the accumulator of a loop would not."""
    reductions = reductions_of(kernel)
    known = kernel.kind is KernelKind.ROWS and type(kernel.cols.extent) is int
    return known and not any(map(_rounds_each, reductions))


def _rounds_each(reduce: Reduce) -> bool:
    adds = reduce.kind in (ReduceKind.SUM, ReduceKind.PROD)
    narrow = reduce.dtype in _HALF or reduce.dtype is torch.bool
    return (adds and narrow) or (reduce.kind is ReduceKind.ANY and reduce.dtype is not torch.bool)


def unrolled(kernel: Kernel) -> Kernel:
    """The same work without a loop over the columns: rows of one column each."""
    last = updates(kernel)
    body = [item for item in kernel.body if item not in last]
    unroll = _Unroll(kernel, _varying(kernel))
    for item in (*body, *last):
        unroll.add(item)
    return replace(kernel, cols=Axis(1), body=tuple(unroll.found))


def _varying(kernel: Kernel) -> set[str]:
    definitions = (item for item in kernel.body if isinstance(item, Definition))
    return {item.name for item in definitions if kernel.cols in item.axes}


@dataclass(frozen=True, slots=True)
class _Choice:
    """The first entry whose condition holds; the last one has none."""

    hits: list[Local]
    entries: list[Expr]


@dataclass
class _Unroll:
    kernel: Kernel
    varying: set[str]
    """The values that each column has for itself."""
    found: list[Definition | Store] = field(default_factory=list[Definition | Store])
    choices: dict[str, _Choice] = field(default_factory=dict[str, _Choice])
    """The places that chains found, and what was made of them."""
    tables: Iterator[int] = field(default_factory=count)

    def add(self, item: Definition | Store) -> None:
        axes = (self.kernel.rows,) if self.kernel.rows in item.axes else ()
        if isinstance(item, Definition) and isinstance(item.expr, Reduce):
            self._chain(item.name, item.expr, axes)
        elif isinstance(item, Definition):
            for name, expr in self._copies(item):
                self.found.append(Definition(name, self._tabulated(expr, axes), axes))
        elif self.kernel.cols in item.axes:
            for k in range(self.kernel.cols.extent):
                index = substitute_index(item.index, {self.kernel.cols: k})
                value = self._value(item.value, k)
                self.found.append(Store(item.buffer, index, value, axes))
        else:
            self.found.append(replace(item, axes=axes))

    def _tabulated(self, expr: Expr, axes: tuple[Axis, ...]) -> Expr:
        """Divisions of a place as chains of their own: ``place // 3`` is a choice of constants."""
        tables: dict[Expr, Expr] = {}

        def found(node: Expr) -> Expr:
            if not isinstance(node, Apply) or node.fn not in ("floordiv", "mod"):
                return node
            names = {inner.name for inner in walk(node) if isinstance(inner, Local)}
            if names <= self.choices.keys() and len(names) == 1 and not loads(node):
                if node not in tables:
                    tables[node] = self._table(node, names.pop(), axes)
                return tables[node]
            return node

        return map_expr(expr, found) if self.choices else expr

    def _table(self, node: Expr, name: str, axes: tuple[Axis, ...]) -> Expr:
        known = self.choices[name]
        entries = [_with(node, name, entry) for entry in known.entries]
        if not all(isinstance(entry, Const) for entry in entries):
            return node
        choice = _Choice(known.hits, entries)
        chosen = self._chosen(choice, f"{name}_table{next(self.tables)}_", axes)
        if isinstance(chosen, Local):
            self.choices[chosen.name] = choice
        return chosen

    def _copies(self, item: Definition) -> Iterator[tuple[str, Expr]]:
        if item.name not in self.varying:
            yield item.name, item.expr
            return
        for k in range(self.kernel.cols.extent):
            yield f"{item.name}_{k}", self._at(item.expr, k)

    def _at(self, expr: Expr, k: int) -> Expr:
        """``expr`` at column ``k``."""
        here = substitute(expr, {self.kernel.cols: Index.of(k)})

        def renamed(node: Expr) -> Expr:
            return self._value(node, k) if isinstance(node, Local) else node

        return simplify(map_expr(here, renamed))

    def _value(self, local: Local, k: int) -> Local:
        return replace(local, name=f"{local.name}_{k}") if local.name in self.varying else local

    def _chain(self, name: str, reduce: Reduce, axes: tuple[Axis, ...]) -> None:
        parts = [self._at(reduce.body, k) for k in range(self.kernel.cols.extent)]
        if is_position(reduce):
            self._first_best(name, reduce.kind, parts, axes)
            return
        fn = _CHAINS[reduce.kind]
        total, *rest = parts
        for k, part in enumerate(rest[:-1], 1):
            total = self._define(f"{name}_{k}", Apply(fn, (total, part), reduce.dtype), axes)
        if rest:
            total = Apply(fn, (total, rest[-1]), reduce.dtype)
        self._define(name, total, axes)

    def _first_best(
        self, name: str, kind: ReduceKind, parts: list[Expr], axes: tuple[Axis, ...]
    ) -> None:
        """The first column that has the best value. Each is compared with that and not with those
        before it: compilers make branches of such chains."""
        fn = "maximum" if kind is ReduceKind.ARGMAX else "minimum"
        values = [self._define(f"{name}_value{k}", part, axes) for k, part in enumerate(parts)]
        best = values[0]
        for k, value in enumerate(values[1:], 1):
            best = self._define(f"{name}_best{k}", Apply(fn, (best, value), value.dtype), axes)
        hits = [
            self._define(f"{name}_is{k}", Apply("same", (value, best), torch.bool), axes)
            for k, value in enumerate(values[:-1])
        ]
        entries: list[Expr] = [Const(k, torch.int64) for k in range(len(parts))]
        choice = _Choice(hits, entries)
        self._define(name, self._chosen(choice, f"{name}_place", axes), axes)
        self.choices[name] = choice

    def _chosen(self, choice: _Choice, name: str, axes: tuple[Axis, ...]) -> Expr:
        chosen = choice.entries[-1]
        for k in reversed(range(len(choice.hits))):
            hit, entry = choice.hits[k], choice.entries[k]
            wanted = Apply("where", (hit, entry, chosen), entry.dtype)
            chosen = self._define(f"{name}{k}", wanted, axes)
        return chosen

    def _define(self, name: str, expr: Expr, axes: tuple[Axis, ...]) -> Local:
        self.found.append(Definition(name, expr, axes))
        return Local(name, expr.dtype)


def _with(expr: Expr, name: str, entry: Expr) -> Expr:
    def put(node: Expr) -> Expr:
        return entry if isinstance(node, Local) and node.name == name else node

    return simplify(map_expr(expr, put))
