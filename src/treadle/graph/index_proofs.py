"""Proofs about formulas of indices, for every value of every index, element and size.

``Prover().holds(condition)`` refutes the opposite: that is split into cases, each a list of linear
inequalities over whole numbers, and a case is closed once elimination of its variables
(Fourier and Motzkin's, with constants rounded to whole numbers) arrives at ``positive <= 0``. A
proof covers all sizes at once. ``False`` is no proof of the opposite: it may be that this method,
or its patience, was not enough.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from treadle.graph.index_formulas import (
    All,
    AnyOne,
    AtMost,
    Condition,
    IndexQuotient,
    IndexVariable,
    Linear,
    Variable,
    all_of,
    negated,
    variable,
)

_INEQUALITIES = 150  # of one case


class Prover:
    """Proofs, all together of at most ``patience`` inequalities: a mask of transformers' takes
    some thousand, and what takes more is not proved."""

    def __init__(self, patience: int = 20_000) -> None:
        self._left = patience

    def holds(self, condition: Condition) -> bool:
        """Whether it is proved that the condition holds everywhere."""
        return self.impossible(negated(condition))

    def impossible(self, condition: Condition) -> bool:
        """Whether it is proved that the condition holds nowhere."""
        return self._closed((), [condition])

    def equivalent(self, left: Condition, right: Condition) -> bool:
        """Whether it is proved that both hold at the same places."""
        one, other = all_of(left, negated(right)), all_of(right, negated(left))
        return self.impossible(one) and self.impossible(other)

    def _closed(self, facts: tuple[Linear, ...], pending: Sequence[Condition]) -> bool:
        """Whether ``facts`` (each at most 0) and all ``pending`` contradict each other."""
        known, splits = _gathered(facts, pending)
        if known is None or self._contradict(known):
            return True
        if not splits or self._left < 0:
            return False
        first, *others = sorted(splits, key=lambda each: len(each.parts))
        return all(self._closed(known, [part, *others]) for part in first.parts)

    def _contradict(self, facts: Sequence[Linear]) -> bool:
        """Whether no whole numbers within their bounds satisfy all inequalities."""
        inequalities = _rounded([*facts, *_bounds_of(facts)])
        while inequalities is not None:
            self._left -= len(inequalities)
            unknowns = dict.fromkeys(each for linear in inequalities for each, _ in linear.terms)
            if not unknowns or self._left < 0:
                return False
            cheapest = min(unknowns, key=partial(_cost, inequalities))
            without = list(_eliminated(inequalities, cheapest))
            if len(without) > _INEQUALITIES:
                return False
            inequalities = _rounded(without)
        return True


def _gathered(
    facts: tuple[Linear, ...], pending: Sequence[Condition]
) -> tuple[tuple[Linear, ...] | None, list[AnyOne]]:
    """The facts and those that conditions add, and what is left to split; no facts if a condition
    holds nowhere."""
    known, splits = dict.fromkeys(facts), list[AnyOne]()
    waiting = list(pending)
    while waiting:
        match waiting.pop():
            case True:
                continue
            case False:
                return None, []
            case AtMost(linear):
                known[linear] = None
            case All(parts):
                waiting += parts
            case AnyOne() as split:
                splits.append(split)
    return tuple(known), splits


def _bounds_of(facts: Iterable[Linear]) -> Iterator[Linear]:
    """What is known of each variable by itself, and of those that its bounds speak of."""
    pending = [each for linear in facts for each, _ in linear.terms]
    seen: dict[Variable, None] = {}
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen[each] = None
        for bound in _bounds(each):
            yield bound
            pending += [other for other, _ in bound.terms]


def _bounds(each: Variable) -> Iterator[Linear]:
    alone = variable(each)
    match each:
        case IndexVariable(size=size):
            yield Linear(0).plus(alone, -1)
            yield alone.plus(Linear.of(size), -1).shifted(1)
        case IndexQuotient(over, under):
            yield alone.times(under).plus(over, -1)
            yield over.plus(alone, -under).shifted(1 - under)
        case _:
            low, high = each.bounds
            yield Linear(low).plus(alone, -1)
            yield alone.shifted(-high)


def _rounded(inequalities: Iterable[Linear]) -> list[Linear] | None:
    """Each with the smallest whole numbers, trivial ones left out; ``None`` if one is false.

    ``2 * i - 3 <= 0``  ->  ``i - 1 <= 0``
    """
    found: dict[tuple[tuple[Variable, int], ...], int] = {}
    for linear in inequalities:
        if linear.is_constant:
            if linear.constant > 0:
                return None
            continue
        divisor = math.gcd(*(number for _, number in linear.terms))
        terms = tuple((each, number // divisor) for each, number in linear.terms)
        constant = -(-linear.constant // divisor)
        found[terms] = max(found.get(terms, constant), constant)
    return [Linear(constant, terms) for terms, constant in found.items()]


def _cost(inequalities: Sequence[Linear], unknown: Variable) -> int:
    """How many inequalities there are more without ``unknown``."""
    signs = [
        number > 0 for linear in inequalities for each, number in linear.terms if each == unknown
    ]
    above = sum(signs)
    return above * (len(signs) - above) - len(signs)


def _eliminated(inequalities: Sequence[Linear], unknown: Variable) -> Iterator[Linear]:
    """What follows for the other variables: each upper bound is at least each lower one."""
    upper: list[tuple[int, Linear]] = []
    lower: list[tuple[int, Linear]] = []
    for linear in inequalities:
        number = dict(linear.terms).get(unknown, 0)
        if number == 0:
            yield linear
        else:
            (upper if number > 0 else lower).append((abs(number), linear))
    for a, above in upper:
        for b, below in lower:
            yield above.times(b).plus(below, a)


__all__ = ["Prover"]
