"""Patterns of rules: a small language over nodes of a graph.

::

    Pattern   =  Variable x              a value or a constant, everywhere the same
              |  Call f                  a call of one operation of a set, its arguments Patterns
              |  List [Pattern, ...]     a list of as many
              |  Each Pattern            a list of any length, each of them a Pattern
              |  Constant                no value of the graph: a dtype, a dim, or a number
              |  Exactly v               that constant
              |  Anything
              |  Read Pattern            and how many others may read it
              |  Chain f ... Pattern     any number of calls of a set, of one value each, none too
              |  Named x Call            whatever call it is, under a name

A Call that a program uses twice is one Call, and matches one value. Programs become patterns in
``pattern_programs.py``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

Test: TypeAlias = Callable[[Any], bool]


@final
@dataclass(frozen=True, slots=True)
class PatternVariable:
    """Whatever stands there, under a name."""

    name: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class PatternCall:
    """A call of one of the operations that are the keys; values: arguments by name. ``rest``:
    whether others are ignored. ``words``: the operations. ``exchanged``: the same with the first
    two arguments in the other order, if either will do."""

    arguments: "Mapping[object, Mapping[str, Pattern]]"
    rest: bool
    words: str
    exchanged: "Mapping[object, Mapping[str, Pattern]] | None" = None

    def __str__(self) -> str:
        return self.words


@final
@dataclass(frozen=True, slots=True)
class ListPattern:
    """A list or tuple of these."""

    items: "tuple[Pattern, ...]"


@final
@dataclass(frozen=True, slots=True)
class Each:
    """A list or tuple of any length. ``names``: the variables of ``item``, each with that of the
    rule which is the list of what it stands for."""

    item: "Pattern"
    names: tuple[tuple[str, str], ...]


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """What is not a value of the graph and passes ``test``, or with ``number`` is one number
    everywhere. ``name``: the variable that is it from then on."""

    test: Test | None
    words: str
    number: bool
    name: str = ""


@final
@dataclass(frozen=True, slots=True)
class Exactly:
    """This constant, of this type."""

    value: object


@final
@dataclass(frozen=True, slots=True)
class Anything:
    """What is ignored."""


@final
@dataclass(frozen=True, slots=True)
class Read:
    """``inner``, which others may read; ``count``: as often as that, matched readers included."""

    inner: "Pattern"
    count: int | None


@final
@dataclass(frozen=True, slots=True)
class ChainPattern:
    """``inner`` through calls of ``targets``, each of the value before it, as many as there are.
    ``name``: the variable that is the list of them, the last first."""

    targets: frozenset[object]
    inner: "Pattern"
    name: str = ""


@final
@dataclass(frozen=True, slots=True)
class NamedCall:
    """``call``, which the variable ``name`` stands for."""

    call: "PatternCall"
    name: str


Pattern: TypeAlias = (
    PatternVariable
    | PatternCall
    | ListPattern
    | Each
    | Constant
    | Exactly
    | Anything
    | Read
    | ChainPattern
    | NamedCall
)


@final
@dataclass(frozen=True, slots=True)
class Roots:
    """What a pattern ends in, in the order of its return; ``calls`` without what is said of their
    readers. ``shared``: whether all its values may have readers elsewhere."""

    patterns: tuple[Pattern, ...]
    calls: tuple[PatternCall, ...]
    shared: bool = False


def inner_of(pattern: Pattern) -> Pattern:
    """The pattern without what is said of its readers, and without its name."""
    match pattern:
        case Read(inner, _):
            return inner_of(inner)
        case NamedCall(call, _):
            return call
        case _:
            return pattern


def parts_of(pattern: Pattern) -> Iterator[Pattern]:
    """The patterns that it is directly made of. What a list of any length is made of is none."""
    match pattern:
        case PatternCall(arguments):
            for each in arguments.values():
                yield from each.values()
        case ListPattern(items):
            yield from items
        case Read(inner, _) | ChainPattern(inner=inner):
            yield inner
        case NamedCall(call, _):
            yield call
        case _:
            pass
