"""A program becomes a plan: kernels, their order, how each runs, and the bytes of every temporary.

The order of the work is the order of ``schedule``: normal form, dependencies, groups, kernels,
order, the schedule of each kernel, arena.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from treadle.algebra.extents import largest, same, same_sizes, surely_less
from treadle.algebra.index import Index
from treadle.algebra.strides import is_dense
from treadle.loop.access import AccessSet
from treadle.loop.expr import Reduce
from treadle.loop.kernel import Definition, Kernel, KernelKind, KernelPlan, Store
from treadle.loop.nest import kernel_loads, locals_of, stored, updates
from treadle.loop.program import IMPORT, Buffer, BufferKind, Call, Program, TensorRef
from treadle.loop.traverse import loads
from treadle.schedule.arena import Interval, chained, pack
from treadle.schedule.beside import blocks_beside, lives_beside
from treadle.schedule.build import KnownKernels, origins_of
from treadle.schedule.depend import facts
from treadle.schedule.fuse import Fuser, loaders_of, stored_buffers
from treadle.schedule.joined import write_where_joined
from treadle.schedule.launches import table_bytes
from treadle.schedule.loop_nest import LoopNest
from treadle.schedule.normalize import normalize
from treadle.schedule.order import ordered
from treadle.schedule.pressure import MemoryPressure
from treadle.schedule.recompute.inline_reordered import inline_reordered
from treadle.schedule.recompute.kernel_recompute import KernelRecompute
from treadle.schedule.recompute.producer_duplication import duplicate_producers
from treadle.schedule.recompute.sink_into_gather import sink_into_gather
from treadle.schedule.sweeps import reduce_both_ways
from treadle.schedule.workers import THREADS, Workers, scratch_buffers
from treadle.util.allocator import PLAIN, Allocator
from treadle.util.reach import reached

PlanStep = Kernel | Call


def schedule(
    program: Program,
    *,
    fuse: bool = True,
    allocator: Allocator = PLAIN,
    workers: Workers = THREADS,
    known: KnownKernels | None = None,
) -> KernelPlan:
    """The plan of ``program`` for ``workers``; without ``fuse`` every compute is a kernel of its
    own. ``allocator``: how bytes are counted in its peak. ``known``: of programs of the same step.

    Products are written where they are joined unless the peak grows by that: a joined buffer is
    there from the first of them on.
    """
    known = known or KnownKernels()
    joined = write_where_joined(program, workers.joins) if fuse and workers.joins else program
    plan = _scheduled(joined, fuse, allocator, workers, known)
    if joined is program:
        return plan
    apart = _scheduled(program, fuse, allocator, workers, known)
    return plan if plan.peak_bytes <= apart.peak_bytes else apart


def _scheduled(
    program: Program, fuse: bool, allocator: Allocator, workers: Workers, known: KnownKernels
) -> KernelPlan:
    nests = known.nests
    steps, buffers = normalize(program, known.split)
    kept = frozenset(ref.buffer for ref in program.results if ref is not None)
    home: Mapping[int, LoopNest] = {}
    if fuse:
        steps = sink_into_gather(steps, buffers)
        steps = inline_reordered(steps, buffers, nests, kept)
        copied = duplicate_producers(steps, buffers, nests, kept)
        steps, buffers, home = copied.steps, copied.buffers, copied.home
    waiting = facts(steps, program.inputs)
    elsewhere = frozenset(name for name, each in buffers.items() if program.is_elsewhere(each))
    pressure = MemoryPressure(steps, buffers, waiting, kept, elsewhere)
    asked = workers.sweeps, workers.descends
    fuser = Fuser(steps, buffers, waiting, nests, home, *asked, pressure)
    groups = fuser.run(fuse=fuse)
    if fuse:
        groups = reduce_both_ways(fuser, buffers, workers.sweeps)
    if fuse and workers.computes_again:
        groups = KernelRecompute(groups, steps, waiting, buffers, kept, nests).run()
    loaders = loaders_of(groups, steps)
    made: list[tuple[PlanStep, ...]] = []
    reads: list[frozenset[str]] = []
    writes: list[frozenset[str]] = []
    for number, group in enumerate(groups):
        step = steps[group.members[0]]
        if isinstance(step, Call):
            made.append((step,))
            reads.append(plan_reads(step))
            writes.append(plan_writes(step))
            continue
        leaving = stored_buffers(number, group, loaders, waiting, buffers, kept)
        becomes = known.of(group, frozenset([op.step for op in leaving]), steps, workers)
        made.append(becomes.at(number, origins_of(group, steps)))
        reads.append(becomes.reads)
        writes.append(becomes.writes)
    calls = [(g, step) for g, parts in enumerate(made) for step in parts if isinstance(step, Call)]
    first = frozenset(g for g, step in calls if is_import(step, buffers))
    waits = frozenset(g for g, step in calls if step.is_wait)
    order = ordered(groups, reads, writes, buffers, kept | elsewhere, first, waits)
    ready = tuple(step for g in order for step in made[g])
    scratch = scratch_buffers(ready, workers, device=program.device)
    return _finish(program, ready, {**buffers, **scratch}, kept, allocator)


def is_import(step: PlanStep, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a step only brings an input from another device: it need not wait for anything."""
    if not isinstance(step, Call) or step.op != IMPORT:
        return False
    (source,) = step.args
    (target,) = step.outputs
    if not isinstance(source, TensorRef):  # a number, of which vmap makes a tensor
        return False
    read = buffers[source.buffer]
    return read.kind is BufferKind.INPUT and buffers[target or ""].device != read.device


