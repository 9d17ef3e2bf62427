"""Formulas as terms of the indices of one element: exact, or refused with ``NoMatch``.

::

    x[i] + 1    at i = 2*a:   the element of x at 2*a, plus 1
    where(i < n, 1.0, 0.0)    1.0 or 0.0 by a condition on the index: a term with two cases
    exp(i)                    refused: no index and no number
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from treadle.algebra.conditions import (
    Condition,
    IndexExpr,
    IndexNumber,
    Numeric,
    Unread,
    all_of,
    any_of,
    as_numeric,
    at_most,
    choice,
    either,
    equal,
    indices_in,
    leaves,
    map_leaves,
    negated,
    truth,
    where_leaves,
    within,
)
from treadle.algebra.extents import largest, least, surely_less
from treadle.algebra.index import ZERO, Axis, Index
from treadle.algebra.index import Value as IndexValue
from treadle.algebra.index_walks import replace_axes, replace_values
from treadle.algebra.proofs import Prover
from treadle.graph.rewrite.rules import NoMatch
from treadle.loop.expr import BOOLEAN, COMPARE, Apply, Const, Expr, Load, Position
from treadle.loop.expr import formula_of as expr_of
from treadle.loop.interpret import apply_function
from treadle.util.errors import require

_LEAVES = 24  # cases of one term, and inequalities of one condition: more would take too long
_INEQUALITIES = 200
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EXACT_UP_TO: Mapping[torch.dtype, int] = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
}
"""Every whole number that is not larger is a number of the dtype."""
OperandAt = Callable[[str, Index], IndexExpr]
"""What a buffer of a formula has at an index."""


def literal_term(value: float, dtype: torch.dtype) -> IndexExpr:
    """A number of ``dtype``."""
    if dtype is torch.bool:
        return bool(value)
    return IndexNumber(float(value)) if dtype.is_floating_point else Index.of(int(value))


@final
class FormulaTerms:
    """Formulas as terms, with an index in the place of each axis."""

    def __init__(self, places: Mapping[Axis, Index], operand_at: OperandAt, prover: Prover) -> None:
        self._places = places
        self._operand_at = operand_at
        self._prover = prover
        self._known: dict[int, IndexExpr] = {}

    def term(self, expr: Expr) -> IndexExpr:
        """What ``expr`` is, exactly; ``NoMatch`` where it is not known."""
        if id(expr) not in self._known:
            self._known[id(expr)] = self._read(expr)
        return self._known[id(expr)]

    def _read(self, expr: Expr) -> IndexExpr:
        match expr:
            case Const(value, dtype):
                return stored_term(literal_term(value, dtype), dtype)
            case Position(index):
                return self._index(index)
            case Load():
                zero = literal_term(0, expr.dtype)
                return (
                    self._loaded(expr) if expr.mask is None else self._where(expr.mask, expr, zero)
                )
            case Apply("where", (condition, yes, no)):
                return self._where(condition, yes, no)
            case Apply():
                return self._applied(expr)
            case _:
                raise NoMatch(f"{type(expr).__name__} has no term")

    def _index(self, index: Index) -> Index:
        if not index.axes.isdisjoint(self._places):
            return replace_axes(index, self._places, self._looked_up)
        return replace_values(index, self._looked_up)

    def _looked_up(self, value: IndexValue) -> Index:
        """An index that a formula computes; it must be proved to lie within its bounds."""
        term = self.term(expr_of(value))
        require(isinstance(term, Index), NoMatch, "a place that is looked up has cases")
        assert isinstance(term, Index)
        inside = self._prover.holds(within(term, value.lo, value.hi))
        require(inside, NoMatch, f"a place may be outside of {value.lo}..{value.hi}")
        return term

    def _loaded(self, load: Load) -> IndexExpr:
        return self._operand_at(load.buffer, self._index(load.index))

    def _where(self, condition: Expr, yes: Expr, no: "Expr | IndexExpr") -> IndexExpr:
        """``yes`` where ``condition``, else ``no``; a branch that is never taken is not read."""
        holds = _as_condition(self.term(condition))
        if holds is False:
            return self.term(no) if isinstance(no, Expr) else no
        is_masked = isinstance(yes, Load) and yes.mask is condition
        first = self._loaded(yes) if is_masked and isinstance(yes, Load) else self.term(yes)
        if holds is True:
            return first
        other = self.term(no) if isinstance(no, Expr) else no
        return stored_term(either(holds, first, other), yes.dtype)

    def _applied(self, expr: Apply) -> IndexExpr:
        operands = [self.term(operand) for operand in expr.operands]
        if expr.fn in _LOGIC:
            return stored_term(_LOGIC[expr.fn](*map(_as_condition, operands)), torch.bool)
        if expr.fn == "cast":
            return stored_term(operands[0], expr.dtype)
        dtype = expr.operands[0].dtype

        def compute(*found: Index | IndexNumber | Unread) -> IndexExpr:
            return _computed(expr, dtype, found)

        numbers = [as_numeric(operand) for operand in operands]
        gives_truth = expr.fn in COMPARE or expr.fn in BOOLEAN
        each_leaf = where_leaves if gives_truth else map_leaves
        return stored_term(_over_leaves(each_leaf, numbers, compute), expr.dtype)


def _over_leaves(
    each_leaf: Callable[..., Any], terms: Sequence[Numeric], make: Callable[..., Any]
) -> Any:
    """``make`` of what all of ``terms`` may be."""
    if not terms:
        return make()
    first, *others = terms
    return each_leaf(
        lambda leaf: _over_leaves(each_leaf, others, lambda *more: make(leaf, *more)), first
    )


_LOGIC: Mapping[str, Callable[..., Condition]] = {
    "and": all_of,
    "or": any_of,
    "not": negated,
    "xor": lambda a, b: any_of(all_of(a, negated(b)), all_of(negated(a), b)),
}


def _computed(expr: Apply, dtype: torch.dtype, operands: Sequence[Any]) -> IndexExpr:
    """A function of numbers as ``dtype`` computes it; of a place and a number if both are whole."""
    for operand in operands:
        if isinstance(operand, Unread):
            raise NoMatch(f"{operand.value} is known at run time only")
    if all(isinstance(operand, IndexNumber) for operand in operands):
        values = [torch.tensor(operand.value, dtype=dtype) for operand in operands]
        return literal_term(apply_function(expr.fn, values, expr.dtype).item(), expr.dtype)
    whole = [_as_whole(operand) for operand in operands]
    compute = _ON_INDICES.get(expr.fn)
    divides = expr.fn in ("floordiv", "mod")
    exact = compute is not None and not (divides and dtype not in WHOLE)
    require(exact, NoMatch, f"{expr.fn} of indices has no term")
    assert compute is not None
    if expr.fn == "mul" and dtype not in WHOLE:
        signed = all(not index.is_const or index.const != 0 for index in whole)
        require(signed, NoMatch, "it multiplies by 0.0, and the sign is lost")
    return compute(*whole)


def _as_whole(number: Index | IndexNumber) -> Index:
    if isinstance(number, Index):
        return number
    whole = abs(number.value) < 2**53 and number.value == int(number.value)
    require(whole, NoMatch, f"{number.value} meets a number that indices decide")
    return Index.of(int(number.value))


def _times(left: Index, right: Index) -> Index:
    require(left.is_const or right.is_const, NoMatch, "it multiplies variables")
    return right * left.const if left.is_const else left * right.const


def _divisor(index: Index) -> int:
    fixed = index.is_const and surely_less(0, index.const)
    require(fixed, NoMatch, "it divides by no positive number")
    return index.const


def _less(left: Index, right: Index) -> Condition:
    return at_most(left - right + 1)


_ON_INDICES: Mapping[str, Callable[..., IndexExpr]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": _times,
    "neg": lambda x: -x,
    "abs": lambda x: choice(at_most(x), -x, x),
    "floordiv": lambda x, n: x // _divisor(n),
    "mod": lambda x, n: x % _divisor(n),
    "maximum": lambda x, y: choice(at_most(x - y), y, x),
    "minimum": lambda x, y: choice(at_most(x - y), x, y),
    "eq": equal,
    "ne": lambda x, y: negated(equal(x, y)),
    "lt": _less,
    "ge": lambda x, y: negated(_less(x, y)),
    "gt": lambda x, y: _less(y, x),
    "le": lambda x, y: negated(_less(y, x)),
}


def stored_term(term: IndexExpr, dtype: torch.dtype) -> IndexExpr:
    """``term`` as an element of ``dtype``; ``NoMatch`` where that may be another number."""
    if dtype is torch.bool:
        condition = _as_condition(term)
        cases = sum(1 for _ in indices_in(condition))
        require(cases <= _INEQUALITIES, NoMatch, "there are too many cases")
        return condition
    require(dtype in WHOLE or dtype in _EXACT_UP_TO, NoMatch, f"numbers of {dtype} are not read")
    found = map_leaves(lambda leaf: _leaf_in(leaf, dtype), as_numeric(term))
    require(sum(1 for _ in leaves(found)) <= _LEAVES, NoMatch, "there are too many cases")
    return found


def _leaf_in(leaf: Index | IndexNumber | Unread, dtype: torch.dtype) -> Numeric:
    match leaf:
        case Unread(value):
            floating = dtype not in WHOLE
            require(floating, NoMatch, f"{value} is known at run time only")
            return leaf
        case IndexNumber(value) if dtype in WHOLE:
            whole = value == value and abs(value) < 2**53 and value == int(value)
            require(whole, NoMatch, f"{value} is not an integer")
            return _leaf_in(Index.of(int(value)), dtype)
        case IndexNumber(value):
            return IndexNumber(float(torch.tensor(value, dtype=torch.float64).to(dtype)))
        case Index():
            if dtype in _EXACT_UP_TO and leaf.is_const and type(leaf.const) is int:
                return _leaf_in(IndexNumber(float(leaf.const)), dtype)
            low, high = _range_of(dtype)
            fits = low <= least(leaf.bounds[0]) and largest(leaf.bounds[1]) <= high
            require(fits, NoMatch, f"an index may be a number that {dtype} does not hold")
            return leaf


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    if dtype in _EXACT_UP_TO:
        return -_EXACT_UP_TO[dtype], _EXACT_UP_TO[dtype]
    known = torch.iinfo(dtype)
    return known.min, known.max


def _as_condition(term: IndexExpr) -> Condition:
    """Where an element is true: not 0."""
    return term if isinstance(term, Condition) else where_leaves(_is_true, term)


def _is_true(leaf: Index | IndexNumber | Unread) -> Condition:
    match leaf:
        case Index():
            return negated(equal(leaf, ZERO))
        case IndexNumber(value):
            return truth(value)
        case Unread(value):
            raise NoMatch(f"{value} is known at run time only")
