"""Reads elements that are computed: sums, products, divisions, comparisons, logic, choices.

::

    (x + y)[i] = x[i] + y[i]      (x < y)[i] = x[i] - y[i] + 1 <= 0      where a variable of an
                                                                        index stays linear
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from treadle.graph.index_formulas import (
    All,
    AnyOne,
    AtMost,
    Condition,
    IndexNumber,
    IndexVariable,
    Linear,
    Numeric,
    Term,
    all_of,
    any_of,
    at_most,
    choice,
    equal,
    map_leaves,
    negated,
    quotient,
    variable,
    where_leaves,
)
from treadle.graph.index_rules import (
    WHOLE,
    At,
    ElementReader,
    Given,
    Rules,
    as_condition,
    as_numeric,
    chosen_by,
    dim_of,
    input_of,
    numeric,
    operand,
    shape_of,
)
from treadle.graph.operators import operation_name
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import type_of
from treadle.util.errors import require

aten = torch.ops.aten

RULES = Rules()
"""Of operations that compute an element of those at its place."""


# Arithmetic.


def _each_pair(left: Numeric, right: Numeric, combine: Callable[[Any, Any], Numeric]) -> Numeric:
    """``combine`` of what both may be."""
    return map_leaves(lambda a: map_leaves(lambda b: combine(a, b), right), left)


@RULES.reads(aten.add.Tensor, aten.add.Scalar)
def _add(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return _sum(reader, node, given["self"], given["other"], given["alpha"], at, sign=1)


@RULES.reads(aten.sub.Tensor, aten.sub.Scalar)
def _sub(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return _sum(reader, node, given["self"], given["other"], given["alpha"], at, sign=-1)


@RULES.reads(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return _sum(reader, node, given["other"], given["self"], given["alpha"], at, sign=-1)


def _sum(
    reader: ElementReader,
    node: fx.Node,
    left: object,
    right: object,
    alpha: object,
    at: At,
    *,
    sign: int,
) -> Term:
    require(alpha == 1, NoMatch, f"{node} has alpha={alpha}")
    dtype = type_of(node).dtype
    require(dtype is not torch.bool, NoMatch, f"{node} adds truth values")
    combine = operator.add if sign > 0 else operator.sub

    def add(one: Linear | IndexNumber, two: Linear | IndexNumber) -> Numeric:
        if isinstance(one, Linear) and isinstance(two, Linear):
            return one.plus(two, sign)
        return _in_dtype(combine, one, two, dtype)

    return _each_pair(numeric(reader, left, at, dtype), numeric(reader, right, at, dtype), add)


@RULES.reads(aten.mul.Tensor, aten.mul.Scalar)
def _mul(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    dtype = type_of(node).dtype
    if dtype is torch.bool:
        return all_of(
            *(as_condition(operand(reader, given[name], at)) for name in ("self", "other"))
        )
    left, right = (numeric(reader, given[name], at, dtype) for name in ("self", "other"))

    def multiply(one: Linear | IndexNumber, two: Linear | IndexNumber) -> Numeric:
        if isinstance(one, Linear) and isinstance(two, Linear):
            require(one.is_constant or two.is_constant, NoMatch, f"{node} multiplies variables")
            return two.times(one.constant) if one.is_constant else one.times(two.constant)
        return _in_dtype(operator.mul, one, two, dtype)

    return _each_pair(left, right, multiply)


def _in_dtype(
    combine: Callable[[Any, Any], Any],
    one: Linear | IndexNumber,
    two: Linear | IndexNumber,
    dtype: torch.dtype,
) -> IndexNumber | Linear:
    """Two numbers combined as ``dtype`` combines them; a variable with a whole number."""
    if isinstance(one, IndexNumber) and isinstance(two, IndexNumber):
        left, right = (torch.tensor(each.value, dtype=dtype) for each in (one, two))
        return IndexNumber(float(combine(left, right)))
    whole = [_as_whole(each) for each in (one, two)]
    if combine is operator.mul:
        require(any(each.is_constant for each in whole), NoMatch, "it multiplies variables")
        fixed, other = whole if whole[0].is_constant else whole[::-1]
        require(fixed.constant != 0, NoMatch, "it multiplies by 0.0, and the sign is lost")
        return other.times(fixed.constant)
    return whole[0].plus(whole[1], 1 if combine is operator.add else -1)


def _as_whole(each: Linear | IndexNumber) -> Linear:
    if isinstance(each, Linear):
        return each
    whole = abs(each.value) < 2**53 and each.value == int(each.value)
    require(whole, NoMatch, f"{each.value} meets a number that indices decide")
    return Linear(int(each.value))


@RULES.reads(aten.neg.default)
def _neg(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return map_leaves(
        lambda leaf: IndexNumber(-leaf.value) if isinstance(leaf, IndexNumber) else leaf.times(-1),
        numeric(reader, given["self"], at, type_of(node).dtype),
    )


@RULES.reads(aten.abs.default)
def _abs(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    def absolute(leaf: Linear | IndexNumber) -> Numeric:
        if isinstance(leaf, IndexNumber):
            return IndexNumber(abs(leaf.value))
        return choice(at_most(leaf), leaf.times(-1), leaf)

    return map_leaves(absolute, numeric(reader, given["self"], at, type_of(node).dtype))


@RULES.reads(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
def _floor_divide(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x // n``, rounded down, for a positive number ``n``."""
    mode = given.get("rounding_mode", "floor")
    require(mode == "floor", NoMatch, f"{node} rounds by {mode}")
    divisor = _divisor(reader, node, given, at)
    return map_leaves(
        lambda leaf: quotient(leaf, divisor),
        numeric(reader, given["self"], at, type_of(node).dtype),
    )


