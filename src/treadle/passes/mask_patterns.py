"""What a mask of attention lets through, by name, proved for every pair of a query and a key.

::

    allowed[b, h, i, j]        query i may see key j
    everything                 always
    window                     j <= i + ahead  and  i <= j + behind      causal: ahead 0, no behind
    prefix                     j <= i  or  j < length
    blocks                     i // size == j // size,  and a window
    documents                  of[b, i] == of[b, j],    and a window
    batch                      a window, and what else only the batch tells
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.algebra.extents import same
from treadle.graph.index_formulas import (
    All,
    AnyOne,
    AtMost,
    Condition,
    Element,
    IndexNumber,
    IndexQuotient,
    IndexVariable,
    Linear,
    SizeProduct,
    Unread,
    Variable,
    all_of,
    any_of,
    at_most,
    atoms_in,
    elements_in,
    equal,
    quotient,
    variable,
    where_leaves,
)
from treadle.graph.index_proofs import Prover
from treadle.graph.index_reading import Reader, shape_of
from treadle.graph.node_info import info
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import type_of
from treadle.util.errors import require

_CANDIDATES = 4  # for each bound of a window


@final
@dataclass(frozen=True, slots=True)
class Window:
    """``i - behind <= j <= i + ahead``; no bound where there is none. Numbers may be sizes."""

    behind: Linear | None = None
    ahead: Linear | None = None

    @property
    def is_everything(self) -> bool:
        """Whether every query sees every key."""
        return self.behind is None and self.ahead is None

    @property
    def is_causal(self) -> bool:
        """Whether query ``i`` sees the keys up to ``i``: aligned at the first of both."""
        return self.behind is None and self.ahead == Linear(0)

    def __str__(self) -> str:
        match self.behind, self.ahead:
            case None, None:
                return "all true"
            case None, Linear(0, ()):
                return "causal"
            case None, ahead:
                return f"causal, {ahead} ahead"
            case behind, None:
                return f"up to {behind} behind"
            case Linear() as behind, Linear(0, ()):
                return f"sliding window of {behind.shifted(1)}"
            case behind, ahead:
                return f"window of {behind} behind and {ahead} ahead"


@final
@dataclass(frozen=True, slots=True)
class Prefix:
    """Causal, and every query sees the first ``length`` keys."""

    length: Linear

    def __str__(self) -> str:
        return f"causal, with a prefix of {self.length}"


@final
@dataclass(frozen=True, slots=True)
class Blocks:
    """Queries and keys of the same block of ``size``, within a window."""

    size: int
    within: Window

    def __str__(self) -> str:
        return f"{self.within}, in blocks of {self.size}"


@final
@dataclass(frozen=True, slots=True)
class Documents:
    """Queries and keys of the same document by the numbers in ``of``, within a window."""

    of: str
    within: Window

    def __str__(self) -> str:
        return f"{self.within}, per document by {self.of}"


@final
@dataclass(frozen=True, slots=True)
class OfBatch:
    """A pattern of the indices, and beside it what elements of the batch decide."""

    within: "Window | Prefix | Blocks"
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " & ".join([str(self.within), *self.words])


Pattern = Window | Prefix | Blocks | Documents | OfBatch


@final
@dataclass(frozen=True, slots=True)
class Mask:
    """A proved pattern, and whether places that are not allowed get a finite number."""

    pattern: Pattern
    finite: bool


@final
@dataclass(frozen=True, slots=True)
class Pairs:
    """The indices of one attention: batch, head, query and key."""

    batch: IndexVariable
    head: IndexVariable
    query: IndexVariable
    key: IndexVariable

    @staticmethod
    def of(query: fx.Node, key: fx.Node) -> "Pairs":
        """Those of a call with these operands, ``[B, H, T, D]`` both."""
        batch, head, rows, _ = shape_of(query)
        columns = shape_of(key)[2]
        return Pairs(
            IndexVariable("b", batch),
            IndexVariable("h", head),
            IndexVariable("i", rows),
            IndexVariable("j", columns),
        )

    @property
    def indices(self) -> tuple[IndexVariable, IndexVariable, IndexVariable, IndexVariable]:
        """In the order of the dims."""
        return self.batch, self.head, self.query, self.key

    @property
    def is_square(self) -> bool:
        """Whether there are as many queries as keys, whatever the sizes."""
        return same(self.query.size, self.key.size)

    def window(self, window: Window) -> Condition:
        """Where query ``i`` sees key ``j``."""
        i, j = variable(self.query), variable(self.key)
        parts: list[Condition] = []
        if window.ahead is not None:
            parts.append(at_most(j.plus(i, -1).plus(window.ahead, -1)))
        if window.behind is not None:
            parts.append(at_most(i.plus(j, -1).plus(window.behind, -1)))
        return all_of(*parts)


def mask_of(bias: fx.Node, pairs: Pairs, never: float = -math.inf) -> Mask:
    """What the number that ``bias`` adds to each score lets through; ``NoMatch`` in words.

    Numbers up to ``never`` hide a pair as -inf does, and so does the least number of the dtype.
    """
    allowed, finite = _allowed(bias, pairs, never)
    return Mask(_pattern(allowed, pairs, Prover()), finite)


def _allowed(bias: fx.Node, pairs: Pairs, never: float) -> tuple[Condition, bool]:
    """Where ``bias`` is 0. Elsewhere it is one of the numbers that hide."""
    dtype = type_of(bias).dtype
    require(dtype.is_floating_point, NoMatch, f"{bias} is no bias: {dtype}")
    rank = len(shape_of(bias))
    indices = [variable(each) for each in pairs.indices]
    reader = Reader()
    term = reader.at(bias, indices[4 - rank :])
    if isinstance(term, Unread):
        raise NoMatch(reader.reasons.get(term.node, f"{term.node} is known at run time only"))
    assert not isinstance(term, bool | AtMost | All | AnyOne), bias
    finite = set[bool]()
    if dtype is not torch.float16:  # whose least number is one that scores reach
        never = max(never, torch.finfo(dtype).min)

    def is_zero(leaf: Linear | IndexNumber | Unread) -> bool:
        match leaf:
            case IndexNumber(value) if value == 0:
                return True
            case IndexNumber(value) if value <= never:
                finite.add(value != -math.inf)
                return False
            case IndexNumber(value):
                raise NoMatch(f"{bias} adds {value} to scores")
            case Unread(node):
                raise NoMatch(f"{bias} adds {node}, which is known at run time only")
            case Linear():
                raise NoMatch(f"{bias} adds {leaf} to scores")

    return where_leaves(is_zero, term), True in finite


def _pattern(allowed: Condition, pairs: Pairs, prover: Prover) -> Pattern:
    if not elements_in(allowed):
        return _of_indices(allowed, pairs, prover)
    for window in _windows(allowed, pairs):  # elements that decide nothing after all
        if prover.equivalent(allowed, pairs.window(window)):
            return window
    parts = _conjuncts(allowed)
    known = all_of(*(each for each in parts if not elements_in(each)))
    unknown = [each for each in parts if elements_in(each)]
    within = _of_indices(known, pairs, prover)
    both = next(
        (two for two in itertools.combinations(unknown, 2) if _documents(two, pairs, prover)), None
    )
    if both is None:
        return OfBatch(within, _words(unknown))
    others = [each for each in unknown if each not in both]
    documents = _documents(both, pairs, prover)
    if not others and isinstance(within, Window):
        return Documents(documents, within)
    return OfBatch(within, (f"per document by {documents}", *_words(others)))


def _of_indices(allowed: Condition, pairs: Pairs, prover: Prover) -> Window | Prefix | Blocks:
    require(not prover.impossible(allowed), NoMatch, "it lets no pair through")
    windows = list(_windows(allowed, pairs))
    for window in windows:
        if prover.equivalent(allowed, pairs.window(window)):
            return window
    causal = pairs.window(Window(None, Linear(0)))
    for length in _prefixes(allowed, pairs):
        inside = at_most(variable(pairs.key).shifted(1).plus(length, -1))
        if prover.equivalent(allowed, any_of(causal, inside)):
            return Prefix(length)
    for size, window in itertools.product(_block_sizes(allowed), windows):
        i, j = (quotient(variable(each), size) for each in (pairs.query, pairs.key))
        if prover.equivalent(allowed, all_of(equal(i, j), pairs.window(window))):
            return Blocks(size, window)
    raise NoMatch("it is none of the patterns: all true, window, prefix, blocks, documents")


def _windows(allowed: Condition, pairs: Pairs) -> Iterator[Window]:
    """Windows whose bounds stand in the formula, the widest first."""
    behind: list[Linear | None] = [None]
    ahead: list[Linear | None] = [None]
    for linear in _both_ways(allowed):
        numbers = dict(linear.terms)
        i, j = numbers.pop(pairs.query, 0), numbers.pop(pairs.key, 0)
        if (i, j) not in ((1, -1), (-1, 1)) or not _are_sizes(numbers):
            continue
        rest = Linear(0).plus(Linear.sum(linear.constant, numbers), -1)
        (ahead if j == 1 else behind).append(rest)
    behind, ahead = (list(dict.fromkeys(each))[:_CANDIDATES] for each in (behind, ahead))
    for one, other in itertools.product(behind, [*ahead, Linear(0)]):
        yield Window(one, other)


def _prefixes(allowed: Condition, pairs: Pairs) -> Iterator[Linear]:
    """Bounds that the key has by itself."""
    for linear in _both_ways(allowed):
        numbers = dict(linear.terms)
        if numbers.pop(pairs.key, 0) == 1 and _are_sizes(numbers):
            yield Linear(1).plus(Linear.sum(linear.constant, numbers), -1)


def _block_sizes(allowed: Condition) -> list[int]:
    variables = [each for linear in atoms_in(allowed) for each in linear.variables]
    return list(dict.fromkeys(each.under for each in variables if isinstance(each, IndexQuotient)))


def _both_ways(allowed: Condition) -> Iterator[Linear]:
    """Every inequality of the formula and its opposite."""
    for linear in atoms_in(allowed):
        yield linear
        yield Linear(1).plus(linear, -1)


def _are_sizes(numbers: Iterable[Variable]) -> bool:
    return all(isinstance(each, SizeProduct) for each in numbers)


def _conjuncts(allowed: Condition) -> Sequence[Condition]:
    return allowed.parts if isinstance(allowed, All) else (allowed,)


def _documents(both: tuple[Condition, Condition], pairs: Pairs, prover: Prover) -> str:
    """The value by which pairs are of one document, if two conditions say that and nothing else;
    empty if they do not."""
    elements = elements_in(both[0])
    if len(elements) != 2:
        return ""
    left, right = elements
    moved = tuple(
        variable(pairs.key) if each == variable(pairs.query) else each for each in left.at
    )
    other = tuple(
        variable(pairs.query) if each == variable(pairs.key) else each for each in left.at
    )
    if left.node is not right.node or right.at not in (moved, other) or left.at == right.at:
        return ""
    same_number = equal(variable(left), variable(right))
    return _name(left) if prover.equivalent(all_of(*both), same_number) else ""


def _words(unknown: Sequence[Condition]) -> tuple[str, ...]:
    """What each condition reads that only the batch tells."""
    found: dict[str, None] = {}
    for each in unknown:
        names = [f"{_name(one)}[{', '.join(map(str, one.at))}]" for one in elements_in(each)]
        found[" with ".join(names)] = None
    return tuple(found)


def _name(element: Element) -> str:
    """What the user calls a value, where it is an input."""
    return info(element.node).name or element.node.name


__all__ = [
    "Blocks",
    "Documents",
    "Mask",
    "OfBatch",
    "Pairs",
    "Pattern",
    "Prefix",
    "Window",
    "mask_of",
]
