"""The costs of keeping and recomputing, after fusion.

A pointwise value that only its neighbours read is never in memory: recomputing it is free, and
keeping it writes and reads additional bytes. A value that is in memory anyway, because a library
call or a later kernel reads it, costs one read to keep.

If a call reads the recomputed value, it must be written. A kernel of the backward pass that reads
the operands anyway can write it, if the kernel does not wait for that call, and the call finds it
in the cache. Otherwise it takes a separate kernel: a launch, the operands, and the result. So a
float32 weight is cast once for the products of both passes, and the inputs of attention are kept,
because the kernel that reads their operands needs attention's gradient.

::

    stage(v)  = how many library calls lie on the longest way to v
    stored(v) = v is a call's operand or result, or someone reads it at a later stage
    alone(v)  = a call reads v after the forward pass, and no formula there reads what v is made of
                without waiting for that call
    again(v)  = arithmetic + operands in memory that no formula of the backward pass reads
                + the other operands        if alone(v)
                + bytes of v       if alone(v), or if several stages read it
                + a launch         if alone(v)
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.graph.core.node_info import value_of
from treadle.graph.core.types import tensors_in
from treadle.passes.memory.cost import CALLS, FUSIBLE, Kind, slow_seconds
from treadle.passes.memory.order import PHASES, Facts
from treadle.targets.model import DeviceModel

_LITTLE = 64  # times the bytes of its operands make a value one that is made from little
_READS = 0.05
"""Share of a pass over a value that computing it again costs at least, inside another kernel."""
_ALL = -1
"""All bits."""


@dataclass(frozen=True)
class RecomputeCost:
    """By position: ``stored``, whether the forward pass has the value in memory whoever keeps it;
    ``again``, seconds to compute it once more; ``keep``, seconds that keeping it adds. ``once``:
    seconds of the step that computes each value once."""

    stored: tuple[bool, ...]
    again: tuple[float, ...]
    keep: tuple[float, ...]
    once: float


_CONSTANT = 1e-6
"""Seconds of each operation whose time is not to matter."""


def constant_costs(facts: Facts) -> RecomputeCost:
    """All operations alike, whatever they share a kernel with; keeping costs no time."""
    free = (Kind.INPUT, Kind.VIEW)
    again = tuple(0.0 if kind in free else _CONSTANT for kind in facts.kinds)
    stored = stored_in(facts, stages_of(facts), phase=0)
    return RecomputeCost(stored, again, (0.0,) * len(again), sum(again))


def recompute_costs(
    facts: Facts, device: DeviceModel, given: Sequence[float] | None = None
) -> RecomputeCost:
    """The fused costs of every value of a step on ``device``. ``given``: seconds of each operation
    as a kernel of its own, if they are not the roofline's; those of a formula change what its part
    of a kernel costs in proportion."""
    stages = stages_of(facts)
    stored, late = stored_in(facts, stages, phase=0), stored_in(facts, stages, phase=1)
    spread = used_later(facts, stages)
    sources = _Sources.of(facts, stored)
    roofline = facts.seconds(device)
    alone = roofline if given is None else given
    shares = [a / r if r else 1.0 for a, r in zip(alone, roofline, strict=True)]
    again: list[float] = []
    keep: list[float] = []
    for i, kind in enumerate(facts.kinds):
        size = facts.held_bytes(i) / device.bandwidth
        if kind is Kind.POINTWISE:
            by_itself = late[i] and bool(sources.waits[i] & sources.calls[i])
            reads = sources.bytes_read(i, by_itself=by_itself) / device.bandwidth
            written = by_itself or spread[i]
            moved = reads + size if written else max(reads, _READS * size)
            launch = device.launch if by_itself else 0.0
            again.append((slow_seconds(facts.nodes[i], device) + moved) * shares[i] + launch)
        else:
            again.append(alone[i] + (device.launch if kind in CALLS else 0.0))
        keep.append(0.0 if stored[i] or kind not in FUSIBLE else size)
    once = _bytes_of_formulas(facts, stages, shares) / device.bandwidth
    for i, kind in enumerate(facts.kinds):
        slow = slow_seconds(facts.nodes[i], device) - facts.held_bytes(i) / device.bandwidth
        beside = max(slow, 0.0) * shares[i]  # a pass over the result
        once += alone[i] if kind in CALLS else beside
    return RecomputeCost(stored, tuple(again), tuple(keep), once)


def _bytes_of_formulas(facts: Facts, stages: Sequence[int], shares: Sequence[float]) -> float:
    """Bytes that formulas read and write, each value's times its share. Those of one phase, stage
    and chunk of rows are as one kernel: it reads a value once, and writes what a call, another
    kernel or the user reads. The head of the forward pass counts as part of the backward pass."""
    phases = [max(phase, int(i >= facts.head)) for i, phase in enumerate(facts.phases)]
    kernels = tuple(zip(phases, stages, facts.chunks, strict=True))
    shown = list(range(len(facts.nodes)))  # what each node is a view of
    readers: dict[int, set[tuple[int, int, int]]] = {}
    written = {i for i in facts.returned if i is not None}
    for i, operands in enumerate(facts.operands):
        if facts.views[i]:
            shown[i] = shown[operands[0]]
            continue
        for groups in (shown[operand] for operand in operands):
            if facts.kinds[i] in CALLS:
                written.add(groups)
            elif facts.kinds[groups] not in FUSIBLE or kernels[i] != kernels[groups]:
                written.add(groups)
                readers.setdefault(groups, set()).add(kernels[i])
    written = {shown[groups] for groups in written}
    moved = 0.0
    for i, kind in enumerate(facts.kinds):
        times = len(readers.get(i, ())) + (kind in FUSIBLE and i in written)
        share = shares[i] if kind in FUSIBLE else 1.0
        moved += times * facts.held_bytes(i) * share
    return moved


@dataclass(frozen=True)
class _Sources:
    """What a second computation reads. By position: ``there``, whether the value is in memory
    whatever is kept; ``read``, whether a formula of the backward pass reads it as well, or of the
    head of the forward pass. In bits, one for each later call: ``calls`` that read the value;
    ``waits``, those that each formula waits for that reads what the value is made of, and whose
    kernel could make it too: all bits if there is none."""

    facts: Facts
    there: tuple[bool, ...]
    read: tuple[bool, ...]
    calls: tuple[int, ...]
    waits: tuple[int, ...]

    @staticmethod
    def of(facts: Facts, stored: Sequence[bool]) -> "_Sources":
        """``stored``: whether the forward pass has a value in memory."""
        calls, after = _late_readers(facts)
        there: list[bool] = []
        waits: list[int] = []
        for i, operands in enumerate(facts.operands):
            if facts.views[i]:
                there.append(there[operands[0]])
                waits.append(waits[operands[0]])
                continue
            is_source = facts.kinds[i] is Kind.INPUT or facts.phases[i] > 0  # a new weight, for one
            there.append(stored[i] or is_source)
            available = (
                after.but_for(i, operand) if there[operand] else waits[operand]
                for operand in operands
            )
            waits.append(functools.reduce(operator.and_, available, _ALL))
        read = tuple(width != _ALL for width in after.all_of)
        return _Sources(facts, tuple(there), read, calls, tuple(waits))

    def bytes_read(self, i: int, *, by_itself: bool) -> int:
        """Bytes of the operands of formula ``i`` that nothing reads if not this, or, in a kernel of
        its own, of all; of one that is larger than the result, at most an element of it for each of
        the result's."""
        elements = sum(tensor.numel() for tensor in tensors_in(value_of(self.facts.nodes[i])))
        return sum(
            min(self.facts.held_bytes(operand), elements * self._width(operand))
            for operand in set(self.facts.operands[i])
            if self.there[operand] and (by_itself or not self.read[operand])
        )

    def _width(self, i: int) -> int:
        """Bytes of an element."""
        return sum(tensor.dtype.itemsize for tensor in tensors_in(value_of(self.facts.nodes[i])))


