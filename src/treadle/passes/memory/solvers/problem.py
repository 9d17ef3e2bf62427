"""The recompute choice as a problem of its own, for solvers that need not know what a graph is."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from treadle.passes.memory.classify import SaveCandidates, must_save
from treadle.passes.memory.cut import keeping_costs
from treadle.passes.memory.fused import RecomputeCost
from treadle.passes.memory.order import Facts
from treadle.util.reach import reached


@final
@dataclass(frozen=True, slots=True)
class SaveProblem:
    """Which forward values to keep for the rest of the step. Values are numbered from 0, in the
    order of the forward pass; each tuple has one entry per value.

    - ``names``: of the values in the graph.
    - ``sizes``: bytes that keeping a value takes; ``None`` for one that cannot be kept (a view, or
      an operation with several results).
    - ``seconds``: estimated, to compute a value again.
    - ``operands``: the values that it is computed from, inputs left out.
    - ``needed``: the values that the rest of the step reads.
    - ``once``: the values that must not be computed again.
    - ``start``: what the fastest plan keeps.
    """

    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    seconds: tuple[float, ...]
    operands: tuple[tuple[int, ...], ...]
    needed: frozenset[int]
    once: frozenset[int]
    start: frozenset[int]

    def recomputed(self, kept: Collection[int]) -> frozenset[int]:
        """What is computed again if ``kept`` is kept."""
        lost = self.needed.difference(kept)
        return frozenset(reached(lost, lambda i: (o for o in self.operands[i] if o not in kept)))

    def kept_bytes(self, kept: Collection[int]) -> int:
        """Bytes of ``kept``."""
        return sum(self.sizes[i] or 0 for i in kept)

    def recompute_seconds(self, kept: Collection[int]) -> float:
        """Seconds for all that is computed again if ``kept`` is kept."""
        return sum(self.seconds[i] for i in sorted(self.recomputed(kept)))

    def allows(self, kept: Collection[int]) -> bool:
        """Whether all of ``kept`` can be kept, and nothing else that happens once is needed."""
        can_keep = all(self.sizes[i] is not None for i in kept)
        return can_keep and self.once.isdisjoint(self.recomputed(kept))


@dataclass(frozen=True)
class SaveProblemOf:
    """The problem of a step; ``places``: the position in the graph of each of its values."""

    problem: SaveProblem
    places: tuple[int, ...]

    @staticmethod
    def of(
        facts: Facts, claims: SaveCandidates, fused: RecomputeCost, start: Collection[int]
    ) -> "SaveProblemOf":
        """``start``: positions that the fastest plan keeps. Products may be computed again."""
        places = tuple(sorted(claims.candidates))
        number = {i: n for n, i in enumerate(places)}
        costs = keeping_costs(facts, claims, fused.stored)
        return SaveProblemOf(
            SaveProblem(
                names=tuple(str(facts.nodes[i]) for i in places),
                sizes=tuple(_size(facts, i, costs[i]) for i in places),
                seconds=tuple(fused.again[i] for i in places),
                operands=tuple(
                    tuple(number[o] for o in dict.fromkeys(facts.operands[i]) if o in number)
                    for i in places
                ),
                needed=frozenset(number[i] for i in claims.needed),
                once=frozenset(
                    number[i]
                    for i in places
                    if must_save(facts, i, products=True, banned=claims.banned)
                ),
                start=frozenset(number[i] for i in start if i in number),
            ),
            places,
        )

    def saved(self, kept: Collection[int]) -> frozenset[int]:
        """The positions in the graph of what is kept."""
        return frozenset(self.places[n] for n in kept)


def _size(facts: Facts, i: int, cost: float) -> int | None:
    """What leaves the step anyway costs nothing, what cannot be kept has no size."""
    if cost == float("inf"):
        return None
    return facts.held_bytes(i) if cost else 0
