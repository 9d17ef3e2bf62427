"""What a kernel reads, writes and computes in which pass, for schedulers and printers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from treadle.algebra.extents import Size, dims_in, same, surely_less
from treadle.algebra.index import Axis, FloorDiv, Index, Mod
from treadle.algebra.index_walks import numbers_in
from treadle.loop.expr import Apply, Expr, Load, Local, Position, Reduce, ReduceKind, values_of
from treadle.loop.kernel import Definition, Kernel, KernelKind, Store
from treadle.loop.program import Buffer
from treadle.loop.traverse import loads, operands_of, substitute, substitute_index, walk, walk_all
from treadle.util.errors import VerifyError, require
from treadle.util.reach import reached

Item = Definition | Store


def roots(item: Item) -> list[Expr]:
    """The formulas that an item evaluates."""
    if isinstance(item, Definition):
        return [item.expr]
    return [item.value, *values_of(item.index)]


def loaded(items: Iterable[Item]) -> tuple[str, ...]:
    """The buffers that the items read, each once, in order."""
    names: dict[str, None] = {}
    for item in items:
        for root in roots(item):
            names.update([(load.buffer, None) for load in loads(root)])
    return tuple(names)


def stored(items: Iterable[Item]) -> tuple[str, ...]:
    """The buffers that the items write, each once, in order."""
    return tuple(dict.fromkeys(item.buffer for item in items if isinstance(item, Store)))


def arguments_of(kernel: Kernel) -> tuple[str, ...]:
    """The buffers that a kernel's function is given: those it reads, those it writes, scratch."""
    return tuple(dict.fromkeys((*loaded(kernel.body), *stored(kernel.body), *kernel.scratch)))


def kernel_loads(kernel: Kernel) -> list[Load]:
    """The distinct loads of each definition, in the order of the body."""
    return [
        load for item in kernel.body if isinstance(item, Definition) for load in loads(item.expr)
    ]


def bytes_moved(kernel: Kernel, buffers: Mapping[str, Buffer]) -> int:
    """Each buffer once per direction: what an ideal cache would let through."""
    return sum(buffers[name].nbytes for name in (*loaded(kernel.body), *stored(kernel.body)))


def reductions_of(kernel: Kernel) -> tuple[Reduce, ...]:
    """What is reduced, in the order of the body."""
    found = (item.expr for item in kernel.body if isinstance(item, Definition))
    return tuple(expr for expr in found if isinstance(expr, Reduce))


def updates(kernel: Kernel) -> tuple[Store, ...]:
    """The stores of a reducing kernel into buffers that it reads, such as a bias that the kernel of
    its gradient updates: one value for each row, or for each column, which is read only where it is
    written. They come after all other work on that row or column."""
    read, full = set(loaded(kernel.body)), (kernel.rows, kernel.cols)
    if not reductions_of(kernel):
        return ()
    stores = (item for item in kernel.body if isinstance(item, Store))
    return tuple(item for item in stores if item.axes != full and item.buffer in read)


def is_over(item: Definition, axis: Axis) -> bool:
    """Whether a definition is a reduction along that axis alone."""
    return isinstance(item.expr, Reduce) and item.expr.axes == (axis,)


def after_rows(kernel: Kernel) -> frozenset[str]:
    """The values of a kernel of both that are there after the last row: what is reduced over the
    rows, and what is made of that."""
    found: set[str] = set()
    for item in kernel.body if kernel.kind is KernelKind.BOTH else ():
        if isinstance(item, Definition) and (
            is_over(item, kernel.rows) or found & set(locals_of(item.expr))
        ):
            found.add(item.name)
    return frozenset(found)


def live(items: Iterable[Item]) -> tuple[Item, ...]:
    """The items that some store needs."""
    needed: set[str] = set()
    kept: list[Item] = []
    for item in reversed(tuple(items)):
        if isinstance(item, Definition) and item.name not in needed:
            continue
        kept.append(item)
        for root in roots(item):
            needed |= set(locals_of(root))
    return tuple(reversed(kept))


def indices(items: Iterable[Item]) -> Iterator[Index]:
    """Every index of these items: where they store, where they load, and positions as values."""
    for item in items:
        if isinstance(item, Store):
            yield item.index
        for root in roots(item):
            for node in walk(root):
                if isinstance(node, Load | Position):
                    yield node.index