def plan_reads(step: PlanStep) -> frozenset[str]:
    """The buffers a kernel or call reads."""
    if isinstance(step, Call):
        return frozenset(step.reads)
    return frozenset(load.buffer for load in kernel_loads(step))


def plan_writes(step: PlanStep) -> frozenset[str]:
    """The buffers a kernel or call writes."""
    if isinstance(step, Call):
        return frozenset(step.writes)
    return frozenset((*stored(step.body), *step.scratch))


def touched_by(steps: Sequence[PlanStep]) -> list[tuple[str, ...]]:
    """What each step reads, and what it writes."""
    return [(*plan_reads(step), *plan_writes(step)) for step in steps]


def _finish(
    program: Program,
    steps: tuple[PlanStep, ...],
    buffers: Mapping[str, Buffer],
    kept: frozenset[str],
    allocator: Allocator,
) -> KernelPlan:
    touched = touched_by(steps)
    lives = lifetimes(touched, buffers, kept)
    by_call = {name for step in steps if isinstance(step, Call) for name in step.allocated}
    apart = by_call | kept
    placed = {name: interval for name, interval in lives.items() if name not in apart}
    hosted = {
        name: interval for name, interval in placed.items() if program.is_elsewhere(buffers[name])
    }
    ours = {name: interval for name, interval in placed.items() if name not in hosted}
    calls = {
        name: replace(interval, nbytes=allocator.taken(interval.nbytes))
        for name, interval in lives.items()
        if name in apart and not program.is_elsewhere(buffers[name])
    }
    offsets, arena_bytes, calls = _placed(steps, ours, buffers, calls, allocator)
    on_host, host_bytes = _packed(steps, hosted, buffers)
    offsets = {**offsets, **on_host}
    steps = tuple(noting_overlap(step, buffers, offsets) for step in steps)
    used = {name for names in touched for name in names}
    used |= {*program.inputs, *program.constants, *kept}
    surviving = {name: buffer for name, buffer in buffers.items() if name in used}
    near = {name: buffer for name, buffer in surviving.items() if not program.is_elsewhere(buffer)}
    peak = _peak(steps, near, calls, arena_bytes, allocator)
    plan = KernelPlan(
        steps,
        surviving,
        offsets,
        arena_bytes,
        peak,
        program.inputs,
        program.results,
        program.constants,
        program.device,
        host_bytes,
    )
    return replace(plan, peak_bytes=peak + table_bytes(plan, allocator))


def _packed(
    steps: Sequence[PlanStep], ours: Mapping[str, Interval], buffers: Mapping[str, Buffer]
) -> tuple[Mapping[str, int], int]:
    """The offsets of temporaries in one block, and its bytes."""
    blocks, block_of = chained(ours, _reuse(steps, ours, buffers))
    places, size = pack(blocks)
    return {name: places[block_of[name]] for name in ours}, size


