"""The order of kernels and calls: close to the program's, but memory is freed early.

Among the steps that are ready, one that frees much more than it allocates (an optimizer update
whose gradient is final) runs now; everything else keeps the position of its last member. Small
steps keep their position too, so that equal ones stay together and become one launch. So do waits:
what stands before one runs while that is on its way which it waits for.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from treadle.algebra.extents import sample_of
from treadle.loop.program import Buffer, BufferKind
from treadle.schedule.fuse import Group

EAGER_BYTES = 1 << 18


def ordered(
    groups: Sequence[Group],
    reads: Sequence[frozenset[str]],
    writes: Sequence[frozenset[str]],
    buffers: Mapping[str, Buffer],
    kept: frozenset[str],
    first: frozenset[int] = frozenset(),
    waits: frozenset[int] = frozenset(),
) -> list[int]:
    """Positions of ``groups`` in a valid order. ``kept`` are the buffers that never die; those of
    ``first``, which wait for nothing, come before all others, and ``waits`` no earlier than where
    they stand."""
    number = {m: g for g, group in enumerate(groups) for m in group.members}
    sources_of = [{number[w] for w in group.waits} - {g} for g, group in enumerate(groups)]
    followers: list[list[int]] = [[] for _ in groups]
    for g, sources in enumerate(sources_of):
        for source in sources:
            followers[source].append(g)
    live = _Liveness(reads, writes, buffers, kept, waits)
    missing = [len(sources) for sources in sources_of]
    place = [-1 if g in first else group.members[-1] for g, group in enumerate(groups)]
    ready = [(place[g], g) for g in range(len(groups)) if not missing[g]]
    heapq.heapify(ready)
    result: list[int] = []
    while ready:
        g = heapq.heappop(ready)[1] if ready[0][0] < 0 else _pick(ready, live)
        result.append(g)
        live.run(g)
        for follower in followers[g]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (place[follower], follower))
    assert len(result) == len(groups), "the groups wait for each other"
    return result


def _pick(ready: list[tuple[int, int]], live: "_Liveness") -> int:
    large = [entry for entry in ready if entry[1] in live.large] if live.large else []
    if large:
        best = max(large, key=lambda entry: live.gain(entry[1]))
        if live.gain(best[1]) >= EAGER_BYTES:
            ready.remove(best)
            heapq.heapify(ready)
            return best[1]
    return heapq.heappop(ready)[1]


class _Liveness:
    """Bytes that a step would free, given what has run. ``large``: those that read enough to be
    worth their while, ``waits`` aside."""

    def __init__(
        self,
        reads: Sequence[frozenset[str]],
        writes: Sequence[frozenset[str]],
        buffers: Mapping[str, Buffer],
        kept: frozenset[str],
        waits: frozenset[int],
    ) -> None:
        self._reads = reads
        self._writes = writes
        self._left = Counter(name for names in reads for name in names)
        self._sizes = {
            name: sample_of(buffers[name].nbytes)
            for name in {name for names in (*reads, *writes) for name in names} - kept
            if buffers[name].kind is BufferKind.TEMPORARY
        }
        sums = [sum(self._sizes.get(name, 0) for name in names) for names in reads]
        large = frozenset(g for g, total in enumerate(sums) if total >= EAGER_BYTES)
        self.large = large - waits
        self._touching: dict[str, list[int]] = {}
        for g in self.large:
            for name in (reads[g] | writes[g]) & self._sizes.keys():
                self._touching.setdefault(name, []).append(g)
        self._begun: set[str] = set()
        self._gains: dict[int, int] = {}

    def gain(self, g: int) -> int:
        """Of one that is large."""
        if g not in self._gains:
            sizes = self._sizes
            freed = sum(sizes.get(n, 0) for n in self._reads[g] if self._left[n] == 1)
            taken = sum(
                sizes.get(n, 0) for n in self._writes[g] - self._begun if self._left.get(n, 0)
            )
            self._gains[g] = freed - taken
        return self._gains[g]

    def run(self, g: int) -> None:
        changed = self._writes[g] - self._begun
        self._begun |= changed
        for name in self._reads[g]:
            self._left[name] -= 1
        changed |= {name for name in self._reads[g] if self._left[name] <= 1}
        for name in changed & self._touching.keys():
            for other in self._touching[name]:
                self._gains.pop(other, None)
