"""Which steps share a kernel. Greedy, in program order; every merge is checked before it is made.

A group is a set of computes in one nest. Two groups may merge when

- one nest holds both: equal, or one is pointwise and fits into the other's;
- there is no third step between them (otherwise the two kernels would wait for each other);
- every value that one member reads from another is at the same position of the nest, so that it can
  stay in a register, and nothing is overwritten while another element still reads it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import final

from treadle.algebra.extents import sample_of
from treadle.algebra.index import Index
from treadle.loop.kernel import KernelKind
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Step
from treadle.schedule.depend import Dependencies
from treadle.schedule.loop_nest import Level, LoopNest, LoopNests, ScheduledOp
from treadle.schedule.pressure import LITTLE, MemoryPressure, Merge

MAX_BUFFERS = 40
"""Of a kernel: those that it reads and writes."""
_MAX_MEMBERS = 96
_WINDOW = 64
_SIBLINGS = 4
_TURN = 12  # steps around the loss, where the forward meets the backward
_LITTLE = 1 << 18  # bytes that are read twice where larger ones are not, for that
_FOLLOWED = 32  # steps that are looked at for it


@dataclass(slots=True, eq=False)
class Group:
    """Steps that become one kernel, or one call (then without a nest). A group is no other that
    has the same steps. ``again``: values among ``placed`` that are members of other groups, too."""

    mask: int
    members: tuple[int, ...]
    nest: LoopNest | None
    placed: tuple[ScheduledOp, ...]
    above: int = 0  # every step this group waits for, directly or not
    waits: frozenset[int] = frozenset()  # those it waits for directly
    buffers: frozenset[str] = field(default_factory=frozenset[str])
    flow: "_Flow | None" = None  # of ``placed``, once it was looked at
    again: frozenset[str] = frozenset()
    pointwise: bool = True
    """Whether nothing in it reduces."""

    @property
    def loaded(self) -> frozenset[str]:
        """What a kernel reads from memory."""
        found, written = set[str](), set[str]()
        for op in self.placed:
            found.update(name for name, _ in op.reads if name not in written)
            written.add(op.buffer)
        return frozenset(found)


@final
@dataclass(frozen=True, slots=True)
class _Needs:
    """What a value of every element is made of. ``reductions``: the steps of those that it waits
    for, as bits: it is there in the pass behind them, and made again in each later one that needs
    it. ``memory``: what is read for it each time."""

    reductions: int
    memory: frozenset[str]


@dataclass(slots=True)
class _Flow:
    """What members of a kernel have written and read so far, and whether one of them has stored
    where another had read. ``needs``: of the values, by their buffers; ``behind``: by a buffer in
    memory, the reductions that reads of its elements wait for; ``stored``: those that the store of
    new elements waits for."""

    written: dict[str, ScheduledOp] = field(default_factory=dict[str, ScheduledOp])
    read: dict[str, tuple[tuple[Level, Index | None], ...]] = field(
        default_factory=dict[str, tuple[tuple[Level, Index | None], ...]]
    )
    overwrites: bool = False
    needs: dict[str, _Needs] = field(default_factory=dict[str, _Needs])
    behind: dict[str, int] = field(default_factory=dict[str, int])
    stored: dict[str, int] = field(default_factory=dict[str, int])

    def copy(self) -> "_Flow":
        return _Flow(
            dict(self.written),
            dict(self.read),
            self.overwrites,
            dict(self.needs),
            dict(self.behind),
            dict(self.stored),
        )

    def takes(self, op: ScheduledOp, facts: Dependencies, nest: LoopNest, *, reduces: bool) -> bool:
        """Whether ``op`` can be the next: it finds the values of earlier members at its own
        place of the nest, and overwrites nothing that another element still reads. ``reduces``:
        whether the kernel does."""
        available, buffer = Level.FULL if op.reduces else op.level, op.buffer
        for name, index in op.reads:
            source = self.written.get(name)
            if source is None:
                self.read[name] = (*self.read.get(name, ()), (available, index))
            elif not _flows(source, op, index, facts):
                return False
        if buffer in self.written:
            return False
        if buffer in self.read:
            in_rows, reads = nest.kind is KernelKind.ROWS, self.read[buffer]
            in_turn = reduces is (op.level is not Level.FULL)  # rows are stored after their loops
            any_level = reduces and in_rows and op.level is Level.ROW
            if any(index != op.index for _, index in reads) or not (in_turn or in_rows):
                return False
            if not any_level and any(level is not op.level for level, _ in reads):
                return False
            self.overwrites = True
        self.written[buffer] = op
        return not reduces or self._comes_after_reads(op)

    def _comes_after_reads(self, op: ScheduledOp) -> bool:
        """Whether no pass reads elements of a buffer behind the one that stores new ones there. A
        value waits for at least the passes of another if it waits for all of its reductions."""
        sources = [self.needs[name] for name, _ in op.reads if name in self.needs]
        waits = 0
        for source in sources:
            waits |= source.reductions
        if op.level is not Level.FULL and not op.reduces:
            self.needs[op.buffer] = _Needs(waits, frozenset())
            return True
        memory = frozenset([name for name, _ in op.reads if name not in self.needs])
        memory = memory.union(*(source.memory for source in sources))
        for name in memory:
            self.behind[name] = self.behind.get(name, 0) | waits
            if name in self.stored and waits & ~self.stored[name]:
                return False
        if op.reduces:
            self.needs[op.buffer] = _Needs(waits | 1 << op.step, frozenset())
            return True
        self.needs[op.buffer] = _Needs(waits, memory)
        self.stored[op.buffer] = waits
        return not self.behind.get(op.buffer, 0) & ~waits


def _flows(
    source: ScheduledOp,
    reader: ScheduledOp,
    index: Index | None,
    facts: Dependencies,
) -> bool:
    """Whether ``reader`` finds the value of ``source`` at its own place in the nest."""
    available = Level.FULL if reader.reduces else reader.level
    if source.level is not available and available is not Level.FULL:
        return False  # it varies over an axis that the reader does not
    writers = facts.writers[source.buffer]
    only = len(writers) == 1 or sum(1 for w in writers if w < reader.step) == 1
    return only and index == source.index


_step_of = attrgetter("step")

Sweeps = Callable[[int, int, int], bool]
"""Whether one kernel may reduce so many rows and columns, with that many sums over the rows."""
Descends = Callable[[int, int], bool]
"""Whether one kernel may go down so many rows of so many columns more than once."""


class Fuser:
    """Grows the groups of one program; ``groups`` is the result, in order of first member."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        buffers: Mapping[str, Buffer],
        facts: Dependencies,
        nests: LoopNests,
        home: Mapping[int, LoopNest],
        sweeps: Sweeps,
        descends: Descends,
        pressure: MemoryPressure,
    ) -> None:
        self._steps = steps
        self._facts = facts
        self._nests = nests
        self._sweeps = sweeps
        self._descends = descends
        self._pressure = pressure
        self._home = {m: self._either(nest) for m, nest in home.items()}
        self._group_of: list[Group] = []
        self._sizes = {name: sample_of(buffer.nbytes) for name, buffer in buffers.items()}
        reads = [step.reads for step in steps]
        self._touched = [(*names, *step.writes) for names, step in zip(reads, steps, strict=True)]
        self._phase = [step.origin.phase for step in steps]
        self._chunk = [step.origin.chunk for step in steps]
        self._computes = [isinstance(step, Compute) for step in steps]
        large = frozenset(name for name, size in self._sizes.items() if size >= _LITTLE)
        self._large = [[name for name in names if name in large] for names in reads]
        self._readers_of_small = [self._follow(step, large) for step in steps]

    def _follow(self, step: Step, large: frozenset[str]) -> list[int]:
        """The formulas that read what ``step`` makes, but for ``large`` values."""
        readers, names = self._facts.readers, [name for name in step.writes if name not in large]
        return [at for name in names for at in readers.get(name, ()) if self._computes[at]]

    def run(self, *, fuse: bool) -> list[Group]:
        """The groups; without ``fuse`` each step is one."""
        recent: dict[str, list[int]] = {}
        for i, step in enumerate(self._steps):
            group = self._alone(i, step)
            self._group_of.append(group)
            if fuse and isinstance(step, Compute):
                self._grow(i, recent)
        return self.groups

    @property
    def groups(self) -> list[Group]:
        """The groups so far, in order of first member."""
        return list(dict.fromkeys(self._group_of))

    def _alone(self, i: int, step: Step) -> Group:
        waits = self._facts.before[i]
        above = 0
        for w in waits:
            source = self._group_of[w]
            above |= source.above | source.mask
        if isinstance(step, Call):
            return Group(1 << i, (i,), None, (), above, waits)
        nest = self._nests.of(step)
        placed = self._nests.place(i, step, nest)
        assert placed is not None, step
        names = frozenset((step.output.buffer, *(name for name, _ in placed.reads)))
        alone = not placed.reduces
        return Group(1 << i, (i,), nest, (placed,), above, waits, names, pointwise=alone)

    def _grow(self, i: int, recent: dict[str, list[int]]) -> None:
        """Merge step ``i`` with the groups it shares most bytes with, best first."""
        for other in self._candidates(i, recent):
            mine = self._group_of[i]
            theirs = self._group_of[other]
            if theirs is not mine and self._near(theirs, mine.members[0]):
                merged = self._merged(theirs, mine)
                if merged is not None:
                    self._replace(merged)
        for name in dict.fromkeys(name for name, _ in self._group_of[i].placed[-1].reads):
            recent.setdefault(name, []).append(i)

    def _candidates(self, i: int, recent: dict[str, list[int]]) -> list[int]:
        score: dict[int, int] = {}
        step = self._steps[i]
        assert isinstance(step, Compute)
        (placed,) = self._group_of[i].placed
        for name in {name for name, _ in placed.reads}:
            size = self._sizes[name]
            for w in self._facts.writers.get(name, ()):
                if w < i and self._computes[w]:
                    score[w] = score.get(w, 0) + 2 * size + 1
            for sibling in recent.get(name, ())[-_SIBLINGS:]:
                if i - sibling <= _WINDOW and size >= step.output.dtype.itemsize * 64:
                    score[sibling] = score.get(sibling, 0) + size
        return sorted(score, key=lambda other: (-score[other], -other))

    def _near(self, earlier: Group, later: int) -> bool:
        """Whether running the two together keeps nothing alive for long: no rows of one chunk until
        those of another.

        A backward step that needs forward values alone would otherwise run in the forward, and
        its result wait for the backward.
        """
        if self._chunk[earlier.members[0]] != self._chunk[later]:
            return False
        last = earlier.members[-1]
        phases = self._phase[last], self._phase[later]
        if phases == ("optimizer", "optimizer"):
            return True
        turns = phases[0] != phases[1] and "forward" in phases
        return later - last <= (_TURN if turns else _WINDOW)

    # -- merging -----------------------------------------------------------------------------

    def _merged(self, a: Group, b: Group) -> Group | None:
        """The union of two groups, or ``None`` where they must stay apart."""
        if a.nest is None or b.nest is None:
            return None
        nest = _common_nest(a, b)
        if nest is None or self._is_too_large(a, b):
            return None
        if self._between(a, b) or self._between(b, a) or not self._at_home(a, b, nest):
            return None
        placed = self._place_all(nest, a, b)
        flow = None if placed is None else self._flow(placed, nest, a)
        if placed is None or flow is None or self._comes_between(a, b):
            return None
        phases = self._phases(a, b)
        later = len(phases) > 1 and "optimizer" in phases  # a gradient waits for its update then
        again = nest.kind is KernelKind.COLUMNS and not _columns_are_last(placed, nest)
        if again and not self._may_descend(nest, flow, is_update=later):
            return None
        if not self._pressure.allows(self._merge_of(a, b), spare=0 if later else LITTLE):
            return None
        return _union(a, b, nest, placed, flow)

    def _may_descend(self, nest: LoopNest, flow: _Flow, *, is_update: bool) -> bool:
        """Whether one kernel may go down columns more than once. It overwrites nothing: an update
        of what it sums would need a kernel of its own that copies it to its place."""
        if flow.overwrites or is_update:
            return False
        return self._descends(nest.rows.extent, nest.cols.extent)

    def _phases(self, a: Group, b: Group) -> set[str]:
        """The phases of two groups."""
        return {self._phase[group.members[0]] for group in (a, b)}

    def _is_too_large(self, a: Group, b: Group) -> bool:
        """Whether one kernel of both would have too many members, or buffers. Of an update those in
        memory count: the values that its members alone read stay in registers."""
        if len(a.members) + len(b.members) > _MAX_MEMBERS:
            return True
        if len(a.buffers) + len(b.buffers) <= MAX_BUFFERS:
            return False
        names, mask = a.buffers | b.buffers, a.mask | b.mask
        if len(names) <= MAX_BUFFERS or "optimizer" not in self._phases(a, b):
            return len(names) > MAX_BUFFERS
        return sum(not self._stays_inside(name, mask) for name in names) > MAX_BUFFERS

    def _stays_inside(self, name: str, mask: int) -> bool:
        """Whether steps of ``mask`` alone touch a buffer, and some read it."""
        readers, writers = self._facts.readers.get(name, ()), self._facts.writers.get(name, ())
        every = all(mask >> step & 1 for step in (*readers, *writers))
        return every and bool(readers) and bool(writers)

    def _comes_between(self, a: Group, b: Group) -> bool:
        """Whether one kernel of both would stand between larger ones that could meet: it waits for
        one of them on behalf of ``a``, and the other waits for it on behalf of ``b``.

        ::

            before:  p = log_softmax(x);  s = sum(pick(p));  n = count(y);  g = f(p, n)
            n + s:   p;  s, n;  g(p, n)        p is stored and read again
            apart:   n;  p, g(p, n);  s
        """
        shared = sum([self._sizes[name] for name in a.buffers & b.buffers])
        if shared >= _LITTLE:
            return False
        for early, late in ((a, b), (b, a)):
            waiting = self._waiting(early, late)
            above = late.above & ~(early.above | early.mask) if waiting else 0
            if above and any(self._meets(between, above) for between in waiting):
                return True
        return False

    def _waiting(self, group: Group, other: Group) -> list[int]:
        """The steps that read what ``group`` makes, or what is made of that and is small; but for
        those of both groups, and for those that read nothing large."""
        seen: set[int] = set()
        found: list[int] = []
        pending = list(group.members)
        count = len(self._group_of)
        while pending and len(seen) < _FOLLOWED:
            for reader in self._readers_of_small[pending.pop()]:
                if reader in seen:
                    continue
                if reader < count and self._group_of[reader] in (group, other):
                    continue
                seen.add(reader)
                pending.append(reader)
                if self._large[reader]:
                    found.append(reader)
        return found

    def _meets(self, reader: int, above: int) -> bool:
        """Whether a step could be in one kernel with one of ``above``, itself or through steps that
        are yet to come, and there is much that it would not read again."""
        seen: set[int] = set()
        pending = [reader]
        while pending and len(seen) < _FOLLOWED:
            large = self._large[pending.pop()]
            for step in {w for name in large for w in self._facts.writers.get(name, ())} - seen:
                seen.add(step)
                if not self._computes[step]:
                    continue
                if step >= len(self._group_of):
                    pending.append(step)
                elif above >> step & 1 and self._near(self._group_of[step], reader):
                    return True
        return False

    def join(self, a: Group, b: Group, nest: LoopNest) -> Group | None:
        """Make one group of two that stand in ``nest`` as they are; ``None`` where they must stay
        apart, or where a row needs what is there after the last row only."""
        earlier, later = sorted((a, b), key=lambda group: group.members[0])
        near = self._near(earlier, later.members[0]) and not self._is_too_large(a, b)
        if not near or self._between(a, b) or self._between(b, a):
            return None
        placed = tuple(sorted((*a.placed, *b.placed), key=_step_of))
        flow = flow_of(placed, self._facts, nest)
        if flow is None or not _columns_are_last(placed, nest):
            return None
        if not self._pressure.allows(self._merge_of(a, b)):
            return None
        joined = _union(a, b, nest, placed, flow)
        self._replace(joined)
        return joined

    def _at_home(self, a: Group, b: Group, nest: LoopNest) -> bool:
        """No member is drawn into a reducing kernel other than the one that wants it."""
        if a.pointwise and b.pointwise:
            homes = {self._home[m] for m in (*a.members, *b.members) if m in self._home}
            return len(homes) <= 1
        here = self._either(nest)
        return all(self._home.get(m, here) == here for m in (*a.members, *b.members))

    def _either(self, nest: LoopNest) -> LoopNest:
        """The nest; where one kernel may reduce both ways, the same one for both."""
        both = self._sweeps(nest.rows.extent, nest.cols.extent, 1)
        return replace(nest, kind=KernelKind.BOTH) if both else nest

    def _between(self, first: Group, last: Group) -> bool:
        """Whether a third group waits for ``first`` and is waited for by ``last``."""
        if not last.above & first.mask:
            return False
        sources = {self._group_of[w] for w in last.waits} - {first, last}
        return any(source.above & first.mask for source in sources)

    def _place_all(self, nest: LoopNest, a: Group, b: Group) -> tuple[ScheduledOp, ...] | None:
        """The members of both in that nest, in order; ``None`` where one does not fit."""
        result: list[ScheduledOp] = []
        for group in (a, b):
            if group.nest == nest:
                result += group.placed
                continue
            for op in group.placed:
                placed = self._nests.place(op.step, op.compute, nest)
                if placed is None:
                    return None
                result.append(placed)
        return tuple(sorted(result, key=_step_of))

    def _flow(
        self, placed: tuple[ScheduledOp, ...], nest: LoopNest, first: Group
    ) -> "_Flow | None":
        """How values pass between ``placed`` in that nest; ``None`` where they cannot. What is
        known of ``first`` is not looked at again where its members come first, as they are."""
        reduces = any(op.reduces for op in placed)
        known = first.flow if placed[: len(first.placed)] == first.placed else None
        if known is None or (reduces and first.pointwise):
            return flow_of(placed, self._facts, nest)
        flow, rest = known.copy(), placed[len(first.placed) :]
        done = all(flow.takes(op, self._facts, nest, reduces=reduces) for op in rest)
        return flow if done else None

    def _merge_of(self, a: Group, b: Group) -> Merge:
        """What runs where once the two are one kernel, and what then waits for it."""
        names = a.buffers | b.buffers
        at, of_b = (self._pressure.places[group.members[0]] for group in (a, b))
        early, late = (a, of_b) if at <= of_b else (b, at)
        steps = frozenset([m for group in self._ahead_of(late, early) for m in group.members])
        if steps:
            names = names.union(*(self._touched[i] for i in steps))
        return Merge(frozenset((*a.members, *b.members)), steps, late, names)

    def _ahead_of(self, place: int, group: Group) -> set[Group]:
        """The groups that wait for ``group``, directly or not, and run before ``place``."""
        found: set[Group] = {group}
        pending = [group]
        after, count, places = self._facts.after, len(self._group_of), self._pressure.places
        while pending:
            for m in pending.pop().members:
                for i in after[m]:
                    if i < count and places[i] < place and self._group_of[i] not in found:
                        found.add(self._group_of[i])
                        pending.append(self._group_of[i])
        return found - {group}

    def _replace(self, merged: Group) -> None:
        self._pressure.make()
        for m in merged.members:
            self._group_of[m] = merged
        gained = merged.above | merged.mask
        pending = [merged]
        while pending:
            for group in self._next(pending.pop()):
                new = gained & ~(group.above | group.mask)
                if new:  # if not, all that waits for it knows as well
                    group.above |= new
                    pending.append(group)

    def _next(self, group: Group) -> set[Group]:
        """The groups so far that wait for one of the steps of ``group``."""
        after, count = self._facts.after, len(self._group_of)
        return {self._group_of[i] for m in group.members for i in after[m] if i < count}


