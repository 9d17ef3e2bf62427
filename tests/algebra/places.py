"""Terms at given places: what they are there."""

from treadle.algebra.conditions import All, AnyOne, AtMost, Choice, IndexNumber
from treadle.algebra.extents import at
from treadle.algebra.index import Axis, FloorDiv, Index, Mod


def number_of(index, places):
    """``places``: a number for each axis, and for the names of sizes."""
    sizes = {name: n for name, n in places.items() if isinstance(name, str)}
    total = at(index.const, sizes)
    for atom, coefficient in index.terms:
        total += at(coefficient, sizes) * _atom(atom, places, sizes)
    return total


def _atom(atom, places, sizes):
    match atom:
        case Axis():
            return places[atom]
        case FloorDiv(index, n):
            return number_of(index, places) // at(n, sizes)
        case Mod(index, n):
            return number_of(index, places) % at(n, sizes)


def is_true(condition, places):
    match condition:
        case bool():
            return condition
        case AtMost(index):
            return number_of(index, places) <= 0
        case All(parts):
            return all(is_true(each, places) for each in parts)
        case AnyOne(parts):
            return any(is_true(each, places) for each in parts)


def value(term, places):
    match term:
        case Index():
            return number_of(term, places)
        case IndexNumber(found):
            return found
        case Choice(condition, yes, no):
            return value(yes if is_true(condition, places) else no, places)
        case _:
            return is_true(term, places)
