"""A kernel that has the operands of a cheap value at hand recomputes it, so it is not stored.

::

    before:  one kernel:  n = x * r;  store n, bf16(n * w)     another:  dx = f(x, r, load n)
    after:   one kernel:  n = x * r;  store bf16(n * w)        another:  n = x * r;  dx = f(x, r, n)

Its operands are read from memory, or recomputed in the same way; a number per row, such as the
maximum and the sum of a softmax, is stored for this.

Kernels are separate because there is a library call between them, or because one sums rows and the
other columns. The typical value is the normalized rows of a norm: two kernels of its backward pass
need them in 32 bits, in addition to the original rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from treadle.loop.program import Buffer, Compute, Step
from treadle.schedule.depend import Dependencies
from treadle.schedule.fuse import MAX_BUFFERS, Group, flow_of, loaded_from_memory, loaders_of
from treadle.schedule.loop_nest import LoopNests, ScheduledOp
from treadle.schedule.recompute.values import COPIED, Values

_LEAST = 1 << 16
"""Bytes of a value from which it is looked at."""
_WORTH = 0.8
"""Bytes read more, of those that are neither written nor read any longer."""
_MAX_STEPS = 4
"""Steps that are computed again for one value."""


@final
@dataclass(frozen=True, slots=True)
class _Again:
    """``group`` with a value computed again, the ``more`` bytes that it reads for that, and the
    buffers that live ``longer``, until then."""

    group: Group
    more: int
    longer: frozenset[str]


class KernelRecompute:
    """Finds the values of one program that kernels compute again where that moves no more bytes and
    keeps no more of them alive. ``results``: what is stored anyway."""

    def __init__(
        self,
        groups: Sequence[Group],
        steps: tuple[Step, ...],
        facts: Dependencies,
        buffers: Mapping[str, Buffer],
        results: frozenset[str],
        nests: LoopNests,
    ) -> None:
        self._groups = list(groups)
        self._steps = steps
        self._facts = facts
        self._values = Values(steps, buffers, results)
        self._results = results
        self._nests = nests
        self._reading = loaders_of(groups, steps)

    def run(self) -> list[Group]:
        """The groups, with those values among them."""
        for g in range(len(self._groups)):
            for op in self._groups[g].placed:
                if self._reading.get(op.buffer) and self._is_candidate(op):
                    self._spare(op)
        return self._groups

    def _spare(self, value: ScheduledOp) -> None:
        """Compute ``value`` where it is loaded, if that is worth it."""
        size = self._values.nbytes((value.buffer,))
        found = {g: self._again(g, value) for g in sorted(self._reading[value.buffer])}
        ready = {g: choice for g, choice in found.items() if choice is not None}
        longer = frozenset[str]().union(*(choice.longer for choice in ready.values()))
        more, saved = sum(choice.more for choice in ready.values()), (len(found) + 1) * size
        everywhere = len(ready) == len(found) and more <= _WORTH * saved
        if not everywhere or self._values.nbytes(longer) > size:  # it is stored all the same
            ready = {
                g: choice
                for g, choice in ready.items()
                if self._values.is_small(choice.more, size) and not choice.longer
            }
        for g, choice in ready.items():
            before, after = (
                loaded_from_memory(one, self._steps) for one in (self._groups[g], choice.group)
            )
            for gone in before - after:
                self._reading[gone].discard(g)
            for new in after - before:
                self._reading.setdefault(new, set()).add(g)
            self._groups[g] = choice.group

    def _again(self, g: int, value: ScheduledOp) -> _Again | None:
        """The group with the value computed in it; ``None`` where that cannot be."""
        group = self._groups[g]
        if group.nest is None:
            return None
        size = self._values.nbytes((value.buffer,))
        new: dict[int, ScheduledOp] = {}
        pending = [value.step]
        while pending:
            number = pending.pop()
            step = self._steps[number]
            if len(new) == _MAX_STEPS or not isinstance(step, Compute):
                return None
            placed = self._nests.place(number, step, group.nest)
            if placed is None:
                return None
            new[number] = placed
            known = {number, *new, *(op.step for op in group.placed)}
            for name in step.reads:
                if self._is_in_memory(name) or self._may_be_stored(name, size):
                    continue
                if not self._values.is_made_once(name):
                    return None
                (source,) = self._values.writers[name]
                if not self._is_cheap(source):
                    return None
                if source not in known:
                    pending.append(source)
        return self._with(group, new)

    def _with(self, group: Group, new: Mapping[int, ScheduledOp]) -> _Again | None:
        assert group.nest is not None
        placed = tuple(sorted((*group.placed, *new.values()), key=lambda op: op.step))
        if flow_of(placed, self._facts, group.nest) is None:
            return None
        again = group.again | {op.buffer for op in new.values()}
        waits = frozenset().union(*(self._facts.before[number] for number in new))
        waits = frozenset(w for w in waits if not group.mask >> w & 1)
        result = replace(group, placed=placed, again=again, waits=group.waits | waits)
        more = result.loaded - group.loaded
        many = len(result.loaded | {op.buffer for op in placed}) > MAX_BUFFERS
        if many or not all(map(self._values.is_fixed, more)):
            return None
        longer = frozenset(name for name in more if not self._lives_until(name, group))
        return _Again(result, self._values.nbytes(more), longer)

    def _lives_until(self, name: str, group: Group) -> bool:
        """Whether a buffer is there as late as ``group`` runs, anyway."""
        if not self._values.is_temporary(name) or name in self._results:
            return True
        last = max((self._groups[g].members[-1] for g in self._reading.get(name, ())), default=-1)
        return last >= group.members[-1]

    def _is_candidate(self, op: ScheduledOp) -> bool:
        """Whether a value may be stored no longer."""
        large = self._values.nbytes((op.buffer,)) >= _LEAST
        return large and op.buffer not in self._results and self._is_cheap(op.step)

    def _is_cheap(self, number: int) -> bool:
        """Whether to compute a step's value again costs next to nothing but its reads."""
        step = self._steps[number]
        if not isinstance(step, Compute) or step.origin.chunk is not None:
            return False  # the operands of a chunk are gone after it
        values, name = self._values, step.output.buffer
        fixed = values.is_made_once(name) and all(map(values.is_fixed, step.reads))
        return fixed and values.is_simple(step.template, COPIED)

    def _may_be_stored(self, name: str, size: int) -> bool:
        """Whether a value that its kernel keeps to itself may be stored in the place of one of
        ``size`` bytes: a number for each row, beside the rows."""
        values = self._values
        writer = values.source(name) if values.is_made_once(name) else None
        small = values.is_small(values.nbytes((name,)), size)
        return writer is not None and writer.origin.chunk is None and small

    def _is_in_memory(self, name: str) -> bool:
        """Whether some group loads the buffer, or it is there for all."""
        if not self._values.is_temporary(name) or name in self._results:
            return True
        return bool(self._reading.get(name))
