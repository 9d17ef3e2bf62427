"""Elements of values as terms of their indices, read from the formulas that lowering creates.

::

    x + y       lowered:  [i, j] -> x[i, j] + y[i, j]      at (a, b):  x at (a, b) plus y at (a, b)
    x[f]        lowered:  [i] -> x[value(f[i])]            at a:       x at what f is at a

Each node is lowered separately when it is first needed, and then its operands. An element without a
formula, or without an exact term, is known only at run time: ``reasons`` has the reason.

Numbers are exact: for integers it is proved that their dtype can hold them, and floating-point
numbers are computed in their dtype. Terms are valid for every index within the value, and undefined
for others.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar, final

import torch
from torch import fx

from treadle.algebra.conditions import (
    Condition,
    Element,
    IndexExpr,
    Unread,
    as_numeric,
    at_most,
    element,
)
from treadle.algebra.extents import Size, as_int, formula_of, is_zero, same
from treadle.algebra.index import ZERO, Atom, Axis, Index, linear
from treadle.algebra.polynomial import Polynomial
from treadle.algebra.proofs import Prover
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dynamic import layout_of, symbols_of_graph
from treadle.graph.core.constants import constant_of
from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import arguments, operation_name
from treadle.graph.core.types import is_tensor, type_of
from treadle.graph.rewrite.rules import NoMatch
from treadle.loop.expr import DTYPES, Array, Load
from treadle.lower.context import Builder, LoweringContext, fresh_axes
from treadle.lower.formula_terms import WHOLE, FormulaTerms, literal_term, stored_term
from treadle.lower.graph import FAMILIES
from treadle.lower.node import origin_of
from treadle.lower.registry import Unsupported, rule_for
from treadle.util.errors import LoweringError, VerifyError, require
from treadle.util.nested import map_leaves as map_arguments

aten = torch.ops.aten

At = tuple[Index, ...]
_DEPTH = 60  # operations between a value and the inputs of its formula
_DIGIT = 1 << 128
"""The place along each dim of an operand is one digit of the index that it is loaded at."""


@final
class Elements:
    """Terms for the elements of the values of one graph, which does not change meanwhile.

    ``reasons``: why a node is read as elements that only a run knows.
    """

    families: ClassVar[tuple[ModuleType, ...]] = FAMILIES
    """Whose rules are read: to import them fills the registry."""

    def __init__(self) -> None:
        self.reasons: dict[fx.Node, str] = {}
        self.prover = Prover()
        self._builder: Builder | None = None
        self._operands: dict[str, fx.Node] = {}
        self._loads: dict[fx.Node, Array] = {}
        self._arrays: dict[fx.Node, Array] = {}
        self._known: dict[tuple[fx.Node, At], IndexExpr] = {}
        self._depth = 0

    def at(self, node: fx.Node, index: Sequence[Index]) -> IndexExpr:
        """The element of ``node`` at ``index``; along a dim of size 1 there is one place."""
        shape = _shape_of(node)
        require(len(shape) == len(index), NoMatch, f"{node} has {len(shape)} dims")
        place = tuple(ZERO if same(n, 1) else i for n, i in zip(shape, index, strict=True))
        key = node, place
        if key not in self._known:
            self._known[key] = self._read(node, place)
        return self._known[key]

    def _loaded(self, buffer: str, index: Index) -> IndexExpr:
        """What an operand that a formula calls ``buffer`` has at ``index``."""
        node = self._operands.get(buffer)
        require(node is not None, NoMatch, f"{buffer} is made on the way")
        assert node is not None
        return self.at(node, _places(index, len(_shape_of(node))))

    def _read(self, node: fx.Node, at: At) -> IndexExpr:
        dtype = type_of(node).dtype
        self._depth += 1
        try:
            require(self._depth < _DEPTH, NoMatch, f"{node} is made in too many steps")
            return stored_term(self._term(node, at), dtype)
        except (NoMatch, VerifyError) as miss:
            self.reasons.setdefault(node, miss.message)
            return _unknown(node, at, dtype)
        finally:
            self._depth -= 1

    def _term(self, node: fx.Node, at: At) -> IndexExpr:
        if node.op == "get_attr":
            return _number(node)
        if node.target is aten.cumsum.default:
            return self._running_sum(node, at)
        array = self._lowered(node)
        places = dict(zip(array.axes, at, strict=True))
        return FormulaTerms(places, self._loaded, self.prover).term(array.body)

    def _running_sum(self, node: fx.Node, at: At) -> IndexExpr:
        """``n * (i + 1)``, where all that is added up is proved to be ``n``; it has no formula."""
        given = arguments(node)
        require(bool(at), NoMatch, f"{node} adds up a single element")
        dim = given["dim"] % len(at)
        summand = Axis(_shape_of(node)[dim]).as_index
        term = self.at(given["self"], [*at[:dim], summand, *at[dim + 1 :]])
        if isinstance(term, Condition):
            term = self._proved(term)
        found = as_numeric(term)
        fixed = isinstance(found, Index) and found.is_const
        require(fixed, NoMatch, f"{node} adds up what differs from place to place")
        assert isinstance(found, Index)
        return (at[dim] + 1) * found.const

    def _proved(self, condition: Condition) -> Condition:
        """The condition, or what it is everywhere if that is proved."""
        if self.prover.impossible(condition):
            return False
        return True if self.prover.holds(condition) else condition

    def _lowered(self, node: fx.Node) -> Array:
        """The formula of a node, made once, in which each operand is a buffer."""
        if node not in self._arrays:
            self._arrays[node] = self._formula(node)
        return self._arrays[node]

    def _formula(self, node: fx.Node) -> Array:
        known = node.op == "call_function"
        what = operation_name(node.target) if known else "an input"
        rule = rule_for(node.target) if isinstance(node.target, OpOverload) else None
        words = f"{node} ({what}) has no formula of its indices"
        require(rule is not None, NoMatch, words)
        assert rule is not None
        if self._builder is None:  # once: to find the symbols takes a walk through the graph
            self._builder = Builder("cpu", symbols=symbols_of_graph(node.graph))
        context = LoweringContext(self._builder, node, origin_of(node), value_of(node), node.name)
        args = [map_arguments(self._operand, value) for value in node.args]
        kwargs = {name: map_arguments(self._operand, value) for name, value in node.kwargs.items()}
        try:
            value = rule(context, *args, **kwargs)
        except (Unsupported, LoweringError) as refusal:
            raise NoMatch(f"{words}: {refusal}") from refusal
        require(isinstance(value, Array), NoMatch, words)
        assert isinstance(value, Array)
        return value

    def _operand(self, leaf: object) -> object:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf not in self._loads:
            require(is_tensor(leaf), NoMatch, f"{leaf} is not a tensor")
            dtype = type_of(leaf).dtype
            require(dtype in DTYPES, NoMatch, f"numbers of {dtype} are not read")
            self._operands[leaf.name] = leaf
            axes = fresh_axes(_shape_of(leaf))
            place = linear(axes, [_DIGIT**dim for dim in range(len(axes))])
            self._loads[leaf] = Array(axes, Load(leaf.name, place, dtype))
        return self._loads[leaf]


def _shape_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes, with a formula where the call decides."""
    return layout_of(value_of(node))[0]