def _placed(
    steps: Sequence[PlanStep],
    ours: Mapping[str, Interval],
    buffers: Mapping[str, Buffer],
    calls: Mapping[str, Interval],
    allocator: Allocator,
) -> tuple[Mapping[str, int], int, Mapping[str, Interval]]:
    """The offsets of temporaries in the arena, its bytes, and what is allocated beside it: what
    ``calls`` hold, and temporaries by which arena and calls together would be too large."""
    blocks, block_of = chained(ours, _reuse(steps, ours, buffers))
    places, size = pack(blocks)
    plain = {name: places[block_of[name]] for name in ours}, size, calls
    if allocator.blocks:  # a GPU's allocator keeps what is freed, and recordings hold addresses
        return plain
    busy = busy_by_calls(steps, calls)
    moved = blocks_beside(blocks, busy)
    if not moved:
        return plain
    beside = {name: interval for name, interval in ours.items() if block_of[name] in moved}
    rest = {name: interval for name, interval in ours.items() if name not in beside}
    both = {**calls, **lives_beside(beside, steps)}
    blocks, block_of = chained(rest, _reuse(steps, rest, buffers))
    places, less = pack(blocks)
    if less + max(busy_by_calls(steps, both)) >= size + max(busy):
        return plain
    return {name: places[block_of[name]] for name in rest}, less, both


def noting_overlap(
    step: PlanStep, buffers: Mapping[str, Buffer], offsets: Mapping[str, int]
) -> PlanStep:
    """A kernel that knows whether its loops may write where they read. Updates of rows and columns
    come after the loops anyway."""
    if isinstance(step, Call):
        return step
    late = updates(step)
    looped = replace(step, body=tuple(item for item in step.body if item not in late))
    if not AccessSet.of(looped, buffers, offsets).overwrites:
        return step
    return replace(step, schedule=replace(step.scheduled, in_place=True))


def lifetimes(
    touched: Sequence[Iterable[str]], buffers: Mapping[str, Buffer], kept: frozenset[str]
) -> dict[str, Interval]:
    """First write to last touch of each temporary; what is returned lives to the end. ``touched``:
    by each step."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, names in enumerate(touched):
        for name in names:
            if buffers[name].kind is BufferKind.TEMPORARY:
                first.setdefault(name, i)
                last[name] = len(touched) if name in kept else i
    return {
        name: Interval(name, largest(buffers[name].allocated), first[name], last[name])
        for name in first
    }


def _peak(
    steps: Sequence[PlanStep],
    buffers: Mapping[str, Buffer],
    calls: Mapping[str, Interval],
    arena_bytes: int,
    allocator: Allocator,
) -> int:
    """Inputs, constants and the arena, and what calls hold and work in at the worst step."""
    fixed = sum(
        allocator.taken(largest(buffer.nbytes))
        for buffer in buffers.values()
        if buffer.kind is not BufferKind.TEMPORARY
    )
    worst = max(busy_by_calls(steps, calls))
    return fixed + allocator.taken(arena_bytes) + worst + allocator.reserve


def busy_by_calls(steps: Sequence[PlanStep], calls: Mapping[str, Interval]) -> list[int]:
    """The same, and what calls work in."""
    work = [step.workspace if isinstance(step, Call) else 0 for step in steps]
    return [a + b for a, b in zip(held_by_calls(steps, calls), (*work, 0), strict=True)]


def held_by_calls(steps: Sequence[PlanStep], calls: Mapping[str, Interval]) -> list[int]:
    """Bytes of the results of calls that are alive at each step, and after the last."""
    change = [0] * (len(steps) + 2)
    for interval in calls.values():
        change[interval.first] += interval.nbytes
        change[interval.last + 1] -= interval.nbytes
    return list(itertools.accumulate(change[: len(steps) + 1]))


def _reuse(
    steps: Sequence[PlanStep], ours: Mapping[str, Interval], buffers: Mapping[str, Buffer]
) -> dict[str, str]:
    """Stores that may overwrite an input which dies at the same kernel, at the same element, and
    calls that may go on in the bytes of an operand."""
    reuse: dict[str, str] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Call):
            reuse |= _into_argument(step, ours, buffers, i)
            continue
        taken: set[str] = set()
        for store in _safe_stores(step):
            if store.buffer not in ours or ours[store.buffer].first != i:
                continue
            for name in _dying_at(step, store, ours, i):
                alike = same(buffers[name].nbytes, buffers[store.buffer].nbytes)
                width = buffers[name].dtype.itemsize == buffers[store.buffer].dtype.itemsize
                if alike and width and name not in taken and store.buffer not in reuse:
                    reuse[store.buffer] = name
                    taken.add(name)
    return reuse


def _into_argument(
    call: Call, ours: Mapping[str, Interval], buffers: Mapping[str, Buffer], i: int
) -> dict[str, str]:
    """``out = x + a @ b``, or ``x`` with other elements at some places or written to by an operator
    of the user's, in the bytes of ``x``, which nobody reads afterwards."""
    if call.into is not None:
        return {}
    reuse: dict[str, str] = {}
    for result, x in call.continued:
        if not {result, x.buffer} <= ours.keys():
            continue
        dies = ours[x.buffer].first < i == ours[x.buffer].last and ours[result].first == i
        alone = sum(ref.buffer == x.buffer for ref in call.refs) == 1
        if dies and alone and _covers(x, buffers[x.buffer]) and _is_all_of(x, buffers[result]):
            reuse[result] = x.buffer
    return reuse


