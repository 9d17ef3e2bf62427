"""Smaller formulas with the same bits: NaN, infinities, -0.0 and roundings included.

::

    1.0 + 2.0            ->  3.0                 x * 1        ->  x
    x + -0.0, x - 0.0    ->  x                   x + 0.0          stays: it turns -0.0 into 0.0
    f32(f64(x:f32))      ->  x                   where(true, x, y) -> x
    <i> < 8, where i<8   ->  true                <i> + 1      ->  <i + 1>
    where(c, where(c, x, y), z)  ->  where(c, x, z)

A second run changes nothing.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from treadle.algebra.extents import Size, same, surely_less
from treadle.algebra.index import Axis, Index, Value
from treadle.algebra.index_walks import replace_values
from treadle.loop.expr import (
    COMPARE,
    Apply,
    Array,
    Const,
    Expr,
    Load,
    Position,
    Reduce,
    ReduceKind,
    formula_of,
    identity,
    values_of,
)
from treadle.loop.interpret import apply_function
from treadle.loop.program import Compute, Program, Step
from treadle.loop.traverse import HashConsing, axes_of, conjuncts, map_expr

_EXACT_STEPS = (
    (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
    (torch.bool, torch.int8, torch.int16, torch.int32, torch.float64),
    (torch.uint8, torch.float16, torch.float32, torch.float64),
    (torch.uint8, torch.bfloat16, torch.float32, torch.float64),
    (torch.int8, torch.float16, torch.float32, torch.float64),
    (torch.int8, torch.bfloat16, torch.float32, torch.float64),
    (torch.int16, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.float8_e4m3fn, torch.float16),
    (torch.float8_e5m2, torch.bfloat16),
    (torch.float8_e5m2, torch.float16),
)
"""Each dtype holds every value of the one before it, so any later one of a row does."""


def _widenings() -> Mapping[torch.dtype, frozenset[torch.dtype]]:
    holds: dict[torch.dtype, set[torch.dtype]] = {}
    for row in _EXACT_STEPS:
        for narrow, wide in pairwise(row):
            holds.setdefault(narrow, set()).add(wide)
            holds.setdefault(wide, set())
    for _ in holds:
        for wider in holds.values():
            wider.update(*(holds[dtype] for dtype in tuple(wider)))
    return {dtype: frozenset(wider | {dtype}) for dtype, wider in holds.items()}


_HOLDS = _widenings()


def simplify_array(array: Array) -> Array:
    """``array`` with its element simplified."""
    return Array(array.axes, simplify(array.body))


def simplify_program(program: Program, known: dict[Array, Array] | None = None) -> Program:
    """``program`` with the formula of each compute simplified, once for a template. ``known``: what
    templates became before; those of this program are added."""
    small = {} if known is None else known
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Compute):
            if step.template not in small:
                small[step.template] = simplify_array(step.template)
            step = step.of_template(small[step.template])
        steps.append(step)
    return replace(program, steps=tuple(steps))


def simplify(expr: Expr) -> Expr:
    """The smaller formula; equal nodes in it are one object."""
    table = HashConsing()

    def settle(node: Expr) -> Expr:
        while True:
            smaller = _smaller(node)
            if smaller is None:
                return table.node(node)
            node = smaller

    return map_expr(expr, settle)


def _smaller(node: Expr) -> Expr | None:
    """One step; ``None`` where no rule applies. Operands are simplified already."""
    match node:
        case Position():
            index = _resolve(node.index)
            if index.is_const and not isinstance(index.const, Size):
                return Const(index.const, torch.int64)
            return None if index is node.index else Position(index)
        case Load():
            return _load(node)
        case Reduce():
            return _reduce(node)
        case Apply():
            return _apply(node)
        case _:
            return None


def _resolve(index: Index) -> Index:
    """``value(<i + 1>)`` is ``i + 1``, and ``value(3)`` is 3."""

    def plain(atom: Value) -> Index:
        inner = _as_index(formula_of(atom))
        return atom.as_index if inner is None else inner

    if all(_as_index(value) is None for value in values_of(index)):
        return index
    return replace_values(index, plain)


def _as_index(expr: Expr) -> Index | None:
    """What an int64 formula is in the index algebra, if it is."""
    match expr:
        case Position():
            return expr.index
        case Const() if expr.dtype is torch.int64:
            return Index.of(int(expr.value))
        case _:
            return None


def on_indices(fn: str, operands: Sequence[Expr]) -> Expr | None:
    """Arithmetic of two integers as index arithmetic, where it is some: ``<i> + 3`` is
    ``<i + 3>``."""
    indices = [index for index in map(_as_index, operands) if index is not None]
    if len(indices) != 2 or len(operands) != 2:
        return None
    left, right = indices
    match fn:
        case "add":
            return Position(left + right)
        case "sub":
            return Position(left - right)
        case "mul" if right.is_const:
            return Position(left * right.const)
        case "mul" if left.is_const:
            return Position(right * left.const)
        case "floordiv" if right.is_const and right.const > 0:
            return Position(left // right.const)
        case "mod" if right.is_const and right.const > 0:
            return Position(left % right.const)
        case _:
            return None


def _load(node: Load) -> Expr | None:
    index = _resolve(node.index)
    if isinstance(node.mask, Const):
        if node.mask.value:
            return Load(node.buffer, index, node.dtype)
        return identity(ReduceKind.SUM, node.dtype)
    return None if index is node.index else Load(node.buffer, index, node.dtype, node.mask)


def _reduce(node: Reduce) -> Expr | None:
    """Axes of one value go, except that a sum of floats keeps one: it turns -0.0 into 0.0. So do
    sums that have one term."""
    wide = tuple(axis for axis in node.axes if not same(axis.extent, 1))
    if wide == node.axes:
        return _one_term(node)
    if wide:
        return Reduce(node.kind, wide, node.body)
    match node.kind:
        case ReduceKind.ARGMAX | ReduceKind.ARGMIN:
            return Const(0, torch.int64)
        case ReduceKind.SUM if node.dtype.is_floating_point:
            return Reduce(node.kind, node.axes[:1], node.body) if len(node.axes) > 1 else None
        case _:
            return node.body


def _one_term(node: Reduce) -> Expr | None:
    """``sum{j < 9} where(n == <j> and b, x, 0)`` is ``where(0 <= n < 9 and b, x, 0)``: the gradient
    of a loss whose targets are classes sums such rows. None of ``n``, ``b`` and ``x`` knows j."""
    if node.kind is not ReduceKind.SUM or len(node.axes) != 1 or not isinstance(node.body, Apply):
        return None
    (axis,), body = node.axes, node.body
    if isinstance(axis.extent, Size) or body.fn != "where":
        return None
    condition, value, rest = body.operands
    parts = list(conjuncts(condition))
    places = [(part, place) for part in parts if (place := _equals(part, axis)) is not None]
    if rest != identity(ReduceKind.SUM, node.dtype) or len(places) != 1 or axis in axes_of(value):
        return None
    ((found, place),) = places
    others = [part for part in parts if part is not found]
    if any(axis in axes_of(other) for other in others):
        return None
    low = Apply("ge", (place, Const(0, torch.int64)), torch.bool)
    high = Apply("lt", (place, Const(axis.extent, torch.int64)), torch.bool)
    inside = functools.reduce(_both, [*others, low, high])
    if node.dtype.is_floating_point:
        value = Apply("add", (value, rest), node.dtype)  # as a sum: of -0.0 it makes 0.0
    return Apply("where", (inside, value, rest), node.dtype)


def _both(left: Expr, right: Expr) -> Expr:
    return Apply("and", (left, right), torch.bool)


def _equals(condition: Expr, axis: Axis) -> Expr | None:
    """What the place on ``axis`` is compared with, if that is the same for all of them."""
    if not isinstance(condition, Apply) or condition.fn != "eq":
        return None
    left, right = condition.operands
    for this, other in ((left, right), (right, left)):
        if isinstance(this, Position) and this.index == Index.of(axis):
            return None if axis in axes_of(other) else other
    return None


def _apply(node: Apply) -> Expr | None:
    if all(isinstance(operand, Const) for operand in node.operands):
        return _fold(node)
    if node.fn in COMPARE:
        return _compare(node.fn, *node.operands)
    rule = _RULES.get(node.fn)
    return None if rule is None else rule(node)


def _fold(node: Apply) -> Const | None:
    """Literals only: compute now, by the interpreter's own functions."""
    values = [
        torch.tensor(operand.value, dtype=operand.dtype)
        for operand in node.operands
        if isinstance(operand, Const)
    ]
    is_whole = not node.dtype.is_floating_point
    if is_whole and node.fn in ("floordiv", "mod", "fmod") and not values[1]:
        return None  # no number is right
    if is_whole and node.fn == "pow" and values[1] < 0:
        return None
    return Const(apply_function(node.fn, values, node.dtype).item(), node.dtype)


