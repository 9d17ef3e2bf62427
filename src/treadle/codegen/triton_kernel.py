"""What kernels read and write, and the rewrites that a grid of programs needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.loop.expr import Expr, Load, Local, Position, Reduce
from treadle.loop.index import Axis, Index
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.program import Buffer
from treadle.loop.traverse import walk
from treadle.util.errors import LoweringError, require


def roots(item: Definition | Store) -> list[Expr]:
    """The expressions an item evaluates."""
    if isinstance(item, Definition):
        return [item.expr]
    return [item.value, *item.index.values]


def loaded(items: Iterable[Definition | Store]) -> list[str]:
    """Buffers that the items read, each once, in order."""
    names: dict[str, None] = {}
    for item in items:
        for root in roots(item):
            names.update({node.buffer: None for node in walk(root) if isinstance(node, Load)})
    return list(names)


def stored(items: Iterable[Definition | Store]) -> list[str]:
    """Buffers that the items write, each once, in order."""
    return list(dict.fromkeys(item.buffer for item in items if isinstance(item, Store)))


def live(items: Sequence[Definition | Store]) -> tuple[Definition | Store, ...]:
    """The items that some store needs."""
    needed: set[str] = set()
    kept: list[Definition | Store] = []
    for item in reversed(items):
        if isinstance(item, Definition) and item.name not in needed:
            continue
        kept.append(item)
        for root in roots(item):
            needed |= {node.name for node in walk(root) if isinstance(node, Local)}
    return tuple(reversed(kept))


def indices(items: Iterable[Definition | Store]) -> Iterable[Index]:
    """Every index of these items: where they store, where they load, and positions as values."""
    for item in items:
        if isinstance(item, Store):
            yield item.index
        for root in roots(item):
            for node in walk(root):
                if isinstance(node, Load | Position):
                    yield node.index


def is_wide(kernel: Kernel) -> bool:
    """Whether offsets need 64 bits."""
    reach = [kernel.rows.extent, kernel.cols.extent]
    for index in indices(kernel.body):
        reach.extend(map(abs, index.bounds))
        reach.extend(abs(scale) for _, scale in index.terms)
    return max(reach) >= 2**31 - 2**20


def has_reduction(kernel: Kernel) -> bool:
    """Whether anything is reduced over an axis of the kernel."""
    return any(isinstance(i, Definition) and isinstance(i.expr, Reduce) for i in kernel.body)


def without_narrow_updates(kernel: Kernel) -> list[Kernel]:
    """Split off stores that other programs would read too late or too early.

    before:  step <- step + 1;  p[c] <- p[c] - f(step)      every program reads the old step
    after:   p[c] <- p[c] - f(step)  ;  step <- step + 1    two launches
    """
    parallel = {kernel.rows, kernel.cols}
    if has_reduction(kernel):
        parallel = {kernel.rows if kernel.kind is KernelKind.ROWS else kernel.cols}
    parallel = {axis for axis in parallel if axis.extent > 1}
    read = set(loaded(kernel.body))
    late = [
        item
        for item in kernel.body
        if isinstance(item, Store) and item.buffer in read and not parallel <= set(item.axes)
    ]
    if not late:
        return [kernel]
    early = live([item for item in kernel.body if item not in late])
    after = live([i for i in kernel.body if isinstance(i, Definition) or i in late])
    clash = set(stored(early)) & set(loaded(after))
    require(
        not clash, LoweringError(f"{kernel.name} reads {clash} after writing it", code="TR-331")
    )
    return [replace(kernel, body=part) for part in (early, after) if part]


def narrowed(kernel: Kernel) -> Kernel:
    """A pointwise kernel over the axes that its stores use."""
    used = {axis for item in kernel.body if isinstance(item, Store) for axis in item.axes}
    rows = kernel.rows if kernel.rows in used else Axis(1)
    cols = kernel.cols if kernel.cols in used else Axis(1)
    return replace(kernel, rows=rows, cols=cols)


def check_order(kernel: Kernel) -> None:
    """No item reads a buffer that an item before it wrote: another program may write it later."""
    written: set[str] = set()
    for item in kernel.body:
        clash = written & set(loaded([item]))
        require(
            not clash, LoweringError(f"{kernel.name} reads {clash} after writing it", code="TR-331")
        )
        written |= set(stored([item]))


@dataclass(slots=True)
class Touched:
    """What kernels read and write: names, and for places in the arena their bytes."""

    reads: set[str]
    writes: set[str]
    read_spans: list[tuple[int, int]]
    write_spans: list[tuple[int, int]]

    @staticmethod
    def of(kernel: Kernel, buffers: Mapping[str, Buffer], offsets: Mapping[str, int]) -> "Touched":
        reads, writes = set(loaded(kernel.body)), set(stored(kernel.body))

        def spans(names: set[str]) -> list[tuple[int, int]]:
            places = [(offsets[name], buffers[name].nbytes) for name in names & offsets.keys()]
            return [(first, first + size) for first, size in places]

        return Touched(reads, writes, spans(reads), spans(writes))

    @property
    def overwrites(self) -> bool:
        """Whether the kernel writes what it reads, by name or by place."""
        return bool(self.reads & self.writes) or _overlap(self.read_spans, self.write_spans)

    def conflicts(self, later: "Touched") -> bool:
        """Whether ``later`` must stay after these kernels."""
        return bool(
            self.writes & (later.reads | later.writes)
            or self.reads & later.writes
            or _overlap(self.write_spans, later.read_spans + later.write_spans)
            or _overlap(self.read_spans, later.write_spans)
        )

    def add(self, other: "Touched") -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.read_spans += other.read_spans
        self.write_spans += other.write_spans


def _overlap(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in left for c, d in right)
