"""Reducing kernels: in registers, in loops, or cut into parts. See ``triton.py``."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from treadle.codegen.triton_body import (
    BLOCK,
    Body,
    DeviceFunction,
    bound,
    new_writer,
    positions,
    power_of_two,
    straight,
    warps,
)
from treadle.codegen.triton_expr import Writer
from treadle.codegen.triton_kernel import loaded, roots
from treadle.codegen.triton_reduce import (
    Partial,
    Tile,
    collapse,
    combine,
    fill,
    identities,
    partial_types,
    start,
)
from treadle.loop.expr import Apply, Expr, Load, Local, Position, Reduce
from treadle.loop.index import Axis, Index
from treadle.loop.kernel import OWN_ROWS, Definition, Kernel, KernelKind, Store
from treadle.loop.traverse import operands_of, walk, walk_all
from treadle.util.errors import VerifyError, require

PERSISTENT = 16384
"""Longest reduced axis that is held in registers."""
FILL = 512
"""Programs worth having: about four per multiprocessor of a large GPU."""


@dataclass(frozen=True)
class Shape:
    """How a reducing kernel is cut up: extents and blocks of its parallel and reduced axes."""

    along: str  # the reduced axis: "c" for rows kernels, "r" for columns kernels
    parallel: int
    reduced: int
    block_p: int
    block_q: int
    splits: int = 1

    @property
    def other(self) -> str:
        return "r" if self.along == "c" else "c"

    @property
    def both(self) -> bool:
        return self.block_p > 1 and self.block_q > 1

    def tile(self, block_q: int) -> Tile:
        """The tile with ``block_q`` places along the reduced axis."""
        if self.block_p == 1:
            return Tile(f"[{block_q}]", self.along, 0, False)
        sizes = [self.block_p, block_q] if self.along == "c" else [block_q, self.block_p]
        return Tile(f"[{sizes[0]}, {sizes[1]}]", self.along, int(self.along == "c"), True)

    @property
    def programs(self) -> int:
        return math.ceil(self.parallel / self.block_p)

    @property
    def warps(self) -> int:
        return warps(self.block_p * self.block_q)


def shape_of(kernel: Kernel) -> Shape:
    rows, cols = kernel.rows.extent, kernel.cols.extent
    lanes = _lanes(kernel)
    if kernel.kind is KernelKind.ROWS:
        block_q = power_of_two(cols) if cols <= PERSISTENT else lanes
        block_p = min(power_of_two(rows), max(1, BLOCK // block_q))
        shape = Shape("c", rows, cols, block_p, block_q)
    else:
        block_p = min(power_of_two(cols), 64)
        block_q = min(power_of_two(rows), lanes // block_p)
        shape = Shape("r", cols, rows, block_p, block_q)
    if kernel.kind is KernelKind.ROWS and rows >= OWN_ROWS:
        return shape
    chunks = math.ceil(shape.reduced / block_q)
    most = min(math.ceil(FILL / shape.programs), chunks // 4, 8192 // block_p)
    return replace(shape, splits=most) if most >= 2 else shape


def _lanes(kernel: Kernel) -> int:
    """Elements of a looped tile: fewer when many accumulators need registers."""
    bytes_per_lane = sum(
        dtype.itemsize
        for item in kernel.body
        if isinstance(item, Definition) and isinstance(item.expr, Reduce)
        for dtype in partial_types(item.expr)
    )
    return max(256, min(2048, 2048 * 16 // power_of_two(bytes_per_lane)))


def render_reducing(
    kernel: Kernel, buffers: Mapping[str, str], in_place: bool
) -> tuple[list[DeviceFunction], list[tuple[torch.dtype, int]]]:
    """The stages of a kernel with reductions, and its scratch tensors."""
    shape = shape_of(kernel)
    if shape.block_q >= shape.reduced:
        return [persistent(kernel, buffers, shape, in_place)], []
    reduced = kernel.cols if kernel.kind is KernelKind.ROWS else kernel.rows
    looped = Looped(kernel, buffers, shape, Levels(kernel, reduced), in_place)
    if shape.splits == 1:
        return [looped.whole()], []
    return looped.split(), looped.sizes


def persistent(
    kernel: Kernel, buffers: Mapping[str, str], shape: Shape, in_place: bool
) -> DeviceFunction:
    writer = _reducing_writer(kernel, buffers, shape)
    _parallel_positions(writer, shape, "tl.program_id(0)")
    positions(writer, shape.along, "0", shape.block_q, shape.both)
    bound(writer, shape.along, shape.reduced, shape.block_q)
    straight(
        Body(kernel, writer, in_place), shape.tile(shape.block_q) if shape.block_q > 1 else None
    )
    return DeviceFunction(tuple(writer.lines), shape.programs, 0, shape.warps)


def _reducing_writer(kernel: Kernel, buffers: Mapping[str, str], shape: Shape) -> Writer:
    blocks = {shape.other: shape.block_p, shape.along: shape.block_q}
    return new_writer(kernel, buffers, [axis for axis, block in blocks.items() if block > 1])


def _parallel_positions(writer: Writer, shape: Shape, program: str) -> None:
    first = program if shape.block_p == 1 else f"{program} * {shape.block_p}"
    positions(writer, shape.other, first, shape.block_p, shape.both)
    bound(writer, shape.other, shape.parallel, shape.block_p)


@dataclass
class Levels:
    """Which loop computes what. A value's level is how many reductions lie on its longest path.

    The loop of level k recomputes the formulas it needs; a reduction of level k is known after it.
    """

    kernel: Kernel
    reduced: Axis
    level: dict[str, int] = field(default_factory=dict[str, int])
    varying: dict[str, Definition] = field(default_factory=dict[str, Definition])
    fixed: list[Definition] = field(default_factory=list[Definition])
    reductions: list[Definition] = field(default_factory=list[Definition])

    def __post_init__(self) -> None:
        for item in self.kernel.body:
            if isinstance(item, Store):
                continue
            below = self.of(item.expr)
            if isinstance(item.expr, Reduce):
                require(
                    item.expr.axes == (self.reduced,),
                    VerifyError,
                    f"{self.kernel.name}: %{item.name} reduces an axis that is not the kernel's",
                )
                self.reductions.append(item)
                below += 1
            elif self.reduced in item.axes:
                self.varying[item.name] = item
            else:
                self.fixed.append(item)
            self.level[item.name] = below

    def of(self, expr: Expr) -> int:
        """The level at which ``expr`` can be computed."""
        return max((self.level[n.name] for n in walk(expr) if isinstance(n, Local)), default=0)

    @property
    def last(self) -> int:
        return max(self.level.values())

    def reduced_in(self, level: int) -> list[Definition]:
        return [item for item in self.reductions if self.level[item.name] == level + 1]

    def stored_in(self, level: int) -> list[Store]:
        """Stores inside the loop of ``level``: as early as can be, unless read again later."""
        read = set(loaded(self.kernel.body))
        found: list[Store] = []
        for item in self.kernel.body:
            if isinstance(item, Store) and self.reduced in item.axes:
                place = self.last if item.buffer in read else self._place(item)
                found.extend([item] if place == level else [])
        return found

    def _place(self, item: Store) -> int:
        return max(map(self.of, roots(item)))

    def closure(self, wanted: Iterable[Expr]) -> set[str]:
        """Names of the varying formulas that the wanted expressions need."""
        needed: set[str] = set()
        stack = list(wanted)
        while stack:
            for node in walk(stack.pop()):
                if isinstance(node, Local) and node.name in self.varying.keys() - needed:
                    needed.add(node.name)
                    stack.append(self.varying[node.name].expr)
        return needed

    def hoisted(self, expressions: Iterable[Expr]) -> list[Expr]:
        """Their parts that are the same along the whole reduced axis, operands first."""
        varies: dict[int, bool] = {}
        found: list[Expr] = []
        for node in walk_all(expressions):
            own = any(self.reduced in index.axes for index in _own_indices(node))
            own |= isinstance(node, Local) and node.name in self.varying
            varies[id(node)] = own or any(varies[id(inner)] for inner in operands_of(node))
            if not varies[id(node)] and isinstance(node, Load | Apply):
                found.append(node)
        return found

    @property
    def final_stores(self) -> list[Store]:
        """Stores of values over the parallel axis alone: after every loop."""
        return [i for i in self.kernel.body if isinstance(i, Store) and self.reduced not in i.axes]


@dataclass
class Looped:
    """Renders a looped kernel, in one stage or in one stage per level."""

    kernel: Kernel
    buffers: Mapping[str, str]
    shape: Shape
    levels: Levels
    in_place: bool
    scratch: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    sizes: list[tuple[torch.dtype, int]] = field(default_factory=list[tuple[torch.dtype, int]])

    def whole(self) -> DeviceFunction:
        """All loops in one program."""
        body = self._begin("tl.program_id(0)")
        for level in range(self.levels.last + 1):
            self._fixed(body, level)
            partials = self._loop(body, level, self.shape.reduced, 1)
            for item, partial in partials:
                assert isinstance(item.expr, Reduce)
                tile = self.shape.tile(self.shape.block_q)
                value = collapse(body.writer, item.expr, partial, tile)
                body.writer.locals[item.name] = body.result(item.expr, value, tile)
        for item in self.levels.final_stores:
            body.store(item)
        return self._stage(body, self.shape.programs)

    def split(self) -> list[DeviceFunction]:
        """One stage per level; partial results pass through scratch."""
        self._reserve()
        stages: list[DeviceFunction] = []
        for level in range(self.levels.last + 1):
            is_last = level == self.levels.last
            has_loop = bool(self.levels.reduced_in(level) or self.levels.stored_in(level))
            if not has_loop and not (is_last and self.levels.final_stores):
                continue
            splits = self.shape.splits if has_loop else 1
            stages.append(self._one(level, splits, is_last))
        return stages

    def _one(self, level: int, splits: int, is_last: bool) -> DeviceFunction:
        body = self._begin(f"(tl.program_id(0) // {splits})")
        if splits > 1:
            body.writer.line(f"part = tl.program_id(0) % {splits}")
        for below in range(level + 1):
            self._fixed(body, below)
            for item in self.levels.reduced_in(below) if below < level else []:
                self._gather(body, item)
        chunk = math.ceil(self.shape.reduced / self.shape.block_q / self.shape.splits)
        chunk *= self.shape.block_q
        for item, partial in self._loop(body, level, chunk, splits) if splits > 1 else []:
            self._scatter(body, item, partial)
        for item in self.levels.final_stores if is_last else []:
            body.store(item, "(part == 0)" if splits > 1 else "")
        return self._stage(body, self.shape.programs * splits)

    def _stage(self, body: Body, programs: int) -> DeviceFunction:
        return DeviceFunction(tuple(body.writer.lines), programs, 0, self.shape.warps)

    def _begin(self, program: str) -> Body:
        writer = _reducing_writer(self.kernel, self.buffers, self.shape)
        _parallel_positions(writer, self.shape, program)
        return Body(self.kernel, writer, self.in_place)

    def _fixed(self, body: Body, level: int) -> None:
        """Formulas that do not vary along the reduced axis, known at this level."""
        for item in self.levels.fixed:
            if self.levels.level[item.name] == level:
                body.define(item, None)

    def _loop(
        self, body: Body, level: int, span: int, splits: int
    ) -> list[tuple[Definition, Partial]]:
        """The loop of one level over ``span`` elements; gives its reductions' accumulators."""
        writer, levels = body.writer, self.levels
        reductions, stores = levels.reduced_in(level), levels.stored_in(level)
        if not reductions and not stores:
            return []
        tile = self.shape.tile(self.shape.block_q)
        wanted = levels.closure(
            [i.expr for i in reductions] + [root for item in stores for root in roots(item)]
        )
        self._hoist(body, [item for item in self.kernel.body if _name(item) in wanted])
        self._hoist(body, [*reductions, *stores])
        sums = [(item, start(writer, _as_reduce(item), tile)) for item in reductions]
        ordered = body.in_place and not reductions and self._reads_before_it_writes(stores)
        if ordered:
            writer.line("tl.debug_barrier()")  # after what other threads read before the loop
        outside = dict(writer.locals), dict(writer.known), dict(writer.masks)
        writer.line(f"for q in range(0, {span}, {self.shape.block_q}):")
        writer.indent += 1
        first = f"part * {span} + q" if splits > 1 else "q"
        positions(writer, self.shape.along, first, self.shape.block_q, self.shape.both)
        covered = math.ceil(span / self.shape.block_q) * self.shape.block_q * splits
        bound(writer, self.shape.along, self.shape.reduced, covered)
        partials = {item.name: partial for item, partial in sums}
        for item in self.kernel.body:
            if isinstance(item, Store):
                if item in stores and not body.in_place:
                    body.store(item)
            elif item.name in wanted:
                body.define(item, None)
            elif item.name in partials:
                reduce = _as_reduce(item)
                combine(writer, reduce, partials[item.name], fill(writer, reduce, tile))
        if ordered:
            body.store(stores[0])
        else:
            body.stores(stores if body.in_place else [])
        writer.indent -= 1
        writer.locals, writer.known, writer.masks = outside
        return sums

    def _reads_before_it_writes(self, stores: Sequence[Store]) -> bool:
        """Whether each element is read once and what is written there depends on it, so that no
        thread can write what another has yet to read: one store, and one load of each buffer."""
        if len(stores) != 1:
            return False
        wanted = self.levels.closure(roots(stores[0]))
        exprs = [self.levels.varying[name].expr for name in wanted] + roots(stores[0])
        places: dict[str, set[tuple[Index, int]]] = {}
        for node in walk_all(exprs):
            if isinstance(node, Load):
                places.setdefault(node.buffer, set()).add((node.index, id(node.mask)))
        return all(len(each) == 1 for each in places.values())

    def _hoist(self, body: Body, items: Iterable[Definition | Store]) -> None:
        """Compute before the loop what does not change in it; equal text finds it again."""
        below = {item.name for item in self.levels.reductions}
        for item in items:
            roots_ = [_as_reduce(item).body] if _name(item) in below else roots(item)
            for part in self.levels.hoisted(roots_):
                body.writer.evaluate(part)

    def _reserve(self) -> None:
        """Scratch for each reduction: one value per split and parallel position."""
        for item in self.levels.reductions:
            names: list[str] = []
            for dtype in partial_types(_as_reduce(item)):
                names.append(f"s{len(self.sizes)}")
                self.sizes.append((dtype, self.shape.splits * self.shape.parallel))
            self.scratch[item.name] = tuple(names)

    def _scatter(self, body: Body, item: Definition, partial: Partial) -> None:
        """scratch[part, p] = this part's value"""
        tile = self.shape.tile(self.shape.block_q)
        value = collapse(body.writer, _as_reduce(item), partial, tile)
        mask = body.writer.masks.get(self.shape.other)
        guard = f", mask={mask}" if mask else ""
        for pointer, text in zip(self.scratch[item.name], value.parts, strict=True):
            offset = f"part * {self.shape.parallel} + {self.shape.other}"
            body.writer.line(f"tl.store({pointer} + ({offset}), {text}{guard})")

    def _gather(self, body: Body, item: Definition) -> None:
        """The reduction over all parts of scratch[part, p], in one fixed order."""
        writer, shape, reduce = body.writer, self.shape, _as_reduce(item)
        count = power_of_two(shape.splits)
        parts = writer.name(f"tl.arange(0, {count})" + _suffix(shape))
        offset = f"{parts} * {shape.parallel} + {shape.other}"
        masks = [f"({parts} < {shape.splits})", *writer.lanes(frozenset({shape.other}))]
        loads: list[str] = []
        for pointer, other in zip(self.scratch[item.name], identities(reduce), strict=True):
            guard = f"mask={' & '.join(masks)}, other={other}"
            loads.append(writer.name(f"tl.load({pointer} + ({offset}), {guard})"))
        tile = shape.tile(count)
        value = collapse(writer, reduce, Partial(tuple(loads)), tile)
        writer.locals[item.name] = body.result(reduce, value, tile)


def _name(item: Definition | Store) -> str:
    return item.name if isinstance(item, Definition) else ""


def _own_indices(node: Expr) -> list[Index]:
    return [node.index] if isinstance(node, Load | Position) else []


def _suffix(shape: Shape) -> str:
    if shape.block_p == 1:
        return ""
    return "[None, :]" if shape.along == "c" else "[:, None]"


def _as_reduce(item: Definition | Store) -> Reduce:
    assert isinstance(item, Definition)
    assert isinstance(item.expr, Reduce)
    return item.expr