def _places(index: Index, rank: int) -> At:
    """``sum(place * _DIGIT**dim)``  ->  the places"""
    terms: list[list[tuple[Atom, int]]] = [[] for _ in range(rank)]
    for atom, number in index.terms:
        for found, digit in zip(terms, _digits(number, rank), strict=True):
            if not is_zero(digit):
                found.append((atom, digit))
    constants = _digits(index.const, rank)
    return tuple(
        Index(constant, tuple(found)) if found else Index.of(constant)
        for constant, found in zip(constants, terms, strict=True)
    )


def _digits(number: int, rank: int) -> list[int]:
    """Digits with signs, the first of ``_DIGIT**0``; of a size those of each coefficient."""
    if isinstance(number, Size):
        terms = [(sizes, _digits(n, rank)) for sizes, n in formula_of(number).terms]
        columns = zip(*([(sizes, n) for n in digits] for sizes, digits in terms), strict=True)
        return [as_int(Polynomial(tuple(t for t in column if t[1]))) for column in columns]
    digits: list[int] = []
    for _ in range(rank):
        digit = (number + _DIGIT // 2) % _DIGIT - _DIGIT // 2
        digits.append(digit)
        number = (number - digit) // _DIGIT
    require(number == 0, VerifyError, "a place that is not a sum of digits")
    return digits


def _number(node: fx.Node) -> IndexExpr:
    """The one number of a tensor that the graph has by itself."""
    held = constant_of(node)
    alone = held is not None and held.numel() == 1
    require(alone, NoMatch, f"{node} (a constant) is not one number")
    assert held is not None
    return literal_term(held.item(), held.dtype)


def _unknown(node: fx.Node, at: At, dtype: torch.dtype) -> IndexExpr:
    of = Element(node.name, at, info(node).name or node.name)
    if dtype is torch.bool:
        return at_most(1 - element(of, 0, 1))
    if dtype in WHOLE:
        known = torch.iinfo(dtype)
        return element(of, known.min, known.max)
    return Unread(node.name)
