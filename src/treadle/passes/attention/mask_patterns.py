"""Named patterns of attention masks, proved for every pair of a query and a key.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import fx

from treadle.algebra.conditions import (
    All,
    Condition,
    Element,
    IndexExpr,
    IndexNumber,
    Numeric,
    Unread,
    all_of,
    any_of,
    at_most,
    elements_in,
    equal,
    indices_in,
    where_leaves,
)
from treadle.algebra.extents import same, size_key
from treadle.algebra.index import Axis, FloorDiv, Index, Mod, Value
from treadle.algebra.index_walks import index_text
from treadle.algebra.proofs import Prover
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.node_info import value_of
from treadle.graph.core.types import type_of
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

_CANDIDATES = 4  # for each bound of a window


@final
@dataclass(frozen=True, slots=True)
class Window:
    """``i - behind <= j <= i + ahead``; no bound where there is none. Numbers may be sizes."""

    behind: int | None = None
    ahead: int | None = None

    @property
    def is_everything(self) -> bool:
        """Whether every query sees every key."""
        return self.behind is None and self.ahead is None

    @property
    def is_causal(self) -> bool:
        """Whether query ``i`` sees the keys up to ``i``: aligned at the first of both."""
        return self.behind is None and self.ahead is not None and same(self.ahead, 0)

    def __str__(self) -> str:
        behind, ahead = self.behind, self.ahead
        if behind is None:
            if ahead is None:
                return "all true"
            return "causal" if same(ahead, 0) else f"causal, {ahead} ahead"
        if ahead is None:
            return f"up to {behind} behind"
        if same(ahead, 0):
            return f"sliding window of {behind + 1}"
        return f"window of {behind} behind and {ahead} ahead"


@final
@dataclass(frozen=True, slots=True)
class Prefix:
    """Causal, and every query sees the first ``length`` keys."""

    length: int

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

    batch: Axis
    head: Axis
    query: Axis
    key: Axis

    @staticmethod
    def of(query: fx.Node, key: fx.Node) -> "Pairs":
        """Those of a call with these operands, ``[B, H, T, D]`` both."""
        batch, head, rows, _ = layout_of(value_of(query))[0]
        columns = layout_of(value_of(key))[0][2]
        return Pairs(Axis(batch), Axis(head), Axis(rows), Axis(columns))

    @property
    def axes(self) -> tuple[Axis, Axis, Axis, Axis]:
        """In the order of the dims."""
        return self.batch, self.head, self.query, self.key

    @property
    def is_square(self) -> bool:
        """Whether there are as many queries as keys, whatever the sizes."""
        return same(self.query.extent, self.key.extent)

    def text(self, index: Index) -> str:
        """As text, with the names of the dims: b, h, i and j."""
        names: dict[Axis | Value, str] = dict(zip(self.axes, "bhij", strict=True))
        return index_text(index, lambda atom: names.get(atom) or self.text_of(atom), str)

    def text_of(self, atom: Axis | Value) -> str:
        """``ids[b, j]``"""
        element = atom.formula if isinstance(atom, Value) else None
        if not isinstance(element, Element):
            return "?"
        return f"{element.known_as}[{', '.join(map(self.text, element.at))}]"

    def window(self, window: Window) -> Condition:
        """Where query ``i`` sees key ``j``."""
        parts: list[Condition] = []
        if window.ahead is not None:
            parts.append(at_most(self.key - self.query - window.ahead))
        if window.behind is not None:
            parts.append(at_most(self.query - self.key - window.behind))
        return all_of(*parts)


class ElementReader(Protocol):
    """What a mask is read with."""

    @property
    def reasons(self) -> Mapping[fx.Node, str]:
        """Why a node is read as elements that only a run knows."""
        ...

    def at(self, node: fx.Node, index: Sequence[Index]) -> IndexExpr:
        """The element of ``node`` at ``index``."""
        ...


def mask_of(bias: fx.Node, pairs: Pairs, reader: ElementReader, never: float = -math.inf) -> Mask:
    """What the number that ``bias`` adds to each score lets through; ``NoMatch`` in words.

    Numbers up to ``never`` hide a pair as -inf does, and so does the least number of the dtype.
    """
    allowed, finite = _allowed(bias, pairs, reader, never)
    return Mask(_pattern(allowed, pairs, Prover()), finite)


def _allowed(
    bias: fx.Node, pairs: Pairs, reader: ElementReader, never: float
) -> tuple[Condition, bool]:
    """Where ``bias`` is 0. Elsewhere it is one of the numbers that hide."""
    dtype = type_of(bias).dtype
    require(dtype.is_floating_point, NoMatch, f"{bias} is not a bias: {dtype}")
    rank = len(type_of(bias).shape)
    term = reader.at(bias, [axis.as_index for axis in pairs.axes[4 - rank :]])
    if isinstance(term, Unread):
        raise NoMatch(reader.reasons.get(bias, f"{term.value} is known at run time only"))
    assert isinstance(term, Numeric), bias
    finite = set[bool]()
    if dtype is not torch.float16:  # whose least number is one that scores reach
        never = max(never, torch.finfo(dtype).min)

    def is_zero(leaf: Index | IndexNumber | Unread) -> bool:
        match leaf:
            case IndexNumber(value) if value == 0:
                return True
            case IndexNumber(value) if value <= never:
                finite.add(value != -math.inf)
                return False
            case IndexNumber(value):
                raise NoMatch(f"{bias} adds {value} to scores")
            case Unread(value):
                raise NoMatch(f"{bias} adds {value}, which is known at run time only")
            case Index():
                raise NoMatch(f"{bias} adds {pairs.text(leaf)} to scores")

    return where_leaves(is_zero, term), True in finite


def _pattern(allowed: Condition, pairs: Pairs, prover: Prover) -> Pattern:
    if not elements_in(allowed):
        return _of_indices(allowed, pairs, prover)
    for window in _windows(allowed, pairs):  # elements that decide nothing
        if prover.equivalent(allowed, pairs.window(window)):
            return window
    parts = _conjuncts(allowed)
    known = all_of(*(part for part in parts if not elements_in(part)))
    unknown = [part for part in parts if elements_in(part)]
    within = _of_indices(known, pairs, prover)
    both = next(
        (two for two in itertools.combinations(unknown, 2) if _documents(two, pairs, prover)), None
    )
    if both is None:
        return OfBatch(within, _words(unknown, pairs))
    others = [part for part in unknown if part not in both]
    documents = _documents(both, pairs, prover)
    if not others and isinstance(within, Window):
        return Documents(documents, within)
    return OfBatch(within, (f"per document by {documents}", *_words(others, pairs)))


def _of_indices(allowed: Condition, pairs: Pairs, prover: Prover) -> Window | Prefix | Blocks:
    require(not prover.impossible(allowed), NoMatch, "it lets no pair through")
    windows = list(_windows(allowed, pairs))
    for window in windows:
        if prover.equivalent(allowed, pairs.window(window)):
            return window
    causal = pairs.window(Window(None, 0))
    for length in _prefixes(allowed, pairs):
        inside = at_most(pairs.key - length + 1)
        if prover.equivalent(allowed, any_of(causal, inside)):
            return Prefix(length)
    for size, window in itertools.product(_block_sizes(allowed), windows):
        i, j = pairs.query // size, pairs.key // size
        if prover.equivalent(allowed, all_of(equal(i, j), pairs.window(window))):
            return Blocks(size, window)
    raise NoMatch("it is none of the patterns: all true, window, prefix, blocks, documents")


def _windows(allowed: Condition, pairs: Pairs) -> Iterator[Window]:
    """Windows whose bounds stand in the formula, the widest first."""
    behind: dict[object, int | None] = {None: None}
    ahead: dict[object, int | None] = {None: None}
    one_key_later = pairs.key - pairs.query
    for index in _both_ways(allowed):
        for distance, bounds in ((one_key_later, ahead), (-one_key_later, behind)):
            rest = distance - index
            if rest.is_const:
                bounds.setdefault(size_key(rest.const), rest.const)
    sides = [list(bounds.values())[:_CANDIDATES] for bounds in (behind, ahead)]
    for one, other in itertools.product(sides[0], [*sides[1], 0]):
        yield Window(one, other)


def _prefixes(allowed: Condition, pairs: Pairs) -> Iterator[int]:
    """Bounds that the key has by itself."""
    for index in _both_ways(allowed):
        rest = pairs.key - index
        if rest.is_const:
            yield rest.const + 1


def _block_sizes(allowed: Condition) -> list[int]:
    atoms = [atom for index in indices_in(allowed) for atom, _ in index.terms]
    sizes = [atom.n for atom in atoms if isinstance(atom, FloorDiv | Mod)]
    return list({size_key(n): n for n in sizes}.values())


def _both_ways(allowed: Condition) -> Iterator[Index]:
    """Every inequality of the formula and its opposite."""
    for index in indices_in(allowed):
        yield index
        yield 1 - index


def _conjuncts(allowed: Condition) -> Sequence[Condition]:
    return allowed.parts if isinstance(allowed, All) else (allowed,)


def _documents(both: tuple[Condition, Condition], pairs: Pairs, prover: Prover) -> str:
    """The value by which pairs are of one document, if two conditions say that and nothing else;
    empty if they do not."""
    elements = elements_in(both[0])
    if len(elements) != 2:
        return ""
    left, right = (element.formula for element in elements)
    assert isinstance(left, Element), both
    assert isinstance(right, Element), both
    i, j = pairs.query.as_index, pairs.key.as_index
    moved = tuple(j if index == i else index for index in left.at)
    other = tuple(i if index == j else index for index in left.at)
    if left.value != right.value or right.at not in (moved, other) or left.at == right.at:
        return ""
    same_number = equal(*(element.as_index for element in elements))
    return left.known_as if prover.equivalent(all_of(*both), same_number) else ""


def _words(unknown: Sequence[Condition], pairs: Pairs) -> tuple[str, ...]:
    """What each condition reads that only the batch tells."""
    words: dict[str, None] = {}
    for condition in unknown:
        words[" with ".join(pairs.text_of(one) for one in elements_in(condition))] = None
    return tuple(words)