def _covers(ref: TensorRef, buffer: Buffer) -> bool:
    """Whether ``ref`` shows all of a buffer, in any order."""
    nbytes = ref.numel * ref.dtype.itemsize
    whole = same(ref.offset, 0) and is_dense(ref.shape, ref.strides)
    return ref.dtype is buffer.dtype and whole and same(nbytes, buffer.nbytes)


def _is_all_of(ref: TensorRef, buffer: Buffer) -> bool:
    """Whether ``ref`` shows a buffer like this one, all of it and as it is laid out."""
    laid_out = same_sizes((*ref.shape, *ref.strides), (*buffer.shape, *buffer.strides))
    return ref.dtype is buffer.dtype and same(ref.offset, 0) and laid_out and not buffer.unsized


def _dying_at(kernel: Kernel, store: Store, ours: Mapping[str, Interval], i: int) -> list[str]:
    """Inputs never read again, and in this kernel only at the element that ``store`` writes, or
    in its row before the last loop."""
    indices: dict[str, set[Index]] = {}
    for item in kernel.body:
        if isinstance(item, Definition):
            early = _is_early(item, kernel)
            for load in loads(item.expr):
                if not (early and _stays_in_row(load.index, store.index, kernel)):
                    indices.setdefault(load.buffer, set()).add(load.index)
    written = plan_writes(kernel)
    return [
        name
        for name, places in sorted(indices.items())
        if places == {store.index}
        and name in ours
        and name not in written
        and ours[name].first < i == ours[name].last
    ]


def _is_early(item: Definition, kernel: Kernel) -> bool:
    """Whether the value belongs to a row that one worker has to itself."""
    alone = kernel.kind is KernelKind.ROWS and kernel.scheduled.parts == 1
    return alone and kernel.cols not in item.axes


def _stays_in_row(place: Index, written: Index, kernel: Kernel) -> bool:
    """Whether ``place`` is among the places written in the same row:  ``n*r + x`` with x < n."""
    if not surely_less(1, kernel.cols.extent) or not same(written.coefficient(kernel.cols), 1):
        return False
    low, high = (place - (written - kernel.cols)).bounds
    return surely_less(-1, low) and surely_less(high, kernel.cols.extent)


def _safe_stores(kernel: Kernel) -> list[Store]:
    """Stores after which no loop of the kernel reads again.

    Without reductions there is one loop, whose values are read as they are needed: only its last
    store comes after every read. With them, only a single store that every reduction comes before
    is sure to stand in the last loop. A kernel of both has one loop as well, over rows.
    """
    full = (kernel.rows, kernel.cols)
    stores = [item for item in kernel.body if isinstance(item, Store) and item.axes == full]
    if kernel.kind is KernelKind.BOTH:
        return _after_loads(kernel, stores)
    definitions = {item.name: item for item in kernel.body if isinstance(item, Definition)}
    reductions = {name for name, d in definitions.items() if isinstance(d.expr, Reduce)}
    if not reductions:
        return stores[-1:]
    if len(stores) != 1 or kernel.kind is KernelKind.COLUMNS:
        return []
    made_of = reached([stores[0].value.name], lambda name: locals_of(definitions[name].expr))
    return stores if reductions <= made_of.keys() else []


def _after_loads(kernel: Kernel, stores: list[Store]) -> list[Store]:
    """Those of ``stores`` behind which nothing is read."""
    reading = [
        place
        for place, item in enumerate(kernel.body)
        if isinstance(item, Definition) and loads(item.expr)
    ]
    return [store for store in stores if kernel.body.index(store) > max(reading, default=-1)]
