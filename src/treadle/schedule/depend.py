"""Dependencies between steps: by buffer, and calls with side effects in their order.

A step depends on every earlier step that writes what it reads (RAW), reads what it overwrites
(WAR), or writes what it overwrites (WAW). Writes to disjoint pieces of a buffer are independent.
Other constraints on the order of calls are in ``Call.effects``, not here.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.algebra.extents import dims_in
from treadle.loop.program import Call, Step, TensorRef, may_end_the_call


@dataclass(frozen=True, slots=True)
class Dependencies:
    """``before[i]``: the steps that step ``i`` waits for, ``after[i]``: those that wait for it;
    ``flow[i]``: those whose values it reads; ``readers`` and ``writers`` of each buffer, in
    order."""

    before: tuple[frozenset[int], ...]
    after: tuple[tuple[int, ...], ...]
    flow: tuple[frozenset[int], ...]
    readers: Mapping[str, tuple[int, ...]]
    writers: Mapping[str, tuple[int, ...]]


def facts(steps: tuple[Step, ...], inputs: Sequence[str] = ()) -> Dependencies:
    """The dependencies of ``steps``, in one walk. ``inputs``: what nothing may write before the
    conditions and collectives that stand earlier are over."""
    theirs, ends = frozenset(inputs), frozenset(may_end_the_call(steps))
    conditions: list[int] = []
    readers: dict[str, list[int]] = defaultdict(list)
    writers: dict[str, list[int]] = defaultdict(list)
    before: list[frozenset[int]] = []
    flow: list[frozenset[int]] = []
    last_in_order: int | None = None
    for i, step in enumerate(steps):
        reads = step.reads
        sources = {w for name in reads for w in writers[name]}
        waits = set(sources)
        for name in step.writes:
            waits.update(reader for reader in readers[name])
            waits.update(w for w in writers[name] if _overlap(steps[w], step, name))
            waits.update(conditions if name in theirs else ())
        if i in ends:
            conditions.append(i)
        if isinstance(step, Call) and step.is_in_order:
            if last_in_order is not None:
                waits.add(last_in_order)
            last_in_order = i
        before.append(frozenset(waits))
        flow.append(frozenset(sources))
        for name in reads:
            readers[name].append(i)
        for name in step.writes:
            writers[name].append(i)
    return Dependencies(
        tuple(before),
        _reversed(before),
        tuple(flow),
        {name: tuple(steps) for name, steps in readers.items()},
        {name: tuple(steps) for name, steps in writers.items()},
    )


def _reversed(before: Sequence[frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    after: list[list[int]] = [[] for _ in before]
    for step, waits in enumerate(before):
        for earlier in waits:
            after[earlier].append(step)
    return tuple(map(tuple, after))


def _overlap(first: Step, second: Step, name: str) -> bool:
    """Whether two writers of one buffer may touch the same element."""
    mine, other = _written(first), _written(second)
    if mine is None or other is None or _is_dynamic(mine) or _is_dynamic(other):
        return True
    a, b = span(mine), span(other)
    if a[1] <= b[0] or b[1] <= a[0]:
        return False
    return not _disjoint_slices(mine, other)


def _is_dynamic(ref: TensorRef) -> bool:
    return bool(dims_in((*ref.shape, *ref.strides, ref.offset)))


def _written(step: Step) -> TensorRef | None:
    """The part of a buffer that a step writes; ``None`` for all of it."""
    return step.into if isinstance(step, Call) else step.output


def span(ref: TensorRef) -> tuple[int, int]:
    """First element, and one past the last, that ``ref`` can touch."""
    last = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
    return ref.offset, ref.offset + last + 1


def _disjoint_slices(a: TensorRef, b: TensorRef) -> bool:
    """Two slices of one tensor along one dim: ``x[:, 0:4]`` and ``x[:, 4:9]``."""
    if len(a.shape) != len(b.shape) or a.strides != b.strides:
        return False
    differing = [d for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m]
    order = sorted(range(len(a.shape)), key=lambda d: -a.strides[d])
    for d in order:
        if any(other != d for other in differing):
            continue
        outer = min((a.strides[o] for o in order if a.strides[o] > a.strides[d]), default=None)
        low, high = (a, b) if a.offset <= b.offset else (b, a)
        gap, stride = high.offset - low.offset, a.strides[d]
        inner = sum((a.shape[o] - 1) * a.strides[o] for o in order if a.strides[o] < stride)
        fits = outer is None or gap + high.shape[d] * stride <= outer
        if inner < stride and gap % stride == 0 and fits:
            return gap >= low.shape[d] * stride
    return False
