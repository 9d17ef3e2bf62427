"""Conditions on indices, and terms for elements of values: the meaning of a mask at each position.

::

    condition  =  true | false | index <= 0 | all of conditions | any of conditions
    term       =  condition | index | number | unread | condition ? term : term

An ``Element`` is an integer (or boolean) that is known only at run time: the only fact about it is
that it is the same wherever value and indices are the same.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from treadle.algebra.extents import surely_less
from treadle.algebra.index import ZERO, Axis, Formula, Index, Value


@final
@dataclass(frozen=True, slots=True)
class Element(Formula):
    """``value[at]``, which a run decides. ``value`` is its name in the graph, ``known_as`` what
    the user calls it."""

    value: str
    at: tuple[Index, ...]
    known_as: str


def element(of: Element, low: int, high: int) -> Index:
    """The element as an index, with its inclusive bounds."""
    axes = frozenset[Axis]().union(*(place.axes for place in of.at))
    structure = ("element", of.value, *(place.key for place in of.at))
    return Value(of, low, high, axes, structure).as_index


@final
@dataclass(frozen=True, slots=True)
class AtMost:
    """``index <= 0``"""

    index: Index


@final
@dataclass(frozen=True, slots=True)
class All:
    """Every one of at least two conditions."""

    parts: "tuple[Condition, ...]"


@final
@dataclass(frozen=True, slots=True)
class AnyOne:
    """One of at least two conditions."""

    parts: "tuple[Condition, ...]"


Condition = bool | AtMost | All | AnyOne


@final
@dataclass(frozen=True, slots=True)
class Unread:
    """An element of a value that is not an integer, and of which nothing is known. ``value`` is
    its name in the graph."""

    value: str


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


Numeric = Index | IndexNumber | Unread | Choice
IndexExpr = Condition | Numeric


def at_most(index: Index) -> Condition:
    """``index <= 0``, decided where its bounds decide it."""
    low, high = index.bounds
    if surely_less(high, 1):
        return True
    return False if surely_less(0, low) else AtMost(index)


def equal(left: Index, right: Index) -> Condition:
    """``left == right``"""
    return all_of(at_most(left - right), at_most(right - left))


def within(index: Index, low: int, high: int) -> Condition:
    """``low <= index <= high``"""
    return all_of(at_most(Index.of(low) - index), at_most(index - high))


def negated(condition: Condition) -> Condition:
    """Where it does not hold: integers that are not at most 0 are at least 1."""
    match condition:
        case bool():
            return not condition
        case AtMost(index):
            return at_most(1 - index)
        case All(parts):
            return any_of(*map(negated, parts))
        case AnyOne(parts):
            return all_of(*map(negated, parts))


def all_of(*conditions: Condition) -> Condition:
    """Where all hold."""
    parts = _flat(conditions, All)
    if False in parts:
        return False
    kept = [part for part in parts if part is not True]
    return All(tuple(kept)) if len(kept) > 1 else kept[0] if kept else True


def any_of(*conditions: Condition) -> Condition:
    """Where at least one holds."""
    parts = _flat(conditions, AnyOne)
    if True in parts:
        return True
    kept = [part for part in parts if part is not False]
    return AnyOne(tuple(kept)) if len(kept) > 1 else kept[0] if kept else False


def _flat(conditions: Iterable[Condition], kind: type[All] | type[AnyOne]) -> list[Condition]:
    """The conditions, each once, with those of inner ones of the same kind."""
    found: dict[Condition, None] = {}
    for condition in conditions:
        if isinstance(condition, kind):
            found |= dict.fromkeys(condition.parts)
        else:
            found[condition] = None
    return list(found)


def choice(condition: Condition, yes: Numeric, no: Numeric) -> Numeric:
    """``condition ? yes : no``"""
    if isinstance(condition, bool):
        return yes if condition else no
    return yes if yes == no else Choice(condition, yes, no)


def leaves(term: Numeric) -> Iterator[Index | IndexNumber | Unread]:
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


def indices_in(condition: Condition) -> Iterator[Index]:
    """Every ``index`` of which it says ``index <= 0``."""
    match condition:
        case bool():
            return
        case AtMost(index):
            yield index
        case All(parts) | AnyOne(parts):
            for part in parts:
                yield from indices_in(part)


def elements_in(condition: Condition) -> list[Value]:
    """The elements that decide it, each once."""
    return list(dict.fromkeys(value for index in indices_in(condition) for value in index.values))


def truth(number: float) -> bool:
    """What a floating-point number is as a boolean: NaN is true."""
    return math.isnan(number) or number != 0


def as_numeric(term: IndexExpr) -> Numeric:
    """True as 1 and false as 0."""
    return choice(term, ZERO + 1, ZERO) if isinstance(term, Condition) else term


def either(condition: Condition, yes: IndexExpr, no: IndexExpr) -> IndexExpr:
    """``condition ? yes : no`` of booleans or of numbers."""
    if isinstance(yes, Condition) and isinstance(no, Condition):
        return any_of(all_of(condition, yes), all_of(negated(condition), no))
    return choice(condition, as_numeric(yes), as_numeric(no))
