"""How a kernel runs on threads that share a cache-coherent memory, with vector lanes in each.

::

    flat      threads share the columns, whose number is an argument
    tiled     some reads do not lie side by side: blocks of both axes, such reads through small
              buffers
    looped    rows kernel: each thread takes rows; columns kernel: blocks of columns, down the rows
    split     few long rows, or many rows and few columns: the reduced axis in parts

Parts are fixed by the shape, so that sums do not depend on the number of threads.
"""

from dataclasses import replace

import torch

from treadle.algebra.extents import (
    Size,
    ceil_div,
    common_divisor,
    largest,
    same,
    sample_of,
    surely_less,
)
from treadle.loop.expr import Apply, Expr
from treadle.loop.functions import WORTH_KEEPING
from treadle.loop.kernel import Kernel, KernelKind, KernelSchedule, LoopForm
from treadle.loop.nest import (
    apart_loads,
    as_rows,
    divisors,
    indices,
    is_position,
    is_straight,
    levels,
    reductions_of,
    roots,
    split_columns,
    transposed,
    transposed_loads,
)
from treadle.loop.traverse import walk
from treadle.loop.unroll import can_unroll, unrolled
from treadle.schedule.scratch import Scratch

SERIAL = 1 << 14
"""Elements below which one thread is faster."""
TILE = 32
"""Places of each axis in a tile of a kernel with transposed reads."""
LANES = 64
"""Places of a flat kernel for which what lies apart is read at once."""
BLOCK = 256
"""Columns that a thread runs down together."""
_LEAST = 16  # columns of the shortest inner loop worth a nest of its own
_WIDE = 1 << 15  # columns from which few rows are shared by all threads
_CHUNKS = 64  # parts of a wide row
_TASKS = 64  # parts of the rows times blocks of columns worth having
_FEWEST = 64  # rows of a part
_ENOUGH = 16  # blocks of columns, for the threads of most machines
_LITTLE = 1 << 17  # elements that stay in a core's cache from one pass to the next
_PIECE_OF_ROW = 256
_PIECE_OF_COLUMN = 32
_WINDOW = 16  # columns of the longest row that is written out
_LONGEST = 512  # nodes of the formulas of such a row, written out
_STACK = 1 << 16  # longest row of values that are kept between passes


def prepared(kernel: Kernel) -> tuple[Kernel, ...]:
    """The kernels that do the work of one. Windows of a few columns are written out: then lanes
    take rows, and not the few columns of each."""
    return (_rows_in_lanes(unrolled(kernel)) if _has_windows(kernel) else kernel,)


def _has_windows(kernel: Kernel) -> bool:
    """Whether each row reduces a few elements that do not lie side by side, on conditions."""
    reads = apart_loads(kernel)
    if not can_unroll(kernel) or not any(load.mask is not None for load in reads):
        return False
    nodes = sum(len(walk(root)) for item in kernel.body for root in roots(item))
    cols = kernel.cols.extent
    return bool(reductions_of(kernel)) and cols <= _WINDOW and cols * nodes <= _LONGEST


def _rows_in_lanes(kernel: Kernel) -> Kernel:
    """A kernel of one column as one of one row, or of as many as leave no divisions."""
    turned = transposed(kernel)
    width = _width(turned)
    return as_rows(turned, width) if width else turned


def choose(kernel: Kernel) -> KernelSchedule:
    """The schedule for threads."""
    if kernel.kind is KernelKind.COLUMNS:
        return _columns(kernel)
    if same(kernel.rows.extent, 1) and not reductions_of(kernel):
        lanes = LANES if _in_lanes(kernel) else 0
        return KernelSchedule(LoopForm.FLAT, cols=lanes, serial_below=SERIAL)
    width = _width(kernel)
    small = min(sample_of(kernel.rows.extent), sample_of(kernel.cols.extent))
    if not width and small >= 8 and transposed_loads(kernel):
        return KernelSchedule(LoopForm.TILED, rows=TILE, cols=TILE, serial_below=SERIAL)
    if not width and is_straight(kernel) and _in_lanes(kernel):
        return KernelSchedule(LoopForm.TILED, rows=TILE, cols=LANES, serial_below=SERIAL)
    if not width and _is_long(kernel):
        return KernelSchedule(
            LoopForm.SPLIT, parts=_CHUNKS, piece=_PIECE_OF_ROW, serial_below=SERIAL
        )
    return KernelSchedule(
        LoopForm.LOOPED,
        cols=0,
        width=width,
        piece=_PIECE_OF_ROW,
        kept=_kept(kernel),
        serial_below=SERIAL,
    )


