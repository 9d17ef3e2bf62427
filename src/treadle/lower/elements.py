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

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, final

import torch
from torch import fx

from treadle.algebra.conditions import (
    Condition,
    Element,
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
    element,
    equal,
    indices_in,
    leaves,
    map_leaves,
    negated,
    truth,
    where_leaves,
    within,
)
from treadle.algebra.extents import (
    Size,
    as_int,
    formula_of,
    is_zero,
    largest,
    least,
    same,
    surely_less,
)
from treadle.algebra.index import ZERO, Atom, Axis, Index, linear
from treadle.algebra.index import (
    Value as IndexValue,
)
from treadle.algebra.index_walks import replace_axes, replace_values
from treadle.algebra.polynomial import Polynomial
from treadle.algebra.proofs import Prover
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dynamic import layout_of, symbols_of_graph
from treadle.graph.core.constants import constant_of
from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import arguments, operation_name
from treadle.graph.core.types import is_tensor, type_of
from treadle.graph.rewrite.rules import NoMatch
from treadle.loop.expr import (
    BOOLEAN,
    COMPARE,
    DTYPES,
    Apply,
    Array,
    Const,
    Expr,
    Load,
    Position,
)
from treadle.loop.expr import (
    formula_of as expr_of,
)
from treadle.loop.interpret import apply_function
from treadle.lower.context import Builder, LoweringContext, fresh_axes
from treadle.lower.graph import FAMILIES
from treadle.lower.node import origin_of
from treadle.lower.registry import Unsupported, rule_for
from treadle.util.errors import LoweringError, VerifyError, require
from treadle.util.nested import map_leaves as map_arguments

aten = torch.ops.aten

At = tuple[Index, ...]
_DEPTH = 60  # operations between a value and what it is made of
_LEAVES = 24  # of one term, and inequalities of one condition: more would be cases without end
_INEQUALITIES = 200
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EXACT_UP_TO: Mapping[torch.dtype, int] = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
}
"""Every whole number that is not larger is a number of the dtype."""
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

    def loaded(self, buffer: str, index: Index) -> IndexExpr:
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
            return _stored(self._term(node, at), dtype)
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
        return _Reading(self, dict(zip(array.axes, at, strict=True))).term(array.body)

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
    return _literal(held.item(), held.dtype)


def _literal(value: float, dtype: torch.dtype) -> IndexExpr:
    if dtype is torch.bool:
        return bool(value)
    return IndexNumber(float(value)) if dtype.is_floating_point else Index.of(int(value))


def _unknown(node: fx.Node, at: At, dtype: torch.dtype) -> IndexExpr:
    of = Element(node.name, at, info(node).name or node.name)
    if dtype is torch.bool:
        return at_most(1 - element(of, 0, 1))
    if dtype in _WHOLE:
        known = torch.iinfo(dtype)
        return element(of, known.min, known.max)
    return Unread(node.name)


@final
class _Reading:
    """Formulas as terms, with an index in the place of each axis."""

    def __init__(self, elements: Elements, places: Mapping[Axis, Index]) -> None:
        self._elements = elements
        self._places = places
        self._known: dict[int, IndexExpr] = {}

    def term(self, expr: Expr) -> IndexExpr:
        """What ``expr`` is, exactly; ``NoMatch`` where it is not known."""
        if id(expr) not in self._known:
            self._known[id(expr)] = self._read(expr)
        return self._known[id(expr)]

    def _read(self, expr: Expr) -> IndexExpr:
        match expr:
            case Const(value, dtype):
                return _stored(_literal(value, dtype), dtype)
            case Position(index):
                return self._index(index)
            case Load():
                zero = _literal(0, expr.dtype)
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
        """A place that a formula computes: all it may be is proved to be within its bounds."""
        term = self.term(expr_of(value))
        require(isinstance(term, Index), NoMatch, "a place that is looked up has cases")
        assert isinstance(term, Index)
        inside = self._elements.prover.holds(within(term, value.lo, value.hi))
        require(inside, NoMatch, f"a place may be outside of {value.lo}..{value.hi}")
        return term

    def _loaded(self, load: Load) -> IndexExpr:
        return self._elements.loaded(load.buffer, self._index(load.index))

    def _where(self, condition: Expr, yes: Expr, no: "Expr | IndexExpr") -> IndexExpr:
        """What may never be chosen need not be known."""
        holds = _as_condition(self.term(condition))
        if holds is False:
            return self.term(no) if isinstance(no, Expr) else no
        is_masked = isinstance(yes, Load) and yes.mask is condition
        first = self._loaded(yes) if is_masked and isinstance(yes, Load) else self.term(yes)
        if holds is True:
            return first
        other = self.term(no) if isinstance(no, Expr) else no
        return _stored(either(holds, first, other), yes.dtype)

    def _applied(self, expr: Apply) -> IndexExpr:
        operands = [self.term(operand) for operand in expr.operands]
        if expr.fn in _LOGIC:
            return _stored(_LOGIC[expr.fn](*map(_as_condition, operands)), torch.bool)
        if expr.fn == "cast":
            return _stored(operands[0], expr.dtype)
        dtype = expr.operands[0].dtype

        def compute(*found: Index | IndexNumber | Unread) -> IndexExpr:
            return _computed(expr, dtype, found)

        numbers = [as_numeric(operand) for operand in operands]
        gives_truth = expr.fn in COMPARE or expr.fn in BOOLEAN
        each_leaf = where_leaves if gives_truth else map_leaves
        return _stored(_over_leaves(each_leaf, numbers, compute), expr.dtype)


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
        return _literal(apply_function(expr.fn, values, expr.dtype).item(), expr.dtype)
    whole = [_as_whole(operand) for operand in operands]
    compute = _ON_INDICES.get(expr.fn)
    divides = expr.fn in ("floordiv", "mod")
    exact = compute is not None and not (divides and dtype not in _WHOLE)
    require(exact, NoMatch, f"{expr.fn} of indices has no term")
    assert compute is not None
    if expr.fn == "mul" and dtype not in _WHOLE:
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


def _stored(term: IndexExpr, dtype: torch.dtype) -> IndexExpr:
    """``term`` as an element of ``dtype``; ``NoMatch`` where that may be another number."""
    if dtype is torch.bool:
        condition = _as_condition(term)
        cases = sum(1 for _ in indices_in(condition))
        require(cases <= _INEQUALITIES, NoMatch, "there are too many cases")
        return condition
    require(dtype in _WHOLE or dtype in _EXACT_UP_TO, NoMatch, f"numbers of {dtype} are not read")
    found = map_leaves(lambda leaf: _leaf_in(leaf, dtype), as_numeric(term))
    require(sum(1 for _ in leaves(found)) <= _LEAVES, NoMatch, "there are too many cases")
    return found


def _leaf_in(leaf: Index | IndexNumber | Unread, dtype: torch.dtype) -> Numeric:
    match leaf:
        case Unread(value):
            floating = dtype not in _WHOLE
            require(floating, NoMatch, f"{value} is known at run time only")
            return leaf
        case IndexNumber(value) if dtype in _WHOLE:
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