@RULES.reads(aten.remainder.Tensor, aten.remainder.Scalar)
def _remainder(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``x - n * (x // n)`` for a positive number ``n``."""
    divisor = _divisor(reader, node, given, at)
    return map_leaves(
        lambda leaf: leaf.plus(quotient(leaf, divisor), -divisor),
        numeric(reader, given["self"], at, type_of(node).dtype),
    )


def _divisor(reader: ElementReader, node: fx.Node, given: Given, at: At) -> int:
    dtype = type_of(node).dtype
    require(dtype in WHOLE, NoMatch, f"{node} divides {dtype}")
    term = numeric(reader, given["other"], at, dtype)
    fixed = isinstance(term, Linear) and term.is_constant and term.constant > 0
    require(fixed, NoMatch, f"{node} divides by no positive number")
    assert isinstance(term, Linear)
    return term.constant


@RULES.reads(aten.cumsum.default)
def _cumsum(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    """``n * (i + 1)``, where all that is added up is proved to be ``n``."""
    x = input_of(given)
    dim = dim_of(given["dim"], len(at))
    require(bool(at), NoMatch, f"{node} adds up a single element")
    summand = IndexVariable(f"{node.name}.{dim}", shape_of(x)[dim])
    term = reader.at(x, [*at[:dim], variable(summand), *at[dim + 1 :]])
    if isinstance(term, bool | AtMost | All | AnyOne) and not isinstance(term, bool):
        term = reader.settled(term)
    found = as_numeric(term)
    fixed = isinstance(found, Linear) and found.is_constant
    require(fixed, NoMatch, f"{node} adds up what differs from place to place")
    assert isinstance(found, Linear)
    return at[dim].shifted(1).times(found.constant)


# Comparisons and logic.

_Compare = Callable[[Linear, Linear], Condition]


def _less(left: Linear, right: Linear) -> Condition:
    return at_most(left.plus(right, -1).shifted(1))


_COMPARISONS: Mapping[str, tuple[Callable[[Any, Any], bool], _Compare]] = {
    "eq": (operator.eq, equal),
    "ne": (operator.ne, lambda a, b: negated(equal(a, b))),
    "lt": (operator.lt, _less),
    "ge": (operator.ge, lambda a, b: negated(_less(a, b))),
    "gt": (operator.gt, lambda a, b: _less(b, a)),
    "le": (operator.le, lambda a, b: negated(_less(b, a))),
}


@RULES.reads(
    *(getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Tensor", "Scalar"))
)
def _compared(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    plain, whole = _COMPARISONS[operation_name(node.target).partition(".")[0]]
    dtype = _common_dtype(node, given["self"], given["other"])
    left = numeric(reader, given["self"], at, dtype)
    right = numeric(reader, given["other"], at, dtype)

    def compare(one: Linear | IndexNumber, two: Linear | IndexNumber) -> Condition:
        if isinstance(one, IndexNumber) and isinstance(two, IndexNumber):
            return plain(one.value, two.value)
        return whole(_as_whole(one), _as_whole(two))

    return where_leaves(lambda a: where_leaves(lambda b: compare(a, b), right), left)


def _common_dtype(node: fx.Node, left: object, right: object) -> torch.dtype:
    """The dtype that two operands are compared in, both numbers exact in it."""
    dtypes = [type_of(each).dtype for each in (left, right) if isinstance(each, fx.Node)]
    if all(each in WHOLE or each is torch.bool for each in dtypes):
        floats = [each for each in (left, right) if isinstance(each, float)]
        require(not floats, NoMatch, f"{node} compares whole numbers with {floats}")
        kinds = {each for each in dtypes if each is not torch.bool}
        scalar = any(not isinstance(each, fx.Node) for each in (left, right))
        return kinds.pop() if scalar and len(kinds) == 1 else torch.int64
    require(len(set(dtypes)) == 1, NoMatch, f"{node} compares {dtypes[0]} with {dtypes[-1]}")
    return dtypes[0]


def _conditions(reader: ElementReader, node: fx.Node, given: Given, at: At) -> list[Condition]:
    """Both operands as truth values; bits of other numbers have no formula."""
    logical = operation_name(node.target).startswith("logical")
    dtype = type_of(node).dtype
    require(logical or dtype is torch.bool, NoMatch, f"{node} combines the bits of {dtype}")
    names = [name for name in ("self", "other") if name in given]
    return [as_condition(operand(reader, given[name], at)) for name in names]


@RULES.reads(aten.logical_and.default, aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)
def _and(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return all_of(*_conditions(reader, node, given, at))


@RULES.reads(aten.logical_or.default, aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)
def _or(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    return any_of(*_conditions(reader, node, given, at))


@RULES.reads(aten.logical_xor.default, aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)
def _xor(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    one, two = _conditions(reader, node, given, at)
    return any_of(all_of(one, negated(two)), all_of(negated(one), two))


@RULES.reads(aten.logical_not.default, aten.bitwise_not.default)
def _not(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    (one,) = _conditions(reader, node, given, at)
    return negated(one)


@RULES.reads(aten.where.self)
def _where(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    condition = as_condition(operand(reader, given["condition"], at))
    yes, no = (operand(reader, given[name], at) for name in ("self", "other"))
    return chosen_by(condition, yes, no, type_of(node).dtype)


@RULES.reads(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(reader: ElementReader, node: fx.Node, given: Given, at: At) -> Term:
    condition = as_condition(operand(reader, given["mask"], at))
    value, x = operand(reader, given["value"], at), operand(reader, given["self"], at)
    return chosen_by(condition, value, x, type_of(node).dtype)


__all__ = ["RULES"]
