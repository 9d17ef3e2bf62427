"""What all loop forms share: the passes of a kernel, and the values within one."""

import itertools
from collections.abc import Mapping, Sequence

from treadle.algebra.index import Axis
from treadle.codegen.contraction import only_summed
from treadle.codegen.cpp.expr import CppWriter, stored
from treadle.codegen.cpp.reduce import Accumulator
from treadle.loop.expr import Expr, Load, Reduce
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.nest import Levels, kernel_loads, levels, split_columns, updates


class CppBody:
    """One kernel on its way to text.

    ``current`` names the values of the element at hand, ``outer`` those of its row or column.
    ``contract``: whether a product and a sum may round once.
    """

    def __init__(self, kernel: Kernel, names: Mapping[str, str], *, contract: bool) -> None:
        self.schedule = kernel.scheduled
        width = self.schedule.width
        self.split = split_columns(kernel, width) if width else None
        self.kernel = kernel if self.split is None else self.split.kernel
        self.levels: Levels = levels(self.kernel)
        self.updates: tuple[Store, ...] = updates(self.kernel)
        self._summed = only_summed(self.kernel) if contract else frozenset[Expr]()
        self.names = names
        self._numbers = itertools.count()
        self.current: dict[str, str] = {}
        self.outer: dict[str, str] = {}

    @property
    def rows(self) -> int:
        """The extent of the outer axis."""
        return self.kernel.rows.extent

    @property
    def cols(self) -> int:
        """The extent of the inner axis."""
        return self.kernel.cols.extent

    @property
    def last(self) -> int:
        """The last pass over the elements; -1 where there is none."""
        return self.levels.passes - 1

    def writer(self, depths: Mapping[Axis, int], names: Mapping[Axis, str]) -> CppWriter:
        """Prints formulas where these axes are loop variables, at these depths."""
        return CppWriter(
            names,
            depths,
            self.names,
            self.local,
            self.local_depth,
            summed=self._summed,
            numbers=self._numbers,
        )

    def local(self, name: str) -> str:
        """The variable that holds a value of the kernel here."""
        return self.current[name] if name in self.current else self.outer[name]

    def local_depth(self, name: str) -> int:
        """How many loops deep a value of the kernel changes."""
        raise NotImplementedError

    def narrow(self, level: int) -> list[Definition | Store]:
        """Values of a row or column, and their stores, that wait for the passes before
        ``level`` and for no later one; updates of what the kernel reads come last. Reductions are
        defined already."""
        known = self.levels
        found: list[Definition | Store] = []
        for item in self.kernel.body:
            if isinstance(item, Definition):
                if item.name in known.varying or isinstance(item.expr, Reduce):
                    continue
                if known.of[item.name] == level:
                    found.append(item)
            elif item.value.name not in known.varying and item not in self.updates:
                found.extend([item] if known.pass_of(item.value) == level else [])
        return [*found, *(self.updates if level == self.last + 1 else ())]

    def target(self, item: Store, writer: CppWriter) -> str:
        """The element that a store writes, as an lvalue."""
        return f"{self.names[item.buffer]}[{writer.index(item.index)}]"

    def store(self, item: Store, writer: CppWriter) -> str:
        """The statement of a store."""
        value = stored(self.local(item.value.name), item.value.dtype)
        return f"{self.target(item, writer)} = {value};"

    def loads(self) -> list[Load]:
        """The distinct loads, in the order of the body."""
        return kernel_loads(self.kernel)


def simd(folds: Sequence[tuple[str, Accumulator]]) -> list[str]:
    """The pragma for a loop with these accumulators; none where one of them has an order."""
    if any(not fold.clause for _, fold in folds):
        return []
    clauses = "".join(f" reduction({fold.clause}: {name})" for name, fold in folds)
    return [f"#pragma omp simd{clauses}"]
