"""Reads an element of a value as a formula of its indices: ``Reader().at(node, (i, j))``.

What has no rule here, or no exact one, is an element that only a run knows; ``reasons`` tells why.
Rules hold for every index within the value, whatever they say of others. Numbers are exact: of
whole numbers it is proved that their dtype holds them, floating-point ones are computed as their
dtype computes them.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from treadle.graph.dynamic import layout_of
from treadle.graph.index_formulas import (
    All,
    AnyOne,
    AtMost,
    Condition,
    Element,
    IndexNumber,
    IndexVariable,
    Linear,
    Numeric,
    Term,
    Unread,
    all_of,
    any_of,
    at_most,
    atoms_in,
    choice,
    equal,
    leaves,
    map_leaves,
    negated,
    quotient,
    truth,
    variable,
    where_leaves,
)
from treadle.graph.index_proofs import Prover
from treadle.graph.node_info import value_of
from treadle.graph.operators import arguments, operation_name
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import is_tensor, type_of
from treadle.util.errors import require
from treadle.util.extents import Size, same, surely_less

aten = torch.ops.aten
At = tuple[Linear, ...]
Given = dict[str, Any]
Rule = Callable[["Reader", fx.Node, Given, At], Term]

_LEAVES = 24  # of one term, and inequalities of one condition: more would be cases without end
_ATOMS = 200
_DEPTH = 60  # operations between a value and what it is made of
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EXACT_UP_TO: Mapping[torch.dtype, int] = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
}
"""Every whole number that is not larger is a number of the dtype."""


class Reader:
    """Formulas for the elements of the values of one graph, which does not change meanwhile.

    ``reasons``: why a node is read as elements that only a run knows. ``prover``: what is asked
    whether an index is within a value.
    """

    def __init__(self) -> None:
        self.reasons: dict[fx.Node, str] = {}
        self.prover = Prover()
        self._known: dict[tuple[fx.Node, At], Term] = {}
        self._depth = 0

    def at(self, node: fx.Node, index: Sequence[Linear]) -> Term:
        """The element of ``node`` at ``index``; along a dim of size 1 there is one place."""
        shape = shape_of(node)
        require(len(shape) == len(index), NoMatch, f"{node} has {len(shape)} dims")
        place = tuple(Linear(0) if same(n, 1) else i for n, i in zip(shape, index, strict=True))
        key = node, place
        if key not in self._known:
            self._known[key] = self._read(node, place)
        return self._known[key]

    def settled(self, condition: Condition) -> Condition:
        """The condition, or what it is everywhere if that is proved."""
        if self.prover.impossible(condition):
            return False
        return True if self.prover.holds(condition) else condition

    def _read(self, node: fx.Node, at: At) -> Term:
        dtype = type_of(node).dtype
        self._depth += 1
        try:
            rule = _RULES.get(node.target)
            what = operation_name(node.target) if node.op == "call_function" else "an input"
            require(rule is not None, NoMatch, f"{node} ({what}) has no formula of its indices")
            require(self._depth < _DEPTH, NoMatch, f"{node} is made in too many steps")
            assert rule is not None
            return stored(rule(self, node, arguments(node), at), dtype)
        except NoMatch as miss:
            self.reasons.setdefault(node, miss.message)
            return _unknown(node, at, dtype)
        finally:
            self._depth -= 1


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes, with a formula where the call decides."""
    return layout_of(value_of(node))[0]


def _unknown(node: fx.Node, at: At, dtype: torch.dtype) -> Term:
    if dtype is torch.bool:
        return at_most(Linear(1).plus(variable(Element(node, at, 0, 1)), -1))
    if dtype in _WHOLE:
        known = torch.iinfo(dtype)
        return variable(Element(node, at, known.min, known.max))
    return Unread(node)


def stored(term: Term, dtype: torch.dtype) -> Term:
    """``term`` as an element of ``dtype``; ``NoMatch`` where that may be another number."""
    if dtype is torch.bool:
        condition = as_condition(term)
        cases = sum(1 for _ in atoms_in(condition))
        require(cases <= _ATOMS, NoMatch, "there are too many cases")
        return condition
    require(dtype in _WHOLE or dtype in _EXACT_UP_TO, NoMatch, f"numbers of {dtype} are not read")
    numeric = as_numeric(term)
    found = map_leaves(lambda leaf: _leaf_in(leaf, dtype), numeric)
    cases = [1 for _ in leaves(found)]
    require(len(cases) <= _LEAVES, NoMatch, "there are too many cases")
    return found