def flow_of(placed: tuple[ScheduledOp, ...], facts: Dependencies, nest: LoopNest) -> "_Flow | None":
    """How values pass between ``placed`` in one kernel of a nest; ``None`` if they cannot."""
    flow, reduces = _Flow(), any(op.reduces for op in placed)
    done = all(flow.takes(op, facts, nest, reduces=reduces) for op in placed)
    return flow if done else None


def _union(
    a: Group, b: Group, nest: LoopNest, placed: tuple[ScheduledOp, ...], flow: _Flow
) -> Group:
    mask = a.mask | b.mask
    members = tuple([op.step for op in placed])
    above = (a.above | b.above) & ~mask
    waits, names, pointwise = a.waits | b.waits, a.buffers | b.buffers, a.pointwise and b.pointwise
    return Group(mask, members, nest, placed, above, waits, names, flow, pointwise=pointwise)


def _columns_are_last(placed: tuple[ScheduledOp, ...], nest: LoopNest) -> bool:
    """Whether only values of columns read what is reduced over the rows, or is made of it."""
    late: set[str] = set()
    for op in placed:
        reads = any(name in late for name, _ in op.reads)
        if reads and (op.reduces or op.level is not Level.COL):
            return False
        if reads or (op.reduces and op.over(nest.rows)):
            late.add(op.buffer)
    return True


