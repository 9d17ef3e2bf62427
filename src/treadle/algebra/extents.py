"""Sizes that are known only when a step is called, as integers that remember their formula.

::

    size   =  sum of  coefficient * atom * ... * atom
    atom   =  dim | size // size | size % size

A ``Size`` is an ``int``: its value is a sample, and arithmetic gives the sample's result and
the formula at once. There are three ways to compare two sizes::

    a == b, a < b                    the answer that holds for all sizes, or else an error
    same(a, b), surely_less(a, b)    whether it holds for all sizes; never an error
    guards.equal(a, b), .less(a, b)  the sample's answer, with a ``Guard`` where sizes decide it

Anything made with a ``GuardSet`` (``guards.py``) is valid for the sizes that satisfy all of its
guards. Nothing else is recorded: a comparison without a guard set has no effect.

An operation that would lose the formula (a float, a shift, text for a machine, a plain number) is
an error; functions that may lose it are explicit: ``sample_of`` for estimates, ``largest`` for
bounds, ``size_key`` for keys and orders.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NoReturn, Self, final

from treadle.algebra.dims import Dim, Sizes
from treadle.algebra.polynomial import (
    Atom,
    Polynomial,
    Quotient,
    Remainder,
    Undecided,
    content,
    reduced,
)
from treadle.util.errors import VerifyError, require


@lru_cache(maxsize=1 << 16)  # the same for all: formulas are data, and nothing is noted
def decided(formula: Polynomial, sign: str) -> bool | None:
    """Whether ``formula < 0`` or ``formula == 0``; ``None`` where sizes decide it."""
    low, high = formula.bounds
    if sign == "<":
        return True if high < 0 else False if low >= 0 else None
    if low > 0 or high < 0:
        return False
    return True if low == high == 0 else None


def difference(left: int, right: int) -> Polynomial:
    """``left - right``"""
    return formula_of(left).plus(formula_of(right), -1)


def _known(formula: Polynomial, sign: str) -> bool:
    """The answer for all sizes. ``VerifyError`` where there is none: it takes a guard, or
    ``same`` or ``surely_less``."""
    answer = decided(formula, sign)
    if answer is None:
        raise Undecided(formula, sign)
    return answer


def as_int(formula: Polynomial) -> int:
    """The number that the formula stands for: a ``Size``, or a plain one."""
    constant = formula.constant
    return Size(formula) if constant is None else constant


def _require_whole(size: "Size", other: object) -> None:
    if not isinstance(other, int):
        raise VerifyError(f"{size.formula.text} with {other!r} would lose the formula")


def _unable(name: str) -> Callable[..., NoReturn]:
    def call(self: "Size", *_: object) -> NoReturn:
        raise VerifyError(f"{self.formula.text}: {name} would lose the formula")

    return call


def formula_of(value: int) -> Polynomial:
    """The formula of a size, or of a plain number."""
    return value.formula if isinstance(value, Size) else Polynomial.of(value)


def size_of(dim: Dim) -> "Size":
    """The size that is a dim."""
    return Size(Polynomial((((dim,), 1),)))


def dim_of(size: "Size") -> Dim:
    """The inverse, of a size that is a dim alone."""
    (dim,) = size.formula.dims
    return dim


@final
class Size(int):
    """A size of a dynamic shape; as an ``int`` it is its sample."""

    formula: Polynomial

    def __new__(cls, formula: Polynomial) -> Self:
        made = super().__new__(cls, formula.sample)
        made.formula = formula
        return made

    @staticmethod
    def dim(name: str, low: int, high: int, sample: int) -> "Size":
        """The size called ``name``."""
        require(0 <= low <= sample <= high, VerifyError, f"{name}: {sample} not in {low}..{high}")
        return size_of(Dim(name, low, high, sample))

    def __reduce__(self) -> tuple[type["Size"], tuple[Polynomial]]:
        return Size, (self.formula,)

    def __add__(self, other: int) -> int:
        _require_whole(self, other)
        return as_int(self.formula.plus(formula_of(other)))

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        _require_whole(self, other)
        return as_int(self.formula.plus(formula_of(other), -1))

    def __rsub__(self, other: int) -> int:
        _require_whole(self, other)
        return as_int(formula_of(other).plus(self.formula, -1))

    def __mul__(self, other: int) -> int:
        _require_whole(self, other)
        return as_int(self.formula.times(formula_of(other)))

    __rmul__ = __mul__

    def __neg__(self) -> int:
        return self * -1

    def __pos__(self) -> int:
        return self

    def __abs__(self) -> int:
        return -self if self < 0 else self

    def __floordiv__(self, other: int) -> int:
        return _divmod(self.formula, formula_of(other))[0]

    def __rfloordiv__(self, other: int) -> int:
        return _divmod(formula_of(other), self.formula)[0]

    def __mod__(self, other: int) -> int:
        return _divmod(self.formula, formula_of(other))[1]

    def __rmod__(self, other: int) -> int:
        return _divmod(formula_of(other), self.formula)[1]

    def __divmod__(self, other: int) -> tuple[int, int]:
        return _divmod(self.formula, formula_of(other))

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return _divmod(formula_of(other), self.formula)

    def __pow__(self, power: int, _mod: int | None = None) -> Any:
        return prod([self] * power)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, int):
            return NotImplemented
        return _known(self.formula.plus(formula_of(other), -1), "==")

    def __ne__(self, other: object) -> bool:
        same = self.__eq__(other)
        return same if same is NotImplemented else not same

    def __lt__(self, other: int) -> bool:
        return _known(self.formula.plus(formula_of(other), -1), "<")

    def __ge__(self, other: int) -> bool:
        return not self < other

    def __gt__(self, other: int) -> bool:
        return _known(formula_of(other).plus(self.formula, -1), "<")

    def __le__(self, other: int) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return not _known(self.formula, "==")

    def __hash__(self) -> int:
        return hash(self.formula)

    def __int__(self) -> int:
        """The number, where all sizes give the same."""
        value = sample_of(self)
        _known(self.formula.plus(formula_of(value), -1), "==")
        return value

    def __str__(self) -> str:
        return self.formula.text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        require(not spec, VerifyError, f"a size has no format {spec!r}")
        return self.formula.text

    __float__ = _unable("a float")
    __truediv__ = __rtruediv__ = _unable("true division")
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _unable("a shift")
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _unable("bit arithmetic")
    __rpow__ = __invert__ = __round__ = bit_length = _unable("this operation")


@lru_cache(maxsize=1 << 14)
def _divmod(over: Polynomial, under: Polynomial) -> tuple[int, int]:
    """``over // under`` and ``over % under``: even parts taken out, the rest an atom."""
    if under.bounds[0] <= 0:
        said = f"division by {under.text}, which may not be positive"
        raise Undecided(under.plus(Polynomial.of(-1)), "<", said)
    whole, rest = over.divided(under)
    low, high = rest.bounds
    if low >= 0 and rest.plus(under, -1).bounds[1] < 0:
        return as_int(whole), as_int(rest)
    if high < 0 and rest.plus(under).bounds[0] >= 0:
        return as_int(whole.plus(formula_of(1), -1)), as_int(rest.plus(under))
    if low < 0 <= over.bounds[0]:  # what was taken out is too much for some sizes
        whole, rest = formula_of(0), over
    elif low < 0:  # -1 // S and the like: add multiples until it cannot be negative
        times = formula_of(-(low // under.bounds[0]))
        whole, rest = whole.plus(times, -1), rest.plus(times.times(under))
    if rest.bounds[0] < 0:
        raise Undecided(rest, "<")
    common = content(rest, under)
    small_over, small_under = reduced(rest, common), reduced(under, common)
    quotient = Polynomial((((Quotient(small_over, small_under),), 1),))
    if common == 1:
        remainder = Polynomial((((Remainder(rest, under),), 1),))
    else:
        inner = Polynomial((((Remainder(small_over, small_under),), 1),))
        remainder = inner.times(formula_of(common))
    return as_int(whole.plus(quotient)), as_int(remainder)


def sample_of(size: int) -> int:
    """A plain number for estimates, which need not be right for other sizes."""
    return size.formula.sample if isinstance(size, Size) else size


def largest(size: int) -> int:
    """A plain number that ``size`` never exceeds."""
    return size.formula.bounds[1] if isinstance(size, Size) else size


def least(size: int) -> int:
    """A plain number that ``size`` is never less than."""
    return size.formula.bounds[0] if isinstance(size, Size) else size


def at(size: int, sizes: Sizes) -> int:
    """The value for these sizes."""
    return size.formula.at(sizes) if isinstance(size, Size) else size


def surely_less(left: int, right: int) -> bool:
    """Whether ``left < right`` for all sizes. ``False`` where it depends."""
    if type(left) is int and type(right) is int:
        return left < right
    return decided(formula_of(left).plus(formula_of(right), -1), "<") is True


def lesser(left: int, right: int) -> int:
    """The one that is never more than the other. ``VerifyError`` where it depends."""
    if surely_less(left, right + 1):
        return left
    if not surely_less(right, left + 1):
        raise Undecided(difference(left, right), "<", f"{left} < {right} depends on sizes")
    return right


def greater(left: int, right: int) -> int:
    """The one that is never less than the other. ``VerifyError`` where it depends."""
    return right if same(lesser(left, right), left) else left


def same(left: int, right: int) -> bool:
    """Whether the two are equal for all sizes. ``False`` where it depends."""
    if type(left) is int and type(right) is int:
        return left == right
    return formula_of(left) == formula_of(right)


def is_zero(size: int) -> bool:
    """Whether ``size == 0`` for all sizes: then it is a plain number."""
    return type(size) is int and size == 0


def is_negative(size: int) -> bool:
    """Whether ``size < 0``, which must have one answer."""
    if type(size) is int:
        return size < 0
    answer = decided(formula_of(size), "<")
    if answer is None:
        raise Undecided(formula_of(size), "<")
    return answer


def split_off(size: int, n: int) -> tuple[int, int]:
    """``(whole, part)`` with ``size == whole * n + part``. For plain numbers ``0 <= part < n``; for
    others ``part`` is what the formula has no factor ``n`` in."""
    if type(size) is int and type(n) is int:
        return divmod(size, n)
    whole, part = formula_of(size).divided(formula_of(n))
    return as_int(whole), as_int(part)


def divides(n: int, size: int) -> bool:
    """Whether ``size`` is a multiple of ``n`` for all sizes."""
    part = split_off(size, n)[1]
    return type(part) is int and part == 0


def ceil_div(size: int, n: int) -> int:
    """``size / n`` rounded up, of numbers that are not negative."""
    return (size + n - 1) // n


def common_divisor(first: int, *others: int) -> int:
    """A number that divides all of them for all sizes: the greatest, as far as it can be seen."""
    found = first
    for size in others:
        if type(found) is int and type(size) is int:
            found = math.gcd(found, size)
        elif type(found) is int and found == 0:
            found = size
        elif (type(size) is int and size == 0) or divides(found, size):
            continue
        else:
            found = size if divides(size, found) else _shared_factors(found, size)
    return found


def _shared_factors(left: int, right: int) -> int:
    one, two = formula_of(left), formula_of(right)
    monomials = [list(atoms) for atoms, _ in (*one.terms, *two.terms)]
    shared = monomials[0]
    for other in monomials[1:]:
        left_over, both = list(other), list[Atom]()
        for atom in shared:
            if atom in left_over:
                left_over.remove(atom)
                both.append(atom)
        shared = both
    return as_int(Polynomial(((tuple(shared), content(one, two)),)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class SizeKey:
    """A size as a part of a key: equal for equal formulas, sorted by sample and then by text."""

    sample: int
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeKey) and (self.sample, self.text) == (other.sample, other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __lt__(self, other: "SizeKey | int") -> bool:
        return self._pair < _pair_of(other)

    def __gt__(self, other: "SizeKey | int") -> bool:
        return self._pair > _pair_of(other)

    @property
    def _pair(self) -> tuple[int, str]:
        return self.sample, self.text


def _pair_of(value: SizeKey | int) -> tuple[int, str]:
    return (value.sample, value.text) if isinstance(value, SizeKey) else (value, "")


def size_key(size: int) -> "int | SizeKey":
    """``size`` as a part of a key, which compares where sizes do not."""
    if type(size) is int:
        return size
    return SizeKey(sample_of(size), str(size)) if isinstance(size, Size) else size


def same_sizes(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether the formulas are the same, one by one."""
    return list(map(size_key, left)) == list(map(size_key, right))


def dims_in(sizes: Iterable[int]) -> list[Size]:
    """The dims that change any of ``sizes``, by name: each as a size of its own."""
    found = {dim for size in sizes if isinstance(size, Size) for dim in size.formula.dims}
    return [size_of(dim) for dim in sorted(found)]


def with_dims(size: int, dims: Mapping[str, Size]) -> int:
    """The same formula over other dims, by name."""
    if not isinstance(size, Size):
        return size
    terms = size.formula.terms
    return sum((prod([_atom_with(a, dims) for a in atoms], start=c) for atoms, c in terms), start=0)


def _atom_with(atom: Atom, dims: Mapping[str, Size]) -> int:
    if isinstance(atom, Dim):
        return dims.get(atom.name, size_of(atom))
    over, under = with_dims(as_int(atom.over), dims), with_dims(as_int(atom.under), dims)
    return over // under if isinstance(atom, Quotient) else over % under


def all_at(numbers: Iterable[int], sizes: Sizes) -> tuple[int, ...]:
    """A shape, or strides, with every ``Size`` as a plain number."""
    return tuple([at(number, sizes) for number in numbers])