def dims_of(kernel: Kernel, buffers: Mapping[str, Buffer]) -> list[Size]:
    """The dims of calls that the kernel mentions: in its extents, in the layouts of its buffers,
    and in its formulas, such as the count that a mean divides by."""
    names = arguments_of(kernel)
    layouts = (n for name in names for n in (*buffers[name].shape, *buffers[name].strides))
    inside = (size for index in indices(kernel.body) for size in numbers_in(index))
    return dims_in([kernel.rows.extent, kernel.cols.extent, *layouts, *inside])


def divisors(index: Index, axis: Axis) -> Iterator[int]:
    """What parts of the index that vary with ``axis`` are divided by."""
    for atom, _ in index.terms:
        if isinstance(atom, FloorDiv | Mod) and axis in atom.index.axes:
            yield atom.n
            yield from divisors(atom.index, axis)


_REACH = 2**31 - 2**20


def is_wide(kernel: Kernel) -> bool:
    """Whether offsets may need 64 bits."""
    reach = [kernel.rows.extent, kernel.cols.extent]
    for index in indices(kernel.body):
        reach.extend(index.bounds)
        reach.extend(scale for _, scale in index.terms)
    return not all(
        surely_less(-_REACH, distance) and surely_less(distance, _REACH) for distance in reach
    )


def locals_of(expr: Expr) -> list[str]:
    """The names of a kernel's own values that a formula reads, one for each place."""
    return [node.name for node in walk(expr) if isinstance(node, Local)]


def transposed_loads(kernel: Kernel) -> list[Load]:
    """Reads of a kernel without reductions whose neighbours in memory are neighbours by row."""
    if not is_straight(kernel):
        return []
    return [load for load in kernel_loads(kernel) if _is_transposed(load, kernel)]


def is_straight(kernel: Kernel) -> bool:
    """Whether every item of a kernel is there for each element, and nothing is reduced."""
    full = (kernel.rows, kernel.cols)
    return not reductions_of(kernel) and all(item.axes == full for item in kernel.body)


def apart_loads(kernel: Kernel) -> list[Load]:
    """Reads whose neighbours by column do not lie side by side, and that depend on nothing
    that the kernel computes: vector instructions cannot do them, and compilers then leave the whole
    loop to scalar ones."""
    written = set(stored(kernel.body))
    return [
        load
        for load in kernel_loads(kernel)
        if load.buffer not in written and _is_apart(load, kernel.cols) and not locals_of(load)
    ]


def _is_apart(load: Load, cols: Axis) -> bool:
    along = [k for atom, k in load.index.terms if cols in Index(0, ((atom, k),)).axes]
    step = abs(load.index.coefficient(cols))
    return bool(along) and not (len(along) == 1 and same(step, 1))


def _is_transposed(load: Load, kernel: Kernel) -> bool:
    by_row = load.index.coefficient(kernel.rows)
    by_col = load.index.coefficient(kernel.cols)
    apart = same(by_row, 1) and surely_less(1, by_col)
    return apart and len(load.index.terms) == 2 and load.mask is None


_POSITIONS = (ReduceKind.ARGMAX, ReduceKind.ARGMIN)
_NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16)
_HALF = (torch.float16, torch.bfloat16)


def is_position(reduce: Reduce) -> bool:
    """Whether the result is a place along the axis and not a value."""
    return reduce.kind in _POSITIONS


def accumulators(reduce: Reduce) -> tuple[torch.dtype, ...]:
    """What a program keeps while it reduces: half precision in float32, small integers in int32,
    and the position beside the value for argmax and argmin."""
    body = reduce.body.dtype
    dtype = torch.int32 if body in _NARROW else torch.float32 if body in _HALF else body
    return (dtype, torch.int32) if is_position(reduce) else (dtype,)


def running_sums(kernel: Kernel) -> dict[str, str]:
    """The sums of exp(x - top) over an axis, by name, with the name of ``top``: the largest x along
    that axis. One pass finds both, as it scales what it has added up whenever ``top`` grows
    (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3)."""
    definitions = {d.name: d for d in kernel.body if isinstance(d, Definition)}

    def resolved(expr: Expr) -> Expr:
        while isinstance(expr, Local) and not isinstance(definitions[expr.name].expr, Reduce):
            expr = definitions[expr.name].expr
        return expr

    found: dict[str, str] = {}
    for name, item in definitions.items():
        if not isinstance(item.expr, Reduce) or item.expr.kind is not ReduceKind.SUM:
            continue
        match resolved(item.expr.body):
            case Apply(fn="exp", operands=(shifted,)):
                match resolved(shifted):
                    case Apply(fn="sub", operands=(x, Local(name=top))) if _is_largest(
                        definitions[top].expr, item.expr, resolved(x), resolved
                    ):
                        found[name] = top
                    case _:
                        pass
            case _:
                pass
    return found


