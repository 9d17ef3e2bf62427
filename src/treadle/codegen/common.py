"""What every backend asks of a kernel: its buffers, its levels, the bytes it moves."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.loop.expr import Expr, Load, Local, Position, Reduce
from treadle.loop.index import Axis, FloorDiv, Index, Mod, substitute_index
from treadle.loop.kernel import Definition, Kernel, Store
from treadle.loop.program import Buffer
from treadle.loop.traverse import loads, substitute, walk
from treadle.util.extents import Size, common_divisor, largest


def kernel_loads(kernel: Kernel) -> list[Load]:
    """Every distinct load of every definition, in order."""
    return [
        load for item in kernel.body if isinstance(item, Definition) for load in loads(item.expr)
    ]


def reads_of(kernel: Kernel) -> tuple[str, ...]:
    """The buffers that a kernel loads from, each once, in the order of its body."""
    return tuple(dict.fromkeys(load.buffer for load in kernel_loads(kernel)))


def writes_of(kernel: Kernel) -> tuple[str, ...]:
    """The buffers that a kernel stores to, each once, in the order of its body."""
    return tuple(dict.fromkeys(s.buffer for s in kernel.body if isinstance(s, Store)))


def bytes_moved(kernel: Kernel, buffers: Mapping[str, Buffer]) -> int:
    """Each buffer once per direction: what an ideal cache would let through."""
    return sum(buffers[name].nbytes for name in (*reads_of(kernel), *writes_of(kernel)))


def locals_of(expr: Expr) -> list[str]:
    """The names of a kernel's own values that a formula reads, one for each place."""
    return [node.name for node in walk(expr) if isinstance(node, Local)]


@dataclass(frozen=True, slots=True)
class Levels:
    """In which pass over the inner loop each value of a kernel exists.

    ``of[name]``: the pass that computes a value of every element, or folds a reduction; for a
    value of a row (in columns kernels: a column), the first pass that may use it.
    """

    of: Mapping[str, int]
    definitions: Mapping[str, Definition]
    full: frozenset[str]

    def pass_of(self, expr: Expr) -> int:
        """The first pass in which ``expr`` can be evaluated."""
        found = 0
        for name in locals_of(expr):
            after = isinstance(self.definitions[name].expr, Reduce) and name not in self.full
            found = max(found, self.of[name] + after)
        return found

    def closure(self, wanted: Iterable[Expr], held: frozenset[str]) -> list[str]:
        """The values of every element that ``wanted`` needs in one pass, in order.

        ``held`` are available already: what only they need is left out.
        """
        seen: set[str] = set()
        pending = [name for expr in wanted for name in locals_of(expr)]
        while pending:
            name = pending.pop()
            if name in self.full and name not in seen:
                seen.add(name)
                if name not in held:
                    pending.extend(locals_of(self.definitions[name].expr))
        return [name for name in self.definitions if name in seen]


def levels(kernel: Kernel) -> Levels:
    """The passes of a kernel; one where nothing is reduced."""
    definitions = {d.name: d for d in kernel.body if isinstance(d, Definition)}
    both = (kernel.rows, kernel.cols)
    full = frozenset(name for name, d in definitions.items() if d.axes == both)
    of: dict[str, int] = {}
    result = Levels(of, definitions, full)
    for name, definition in definitions.items():
        of[name] = result.pass_of(definition.expr)
    return result


@dataclass(frozen=True, slots=True)
class Split:
    """A kernel whose columns are ``outer * inner.extent + inner``: indices need no division."""

    kernel: Kernel
    outer: Axis
    inner: Axis


def split_columns(kernel: Kernel, least: int, most: int = 1 << 62) -> Split | None:
    """Cut the columns so that divisions by column leave the inner loop.

    ``x[(c // 64) * 512 + c % 64]`` with c = 64 a + b is ``x[512 a + b]``. ``None`` where there is
    nothing to gain, or where the pieces would be shorter than ``least``; longer ones than
    ``most`` are cut further.
    """
    divisors = {n for index in _indices(kernel) for n in _divisors(index, kernel.cols)}
    width = common_divisor(kernel.cols.extent, *divisors)
    if isinstance(width, Size):
        return None
    if width > most:
        width = max(n for n in range(1, most + 1) if width % n == 0)
    if not divisors or width < least:
        return None
    outer, inner = Axis(kernel.cols.extent // width), Axis(width)
    value = outer * width + inner
    body = tuple(_substituted(item, {kernel.cols: value}) for item in kernel.body)
    result = replace(kernel, body=body)
    if any(True for index in _indices(result) for _ in _divisors(index, inner)):
        return None
    return Split(result, outer, inner)


def _substituted(item: Definition | Store, mapping: Mapping[Axis, Index]) -> Definition | Store:
    if isinstance(item, Definition):
        return replace(item, expr=substitute(item.expr, mapping))
    return replace(item, index=substitute_index(item.index, mapping))


def _indices(kernel: Kernel) -> Iterator[Index]:
    for item in kernel.body:
        if isinstance(item, Store):
            yield item.index
            continue
        for node in walk(item.expr):
            if isinstance(node, Load | Position):
                yield node.index


def _divisors(index: Index, axis: Axis) -> Iterator[int]:
    for atom, _ in index.terms:
        if isinstance(atom, FloorDiv | Mod) and axis in atom.index.axes:
            yield atom.n
            yield from _divisors(atom.index, axis)


@dataclass(slots=True)
class Touched:
    """What kernels read and write: by name, and by bytes of the arena."""

    reads: set[str]
    writes: set[str]
    read_bytes: list[tuple[int, int]]
    write_bytes: list[tuple[int, int]]

    @staticmethod
    def of(kernel: Kernel, buffers: Mapping[str, Buffer], offsets: Mapping[str, int]) -> "Touched":
        reads, writes = set(reads_of(kernel)), set(writes_of(kernel))

        def places(names: set[str]) -> list[tuple[int, int]]:
            return [
                (offsets[name], offsets[name] + largest(buffers[name].nbytes))
                for name in sorted(names & offsets.keys())
            ]

        return Touched(reads, writes, places(reads), places(writes))

    def before(self, later: "Touched") -> bool:
        """Whether ``later`` must wait for these kernels."""
        return bool(
            self.writes & later.reads
            or self.writes & later.writes
            or self.reads & later.writes
            or _overlap(self.write_bytes, later.read_bytes)
            or _overlap(self.write_bytes, later.write_bytes)
            or _overlap(self.read_bytes, later.write_bytes)
        )

    def add(self, other: "Touched") -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.read_bytes += other.read_bytes
        self.write_bytes += other.write_bytes


def _overlap(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in left for c, d in right)


def instances(
    run: Sequence[Kernel],
    keys: Sequence[Hashable],
    buffers: Mapping[str, Buffer],
    offsets: Mapping[str, int],
) -> list[list[int]]:
    """Positions of ``run`` in launches: kernels of equal key together, where none has to wait.

    A kernel may move forward to an earlier launch when nothing on the way touches its data.
    """
    groups: list[list[int]] = []
    touched: list[Touched] = []
    for position, kernel in enumerate(run):
        mine = Touched.of(kernel, buffers, offsets)
        place = None
        for candidate in reversed(range(len(groups))):
            if touched[candidate].before(mine):
                break
            if keys[groups[candidate][0]] == keys[position]:
                place = candidate
                break
        if place is None:
            groups.append([position])
            touched.append(mine)
        else:
            groups[place].append(position)
            touched[place].add(mine)
    return groups