def _leaf_in(leaf: Linear | IndexNumber | Unread, dtype: torch.dtype) -> Numeric:
    match leaf:
        case Unread(node):
            same_dtype = type_of(node).dtype is dtype
            require(same_dtype, NoMatch, f"{node} is known at run time only")
            return leaf
        case IndexNumber(value) if dtype in _WHOLE:
            whole = value == value and abs(value) < 2**53 and value == int(value)
            require(whole, NoMatch, f"{value} is no whole number")
            return _leaf_in(Linear(int(value)), dtype)
        case IndexNumber(value):
            return IndexNumber(float(torch.tensor(value, dtype=torch.float64).to(dtype)))
        case Linear():
            if leaf.is_constant and dtype in _EXACT_UP_TO:
                return _leaf_in(IndexNumber(float(leaf.constant)), dtype)
            low, high = _range_of(dtype)
            least, most = leaf.bounds
            fits = low <= least and most <= high
            require(fits, NoMatch, f"{leaf} may be a number that {dtype} does not hold")
            return leaf


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    if dtype in _EXACT_UP_TO:
        return -_EXACT_UP_TO[dtype], _EXACT_UP_TO[dtype]
    known = torch.iinfo(dtype)
    return known.min, known.max


def as_condition(term: Term) -> Condition:
    """Where an element is true: not 0."""
    if isinstance(term, bool | AtMost | All | AnyOne):
        return term
    return where_leaves(_is_true, term)


def _is_true(leaf: Linear | IndexNumber | Unread) -> Condition:
    match leaf:
        case Linear():
            return negated(equal(leaf, Linear(0)))
        case IndexNumber(value):
            return truth(value)
        case Unread(node):
            raise NoMatch(f"{node} is known at run time only")


def as_numeric(term: Term) -> Numeric:
    """True as 1 and false as 0."""
    if isinstance(term, bool | AtMost | All | AnyOne):
        return choice(term, Linear(1), Linear(0))
    return term


_RULES: dict[object, Rule] = {}


def _reads(*targets: object) -> Callable[[Rule], Rule]:
    """Register how the results of ``targets`` are read."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            assert target not in _RULES, f"{target} is registered twice"
            _RULES[target] = rule
        return rule

    return register


# Operands.


def _operand(reader: Reader, value: object, at: At) -> Term:
    """An operand as it stands against a result that is read at ``at``."""
    if isinstance(value, fx.Node):
        require(is_tensor(value), NoMatch, f"{value} is no tensor")
        return reader.at(value, at[len(at) - len(shape_of(value)) :])
    return _constant(value)


def _constant(value: object) -> Term:
    match value:
        case bool():
            return value
        case int():
            return Linear.of(value)
        case float():
            return IndexNumber(value)
        case _:
            raise NoMatch(f"{value} is no number")


def _first(given: Given) -> fx.Node:
    value = given.get("self", given.get("input"))
    require(is_tensor(value), NoMatch, f"{value} is no tensor")
    assert isinstance(value, fx.Node)
    return value


def _numeric(reader: Reader, value: object, at: At, dtype: torch.dtype) -> Numeric:
    """An operand converted to the dtype that is computed in."""
    found = stored(_operand(reader, value, at), dtype)
    assert not isinstance(found, bool | AtMost | All | AnyOne)
    for leaf in leaves(found):
        if isinstance(leaf, Unread):
            raise NoMatch(f"{leaf.node} is known at run time only")
        exact = not isinstance(value, float) or leaf == IndexNumber(value)
        require(exact, NoMatch, f"{value} is no number of {dtype}")
    return found


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


# Values that are made.


@_reads(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``start + step * i``"""
    start, step = given.get("start", 0), given.get("step", 1)
    whole = isinstance(start, int) and isinstance(step, int) and not isinstance(step, Size)
    require(whole, NoMatch, f"{node} counts from {start} in steps of {step}")
    return Linear.of(start).plus(at[0], step)