def _common_nest(a: Group, b: Group) -> LoopNest | None:
    assert a.nest is not None
    assert b.nest is not None
    if a.nest == b.nest:
        return a.nest
    if a.pointwise:
        return None if b.pointwise else b.nest
    return a.nest if b.pointwise else None


def loaded_from_memory(group: Group, steps: Sequence[Step]) -> frozenset[str]:
    """What a kernel, or a call, reads from memory."""
    if group.nest is None:
        return frozenset(name for m in group.members for name in steps[m].reads)
    return group.loaded


def loaders_of(groups: Sequence[Group], steps: Sequence[Step]) -> dict[str, set[int]]:
    """The positions of the groups that read each buffer from memory."""
    loaders: dict[str, set[int]] = {}
    for g, group in enumerate(groups):
        for name in loaded_from_memory(group, steps):
            loaders.setdefault(name, set()).add(g)
    return loaders


def stored_buffers(
    number: int,
    group: Group,
    loaders: Mapping[str, Set[int]],
    facts: Dependencies,
    buffers: Mapping[str, Buffer],
    results: frozenset[str],
) -> Iterator[ScheduledOp]:
    """The members of the group at a position whose value someone outside the kernel reads.
    ``loaders``: of all groups."""
    for op in group.placed:
        name = op.buffer
        if name in group.again:
            continue
        outside = bool(loaders.get(name, set[int]()) - {number})
        several = len(facts.writers[name]) > 1
        ours = buffers[name].kind is BufferKind.TEMPORARY
        if outside or several or not ours or name in results:
            yield op
