"""Integer index algebra: affine sums over loop axes, floor-divisions and remainders, with ranges.

::

    index  =  const + coefficient * atom + ...
    atom   =  axis | floordiv(index, n) | mod(index, n) | value(formula, lo, hi)    n > 0

The algebra never looks into the formula of a value: it is given its free axes and its key. What
formulas are, ``loop/expr.py`` says, which stands above this room as ``loop/traverse.py`` does.
Every constructor simplifies, using the range of each atom, so that equal offsets tend to be
equal objects::

    (r*C + c) // C           ->  r                       0 <= c < C
    (r*C + c) % C            ->  c                       0 <= c < C
    (f // T) * T + f % T     ->  f
    (f // A) // B            ->  f // (A*B)
    (f % (A*B)) // B         ->  (f // B) % A
    (f // B) % A * B + f % B ->  f % (A*B)

Division rounds down and a remainder is never negative, as in Python. Terms are in a canonical
order that depends only on the order in which axes were made.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Union, final

from treadle.algebra.extents import (
    Size,
    common_divisor,
    divides,
    is_negative,
    is_zero,
    same,
    sample_of,
    size_key,
    split_off,
    surely_less,
)
from treadle.util.errors import VerifyError, require

Key = tuple[object, ...]
"""Nested tuples of numbers and strings: equal exactly when the structures are."""

_serial = itertools.count()
_NO_AXES = frozenset["Axis"]()


class _Arithmetic:
    """Operators that an axis and an index share; each gives a simplified ``Index``."""

    __slots__ = ()

    def __add__(self, other: "IndexLike") -> "Index":
        return combine(((_of(self), 1), (Index.of(other), 1)))

    def __radd__(self, other: int) -> "Index":
        return combine(((_of(self), 1),), other)

    def __sub__(self, other: "IndexLike") -> "Index":
        return combine(((_of(self), 1), (Index.of(other), -1)))

    def __rsub__(self, other: int) -> "Index":
        return combine(((_of(self), -1),), other)

    def __mul__(self, factor: int) -> "Index":
        return combine(((_of(self), factor),))

    def __rmul__(self, factor: int) -> "Index":
        return combine(((_of(self), factor),))

    def __neg__(self) -> "Index":
        return combine(((_of(self), -1),))

    def __floordiv__(self, divisor: int) -> "Index":
        return _divmod(_of(self), divisor)[0]

    def __mod__(self, divisor: int) -> "Index":
        return _divmod(_of(self), divisor)[1]


@final
@dataclass(frozen=True, eq=False, slots=True)
class Axis(_Arithmetic):
    """A loop variable, ``0 <= axis < extent``; two axes are never equal. It sorts by age."""

    extent: int
    serial: int = field(default_factory=_serial.__next__, init=False, repr=False)
    as_index: "Index" = field(init=False, repr=False)
    """An axis of one value at most is the number zero."""

    def __post_init__(self) -> None:
        require(self.extent >= 0, VerifyError, f"an axis of extent {self.extent}")
        single = surely_less(self.extent, 2)
        _fill(self, as_index=ZERO if single else Index(0, ((self, 1),)))

    @property
    def bounds(self) -> tuple[int, int]:
        """Inclusive; an empty axis counts as its one impossible value, zero. One that is empty
        for some sizes has no values for those, so that any bounds are right there."""
        return 0, 0 if surely_less(self.extent, 1) else self.extent - 1

    @property
    def axes(self) -> "frozenset[Axis]":
        """Itself alone."""
        return frozenset((self,))

    @property
    def key(self) -> Key:
        """What tells it from all other atoms."""
        return 0, self.serial


class _Keyed:
    """Structural equality through ``key``, whose hash is taken once."""

    __slots__ = ()
    key: Key
    hash: int

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Keyed) or type(self) is not type(other):
            return NotImplemented
        return self.hash == other.hash and self.key == other.key

    def __hash__(self) -> int:
        return self.hash


def _fill(node: object, **derived: object) -> None:
    """Set the derived fields of a frozen node, once, while it is made."""
    for name, value in derived.items():
        object.__setattr__(node, name, value)


class _Divided(_Keyed):
    """What an index divided by a number gives."""

    __slots__ = ()
    index: "Index"

    @property
    def axes(self) -> frozenset[Axis]:
        """Those of the index that is divided."""
        return self.index.axes


@final
@dataclass(frozen=True, eq=False, slots=True)
class FloorDiv(_Divided):
    """``index // n``. Made by ``//`` alone, which simplifies first."""

    index: "Index"
    n: int
    bounds: tuple[int, int] = field(init=False, repr=False)
    key: Key = field(init=False, repr=False)
    hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        low, high = self.index.bounds
        key = (1, size_key(self.n), self.index.key)
        _fill(self, bounds=(low // self.n, high // self.n), key=key, hash=hash(key))


@final
@dataclass(frozen=True, eq=False, slots=True)
class Mod(_Divided):
    """``index % n``, never negative. Made by ``%`` alone, which simplifies first."""

    index: "Index"
    n: int
    bounds: tuple[int, int] = field(init=False, repr=False)
    key: Key = field(init=False, repr=False)
    hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = (2, size_key(self.n), self.index.key)
        _fill(self, bounds=(0, self.n - 1), key=key, hash=hash(key))


class Formula:
    """What computes a value: a node of ``expr.py``, where ``Expr`` is the closed union of all."""

    __slots__ = ()


@final
@dataclass(frozen=True, eq=False, slots=True)
class Value(_Keyed):
    """A formula's integer value, known to lie in ``lo <= value <= hi``: an embedding's row.

    ``axes`` are the free axes of the formula; ``structure`` is equal for equal formulas. Made by
    ``value_index`` of ``traverse.py``, which knows both.
    """

    formula: Formula
    lo: int
    hi: int
    axes: frozenset[Axis] = field(repr=False)
    structure: Key = field(repr=False)
    key: Key = field(init=False, repr=False)
    hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.lo <= self.hi, VerifyError, f"no value lies in {self.lo}..{self.hi}")
        key = (3, size_key(self.lo), size_key(self.hi), self.structure)
        _fill(self, key=key, hash=hash(key))

    @property
    def bounds(self) -> tuple[int, int]:
        """Inclusive."""
        return self.lo, self.hi

    @property
    def as_index(self) -> "Index":
        """The value as an index; a number where there is one possible value only."""
        return ZERO + self.lo if self.lo == self.hi else Index(0, ((self, 1),))


Atom = Axis | FloorDiv | Mod | Value


@final
@dataclass(frozen=True, eq=False, slots=True)
class Index(_Keyed, _Arithmetic):
    """``const + sum(coefficient * atom)``: no zero coefficient, no atom twice, sorted.

    ``bounds`` is inclusive and sound, not always tight. Build one with ``Index.of`` and
    operators; the constructor itself does not simplify.
    """

    const: int
    terms: tuple[tuple[Atom, int], ...]
    bounds: tuple[int, int] = field(init=False, repr=False)
    axes: frozenset[Axis] = field(init=False, repr=False)
    values: tuple[Value, ...] = field(init=False, repr=False)
    """The values of formulas that this index depends on."""
    key: Key = field(init=False, repr=False)
    hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        low = high = self.const
        values: tuple[Value, ...] = ()
        for atom, coefficient in self.terms:
            least, most = atom.bounds
            if is_negative(coefficient):
                least, most = most, least
            low += coefficient * least
            high += coefficient * most
            if isinstance(atom, Value):
                values += (atom,)
            elif not isinstance(atom, Axis):
                values += atom.index.values
        axes = self.terms[0][0].axes if self.terms else _NO_AXES
        if len(self.terms) > 1:
            axes = axes.union(*(atom.axes for atom, _ in self.terms))
        key = (size_key(self.const), tuple([(atom.key, size_key(c)) for atom, c in self.terms]))
        put = object.__setattr__  # not ``_fill``: most of a schedule's time is spent here
        put(self, "bounds", (low, high))
        put(self, "axes", axes)
        put(self, "values", values)
        put(self, "key", key)
        put(self, "hash", hash(key))

    @staticmethod
    def of(value: "IndexLike") -> "Index":
        """A number or an axis as an index."""
        if isinstance(value, Index):
            return value
        if isinstance(value, Axis):
            return value.as_index
        require(not isinstance(value, bool), VerifyError, "a truth value is not an index")
        exact = value if isinstance(value, Size) else int(value)
        return ZERO if is_zero(exact) else Index(exact, ())

    @property
    def is_const(self) -> bool:
        """Whether it is a number."""
        return not self.terms

    def coefficient(self, atom: Atom) -> int:
        """The factor of ``atom`` in the sum; zero where it does not occur at top level."""
        return next((c for a, c in self.terms if a == atom), 0)


IndexLike = Union[int, Axis, Index]  # noqa: UP007  (strings above refer to it)
ZERO = Index(0, ())


def _of(value: _Arithmetic) -> Index:
    return Index.of(value) if isinstance(value, Axis | Index) else ZERO


def linear(indices: Sequence[IndexLike], strides: Sequence[int], offset: int = 0) -> Index:
    """``offset + sum(index * stride)``."""
    pairs = zip(indices, strides, strict=True)
    return combine([(Index.of(index), stride) for index, stride in pairs], offset)


def unflatten(index: IndexLike, shape: Sequence[int]) -> tuple[Index, ...]:
    """The coordinates of a row-major position: ``f`` in (R, C) -> ``(f // C, f % C)``.

    ``index`` lies in the shape; the first coordinate is not reduced.
    """
    if any(is_zero(extent) for extent in shape):
        return (ZERO,) * len(shape)
    rest = Index.of(index)
    found: list[Index] = []
    for extent in reversed(shape[1:]):
        rest, remainder = _divmod(rest, extent)
        found.append(remainder)
    if shape:
        found.append(rest)
    return tuple(reversed(found))


def combine(parts: Sequence[tuple[Index, int]], const: int = 0) -> Index:
    """``const + sum(index * factor)``, like terms collected, quotients and remainders rejoined."""
    total: dict[Atom, int] = {}
    for index, factor in parts:
        const += index.const * factor
        for atom, coefficient in index.terms:
            total[atom] = total.get(atom, 0) + coefficient * factor
    total = {atom: c for atom, c in total.items() if isinstance(c, Size) or c}
    for atom in total:
        if isinstance(atom, Mod):
            joined = _rejoin(atom, total, const)
            if joined is not None:
                return joined
    if not total:
        return ZERO if is_zero(const) else Index(const, ())
    return Index(const, tuple(sorted(total.items(), key=_order)))


def _order(term: tuple[Atom, int]) -> Key:
    return term[0].key


def _rejoin(mod: Mod, total: dict[Atom, int], const: int) -> Index | None:
    """``n * (f // n) + f % n -> f`` and ``n * ((f // n + d) % m) + f % n -> (f + n*d) % (n*m)``.

    The first needs ``f // n`` to be one atom, which it is up to a constant: ``f`` is reduced.
    """
    factor, quotient = total[mod], mod.index // mod.n
    if len(quotient.terms) != 1 or not same(quotient.terms[0][1], 1):
        return None
    atom, wanted = quotient.terms[0][0], factor * mod.n
    if same(total.get(atom, 0), wanted):
        whole = mod.index - mod.n * quotient.const
        return combine([*_without(total, mod, atom), (whole, factor)], const)
    for other, coefficient in total.items():
        if not same(coefficient, wanted):
            continue
        if (
            isinstance(other, FloorDiv)
            and same(other.n, mod.n)
            and other.index % mod.n == _term(mod)
        ):
            return combine([*_without(total, mod, other), (other.index, factor)], const)
        if isinstance(other, Mod) and same(other.index.coefficient(atom), 1):
            joined = (mod.index + (other.index - quotient) * mod.n) % (mod.n * other.n)
            return combine([*_without(total, mod, other), (joined, factor)], const)
    return None


def _without(total: dict[Atom, int], *gone: Atom) -> list[tuple[Index, int]]:
    return [(_term(atom, c), 1) for atom, c in total.items() if atom not in gone]


def _term(atom: Atom, coefficient: int = 1) -> Index:
    return Index(0, ((atom, coefficient),))


@lru_cache(maxsize=1 << 14)
def _divmod(index: Index, n: int) -> tuple[Index, Index]:
    """``(index // n, index % n)``, made together so that ``combine`` can rejoin them.

    ``index = n*whole + part`` first; then ``part`` alone is divided.
    """
    require(surely_less(0, n), VerifyError, f"division of an index by {n}")
    if same(n, 1):
        return index, ZERO
    whole, part = _split(index, n)
    quotient, remainder = _divide_part(part, n)
    return whole + quotient, remainder


def _split(index: Index, n: int) -> tuple[Index, Index]:
    """``index = n*whole + part``: coefficients of ``part`` are smaller than ``n``."""
    whole: list[tuple[Atom, int]] = []
    part: list[tuple[Atom, int]] = []
    for atom, coefficient in index.terms:
        negative = is_negative(coefficient)
        times = split_off(-coefficient if negative else coefficient, n)[0]
        times = -times if negative else times
        if not is_zero(times):
            whole.append((atom, times))
        left = coefficient - times * n
        if not is_zero(left):
            part.append((atom, left))
    above, below = split_off(index.const, n)
    return (
        combine([(_term(*term), 1) for term in whole], above),
        combine([(_term(*term), 1) for term in part], below),
    )


def _divide_part(part: Index, n: int) -> tuple[Index, Index]:
    """``(part // n, part % n)`` where no coefficient of ``part`` reaches ``n``."""
    multiple = _multiple(part.bounds, n)
    if multiple is not None:
        return ZERO + multiple, part - multiple * n
    for divisor in _divisors([c for _, c in part.terms], n):
        found = _by_divisor(part, n, divisor)
        if found is not None:
            return found
    if len(part.terms) == 1 and same(part.terms[0][1], 1):
        found = _of_atom(part.terms[0][0], part.const, n)
        if found is not None:
            return found
    part_mod = _reduce_mods(part, n)
    if part_mod is not part:
        return _term(FloorDiv(part, n)), part_mod % n
    return _term(FloorDiv(part, n)), _term(Mod(part, n))


def _divisors(coefficients: list[int], n: int) -> list[int]:
    """Divisors of ``n`` that leave whole the biggest terms, or one term, or all of them."""
    positive = (-c if is_negative(c) else c for c in coefficients)
    ordered = sorted(positive, key=sample_of, reverse=True)
    of_biggest = itertools.accumulate(ordered, common_divisor, initial=n)
    found = {*of_biggest, *(common_divisor(c, n) for c in ordered)} - {1, n}
    return sorted(found, key=sample_of, reverse=True)


def _multiple(bounds: tuple[int, int], n: int) -> int | None:
    """The one ``q`` with ``n*q <= low`` and ``high < n*(q + 1)``, if there is one."""
    low, high = bounds
    if type(low) is int and type(high) is int and type(n) is int:
        return low // n if low // n == high // n else None
    for q in (split_off(low, n)[0], split_off(high, n)[0], split_off(low, n)[0] - 1):
        if not surely_less(n * q - 1, low):
            continue
        if surely_less(high, n * (q + 1)):
            return q
    return None


def _by_divisor(part: Index, n: int, g: int) -> tuple[Index, Index] | None:
    """``part = g*coarse + fine`` with ``0 <= fine < g``, ``g`` a divisor of ``n``.

    Then ``part // n = coarse // (n/g)`` and ``part % n = g * (coarse % (n/g)) + fine``.
    """
    coarse = [(_term(atom, c // g), 1) for atom, c in part.terms if divides(g, c)]
    above, below = split_off(part.const, g)
    fine = combine([(_term(atom, c), 1) for atom, c in part.terms if not divides(g, c)], below)
    shift = _multiple(fine.bounds, g)
    if shift is None:
        return None
    quotient, remainder = _divmod(combine(coarse, above + shift), n // g)
    return quotient, remainder * g + fine - shift * g


def _of_atom(atom: Atom, const: int, n: int) -> tuple[Index, Index] | None:
    """Quotient and remainder of ``atom + const`` where the atom is itself one of these."""
    if isinstance(atom, FloorDiv):  # (f//a + c) // n = (f + c*a) // (a*n)
        quotient = (atom.index + const * atom.n) // (atom.n * n)
        return quotient, _term(Mod(_term(atom) + const, n))
    if isinstance(atom, Mod) and is_zero(const) and divides(n, atom.n):
        quotient, remainder = _divmod(atom.index, n)
        return quotient % (atom.n // n), remainder
    return None


def _reduce_mods(part: Index, n: int) -> Index:
    """``c*(f % a)`` is ``c*f`` modulo ``n`` where ``n`` divides ``c*a``."""
    if not any(isinstance(atom, Mod) and divides(n, c * atom.n) for atom, c in part.terms):
        return part
    return combine(
        [
            (atom.index, c)
            if isinstance(atom, Mod) and divides(n, c * atom.n)
            else (_term(atom, c), 1)
            for atom, c in part.terms
        ],
        part.const,
    )
