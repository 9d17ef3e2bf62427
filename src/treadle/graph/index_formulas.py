"""Elements of a value as formulas of its indices: what a mask made of positions says of each pair.

::

    linear     =  number + sum of  number * variable
    variable   =  index | element | quotient | product of sizes
    condition  =  true | false | linear <= 0 | all of conditions | any of conditions
    term       =  condition | linear | number | unread | condition ? term : term

An ``Element`` is a whole number (or truth value) that only a run of the step knows: nothing is
concluded of it but that it is the same wherever value and indices are the same.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import fx

from treadle.algebra.extents import formula_of, largest
from treadle.algebra.polynomial import Atom, Bounds


@final
@dataclass(frozen=True, slots=True)
class IndexVariable:
    """``0 <= index < size``. Indices are told apart by name."""

    name: str
    size: int = field(compare=False)

    @property
    def bounds(self) -> Bounds:
        """Inclusive."""
        return 0, max(largest(self.size) - 1, 0)

    def __str__(self) -> str:
        return self.name


@final
@dataclass(frozen=True, slots=True)
class Element:
    """``node[at]``, a whole number between ``low`` and ``high`` that a run decides."""

    node: fx.Node
    at: "tuple[Linear, ...]"
    low: int
    high: int

    @property
    def bounds(self) -> Bounds:
        """Inclusive."""
        return self.low, self.high

    def __str__(self) -> str:
        return f"{self.node}[{', '.join(map(str, self.at))}]"


@final
@dataclass(frozen=True, slots=True)
class IndexQuotient:
    """``over // under``, rounded down; ``under`` is positive."""

    over: "Linear"
    under: int

    @property
    def bounds(self) -> Bounds:
        """Inclusive."""
        low, high = self.over.bounds
        return low // self.under, high // self.under

    def __str__(self) -> str:
        return f"({self.over}) // {self.under}"


@final
@dataclass(frozen=True, slots=True)
class SizeProduct:
    """A product of sizes that the call decides."""

    atoms: tuple[Atom, ...]

    @property
    def bounds(self) -> Bounds:
        """Inclusive; sizes are never negative."""
        low = high = 1
        for atom in self.atoms:
            least, most = atom.bounds
            low, high = low * max(least, 0), high * most
        return low, high

    def __str__(self) -> str:
        return " * ".join(atom.text for atom in self.atoms)


Variable = IndexVariable | Element | IndexQuotient | SizeProduct