def _is_largest(top: Expr, total: Reduce, x: Expr, resolved: Callable[[Expr], Expr]) -> bool:
    """Whether ``top`` is the largest ``x`` along the axis of ``total``, in a dtype that rounds no
    more than the sum does."""
    if not isinstance(top, Reduce) or top.kind is not ReduceKind.MAX or top.axes != total.axes:
        return False
    wide = accumulators(top) == (top.body.dtype,) == accumulators(total) == (total.dtype,)
    return wide and top.body.dtype.is_floating_point and resolved(top.body) == x


@dataclass(frozen=True, slots=True)
class Levels:
    """In which pass along the reduced axis each value of a kernel exists.

    ``of[name]``: the pass that computes a value of every element, or that reduces; for a value
    that does not vary along the axis, the first pass that may use it. ``varying``: the values that
    do. Each pass computes again what it needs of those. ``running``: sums that the pass of their
    maximum adds up, with the name of that.
    """

    kernel: Kernel
    of: Mapping[str, int]
    definitions: Mapping[str, Definition]
    varying: frozenset[str]
    running: Mapping[str, str]

    @property
    def reduced(self) -> Axis:
        """The axis that reductions of this kernel run along."""
        return _reduced(self.kernel)

    def pass_of(self, expr: Expr) -> int:
        """The first pass in which ``expr`` can be evaluated."""
        return max((self._after(name) for name in locals_of(expr)), default=0)

    def _after(self, name: str) -> int:
        return self.of[name] + isinstance(self.definitions[name].expr, Reduce)

    @property
    def last(self) -> int:
        """The last pass, or the end after it where only values of no pass are left."""
        return max(map(self._after, self.of))

    @property
    def passes(self) -> int:
        """How many passes along the axis there are."""
        looped = [
            level
            for name, level in self.of.items()
            if name in self.varying or isinstance(self.definitions[name].expr, Reduce)
        ]
        return max(looped, default=-1) + 1

    def closure(self, wanted: Iterable[Expr], held: frozenset[str] = frozenset()) -> list[str]:
        """The varying values that ``wanted`` needs in one pass, in order.

        ``held`` are available already: what only they need is left out.
        """

        def needed(exprs: Iterable[Expr]) -> list[str]:
            return [n for expr in exprs for n in locals_of(expr) if n in self.varying]

        def operands(name: str) -> list[str]:
            return [] if name in held else needed([self.definitions[name].expr])

        found = reached(needed(wanted), operands)
        return [name for name in self.definitions if name in found]

    def reduced_in(self, level: int) -> list[Definition]:
        """The reductions of a pass."""
        found = (item for item in self.definitions.values() if isinstance(item.expr, Reduce))
        return [item for item in found if self.of[item.name] == level]

    def fixed_in(self, level: int) -> list[Definition]:
        """Values that do not vary along the axis and are known before pass ``level``, no sooner."""
        return [
            item
            for name, item in self.definitions.items()
            if name not in self.varying
            and not isinstance(item.expr, Reduce)
            and self.of[name] == level
        ]

    def roots(self, level: int) -> list[Item]:
        """What a pass is for: its reductions, and the stores of its values."""
        found: list[Item] = []
        for item in self.kernel.body:
            if isinstance(item, Definition):
                if isinstance(item.expr, Reduce) and self.of[item.name] == level:
                    found.append(item)
            elif item.value.name in self.varying and self.of[item.value.name] == level:
                found.append(item)
        return found

    def wanted(self, level: int) -> list[Expr]:
        """The formulas of what a pass is for."""
        return [item.value if isinstance(item, Store) else item.expr for item in self.roots(level)]

    def stored_in(self, level: int) -> list[Store]:
        """Stores along the axis in pass ``level``: as early as can be, unless read again later."""
        read = set(loaded(self.kernel.body))
        found: list[Store] = []
        for item in self.kernel.body:
            if isinstance(item, Store) and self.reduced in item.axes:
                early = max(map(self.pass_of, roots(item)))
                place = self.last if item.buffer in read else early
                found.extend([item] if place == level else [])
        return found

    @property
    def final_stores(self) -> list[Store]:
        """Stores of values that do not vary along the axis: after every pass."""
        return [i for i in self.kernel.body if isinstance(i, Store) and self.reduced not in i.axes]

    def hoisted(self, expressions: Iterable[Expr]) -> list[Expr]:
        """Their parts that are the same along the whole axis, operands first."""
        return hoisted(expressions, self.reduced, self.varying)


