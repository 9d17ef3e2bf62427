"""The cost of recomputing a value, and other facts about it: one definition for all steps.

::

    simple(v)   no reduction, few functions, none of them expensive
    fixed(v)    all who read v's buffer find the same in it
    late(v)     somebody far away, or of another phase, reads v: it is stored whatever is done here
    pinned(v)   a call reads v, or the step returns it

The callers recompute a value different numbers of times, so each has its own limit for "few
functions".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from treadle.algebra.extents import sample_of
from treadle.loop.expr import Apply, Array, Reduce
from treadle.loop.functions import EXPENSIVE
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Step, TensorRef
from treadle.loop.traverse import walk

_NEAR = 48  # steps; a reader further away finds the value stored
_SMALL = 4
"""What has that many times fewer bytes than a value is read along with it for next to nothing."""


@final
@dataclass(frozen=True, slots=True)
class FormulaLimit:
    """How many ``functions`` a formula may have, and whether they may be ``expensive``."""

    functions: int
    expensive: bool = False


GATHERED = FormulaLimit(24, expensive=True)
"""Of a value of which few elements are computed at all."""
REORDERED = FormulaLimit(8)
"""Of a value that each of several loads computes."""
COPIED = FormulaLimit(12)
"""Of a value that one more kernel computes."""


@final
class Values:
    """The values of ``steps``: who writes and who reads each buffer, by position, and what is cheap
    to compute again. ``results``: buffers that are stored anyway."""

    def __init__(
        self,
        steps: Sequence[Step],
        buffers: Mapping[str, Buffer],
        results: frozenset[str] = frozenset(),
    ) -> None:
        self._steps = steps
        self._buffers = buffers
        self._work: dict[Array, tuple[int, bool, bool]] = {}
        self._sizes: dict[str, int] = {}
        self.pinned = set(results)
        self.writers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        for i, step in enumerate(steps):
            for name in step.writes:
                self.writers.setdefault(name, []).append(i)
            for name in step.reads:
                self.readers.setdefault(name, []).append(i)
            if isinstance(step, Call):
                self.pinned.update(step.reads)

    def source(self, name: str) -> Compute | None:
        """The formula that a buffer is filled with; ``None`` if a call or no step does it."""
        step = self._steps[self.writers[name][-1]] if name in self.writers else None
        return step if isinstance(step, Compute) else None

    def is_simple(self, template: Array, limit: FormulaLimit) -> bool:
        """Whether a formula has no reduction and keeps to ``limit``."""
        functions, reduces, expensive = self._work_of(template)
        return not reduces and functions <= limit.functions and (limit.expensive or not expensive)

    def _work_of(self, template: Array) -> tuple[int, bool, bool]:
        """How many functions, whether one is a reduction, whether one is expensive."""
        if template not in self._work:
            parts = list(walk(template.body))
            functions = [part.fn for part in parts if isinstance(part, Apply)]
            reduces = any(isinstance(part, Reduce) for part in parts)
            self._work[template] = len(functions), reduces, not EXPENSIVE.isdisjoint(functions)
        return self._work[template]

    def is_temporary(self, name: str) -> bool:
        """Whether the buffer is neither an input nor a constant."""
        return self._buffers[name].kind is BufferKind.TEMPORARY

    def is_fixed(self, name: str) -> bool:
        """Whether all who read the buffer find the same in it: of several writers each fills a part
        of it, before anybody reads."""
        writers = self.writers.get(name, ())
        if not self.is_temporary(name):
            return not writers
        readers = self.readers.get(name, ())
        return bool(writers) and (not readers or writers[-1] < readers[0])

    def is_made_once(self, name: str) -> bool:
        """Whether the buffer is ours, and one step fills it."""
        return self.is_temporary(name) and len(self.writers.get(name, ())) == 1

    def is_whole(self, step: Compute) -> bool:
        """Whether the step fills all of its buffer, as the buffer lies."""
        buffer = self._buffers[step.output.buffer]
        return step.output == TensorRef(buffer.name, buffer.dtype, buffer.shape, buffer.strides)

    def may_vanish(self, name: str) -> bool:
        """Whether one step alone fills the buffer, and no call and no caller needs it stored."""
        return self.is_made_once(name) and name not in self.pinned

    def is_late(self, name: str) -> bool:
        """Whether a reader far away, or of another phase, wants what the last writer makes."""
        made = self.writers[name][-1]
        last = self.readers.get(name, [made])[-1]
        return (
            last - made > _NEAR or self._steps[last].origin.phase != self._steps[made].origin.phase
        )

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes of buffers, at the sample of sizes that vary."""
        return sum([self._size(name) for name in names])

    def _size(self, name: str) -> int:
        size = self._sizes.get(name)
        if size is None:
            size = self._sizes[name] = sample_of(self._buffers[name].nbytes)
        return size

    def is_small(self, size: int, beside: int) -> bool:
        """Whether ``size`` is next to nothing beside another number."""
        return size * _SMALL <= beside
