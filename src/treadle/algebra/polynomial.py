"""Formulas of sizes: sums of products of named dims, quotients and remainders.

::

    polynomial  =  sum of  coefficient * atom * ... * atom
    atom        =  dim | polynomial // polynomial | polynomial % polynomial
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, final

from treadle.algebra import dims
from treadle.algebra.dims import Bounds, Dim, Operand, SizeExpression, Sizes, sizes_of
from treadle.util.errors import VerifyError


@final
class Undecided(VerifyError):
    """Whether ``formula < 0`` or ``formula == 0`` has no answer for all sizes."""

    def __init__(self, formula: "Polynomial", sign: str, said: str = "") -> None:
        """``said``: what depends on it."""
        super().__init__(said or f"{formula.text} {sign} 0 has no answer for all sizes")
        self.formula, self.sign = formula, sign


@final
@dataclass(frozen=True, slots=True)
class Quotient:
    """``over // under``, rounded down, of sizes that do not divide evenly."""

    over: "Polynomial"
    under: "Polynomial"

    @property
    def sample(self) -> int:
        """Of the samples."""
        return self.over.sample // self.under.sample

    @property
    def text(self) -> str:
        """As generated code writes it."""
        return f"({self.over.text} / {self.under.text})"

    def at(self, sizes: Sizes) -> int:
        """Its value for ``sizes``."""
        return self.over.at(sizes) // self.under.at(sizes)

    @property
    def dims(self) -> frozenset[Dim]:
        """Those it depends on."""
        return self.over.dims | self.under.dims

    @property
    def bounds(self) -> Bounds:
        """Inclusive. ``VerifyError`` where it may be negative."""
        (a, b), (c, d) = self.over.bounds, self.under.bounds
        if a < 0 or c <= 0:
            raise Undecided(self.over if a < 0 else self.under.plus(Polynomial.of(-1)), "<")
        return a // d, b // c


@final
@dataclass(frozen=True, slots=True)
class Remainder:
    """``over % under``, never negative."""

    over: "Polynomial"
    under: "Polynomial"

    @property
    def sample(self) -> int:
        """Of the samples."""
        return self.over.sample % self.under.sample

    @property
    def text(self) -> str:
        """As generated code writes it."""
        return f"({self.over.text} % {self.under.text})"

    def at(self, sizes: Sizes) -> int:
        """Its value for ``sizes``."""
        return self.over.at(sizes) % self.under.at(sizes)

    @property
    def dims(self) -> frozenset[Dim]:
        """Those it depends on."""
        return self.over.dims | self.under.dims

    @property
    def bounds(self) -> Bounds:
        """Inclusive. ``VerifyError`` where it may be negative."""
        if self.over.bounds[0] < 0:
            raise Undecided(self.over, "<")
        return 0, max(self.under.bounds[1] - 1, 0)


Atom = Dim | Quotient | Remainder
Monomial = tuple[Atom, ...]
"""Factors in a canonical order; none for the constant term."""


def _rank(atom: Atom) -> tuple[int, str]:
    return isinstance(atom, Quotient) + 2 * isinstance(atom, Remainder), atom.text


def _monomial(atoms: Sequence[Atom]) -> Monomial:
    return tuple(sorted(atoms, key=_rank))