@_reads(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return _constant(given["fill_value"])


@_reads(aten.scalar_tensor.default)
def _scalar(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return _constant(given["s"])


@_reads(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return Linear(1)


@_reads(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return Linear(0)


# Elements that move.


@_reads(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)
def _same(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i]``, in another dtype or layout perhaps."""
    return _operand(reader, given.get("self", given.get("a")), at)


@_reads(aten.expand.default)
def _expand(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i]`` for the last dims; the reader knows that a dim of size 1 has one place."""
    return _operand(reader, given["self"], at)


@_reads(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _reshaped(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """Dims of size 1 come and go; all others stay, in their order."""
    x = _first(given)
    before, after = shape_of(x), shape_of(node)
    moving = [(n, i) for n, i in zip(after, at, strict=True) if not same(n, 1)]
    kept = [n for n in before if not same(n, 1)]
    fits = len(kept) == len(moving) and all(map(same, kept, [n for n, _ in moving]))
    require(fits, NoMatch, f"{node} makes {list(after)} of {list(before)}")
    indices = iter(i for _, i in moving)
    return reader.at(x, [Linear(0) if same(n, 1) else next(indices) for n in before])


@_reads(aten.permute.default)
def _permuted(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    place = {_dim(dim, len(at)): i for dim, i in zip(given["dims"], at, strict=True)}
    return reader.at(_first(given), [place[dim] for dim in range(len(at))])


@_reads(aten.transpose.int)
def _transposed(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    place = list(at)
    one, two = _dim(given["dim0"], len(at)), _dim(given["dim1"], len(at))
    place[one], place[two] = place[two], place[one]
    return reader.at(_first(given), place)


@_reads(aten.t.default)
def _t(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return reader.at(_first(given), at[::-1])


@_reads(aten.slice.Tensor)
def _slice(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[start + step * i]``"""
    x = _first(given)
    dim = _dim(given["dim"], len(at))
    start, step = given["start"], given["step"]
    require(not isinstance(step, Size), NoMatch, f"{node} takes steps of {step}")
    first = _place(0 if start is None else start, shape_of(x)[dim], node)
    moved = Linear.of(first).plus(at[dim], step)
    return reader.at(x, [*at[:dim], moved, *at[dim + 1 :]])


@_reads(aten.select.int)
def _select(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    x = _first(given)
    dim = _dim(given["dim"], len(at) + 1)
    chosen = Linear.of(_place(given["index"], shape_of(x)[dim], node))
    return reader.at(x, [*at[:dim], chosen, *at[dim:]])


def _place(start: int, size: int, node: fx.Node) -> int:
    """A start as a place that is counted from the first element."""
    negative = surely_less(start, 0)
    place = start + size if negative else start
    inside = surely_less(-1, place) and surely_less(place, size + 1)
    require(inside, NoMatch, f"{node} starts at {start} of {size}")
    return place


@_reads(aten.flip.default)
def _flip(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    flipped = {_dim(dim, len(at)) for dim in given["dims"]}
    shape = shape_of(node)
    place = [
        Linear.of(n).shifted(-1).plus(i, -1) if dim in flipped else i
        for dim, (n, i) in enumerate(zip(shape, at, strict=True))
    ]
    return reader.at(_first(given), place)


@_reads(aten.cat.default)
def _cat(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """The first part that the index is within."""
    parts: list[fx.Node] = list(given["tensors"])
    require(
        len({len(shape_of(each)) for each in parts}) == 1, NoMatch, f"{node} joins an empty part"
    )
    dim = _dim(given["dim"], len(at))
    found: list[tuple[Condition, Term]] = []
    start = Linear(0)
    for part in parts:
        inner = at[dim].plus(start, -1)
        start = start.plus(Linear.of(shape_of(part)[dim]))
        inside = at_most(at[dim].shifted(1).plus(start, -1))
        found.append((inside, reader.at(part, [*at[:dim], inner, *at[dim + 1 :]])))
    result = found[-1][1]
    for inside, term in reversed(found[:-1]):
        result = _either(inside, term, result)
    return result


def _either(condition: Condition, yes: Term, no: Term) -> Term:
    """``condition ? yes : no`` of truth values or of numbers."""
    if all(isinstance(each, bool | AtMost | All | AnyOne) for each in (yes, no)):
        return any_of(
            all_of(condition, as_condition(yes)), all_of(negated(condition), as_condition(no))
        )
    return choice(condition, as_numeric(yes), as_numeric(no))


@_reads(aten.constant_pad_nd.default)
def _padded(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i - before]`` inside, the value of the padding outside."""
    x, pads = _first(given), list(given["pad"])
    shape, place, inside = shape_of(x), list(at), list[Condition]()
    for position in range(0, len(pads), 2):
        dim = len(at) - 1 - position // 2
        place[dim] = at[dim].plus(Linear.of(pads[position]), -1)
        inside.append(at_most(Linear(0).plus(place[dim], -1)))
        inside.append(at_most(place[dim].shifted(1).plus(Linear.of(shape[dim]), -1)))
    return _either(all_of(*inside), reader.at(x, place), _constant(given["value"]))


@_reads(aten.index.Tensor)
def _indexed(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[f(i), g(i), ...]`` for whole numbers ``f(i)``, all proved to be places of ``x``."""
    x, indices = _first(given), list(given["indices"])
    require(None not in indices, NoMatch, f"{node} leaves out dims")
    shape = shape_of(x)
    rank = len(at) - (len(shape) - len(indices))
    place = [_chosen(reader, each, at[:rank]) for each in indices]
    for term, size in zip(place, shape, strict=False):
        inside = all_of(
            at_most(Linear(0).plus(term, -1)), at_most(term.shifted(1).plus(Linear.of(size), -1))
        )
        require(reader.prover.holds(inside), NoMatch, f"{node} may choose a place outside of {x}")
    return reader.at(x, [*place, *at[rank:]])


def _chosen(reader: Reader, index: fx.Node, at: At) -> Linear:
    require(type_of(index).dtype in (torch.int32, torch.int64), NoMatch, f"{index} is a mask")
    term = _operand(reader, index, at)
    require(isinstance(term, Linear), NoMatch, f"the place that {index} chooses has cases")
    assert isinstance(term, Linear)
    return term


# Arithmetic.


def _each_pair(left: Numeric, right: Numeric, combine: Callable[[Any, Any], Numeric]) -> Numeric:
    """``combine`` of what both may be."""
    return map_leaves(lambda a: map_leaves(lambda b: combine(a, b), right), left)


@_reads(aten.add.Tensor, aten.add.Scalar)
def _add(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return _sum(reader, node, given["self"], given["other"], given["alpha"], at, sign=1)


@_reads(aten.sub.Tensor, aten.sub.Scalar)
def _sub(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return _sum(reader, node, given["self"], given["other"], given["alpha"], at, sign=-1)


@_reads(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return _sum(reader, node, given["other"], given["self"], given["alpha"], at, sign=-1)


def _sum(
    reader: Reader, node: fx.Node, left: object, right: object, alpha: object, at: At, *, sign: int
) -> Term:
    require(alpha == 1, NoMatch, f"{node} has alpha={alpha}")
    dtype = type_of(node).dtype
    require(dtype is not torch.bool, NoMatch, f"{node} adds truth values")
    combine = operator.add if sign > 0 else operator.sub

    def add(one: Linear | IndexNumber, two: Linear | IndexNumber) -> Numeric:
        if isinstance(one, Linear) and isinstance(two, Linear):
            return one.plus(two, sign)
        return _in_dtype(combine, one, two, dtype)

    return _each_pair(_numeric(reader, left, at, dtype), _numeric(reader, right, at, dtype), add)


@_reads(aten.mul.Tensor, aten.mul.Scalar)
def _mul(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    dtype = type_of(node).dtype
    if dtype is torch.bool:
        return all_of(
            *(as_condition(_operand(reader, given[name], at)) for name in ("self", "other"))
        )
    left, right = (_numeric(reader, given[name], at, dtype) for name in ("self", "other"))

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


@_reads(aten.neg.default)
def _neg(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return map_leaves(
        lambda leaf: IndexNumber(-leaf.value) if isinstance(leaf, IndexNumber) else leaf.times(-1),
        _numeric(reader, given["self"], at, type_of(node).dtype),
    )


@_reads(aten.abs.default)
def _abs(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    def absolute(leaf: Linear | IndexNumber) -> Numeric:
        if isinstance(leaf, IndexNumber):
            return IndexNumber(abs(leaf.value))
        return choice(at_most(leaf), leaf.times(-1), leaf)

    return map_leaves(absolute, _numeric(reader, given["self"], at, type_of(node).dtype))


@_reads(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
def _floor_divide(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x // n``, rounded down, for a positive number ``n``."""
    mode = given.get("rounding_mode", "floor")
    require(mode == "floor", NoMatch, f"{node} rounds by {mode}")
    divisor = _divisor(reader, node, given, at)
    return map_leaves(
        lambda leaf: quotient(leaf, divisor),
        _numeric(reader, given["self"], at, type_of(node).dtype),
    )


@_reads(aten.remainder.Tensor, aten.remainder.Scalar)
def _remainder(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x - n * (x // n)`` for a positive number ``n``."""
    divisor = _divisor(reader, node, given, at)
    return map_leaves(
        lambda leaf: leaf.plus(quotient(leaf, divisor), -divisor),
        _numeric(reader, given["self"], at, type_of(node).dtype),
    )


def _divisor(reader: Reader, node: fx.Node, given: Given, at: At) -> int:
    dtype = type_of(node).dtype
    require(dtype in _WHOLE, NoMatch, f"{node} divides {dtype}")
    term = _numeric(reader, given["other"], at, dtype)
    fixed = isinstance(term, Linear) and term.is_constant and term.constant > 0
    require(fixed, NoMatch, f"{node} divides by no positive number")
    assert isinstance(term, Linear)
    return term.constant


@_reads(aten.cumsum.default)
def _cumsum(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``n * (i + 1)``, where all that is added up is proved to be ``n``."""
    x = _first(given)
    dim = _dim(given["dim"], len(at))
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


@_reads(
    *(getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Tensor", "Scalar"))
)
def _compared(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    plain, whole = _COMPARISONS[operation_name(node.target).partition(".")[0]]
    dtype = _common_dtype(node, given["self"], given["other"])
    left = _numeric(reader, given["self"], at, dtype)
    right = _numeric(reader, given["other"], at, dtype)

    def compare(one: Linear | IndexNumber, two: Linear | IndexNumber) -> Condition:
        if isinstance(one, IndexNumber) and isinstance(two, IndexNumber):
            return plain(one.value, two.value)
        return whole(_as_whole(one), _as_whole(two))

    return where_leaves(lambda a: where_leaves(lambda b: compare(a, b), right), left)


def _common_dtype(node: fx.Node, left: object, right: object) -> torch.dtype:
    """The dtype that two operands are compared in, both numbers exact in it."""
    dtypes = [type_of(each).dtype for each in (left, right) if isinstance(each, fx.Node)]
    if all(each in _WHOLE or each is torch.bool for each in dtypes):
        floats = [each for each in (left, right) if isinstance(each, float)]
        require(not floats, NoMatch, f"{node} compares whole numbers with {floats}")
        kinds = {each for each in dtypes if each is not torch.bool}
        scalar = any(not isinstance(each, fx.Node) for each in (left, right))
        return kinds.pop() if scalar and len(kinds) == 1 else torch.int64
    require(len(set(dtypes)) == 1, NoMatch, f"{node} compares {dtypes[0]} with {dtypes[-1]}")
    return dtypes[0]


def _conditions(reader: Reader, node: fx.Node, given: Given, at: At) -> list[Condition]:
    """Both operands as truth values; bits of other numbers have no formula."""
    logical = operation_name(node.target).startswith("logical")
    dtype = type_of(node).dtype
    require(logical or dtype is torch.bool, NoMatch, f"{node} combines the bits of {dtype}")
    names = [name for name in ("self", "other") if name in given]
    return [as_condition(_operand(reader, given[name], at)) for name in names]


@_reads(aten.logical_and.default, aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)
def _and(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return all_of(*_conditions(reader, node, given, at))


@_reads(aten.logical_or.default, aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)
def _or(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    return any_of(*_conditions(reader, node, given, at))


@_reads(aten.logical_xor.default, aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)
def _xor(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    one, two = _conditions(reader, node, given, at)
    return any_of(all_of(one, negated(two)), all_of(negated(one), two))


@_reads(aten.logical_not.default, aten.bitwise_not.default)
def _not(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    (one,) = _conditions(reader, node, given, at)
    return negated(one)


@_reads(aten.where.self)
def _where(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    condition = as_condition(_operand(reader, given["condition"], at))
    yes, no = (_operand(reader, given[name], at) for name in ("self", "other"))
    return _chosen_by(condition, yes, no, type_of(node).dtype)


@_reads(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    condition = as_condition(_operand(reader, given["mask"], at))
    value, x = _operand(reader, given["value"], at), _operand(reader, given["self"], at)
    return _chosen_by(condition, value, x, type_of(node).dtype)


@_reads(aten.tril.default)
def _tril(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i, j]`` where ``j <= i + diagonal``, 0 elsewhere."""
    *_, row, column = at
    inside = at_most(column.plus(row, -1).plus(Linear.of(given["diagonal"]), -1))
    return _chosen_by(inside, reader.at(_first(given), at), Linear(0), type_of(node).dtype)


@_reads(aten.triu.default)
def _triu(reader: Reader, node: fx.Node, given: Given, at: At) -> Term:
    """``x[i, j]`` where ``j >= i + diagonal``, 0 elsewhere."""
    *_, row, column = at
    inside = at_most(row.plus(column, -1).plus(Linear.of(given["diagonal"])))
    return _chosen_by(inside, reader.at(_first(given), at), Linear(0), type_of(node).dtype)


def _chosen_by(condition: Condition, yes: Term, no: Term, dtype: torch.dtype) -> Term:
    """What may never be chosen need not be known."""
    if isinstance(condition, bool):
        return yes if condition else no
    return _either(condition, *(_kept(each, dtype) for each in (yes, no)))


def _kept(term: Term, dtype: torch.dtype) -> Term:
    """A branch in the dtype of the result. One that is not known stays what it is."""
    return term if isinstance(term, Unread) else stored(term, dtype)


__all__ = ["Reader", "as_condition", "as_numeric", "shape_of", "stored"]
