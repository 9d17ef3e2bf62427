"""What keeping and recomputing cost once fusion has had its way.

A pointwise value that only its neighbours read is never in memory: to compute it again is free,
to keep it writes and reads bytes that would not have moved. A value in memory anyway, because a
library call or a later kernel reads it, costs one read to keep.

::

    stage(v)  = how many library calls lie on the longest way to v
    stored(v) = v is a call's operand or result, or someone reads it at a later stage
"""

from dataclasses import dataclass

from treadle.passes.memory.cost import CALLS, FUSIBLE, Kind, slow_seconds
from treadle.passes.memory.order import Facts
from treadle.targets.model import DeviceModel

_LITTLE = 64  # times the bytes of its operands make a value one that is made from little
_READS = 0.05
"""Share of a pass over a value that computing it again costs inside another kernel."""


@dataclass(frozen=True)
class RecomputeCost:
    """By position: ``stored``, whether the forward pass has the value in memory whoever keeps it;
    ``again``, seconds to compute it once more; ``keep``, seconds that keeping it adds."""

    stored: tuple[bool, ...]
    again: tuple[float, ...]
    keep: tuple[float, ...]


def traffic(facts: Facts, device: DeviceModel) -> RecomputeCost:
    """The fused costs of every value of a step on ``device``."""
    stages = _stages(facts)
    stored, late = _stored(facts, stages, phase=0), _stored(facts, stages, phase=1)
    spread = _spread(facts, stages)
    alone = facts.seconds(device)
    again: list[float] = []
    keep: list[float] = []
    for i, kind in enumerate(facts.kinds):
        size = facts.held_bytes(i) / device.bandwidth
        if kind is Kind.POINTWISE:
            passes = 1.0 if late[i] or spread[i] else _READS
            again.append(slow_seconds(facts.nodes[i], device) + passes * size)
        else:
            again.append(alone[i])
        keep.append(0.0 if stored[i] or kind not in FUSIBLE else size)
    return RecomputeCost(stored, tuple(again), tuple(keep))


def stored_anyway(facts: Facts) -> tuple[bool, ...]:
    """Whether the forward pass has each value in memory: for a call, or for a later stage."""
    return _stored(facts, _stages(facts), phase=0)


def _stored(facts: Facts, stages: list[int], phase: int) -> tuple[bool, ...]:
    """``phase`` 0: in the forward pass; 1: after it, if forward values were computed again."""
    stored = [phase == 0 and kind in CALLS for kind in facts.kinds]
    spread = _spread(facts, stages) if phase == 0 else [False] * len(stored)
    for i in range(len(facts.nodes) - 1, -1, -1):
        if min(facts.phases[i], 1) != phase:
            continue
        for operand in facts.operands[i]:
            is_view = facts.kinds[i] is Kind.VIEW
            stored[operand] |= stored[i] if is_view else facts.kinds[i] in CALLS
    return tuple(a or b for a, b in zip(stored, spread, strict=True))


def _spread(facts: Facts, stages: list[int]) -> list[bool]:
    """Whether the forward pass reads each value at a later stage: a residual stream.

    Computed again, it would be stored again, for the kernels of those stages.
    """
    spread = [False] * len(stages)
    for i, operands in enumerate(facts.operands):
        for operand in operands if facts.phases[i] == 0 else ():
            spread[operand] |= stages[i] > stages[operand] and facts.kinds[i] not in CALLS
    return spread


def _stages(facts: Facts) -> list[int]:
    stages: list[int] = []
    for i, operands in enumerate(facts.operands):
        below = max((stages[each] for each in operands), default=0)
        stages.append(below + (facts.kinds[i] in CALLS))
    made = _from_little(facts)
    readers: dict[int, int] = {}  # the first stage of the same phase that reads a value
    for i in range(len(stages) - 1, -1, -1):
        if made[i]:
            stages[i] = readers.get(i, stages[i])
        for operand in facts.operands[i]:
            if facts.phases[operand] == facts.phases[i]:
                readers[operand] = min(readers.get(operand, stages[i]), stages[i])
    return stages


def _from_little(facts: Facts) -> list[bool]:
    """Whether a value is computed from next to nothing, such as a position and a key: it comes
    about where it is read, however early that could have been."""
    made: list[bool] = []
    for i, kind in enumerate(facts.kinds):
        least = facts.held_bytes(i) / _LITTLE
        little = all(made[each] or facts.held_bytes(each) < least for each in facts.operands[i])
        made.append(kind is Kind.POINTWISE and little)
    return made
