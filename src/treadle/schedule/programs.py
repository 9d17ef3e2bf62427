"""How a kernel runs on a grid of programs, each a few warps of a GPU.

A program owns a block of the parallel axis (rows of a rows kernel, columns of a columns kernel)::

    flat         nothing reduced, one axis: blocks of it; the extent is an argument
    tiled        nothing reduced: blocks over both axes
    persistent   the reduced axis is one block:      load, reduce, use, all in registers
    looped       one loop per pass:                  each reads again what it needs; a sum of
                 exp(x - top) is added up in the pass that finds the largest x
    split        as looped, but the reduced axis is cut into parts that run in parallel; each pass
                 is a launch of its own, and partial results go through scratch, in a fixed order,
                 so that results do not change from run to run
    swept        rows are reduced in registers, one after another; what they add up to by columns
                 goes through scratch as well, and a second launch joins it

Blocks, parts and warps are plain numbers. For a dynamic size, they are chosen from the largest
size: what fits it fits all.
"""

from collections.abc import Sequence
from dataclasses import replace

from treadle.algebra.extents import ceil_div, divides, largest, same, surely_less
from treadle.algebra.index import Axis
from treadle.loop.kernel import Definition, Kernel, KernelKind, KernelSchedule, LoopForm, Store
from treadle.loop.nest import (
    accumulators,
    after_rows,
    indices,
    kernel_loads,
    live,
    loaded,
    narrowed,
    reductions_of,
    running_sums,
    stored,
)
from treadle.schedule.scratch import Scratch
from treadle.util.errors import LoweringError, require

BLOCK = 1024
"""Elements of a program without reductions."""
PERSISTENT = 16384
"""Longest reduced axis that is held in registers."""
_MANY_ROWS = 1024  # from which programs are enough without parts
_FILL = 512  # programs worth having: about four per multiprocessor of a large GPU
_COLUMNS = 64  # of a program that goes down them
_JOINED = 8192  # partial results that a program joins
_FEW_ROWS = 32  # of the window of a pool, which threads go through one by one
_SWEEPS = 1024  # programs that go through rows: eight each
_TURNS = 8  # blocks of rows for a program, at least: as many bytes again are partial sums
_RUNNING, _RUNNING_WARPS, _UNROLLED = 4096, 16, 2
"""A looped tile with a sum that is scaled as its maximum grows: elements, warps, and tiles between
two scalings (decision 14)."""
_AHEAD = 4  # tiles that such a loop loads ahead where rows end within a vector of a thread
_VECTOR = 16  # elements; of one byte, what a thread loads at once
_PIPELINE, _PIPELINE_BYTES = 3, 40 << 10
"""Tiles that a loop down columns has on their way, and the shared memory that they may take: with
more than 48 KiB fewer programs run at once, and the driver must be asked for it."""
_WIDEST = 4096  # columns of a swept kernel, and of its accumulators together
_NARROWEST = 32


def prepared(kernel: Kernel) -> tuple[Kernel, ...]:
    """The kernels that do the work of one on a grid, in order.

    ::

        before:  step <- step + 1;  p[c] <- p[c] - f(step)      every program reads the old step
        after:   p[c] <- p[c] - f(step)  ;  step <- step + 1    two kernels

    ``LoweringError`` TR-331 where a program would read what another may have written.
    """
    parts = [_narrowed(part) for part in _without_narrow_updates(kernel)]
    for part in parts:
        _require_order(part)
    return tuple(parts)


def _narrowed(kernel: Kernel) -> Kernel:
    return kernel if reductions_of(kernel) else narrowed(kernel)


def _without_narrow_updates(kernel: Kernel) -> list[Kernel]:
    """Split off stores that other programs would read too late or too early."""
    read = set(loaded(kernel.body))
    late = [
        item
        for item in kernel.body
        if isinstance(item, Store)
        and item.buffer in read
        and any(axis not in item.axes for axis in _shared(kernel, item))
    ]
    if not late:
        return [kernel]
    early = live(item for item in kernel.body if item not in late)
    after = live(i for i in kernel.body if isinstance(i, Definition) or i in late)
    _require_none(kernel, set(stored(early)) & set(loaded(after)))
    parts = [part for part in (early, after) if part]
    if len(parts) == 1:
        return [replace(kernel, body=parts[0])]
    names = (kernel.name, f"{kernel.name}_after")
    return [replace(kernel, name=n, body=part) for n, part in zip(names, parts, strict=True)]