def _in_lanes(kernel: Kernel) -> bool:
    """Whether reads are worth a loop of their own: those that lie apart and have conditions, which
    compilers leave to a scalar loop with all that follows."""
    return any(load.mask is not None for load in apart_loads(kernel))


def descends(rows: int, cols: int) -> bool:
    """Whether a kernel may go down the rows more than once: each thread then has its columns for
    itself, which is right for many columns, or for little work. Otherwise every pass is a kernel
    in parts."""
    blocks = sample_of(ceil_div(cols, BLOCK))
    return blocks >= _ENOUGH or sample_of(rows * cols) <= _LITTLE


def scratch_of(kernel: Kernel, how: KernelSchedule) -> tuple[Scratch, ...]:
    """Of a columns kernel in parts, one accumulator of 64 bits for each part and column. Parts of
    rows are few, and stand on the stack of the thread that starts the others."""
    if kernel.kind is KernelKind.ROWS or how.form is not LoopForm.SPLIT:
        return ()
    count = how.parts * kernel.cols.extent
    return tuple(Scratch(torch.float64, count) for _ in reductions_of(kernel))


def _is_long(kernel: Kernel) -> bool:
    """Whether threads should share a row."""
    few = sample_of(kernel.rows.extent) < 16 and sample_of(kernel.cols.extent) >= _WIDE
    return few and not any(map(is_position, reductions_of(kernel)))


def _columns(kernel: Kernel) -> KernelSchedule:
    width = _width(kernel, BLOCK)
    cols = kernel.cols.extent
    block = width or (0 if surely_less(cols, BLOCK) else BLOCK)
    parts = _parts(kernel, block or cols)
    return KernelSchedule(
        LoopForm.SPLIT if parts > 1 else LoopForm.LOOPED,
        rows=0,
        cols=block,
        parts=parts,
        width=width,
        piece=_PIECE_OF_COLUMN,
        serial_below=SERIAL,
    )


def _parts(kernel: Kernel, block: int) -> int:
    """In how many parts the rows are added up; 1 where one thread must see every row."""
    reductions = reductions_of(kernel)
    if not reductions or any(map(is_position, reductions)) or levels(kernel).passes != 1:
        return 1
    rows = kernel.rows.extent
    tasks = ceil_div(_TASKS, sample_of(ceil_div(kernel.cols.extent, block)))
    wanted = max(1, min(sample_of(rows) // _FEWEST, tasks))
    if wanted == 1:
        return 1
    chunk = ceil_div(rows, wanted)
    return wanted if isinstance(chunk, Size) else ceil_div(rows, chunk)


def _width(kernel: Kernel, most: int = 1 << 62) -> int:
    """How long the inner one of two loops over the columns is, so that divisions by column leave
    it; 0 where there is nothing to gain, or where it would be too short."""
    found = {n for index in indices(kernel.body) for n in divisors(index, kernel.cols)}
    width = common_divisor(kernel.cols.extent, *found)
    if isinstance(width, Size):
        return 0
    if width > most:
        width = max(n for n in range(1, most + 1) if width % n == 0)
    if not found or width < _LEAST:
        return 0
    split = split_columns(kernel, width)
    left = (any(divisors(index, split.inner)) for index in indices(split.kernel.body))
    return 0 if any(left) else width


def _kept(kernel: Kernel) -> tuple[str, ...]:
    """Values of every element that a later pass wants again and that are expensive."""
    known = levels(kernel)
    kept: list[str] = []
    if not known.of or largest(kernel.cols.extent) > _STACK:
        return ()
    for level in range(known.last + 1):
        for name in known.closure(known.wanted(level), frozenset(kept)):
            again = known.of[name] < level
            if again and name not in kept and _is_expensive(known.definitions[name].expr):
                kept.append(name)
    return tuple(kept)


def _is_expensive(expr: Expr) -> bool:
    return any(isinstance(node, Apply) and node.fn in WORTH_KEEPING for node in walk(expr))


def alternatives(kernel: Kernel) -> tuple[KernelSchedule, ...]:
    """Schedules worth trying beside the chosen one, which comes first: nothing kept between passes,
    more and fewer elements before threads share the work."""
    chosen = choose(kernel)
    found = [chosen, replace(chosen, kept=())]
    found += [replace(chosen, serial_below=n) for n in (SERIAL // 4, SERIAL * 4)]
    return tuple(dict.fromkeys(found))