@final
@dataclass(frozen=True, slots=True)
class Linear:
    """``constant + sum(number * variable)``; no number is 0, variables stand in the order of their
    words."""

    constant: int
    terms: tuple[tuple[Variable, int], ...] = ()

    @staticmethod
    def of(value: int) -> "Linear":
        """A number, or a size with its formula."""
        terms = formula_of(value).terms
        constant = sum(c for atoms, c in terms if not atoms)
        return Linear.sum(constant, {SizeProduct(atoms): c for atoms, c in terms if atoms})

    @staticmethod
    def sum(constant: int, terms: Mapping[Variable, int]) -> "Linear":
        """In canonical order."""
        kept = [(variable, number) for variable, number in terms.items() if number]
        kept.sort(key=lambda each: (type(each[0]).__name__, str(each[0])))
        return Linear(constant, tuple(kept))

    def plus(self, other: "Linear", factor: int = 1) -> "Linear":
        """``self + factor * other``"""
        total = dict(self.terms)
        for variable, number in other.terms:
            total[variable] = total.get(variable, 0) + factor * number
        return Linear.sum(self.constant + factor * other.constant, total)

    def times(self, factor: int) -> "Linear":
        """``factor * self``"""
        return Linear(0).plus(self, factor)

    def shifted(self, by: int) -> "Linear":
        """``self + by``"""
        return Linear(self.constant + by, self.terms)

    @property
    def is_constant(self) -> bool:
        """Whether no variable changes it."""
        return not self.terms

    @property
    def bounds(self) -> Bounds:
        """Inclusive, each variable on its own."""
        low = high = self.constant
        for variable, number in self.terms:
            least, most = variable.bounds
            low += min(number * least, number * most)
            high += max(number * least, number * most)
        return low, high

    @property
    def variables(self) -> Iterator[Variable]:
        """Those it is a sum of, and those inside them."""
        for variable, _ in self.terms:
            yield variable
            if isinstance(variable, IndexQuotient):
                yield from variable.over.variables

    def __str__(self) -> str:
        parts = [_times(variable, number) for variable, number in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


def _times(variable: Variable, number: int) -> str:
    return str(variable) if number == 1 else f"{number} * {variable}"


def variable(each: Variable) -> Linear:
    """A variable alone."""
    return Linear(0, ((each, 1),))


def quotient(over: Linear, under: int) -> Linear:
    """``over // under``, for a positive number."""
    if over.is_constant:
        return Linear(over.constant // under)
    return variable(IndexQuotient(over, under))


@final
@dataclass(frozen=True, slots=True)
class AtMost:
    """``linear <= 0``"""

    linear: Linear

    def __str__(self) -> str:
        return f"{self.linear} <= 0"


@final
@dataclass(frozen=True, slots=True)
class All:
    """Every one of at least two conditions."""

    parts: "tuple[Condition, ...]"

    def __str__(self) -> str:
        return f"({' and '.join(map(str, self.parts))})"


@final
@dataclass(frozen=True, slots=True)
class AnyOne:
    """One of at least two conditions."""

    parts: "tuple[Condition, ...]"

    def __str__(self) -> str:
        return f"({' or '.join(map(str, self.parts))})"


Condition = bool | AtMost | All | AnyOne


@final
@dataclass(frozen=True, slots=True)
class Unread:
    """An element of ``node``, which is no whole number, and of which nothing is known."""

    node: fx.Node


@final
@dataclass(frozen=True, slots=True)
class IndexNumber:
    """A floating-point number, as its dtype stores it."""

    value: float


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """``yes`` where the condition holds, ``no`` elsewhere."""

    condition: AtMost | All | AnyOne
    yes: "Numeric"
    no: "Numeric"


Numeric = Linear | IndexNumber | Unread | Choice
Term = Condition | Numeric


def at_most(linear: Linear) -> Condition:
    """``linear <= 0``, decided where the bounds of the variables decide it."""
    low, high = linear.bounds
    if high <= 0:
        return True
    return False if low > 0 else AtMost(linear)


def equal(left: Linear, right: Linear) -> Condition:
    """``left == right``"""
    return all_of(at_most(left.plus(right, -1)), at_most(right.plus(left, -1)))


def negated(condition: Condition) -> Condition:
    """Where it does not hold: whole numbers that are not at most 0 are at least 1."""
    match condition:
        case bool():
            return not condition
        case AtMost(linear):
            return at_most(Linear(1).plus(linear, -1))
        case All(parts):
            return any_of(*map(negated, parts))
        case AnyOne(parts):
            return all_of(*map(negated, parts))


def all_of(*conditions: Condition) -> Condition:
    """Where all hold."""
    parts = _flat(conditions, All)
    if False in parts:
        return False
    kept = [each for each in parts if each is not True]
    return All(tuple(kept)) if len(kept) > 1 else kept[0] if kept else True


def any_of(*conditions: Condition) -> Condition:
    """Where at least one holds."""
    parts = _flat(conditions, AnyOne)
    if True in parts:
        return True
    kept = [each for each in parts if each is not False]
    return AnyOne(tuple(kept)) if len(kept) > 1 else kept[0] if kept else False


def _flat(conditions: Iterable[Condition], kind: type[All] | type[AnyOne]) -> list[Condition]:
    """The conditions, each once, with those of inner ones of the same kind."""
    found: dict[Condition, None] = {}
    for each in conditions:
        if isinstance(each, kind):
            found |= dict.fromkeys(each.parts)
        else:
            found[each] = None
    return list(found)


def choice(condition: Condition, yes: Numeric, no: Numeric) -> Numeric:
    """``condition ? yes : no``"""
    if isinstance(condition, bool):
        return yes if condition else no
    return yes if yes == no else Choice(condition, yes, no)


def leaves(term: Numeric) -> Iterator[Linear | IndexNumber | Unread]:
    """Everything it may be."""
    if isinstance(term, Choice):
        yield from leaves(term.yes)
        yield from leaves(term.no)
    else:
        yield term


def map_leaves(make: Callable[[Any], Numeric], term: Numeric) -> Numeric:
    """The term with every leaf replaced."""
    if isinstance(term, Choice):
        return choice(term.condition, map_leaves(make, term.yes), map_leaves(make, term.no))
    return make(term)


def where_leaves(holds: Callable[[Any], Condition], term: Numeric) -> Condition:
    """Where the leaf that is chosen has a property."""
    if not isinstance(term, Choice):
        return holds(term)
    yes, no = where_leaves(holds, term.yes), where_leaves(holds, term.no)
    return any_of(all_of(term.condition, yes), all_of(negated(term.condition), no))


def atoms_in(condition: Condition) -> Iterator[Linear]:
    """Every ``linear`` of which it says ``linear <= 0``."""
    match condition:
        case bool():
            return
        case AtMost(linear):
            yield linear
        case All(parts) | AnyOne(parts):
            for each in parts:
                yield from atoms_in(each)


def elements_in(condition: Condition) -> list[Element]:
    """The elements that decide it, each once."""
    variables = [each for linear in atoms_in(condition) for each in linear.variables]
    return list(dict.fromkeys(each for each in variables if isinstance(each, Element)))


def truth(number: float) -> bool:
    """What a floating-point number is as a truth value: NaN is true."""
    return math.isnan(number) or number != 0


__all__ = [
    "All",
    "AnyOne",
    "AtMost",
    "Choice",
    "Condition",
    "Element",
    "IndexNumber",
    "IndexQuotient",
    "IndexVariable",
    "Linear",
    "Numeric",
    "SizeProduct",
    "Term",
    "Unread",
    "Variable",
    "all_of",
    "any_of",
    "at_most",
    "atoms_in",
    "choice",
    "elements_in",
    "equal",
    "leaves",
    "map_leaves",
    "negated",
    "quotient",
    "truth",
    "variable",
    "where_leaves",
]