def _shared(kernel: Kernel, item: Store) -> list[Axis]:
    """The axes that the programs which compute a value divide among themselves."""
    shared = [kernel.rows, kernel.cols]
    if reductions_of(kernel):
        by_columns = item.value.name in after_rows(kernel) or kernel.kind is KernelKind.COLUMNS
        shared = [kernel.cols if by_columns else kernel.rows]
    return [axis for axis in shared if not surely_less(axis.extent, 2)]


def _require_order(kernel: Kernel) -> None:
    """No item reads a buffer that an item before it wrote: another program may write it later."""
    written: set[str] = set()
    for item in kernel.body:
        _require_none(kernel, written & set(loaded([item])))
        written |= set(stored([item]))


def _require_none(kernel: Kernel, clash: set[str]) -> None:
    reason = f"{kernel.name} reads {sorted(clash)} after writing it"
    require(not clash, LoweringError(reason, code="TR-331"))


def choose(kernel: Kernel) -> KernelSchedule:
    """The schedule for a grid of programs."""
    if kernel.kind is KernelKind.BOTH:
        return _swept(kernel)
    return _reducing(kernel) if reductions_of(kernel) else _pointwise(kernel)


def sweeps(rows: int, cols: int, sums: int) -> bool:
    """Whether one kernel reduces along both axes at no loss: rows that programs hold in registers
    beside ``sums`` accumulators for each column, and enough of them."""
    along = power_of_two(cols)
    narrow = not surely_less(cols, _NARROWEST) and along * sums <= _WIDEST
    return narrow and largest(rows) * along >= _SWEEPS * _TURNS * BLOCK // 2


def scratch_of(kernel: Kernel, how: KernelSchedule) -> tuple[Scratch, ...]:
    """For each reduction in parts, its accumulators for each part and place of the other axis."""
    if how.form is LoopForm.SWEPT:
        count = how.parts * kernel.cols.extent
        return tuple(
            Scratch(dtype, count)
            for reduce in reductions_of(kernel)
            if reduce.axes == (kernel.rows,)
            for dtype in accumulators(reduce)
        )
    if how.form is not LoopForm.SPLIT:
        return ()
    parallel = kernel.rows if kernel.kind is KernelKind.ROWS else kernel.cols
    count = how.parts * parallel.extent
    return tuple(
        Scratch(dtype, count) for reduce in reductions_of(kernel) for dtype in accumulators(reduce)
    )


def _pointwise(kernel: Kernel) -> KernelSchedule:
    rows, cols = kernel.rows.extent, kernel.cols.extent
    if same(rows, 1) and same(cols, 1):
        return KernelSchedule(LoopForm.FLAT, warps=1)
    if same(rows, 1):
        return KernelSchedule(LoopForm.FLAT, cols=BLOCK, warps=4)
    if same(cols, 1):
        return KernelSchedule(LoopForm.FLAT, rows=BLOCK, warps=4)
    block_r, block_c = _tile(kernel)
    return KernelSchedule(LoopForm.TILED, block_r, block_c, warps=warps(block_r * block_c))


