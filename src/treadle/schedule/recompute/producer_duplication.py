"""Cheap values are computed twice rather than stored for a kernel of another shape.

::

    before:  p = dy * (x - mean);   dx = f(rows of p);   dw = sum over rows of p
    after:   p = dy * (x - mean);   dx = f(rows of p)
             q = dy * (x - mean);                        dw = sum over rows of q

With ``p`` in both, neither kernel stores it. If one kernel may reduce both ways (``sweeps.py``),
the two become one, in which equal formulas are merged again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from treadle.algebra.extents import same
from treadle.loop.expr import Reduce
from treadle.loop.kernel import KernelKind
from treadle.loop.program import Buffer, Compute, Step
from treadle.schedule.loop_nest import LoopNest, LoopNests
from treadle.schedule.recompute.values import COPIED, Values

_MAX_LEAVES = 3


@dataclass(frozen=True, slots=True)
class Duplicated:
    """``home[i]``: the only reducing nest that wants the value of step ``i``."""

    steps: tuple[Step, ...]
    buffers: Mapping[str, Buffer]
    home: Mapping[int, LoopNest]


def duplicate_producers(
    steps: tuple[Step, ...],
    buffers: Mapping[str, Buffer],
    nests: LoopNests,
    results: frozenset[str],
) -> Duplicated:
    """Give each columns kernel its own copy of the cheap values that others want as well."""
    work = _Duplicator(steps, buffers, nests, results)
    return work.run()


class _Duplicator:
    def __init__(
        self,
        steps: tuple[Step, ...],
        buffers: Mapping[str, Buffer],
        nests: LoopNests,
        results: frozenset[str],
    ) -> None:
        self._steps = list(steps)
        self._buffers = dict(buffers)
        self._nests = nests
        self._values = Values(steps, buffers, results)
        self._leaves: dict[str, frozenset[str]] = {}
        self._wants: dict[str, set[LoopNest]] = {}  # nests that want each buffer
        self._readers: dict[str, list[tuple[int, int]]] = {}  # step, copy (-1: the step itself)
        self._copies: list[list[Compute]] = [[] for _ in steps]
        self._home: dict[int, LoopNest] = {}
        self._copy_home: dict[tuple[int, int], LoopNest] = {}

    def run(self) -> Duplicated:
        self._find_leaves()
        for i in reversed(range(len(self._steps))):
            step = self._steps[i]
            if isinstance(step, Compute):
                self._visit(i, step)
        steps: list[Step] = []
        home: dict[int, LoopNest] = {}
        for i, step in enumerate(self._steps):
            if i in self._home:
                home[len(steps)] = self._home[i]
            steps.append(step)
            for n, copy in enumerate(self._copies[i]):
                home[len(steps)] = self._copy_home[i, n]
                steps.append(copy)
        return Duplicated(tuple(steps), self._buffers, home)

    def _find_leaves(self) -> None:
        """For each value that is cheap to compute again: the large buffers it then reads."""
        for step in self._steps:
            if not isinstance(step, Compute) or not self._is_candidate(step):
                continue
            leaves: set[str] = set()
            for name in step.reads:
                mine = self._values.nbytes((step.output.buffer,))
                if self._values.nbytes((name,)) * 4 >= mine:  # also a mask of bytes beside floats
                    leaves |= self._leaves.get(name, frozenset((name,)))
            if len(leaves) <= _MAX_LEAVES:
                self._leaves[step.output.buffer] = frozenset(leaves)

    def _is_candidate(self, step: Compute) -> bool:
        values, name = self._values, step.output.buffer
        if not values.may_vanish(name) or step.origin.chunk is not None:
            return False  # the operands of a chunk are gone after it
        fixed = all(map(values.is_fixed, step.reads))  # a later copy reads the same
        return fixed and values.is_simple(step.template, COPIED) and not values.is_late(name)

    def _visit(self, i: int, step: Compute) -> None:
        name = step.output.buffer
        wants = self._wants.get(name, set())
        if isinstance(step.template.body, Reduce):
            self._want(i, -1, step, {self._nests.of(step)})
            return
        if name not in self._leaves:
            self._want(i, -1, step, set() if name in self._values.pinned else wants)
            return
        wants = {nest for nest in wants if same(nest.elements, step.output.numel)}
        columns = [f for f in wants if f.kind is KernelKind.COLUMNS]
        for nest in columns if len(wants) > 1 else ():
            self._copy(i, step, nest)
            wants = wants - {nest}
        if len(wants) == 1:
            self._home[i] = next(iter(wants))
        self._want(i, -1, step, wants)

    def _want(self, i: int, copy: int, step: Compute, nests: set[LoopNest]) -> None:
        for name in step.reads:
            self._wants.setdefault(name, set()).update(nests)
            self._readers.setdefault(name, []).append((i, copy))

    def _copy(self, i: int, step: Compute, nest: LoopNest) -> None:
        """A second value for the readers in ``nest``; they read it instead."""
        old = step.output.buffer
        new = f"{old}_again"
        while new in self._buffers:
            new += "_"
        self._buffers[new] = replace(self._buffers[old], name=new)
        copy = replace(step, output=replace(step.output, buffer=new))
        number = len(self._copies[i])
        self._copies[i].append(copy)
        self._copy_home[i, number] = nest
        left: list[tuple[int, int]] = []
        for reader, which in self._readers[old]:
            target = self._steps[reader] if which < 0 else self._copies[reader][which]
            assert isinstance(target, Compute)
            if self._nest_of(reader, which, target) != nest:
                left.append((reader, which))
                continue
            changed = _reading(target, old, new)
            if which < 0:
                self._steps[reader] = changed
            else:
                self._copies[reader][which] = changed
        self._readers[old] = left
        self._want(i, number, copy, {nest})

    def _nest_of(self, reader: int, which: int, step: Compute) -> LoopNest | None:
        if which >= 0:
            return self._copy_home[reader, which]
        if isinstance(step.template.body, Reduce):
            return self._nests.of(step)
        return self._home.get(reader)


def _reading(step: Compute, old: str, new: str) -> Compute:
    """The step with loads of ``old`` turned into loads of ``new``, which it does not read yet."""
    return step.renamed({old: new})