def _compare(fn: str, left: Expr, right: Expr) -> Expr | None:
    """Decided where the range of the difference decides it."""
    first, second = _as_index(left), _as_index(right)
    if first is None or second is None:
        return None
    low, high = (first - second).bounds
    below, above = surely_less(high, 0), surely_less(0, low)
    match fn:
        case "lt":
            known = (below, surely_less(-1, low))
        case "le":
            known = (surely_less(high, 1), above)
        case "gt":
            known = (above, surely_less(high, 1))
        case "ge":
            known = (surely_less(-1, low), below)
        case "eq" | "same":
            known = (same(low, 0) and same(high, 0), above or below)
        case _:
            known = (above or below, same(low, 0) and same(high, 0))
    return Const(known[0], torch.bool) if any(known) else None


def _is(expr: Expr, value: float) -> bool:
    """Is it this literal? Tells 0.0 from -0.0."""
    if not isinstance(expr, Const):
        return False
    same_sign = math.copysign(1, expr.value) == math.copysign(1, value)
    return expr.value == value and same_sign


def _add(node: Apply) -> Expr | None:
    left, right = node.operands
    zero = -0.0 if node.dtype.is_floating_point else 0
    if _is(right, zero):
        return left
    if _is(left, zero):
        return right
    return on_indices(node.fn, node.operands)