def _tile(kernel: Kernel) -> tuple[int, int]:
    """Long along the contiguous axis; square when some accesses run along each."""
    rows, cols = power_of_two(kernel.rows.extent), power_of_two(kernel.cols.extent)
    contiguous: set[Axis] = set()
    for index in indices(kernel.body):
        contiguous |= {
            atom for atom, scale in index.terms if same(scale, 1) and isinstance(atom, Axis)
        }
    if kernel.rows not in contiguous:
        block_c = min(cols, BLOCK)
        return min(rows, BLOCK // block_c), block_c
    if kernel.cols not in contiguous:
        block_r = min(rows, BLOCK)
        return block_r, min(cols, BLOCK // block_r)
    block_c = min(cols, 32)
    return min(rows, BLOCK // block_c), block_c


def _reducing(kernel: Kernel) -> KernelSchedule:
    is_rows = kernel.kind is KernelKind.ROWS
    axes = (kernel.rows, kernel.cols) if is_rows else (kernel.cols, kernel.rows)
    parallel, reduced = (largest(axis.extent) for axis in axes)
    running = tuple(running_sums(kernel)) if is_rows and parallel >= _MANY_ROWS else ()
    lanes = _RUNNING if running else _lanes(kernel)
    if is_rows:
        along = power_of_two(reduced) if reduced <= PERSISTENT else lanes
        across = min(power_of_two(parallel), max(1, BLOCK // along))
    elif reduced <= _FEW_ROWS and parallel >= BLOCK * _FILL:
        across, along = min(BLOCK, lanes), 1  # each thread goes down columns of its own
    else:
        across = min(power_of_two(parallel), _columns(parallel))
        along = min(power_of_two(reduced), lanes // across)
    parts = 1 if along >= reduced else _parts(kernel, parallel, reduced, across, along)
    form = (
        LoopForm.PERSISTENT
        if along >= reduced
        else LoopForm.SPLIT
        if parts > 1
        else LoopForm.LOOPED
    )
    tile = (across, along) if is_rows else (along, across)
    how = KernelSchedule(form, *tile, parts=parts, warps=warps(across * along))
    if not is_rows and form is not LoopForm.PERSISTENT and along > 1:
        return replace(how, stages=_pipelined(kernel, across * along))
    if form is not LoopForm.LOOPED or not running:
        return how
    ahead = 0 if divides(_VECTOR, axes[1].extent) else _AHEAD
    return replace(how, running=running, unrolled=_UNROLLED, stages=ahead, warps=_RUNNING_WARPS)


def _pipelined(kernel: Kernel, elements: int) -> int:
    """How many tiles of so many elements are loaded before they are used; 0 if there is no room for
    two."""
    both = {kernel.rows, kernel.cols}
    tiles = {load for load in kernel_loads(kernel) if both <= load.index.axes}
    room = _PIPELINE_BYTES // max(1, elements * sum(load.dtype.itemsize for load in tiles))
    return min(_PIPELINE, room) if room > 1 else 0


def _columns(parallel: int) -> int:
    """Columns of a program: fewer where the wider blocks, in as many parts as one program joins,
    leave multiprocessors without work."""
    fills = ceil_div(parallel, _COLUMNS) * (_JOINED // _COLUMNS) >= _FILL
    return _COLUMNS if fills else _COLUMNS // 2


def _swept(kernel: Kernel) -> KernelSchedule:
    along = power_of_two(kernel.cols.extent)
    across = min(power_of_two(kernel.rows.extent), max(1, BLOCK // along))
    parts = min(_SWEEPS, ceil_div(largest(kernel.rows.extent), across * _TURNS))
    return KernelSchedule(LoopForm.SWEPT, across, along, parts=parts, warps=warps(across * along))


def _parts(kernel: Kernel, parallel: int, reduced: int, across: int, along: int) -> int:
    """As many as fill a large GPU, if each has a few blocks of its own."""
    if kernel.kind is KernelKind.ROWS and parallel >= _MANY_ROWS:
        return 1
    blocks, programs = ceil_div(reduced, along), ceil_div(parallel, across)
    most = min(ceil_div(_FILL, programs), blocks // 4, _JOINED // across)
    return max(1, most)


def _lanes(kernel: Kernel) -> int:
    """Elements of a looped tile: fewer when many accumulators need registers."""
    kinds: Sequence[int] = [
        dtype.itemsize for reduce in reductions_of(kernel) for dtype in accumulators(reduce)
    ]
    return max(256, min(2048, 2048 * 16 // power_of_two(sum(kinds))))


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``, whatever that is."""
    return 1 << max(0, largest(n) - 1).bit_length()


def warps(elements: int) -> int:
    """Warps of a program that works on so many elements at once."""
    return 4 if elements <= 2048 else 8 if elements <= 4096 else 16


def alternatives(kernel: Kernel) -> tuple[KernelSchedule, ...]:
    """Schedules worth trying beside the chosen one, which comes first: half and twice the warps,
    half and twice the block, loops instead of registers."""
    chosen = choose(kernel)
    if chosen.rows * chosen.cols == 1:
        return (chosen,)
    found = [chosen]
    for block in (1, 2):
        for divided in (chosen.warps // 2, chosen.warps, chosen.warps * 2):
            found.append(_scaled(kernel, chosen, block, divided))
    found.append(_scaled(kernel, chosen, 0, chosen.warps))
    if chosen.form is LoopForm.SWEPT:
        found += [replace(chosen, parts=max(1, n)) for n in (chosen.parts // 2, chosen.parts * 2)]
    found += [replace(chosen, stages=n) for n in (2, 4) if chosen.form is LoopForm.LOOPED]
    return tuple(dict.fromkeys(found))


def _scaled(kernel: Kernel, how: KernelSchedule, block: int, count: int) -> KernelSchedule:
    """``block``: 0 halves, 1 keeps and 2 doubles the block of the parallel axis, or of the only
    one."""
    by_rows = how.cols <= 1 if how.form is LoopForm.FLAT else kernel.kind is not KernelKind.COLUMNS
    size = how.rows if by_rows else how.cols
    scaled = size * block if block else max(1, size // 2)
    limited = min(32, max(1, count))
    if by_rows:
        return replace(how, rows=scaled, warps=limited)
    return replace(how, cols=scaled, warps=limited)