@dataclass(frozen=True, slots=True)
class _After:
    """In bits, one for each call after the forward pass, which of them all formulas of the backward
    pass wait for that read a value, itself or through views; all bits if there is none.
    ``all_of``: by value. ``adds``: what each node adds to that of its operands, its ``readers``."""

    all_of: Sequence[int]
    adds: Sequence[int]
    readers: Sequence[Sequence[int]]

    def but_for(self, i: int, operand: int) -> int:
        """Without formula ``i``, which is no second computation of itself."""
        if self.adds[i] == _ALL:
            return self.all_of[operand]
        others = (self.adds[reader] for reader in self.readers[operand] if reader != i)
        return functools.reduce(operator.and_, others, _ALL)


def _late_readers(facts: Facts) -> tuple[tuple[int, ...], _After]:
    """Which calls after the forward pass read each value, in bits, and what formulas wait for. The
    head of the forward pass counts as part of the backward pass."""
    own, behind = _later_calls(facts)
    count = len(facts.nodes)
    calls, after, adds = [0] * count, [_ALL] * count, [_ALL] * count
    readers: list[list[int]] = [[] for _ in range(count)]
    for i in range(count - 1, -1, -1):
        late = facts.phases[i] == PHASES["backward"] or (facts.phases[i] == 0 and i >= facts.head)
        if facts.views[i]:
            reads, adds[i] = calls[i], after[i]
        elif facts.kinds[i] in CALLS:
            reads = own[i]
        else:
            reads, adds[i] = 0, (behind[i] if late and facts.fusible[i] else _ALL)
        for operand in facts.operands[i]:
            calls[operand] |= reads
            after[operand] &= adds[i]
            readers[operand].append(i)
    return tuple(calls), _After(after, adds, readers)


