"""Proofs about index formulas, for every value of every index, element and size.

``Prover().holds(condition)`` refutes the negation. The negation is split into cases, each a list of
linear inequalities over integers, and a case is closed once elimination of its variables
(Fourier-Motzkin, with constants rounded to integers) arrives at ``positive <= 0``. A proof covers
all sizes at once. ``False`` does not prove the negation: the method, or its limits, may not have
been enough.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TypeVar

from treadle.algebra.conditions import All, AnyOne, AtMost, Condition, all_of, negated
from treadle.algebra.extents import formula_of, largest, least
from treadle.algebra.index import Atom, Axis, FloorDiv, Index, Mod, Value
from treadle.algebra.polynomial import Monomial

_Unknown = tuple[Monomial, Atom | None]
"""A product of sizes, of an atom of an index, or of both. The empty one is the number 1."""
_ONE: _Unknown = ((), None)
_Row = dict[_Unknown, int]
"""``sum(number * unknown) <= 0``; no number is 0."""
_Inequality = Mapping[int, int]
"""The same, with a number for each unknown in the order in which they occur; 0 is ``_ONE``."""
_K = TypeVar("_K")
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

    def _closed(self, facts: tuple[Index, ...], pending: Sequence[Condition]) -> bool:
        """Whether ``facts`` (each at most 0) and all ``pending`` contradict each other."""
        known, splits = _gathered(facts, pending)
        if known is None or self._contradict(known):
            return True
        if not splits or self._left < 0:
            return False
        first, *others = sorted(splits, key=lambda split: len(split.parts))
        return all(self._closed(known, [part, *others]) for part in first.parts)

    def _contradict(self, facts: Sequence[Index]) -> bool:
        """Whether no integers within their bounds satisfy all inequalities."""
        rows = [_row(index) for index in facts]
        inequalities = _rounded(_numbered([*rows, *_bounds_of(rows)]))
        while inequalities is not None:
            self._left -= len(inequalities)
            unknowns = dict.fromkeys(unknown for row in inequalities for unknown in row)
            unknowns.pop(0, None)
            if not unknowns or self._left < 0:
                return False
            cheapest = min(unknowns, key=partial(_cost, inequalities))
            without = list(_eliminated(inequalities, cheapest))
            if len(without) > _INEQUALITIES:
                return False
            inequalities = _rounded(without)
        return True


def _gathered(
    facts: tuple[Index, ...], pending: Sequence[Condition]
) -> tuple[tuple[Index, ...] | None, list[AnyOne]]:
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
            case AtMost(index):
                known[index] = None
            case All(parts):
                waiting += parts
            case AnyOne() as split:
                splits.append(split)
    return tuple(known), splits


def _row(index: Index, factor: int = 1) -> _Row:
    """``factor * index``, products of sizes as unknowns of their own. ``factor``: also a size.

    ``f % n`` is ``f - n * (f // n)``.
    """
    found: _Row = {}
    for atom, coefficient in ((None, index.const), *index.terms):
        times = coefficient * factor
        if isinstance(atom, Mod):
            found = _plus(found, _row(atom.index, times))
            found = _plus(found, _row(atom.index // atom.n, times * atom.n), -1)
            continue
        for sizes, number in formula_of(times).terms:
            found[sizes, atom] = found.get((sizes, atom), 0) + number
    return found


def _plus(left: Mapping[_K, int], right: Mapping[_K, int], factor: int = 1) -> dict[_K, int]:
    """``left + factor * right``"""
    total = dict(left)
    for unknown, number in right.items():
        total[unknown] = total.get(unknown, 0) + factor * number
    return {unknown: number for unknown, number in total.items() if number}


def _bounds_of(rows: Iterable[_Row]) -> Iterator[_Row]:
    """What is known of each unknown by itself, and of those that its bounds speak of."""
    pending = [unknown for row in rows for unknown in row]
    seen: set[_Unknown] = {_ONE}
    while pending:
        unknown = pending.pop()
        if unknown in seen:
            continue
        seen.add(unknown)
        for bound in _bounds(unknown):
            yield bound
            pending += bound


def _bounds(unknown: _Unknown) -> Iterator[_Row]:
    sizes, atom = unknown
    alone = {unknown: 1}
    match atom:
        case Axis() | Value() if not sizes:
            low, high = atom.bounds
            yield _plus(_row(Index.of(low)), alone, -1)
            yield _plus(alone, _row(Index.of(high)), -1)
        case FloorDiv(index, n) if not sizes:
            whole = _row(Index(0, ((atom, 1),)), n)
            yield _plus(whole, _row(index), -1)
            yield _plus(_plus(_row(index), whole, -1), _row(Index.of(n - 1)), -1)
        case _:
            low, high = _numbers(unknown)
            yield _plus({_ONE: low}, alone, -1)
            yield _plus(alone, {_ONE: high}, -1)


def _numbers(unknown: _Unknown) -> tuple[int, int]:
    """The least and the greatest number that a product may be. Sizes are never negative."""
    sizes, atom = unknown
    low, high = (prod(max(size.bounds[end], 0) for size in sizes) for end in (0, 1))
    if atom is None:
        return low, high
    first, last = least(atom.bounds[0]), largest(atom.bounds[1])
    return min(low * first, high * first), max(low * last, high * last)


def _numbered(rows: Iterable[_Row]) -> list[_Inequality]:
    """The rows with a number for each unknown: what is eliminated first depends on nothing else."""
    numbers: dict[_Unknown, int] = {_ONE: 0}
    return [
        {numbers.setdefault(unknown, len(numbers)): n for unknown, n in row.items()} for row in rows
    ]


def _rounded(inequalities: Iterable[_Inequality]) -> list[_Inequality] | None:
    """Each with the smallest integers, trivial ones left out; ``None`` if one is false.

    ``2 * i - 3 <= 0``  ->  ``i - 1 <= 0``
    """
    found: dict[tuple[tuple[int, int], ...], int] = {}
    for row in inequalities:
        constant, terms = row.get(0, 0), sorted(term for term in row.items() if term[0])
        if not terms:
            if constant > 0:
                return None
            continue
        divisor = math.gcd(*(number for _, number in terms))
        small = tuple([(unknown, number // divisor) for unknown, number in terms])
        constant = -(-constant // divisor)
        found[small] = max(found.get(small, constant), constant)
    return [{0: constant, **dict(small)} for small, constant in found.items()]


def _cost(inequalities: Sequence[_Inequality], unknown: int) -> int:
    """How many inequalities there are more without ``unknown``."""
    signs = [row[unknown] > 0 for row in inequalities if unknown in row]
    above = sum(signs)
    return above * (len(signs) - above) - len(signs)


def _eliminated(inequalities: Sequence[_Inequality], unknown: int) -> Iterator[_Inequality]:
    """What follows for the other unknowns: each upper bound is at least each lower one."""
    upper: list[tuple[int, _Inequality]] = []
    lower: list[tuple[int, _Inequality]] = []
    for row in inequalities:
        number = row.get(unknown, 0)
        if number == 0:
            yield row
        else:
            (upper if number > 0 else lower).append((abs(number), row))
    for a, above in upper:
        for b, below in lower:
            yield _plus(_plus({}, above, b), below, a)
