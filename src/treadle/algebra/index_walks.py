"""Walks over an index: its numbers, its text, and parts of it replaced."""

from collections.abc import Callable, Iterator, Mapping

from treadle.algebra.extents import Size, is_zero, sample_of
from treadle.algebra.index import Atom, Axis, FloorDiv, Index, IndexLike, Mod, Value, combine


def numbers_in(index: Index) -> Iterator[int]:
    """The numbers of an index, also of those inside: constants, factors, what parts are divided by,
    and the bounds of values."""
    yield index.const
    for atom, factor in index.terms:
        yield factor
        match atom:
            case FloorDiv() | Mod():
                yield atom.n
                yield from numbers_in(atom.index)
            case Value():
                yield from atom.bounds
            case Axis():
                pass


def index_text(
    index: Index, name: Callable[[Axis | Value], str], number: Callable[[int], str]
) -> str:
    """``8*i + j``: rows before columns, as people write offsets; equal factors keep their order."""
    terms = sorted(index.terms, key=lambda term: -sample_of(term[1]))
    parts = [_product_text(_atom_text(atom, name, number), c, number) for atom, c in terms]
    if not is_zero(index.const) or not parts:
        parts.append(number(index.const))
    signed = (f"- {part[1:]}" if part.startswith("-") else f"+ {part}" for part in parts[1:])
    return " ".join((parts[0], *signed))


def _atom_text(
    atom: Atom, name: Callable[[Axis | Value], str], number: Callable[[int], str]
) -> str:
    if isinstance(atom, Axis | Value):
        return name(atom)
    sign = "//" if isinstance(atom, FloorDiv) else "%"
    inner = index_text(atom.index, name, number)
    operand = f"({inner})" if " " in inner or "*" in inner else inner
    return f"({operand}{sign}{number(atom.n)})"


def _product_text(atom: str, coefficient: int, number: Callable[[int], str]) -> str:
    if isinstance(coefficient, Size):
        return f"{number(coefficient)}*{atom}"
    if coefficient in (1, -1):
        return atom if coefficient == 1 else f"-{atom}"
    return f"{coefficient}*{atom}"


def replace_axes(
    index: Index, mapping: Mapping[Axis, IndexLike], on_value: Callable[[Value], Index]
) -> Index:
    """``index`` with axes replaced, simplified anew. ``on_value`` does the same to a value."""
    if index.axes.isdisjoint(mapping):
        return index

    def atom_of(atom: Atom) -> Index:
        match atom:
            case Axis():
                return Index.of(mapping.get(atom, atom))
            case FloorDiv():
                return replace_axes(atom.index, mapping, on_value) // atom.n
            case Mod():
                return replace_axes(atom.index, mapping, on_value) % atom.n
            case Value():
                return on_value(atom)

    return combine([(atom_of(atom), c) for atom, c in index.terms], index.const)


def replace_values(index: Index, on_value: Callable[[Value], Index]) -> Index:
    """``index`` with each ``Value`` replaced by an index."""
    if not index.values:
        return index

    def atom_of(atom: Atom) -> Index:
        match atom:
            case Axis():
                return Index.of(atom)
            case FloorDiv():
                return replace_values(atom.index, on_value) // atom.n
            case Mod():
                return replace_values(atom.index, on_value) % atom.n
            case Value():
                return on_value(atom)

    return combine([(atom_of(atom), c) for atom, c in index.terms], index.const)