@final
@dataclass(frozen=True, slots=True)
class Polynomial:
    """``sum(coefficient * prod(monomial))``: sorted, no zero coefficients."""

    terms: tuple[tuple[Monomial, int], ...]
    sample: int = field(init=False, compare=False)
    hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        value = sum(c * prod(atom.sample for atom in atoms) for atoms, c in self.terms)
        object.__setattr__(self, "sample", value)
        object.__setattr__(self, "hash", hash(self.terms))

    def __hash__(self) -> int:
        return self.hash

    @staticmethod
    def of(value: int) -> "Polynomial":
        """A plain number."""
        return Polynomial((((), value),) if value else ())

    @staticmethod
    def _sum(terms: Mapping[Monomial, int]) -> "Polynomial":
        kept = [(atoms, c) for atoms, c in terms.items() if c]
        if len(kept) < 2:  # most have nothing to sort
            return Polynomial(tuple(kept))
        order = sorted(kept, key=lambda term: (-len(term[0]), [_rank(a) for a in term[0]]))
        return Polynomial(tuple(order))

    def plus(self, other: "Polynomial", factor: int = 1) -> "Polynomial":
        """``self + factor * other``"""
        total = dict(self.terms)
        for atoms, c in other.terms:
            total[atoms] = total.get(atoms, 0) + factor * c
        return Polynomial._sum(total)

    def times(self, other: "Polynomial") -> "Polynomial":
        """``self * other``"""
        for number, rest in ((self.constant, other), (other.constant, self)):
            if number:
                return Polynomial(tuple((atoms, number * c) for atoms, c in rest.terms))
        total: dict[Monomial, int] = {}
        for (a, c), (b, d) in itertools.product(self.terms, other.terms):
            atoms = _monomial((*a, *b))
            total[atoms] = total.get(atoms, 0) + c * d
        return Polynomial._sum(total)

    @property
    def constant(self) -> int | None:
        """The value, if no dim changes it."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def at(self, sizes: Sizes) -> int:
        """Its value for ``sizes``."""
        return sum(c * prod(atom.at(sizes) for atom in atoms) for atoms, c in self.terms)

    @property
    def dims(self) -> frozenset[Dim]:
        """Those it depends on."""
        return frozenset[Dim]().union(*(a.dims for atoms, _ in self.terms for a in atoms))

    @property
    def roots(self) -> frozenset[Dim]:
        """The dims of arguments that decide it."""
        return frozenset[Dim]().union(*(dim.roots for dim in self.dims))

    @property
    def text(self) -> str:
        """As C, C++ and Python write it. Divisions are of numbers that are not negative."""
        if not self.terms:
            return "0"
        parts = [_term_text(atoms, c) for atoms, c in self.terms]
        return parts[0] if len(self.terms) == 1 and len(parts[0].split()) == 1 else _joined(parts)

    @property
    def bounds(self) -> Bounds:
        """Bounds over the ranges of the dims: sound, and tight for sums of one sign, and where a
        dim is computed of others."""
        if any(dim.of is not None for dim in self.dims):
            known = _bounds_of_all(self)
            if known is not None:
                return known
        low = high = 0
        for atoms, c in self.terms:
            least, most = _product([atom.bounds for atom in atoms])
            low += min(c * least, c * most)
            high += max(c * least, c * most)
        shifted = self._from(0), self._from(1)
        known = [*shifted, self._without_quotient()]
        least = max([low, *(p[0] for p in known if p[0] is not None)])
        most = min([high, *(p[1] for p in known if p[1] is not None)])
        return least, most

    def _without_quotient(self) -> tuple[int | None, int | None]:
        """Bounds with ``q = (over - r) / n`` in the place of a quotient ``q = over // n``, where
        ``0 <= r < n``: so ``S - S // 2`` is positive."""
        quotients = [a for atoms, _ in self.terms for a in atoms if isinstance(a, Quotient)]
        if not quotients:
            return None, None
        quotient = quotients[0]
        n = quotient.under.constant
        if n is None or n < 1 or any(atoms.count(quotient) > 1 for atoms, _ in self.terms):
            return None, None
        rest = Polynomial((((Dim(f"{quotient.text}'s rest", 0, n - 1, 0),), 1),))
        whole = quotient.over.plus(rest, -1)
        scaled = Polynomial.of(0)
        for atoms, c in self.terms:
            other = _without(atoms, (quotient,))
            part = Polynomial(((atoms, c * n),))
            if other is not None:
                part = Polynomial(((other, c),)).times(whole)
            scaled = scaled.plus(part)
        low, high = scaled.bounds
        return -(-low // n), high // n

    def _from(self, end: int) -> tuple[int | None, int | None]:
        """Bounds from the dims' distances to one end: with S = low + t a sum of positive terms
        in t is least at t = 0."""
        moved = Polynomial.of(0)
        for atoms, c in self.terms:
            part = Polynomial.of(c)
            for atom in atoms:
                base, sign = Polynomial.of(atom.bounds[end]), (1, -1)[end]
                part = part.times(base.plus(Polynomial((((atom,), sign),))))
            moved = moved.plus(part)
        const = dict(moved.terms).get((), 0)
        signs = {c > 0 for atoms, c in moved.terms if atoms}
        return (const if signs <= {True} else None), (const if signs <= {False} else None)

    def divided(self, under: "Polynomial") -> "tuple[Polynomial, Polynomial]":
        """``(whole, rest)`` with ``self = whole * under + rest``, by leading terms."""
        whole, rest, left = Polynomial.of(0), Polynomial.of(0), self
        lead, factor = under.terms[0]
        while left.terms:
            atoms, c = left.terms[0]
            quotient = _without(atoms, lead)
            times = c // factor if quotient is not None else 0
            if quotient is None or times == 0:
                term = Polynomial((left.terms[0],))
                rest, left = rest.plus(term), left.plus(term, -1)
                continue
            part = Polynomial(((quotient, times),))
            whole, left = whole.plus(part), left.plus(part.times(under), -1)
            if left.terms and left.terms[0][0] == atoms:
                term = Polynomial((left.terms[0],))
                rest, left = rest.plus(term), left.plus(term, -1)
        return whole, rest


@lru_cache(maxsize=1 << 14)
def _bounds_of_all(formula: Polynomial) -> Bounds | None:
    """The least and the largest value of all; ``None`` where there are too many."""
    every = sizes_of(formula.roots, _MOST)
    if every is None:
        return None
    values = list(map(formula.at, every))
    return min(values), max(values)


_MOST = 1 << 14
"""Sizes for which a formula is computed to know its bounds."""


def _term_text(atoms: Monomial, coefficient: int) -> str:
    factors = [a.text for a in atoms]
    if coefficient != 1 or not factors:
        factors.insert(0, str(coefficient))
    return " * ".join(factors)


def _joined(parts: Sequence[str]) -> str:
    return f"({' + '.join(parts)})"


def _without(atoms: Monomial, gone: Monomial) -> Monomial | None:
    """``atoms`` with the factors ``gone`` taken out; ``None`` if one is missing."""
    left = list(atoms)
    for atom in gone:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _product(bounds: Sequence[Bounds]) -> Bounds:
    low = high = 1
    for a, b in bounds:
        corners = (low * a, low * b, high * a, high * b)
        low, high = min(corners), max(corners)
    return low, high


def content(*formulas: Polynomial) -> int:
    """The greatest number that divides every coefficient."""
    return math.gcd(*(c for formula in formulas for _, c in formula.terms))


def reduced(formula: Polynomial, n: int) -> Polynomial:
    """``formula / n``, which divides it."""
    return Polynomial(tuple((atoms, c // n) for atoms, c in formula.terms))


def to_data(formula: Polynomial) -> list[object]:
    """A formula as lists of strings and numbers."""
    return [[[_atom_data(atom) for atom in atoms], c] for atoms, c in formula.terms]


def _atom_data(atom: Atom) -> object:
    match atom:
        case Dim():
            return dims.to_data(atom)
        case Quotient(over, under):
            return ["/", to_data(over), to_data(under)]
        case Remainder(over, under):
            return ["%", to_data(over), to_data(under)]


def from_data(data: Sequence[Any]) -> Polynomial:
    """The inverse of ``to_data``."""
    return Polynomial(tuple((tuple(map(_atom_from, atoms)), int(c)) for atoms, c in data))


def _atom_from(data: Sequence[Any]) -> Atom:
    match data:
        case ["/", over, under]:
            return Quotient(from_data(over), from_data(under))
        case ["%", over, under]:
            return Remainder(from_data(over), from_data(under))
        case _:
            return dims.from_data(data)


def computed(formula: Polynomial) -> Operand:
    """A formula as what a size is computed of."""
    total: Operand = 0
    for atoms, c in formula.terms:
        term: Operand = c
        for atom in atoms:
            factor = _computed_atom(atom)
            term = factor if term == 1 else SizeExpression("operator.mul", (term, factor))
        total = term if total == 0 else SizeExpression("operator.add", (total, term))
    return total


def _computed_atom(atom: Atom) -> Operand:
    if isinstance(atom, Dim):
        return atom
    function = "operator.floordiv" if isinstance(atom, Quotient) else "operator.mod"
    return SizeExpression(function, (computed(atom.over), computed(atom.under)))