def _sub(node: Apply) -> Expr | None:
    left, right = node.operands
    return left if _is(right, 0) else on_indices(node.fn, node.operands)


def _mul(node: Apply) -> Expr | None:
    left, right = node.operands
    if _is(right, 1):
        return left
    if _is(left, 1):
        return right
    if not node.dtype.is_floating_point and (_is(left, 0) or _is(right, 0)):
        return identity(ReduceKind.SUM, node.dtype)
    return on_indices(node.fn, node.operands)


def _floordiv(node: Apply) -> Expr | None:
    left, right = node.operands
    if node.dtype.is_floating_point:
        return None
    if _is(right, 1):
        return left
    return on_indices(node.fn, node.operands)


def _mod(node: Apply) -> Expr | None:
    right = node.operands[1]
    if node.dtype.is_floating_point:
        return None
    if _is(right, 1):
        return identity(ReduceKind.SUM, node.dtype)
    return on_indices(node.fn, node.operands)


def _right_one(node: Apply) -> Expr | None:
    return node.operands[0] if _is(node.operands[1], 1) else None


def _twice(node: Apply) -> Expr | None:
    """``neg(neg(x))``, ``not(not(x))``, ``bitnot(bitnot(x))``."""
    (inner,) = node.operands
    return inner.operands[0] if isinstance(inner, Apply) and inner.fn == node.fn else None


def _repeated(node: Apply) -> Expr | None:
    """``max(x, x)``, NaN or not."""
    left, right = node.operands
    return left if left is right else None


def _and_or(node: Apply) -> Expr | None:
    left, right = node.operands
    if left is right:
        return left
    decisive = node.fn == "or"  # true or x, false and x
    for this, other in ((left, right), (right, left)):
        if isinstance(this, Const):
            return this if bool(this.value) == decisive else other
    return None


def _where(node: Apply) -> Expr | None:
    condition, yes, no = node.operands
    if isinstance(condition, Const):
        return yes if condition.value else no
    if yes is no:
        return yes
    if isinstance(condition, Apply) and condition.fn == "not":
        return Apply("where", (condition.operands[0], no, yes), node.dtype)
    if isinstance(yes, Apply) and yes.fn == "where" and yes.operands[0] is condition:
        return Apply("where", (condition, yes.operands[1], no), node.dtype)
    return None


def _cast(node: Apply) -> Expr | None:
    """A cast to the same dtype goes; a widening that loses nothing goes before another cast."""
    (inner,) = node.operands
    if inner.dtype is node.dtype:
        return inner
    if isinstance(inner, Apply) and inner.fn == "cast":
        source = inner.operands[0]
        if inner.dtype in _HOLDS.get(source.dtype, frozenset()):
            return Apply("cast", (source,), node.dtype)
    return None


_RULES: Mapping[str, Callable[[Apply], Expr | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _right_one,
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": _right_one,
    "neg": _twice,
    "not": _twice,
    "bitnot": _twice,
    "minimum": _repeated,
    "maximum": _repeated,
    "bitand": _repeated,
    "bitor": _repeated,
    "and": _and_or,
    "or": _and_or,
    "where": _where,
    "cast": _cast,
}