def hoisted(expressions: Iterable[Expr], axis: Axis, varying: frozenset[str]) -> list[Expr]:
    """The parts that are the same along the whole of ``axis``, operands first; ``varying``: the
    values of the kernel that are not."""
    varies: dict[int, bool] = {}
    found: list[Expr] = []
    for node in walk_all(expressions):
        own = isinstance(node, Load | Position) and axis in node.index.axes
        own |= isinstance(node, Local) and node.name in varying
        varies[id(node)] = own or any(varies[id(inner)] for inner in operands_of(node))
        if not varies[id(node)] and isinstance(node, Load | Apply):
            found.append(node)
    return found


def levels(kernel: Kernel) -> Levels:
    """The passes of a rows kernel or a columns kernel; one where nothing is reduced.
    ``VerifyError`` for a reduction along another axis than the kernel's."""
    definitions = {d.name: d for d in kernel.body if isinstance(d, Definition)}
    axis = _reduced(kernel)
    for item in definitions.values():
        along = item.expr.axes if isinstance(item.expr, Reduce) else (axis,)
        reason = f"{kernel.name}: %{item.name} reduces an axis that is not the kernel's"
        require(along == (axis,), VerifyError, reason)
    varying = frozenset(name for name, item in definitions.items() if axis in item.axes)
    of: dict[str, int] = {}
    wanted = kernel.schedule.running if kernel.schedule else ()
    running = {name: top for name, top in running_sums(kernel).items() if name in wanted}
    result = Levels(kernel, of, definitions, varying, running)
    for name, item in definitions.items():
        of[name] = of[running[name]] if name in running else result.pass_of(item.expr)
    return result


def _reduced(kernel: Kernel) -> Axis:
    return kernel.cols if kernel.kind is KernelKind.ROWS else kernel.rows


@dataclass(frozen=True, slots=True)
class SplitColumns:
    """A kernel whose columns are ``outer * inner.extent + inner``."""

    kernel: Kernel
    outer: Axis
    inner: Axis


def split_columns(kernel: Kernel, width: int) -> SplitColumns:
    """The columns as two loops, the inner one of ``width``.

    ``x[(c // 64) * 512 + c % 64]`` with c = 64 a + b is ``x[512 a + b]``.
    """
    outer, inner = Axis(kernel.cols.extent // width), Axis(width)
    value = {kernel.cols: outer * width + inner}
    body = tuple(_substituted(item, value) for item in kernel.body)
    return SplitColumns(replace(kernel, body=body), outer, inner)


def as_rows(kernel: Kernel, width: int) -> Kernel:
    """A kernel of one row as rows of ``width`` columns."""
    split = split_columns(kernel, width)
    return _over(split.kernel, split.outer, split.inner)


def transposed(kernel: Kernel) -> Kernel:
    """A kernel without reductions that has one column, as one that has one row."""
    return _over(kernel, Axis(1), kernel.rows)


def _over(kernel: Kernel, rows: Axis, cols: Axis) -> Kernel:
    """Work that is done once for each place, over these axes instead of its own."""
    body = tuple(replace(item, axes=(rows, cols)) for item in kernel.body)
    return replace(kernel, rows=rows, cols=cols, body=body)


def _substituted(item: Item, mapping: Mapping[Axis, Index]) -> Item:
    if isinstance(item, Definition):
        return replace(item, expr=substitute(item.expr, mapping))
    return replace(item, index=substitute_index(item.index, mapping))


def narrowed(kernel: Kernel) -> Kernel:
    """A kernel without reductions, over the axes that its stores use."""
    used = {axis for item in kernel.body if isinstance(item, Store) for axis in item.axes}
    rows = kernel.rows if kernel.rows in used else Axis(1)
    cols = kernel.cols if kernel.cols in used else Axis(1)
    return replace(kernel, rows=rows, cols=cols)