def _later_calls(facts: Facts) -> tuple[list[int], list[int]]:
    """The bit of each call after the forward pass, and those of all that each value waits for."""
    own: list[int] = []
    behind: list[int] = []
    bit = 1
    for kind, phase, operands in zip(facts.kinds, facts.phases, facts.operands, strict=True):
        own.append(bit if phase and kind in CALLS else 0)
        bit <<= bool(own[-1])
        behind.append(
            functools.reduce(operator.or_, (behind[operand] for operand in operands), own[-1])
        )
    return own, behind


def stored_anyway(facts: Facts) -> tuple[bool, ...]:
    """Whether the forward pass has each value in memory: for a call, or for a later stage."""
    return stored_in(facts, stages_of(facts), phase=0)


def stored_in(facts: Facts, stages: list[int], phase: int) -> tuple[bool, ...]:
    """``phase`` 0: in the forward pass; 1: after it, if forward values were computed again."""
    stored = [phase == 0 and kind in CALLS for kind in facts.kinds]
    spread = used_later(facts, stages) if phase == 0 else [False] * len(stored)
    for i in range(len(facts.nodes) - 1, -1, -1):
        is_view = facts.kinds[i] is Kind.VIEW
        if min(facts.phases[i], 1) != phase and not (is_view and phase == 1):
            continue  # a later phase reads a value through views of the forward pass, too
        for operand in facts.operands[i]:
            stored[operand] |= stored[i] if is_view else facts.kinds[i] in CALLS
    return tuple(a or b for a, b in zip(stored, spread, strict=True))


def used_later(facts: Facts, stages: list[int]) -> list[bool]:
    """Whether the forward pass reads each value at a later stage: a residual stream.

    Computed again, it would be stored again, for the kernels of those stages.
    """
    spread = [False] * len(stages)
    for i, operands in enumerate(facts.operands):
        for operand in operands if facts.phases[i] == 0 else ():
            spread[operand] |= stages[i] > stages[operand] and facts.kinds[i] not in CALLS
    return spread


def stages_of(facts: Facts) -> list[int]:
    """How many library calls lie on the longest way to each value."""
    stages: list[int] = []
    for i, operands in enumerate(facts.operands):
        below = max((stages[operand] for operand in operands), default=0)
        stages.append(below + (facts.kinds[i] in CALLS))
    from_little = _from_little(facts)
    readers: dict[int, int] = {}  # the first stage of the same phase that reads a value
    for i in range(len(stages) - 1, -1, -1):
        if from_little[i]:
            stages[i] = readers.get(i, stages[i])
        for operand in facts.operands[i]:
            if facts.phases[operand] == facts.phases[i]:
                readers[operand] = min(readers.get(operand, stages[i]), stages[i])
    return stages


def _from_little(facts: Facts) -> list[bool]:
    """Whether a value is computed from next to nothing, such as a position and a key: it comes
    about where it is read, however early that could have been."""
    from_little: list[bool] = []
    for i, kind in enumerate(facts.kinds):
        least = facts.held_bytes(i) / _LITTLE
        little = all(
            from_little[operand] or facts.held_bytes(operand) < least
            for operand in facts.operands[i]
        )
        from_little.append(kind is Kind.POINTWISE and little)
    return from_little
