"""Walking and rebuilding formulas. Each distinct node is visited once, without recursion.

A formula's operands are: the operands of an apply, the body of a reduce, the mask of a load, and
the formulas whose values stand in an index.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

from treadle.algebra.index import Axis, Index, IndexLike, Key, Value
from treadle.algebra.index_walks import replace_axes, replace_values
from treadle.loop.expr import (
    Apply,
    Const,
    Expr,
    Inner,
    Load,
    Local,
    Position,
    Reduce,
    formula_of,
    values_of,
)


def operands_of(expr: Expr) -> tuple[Expr, ...]:
    """Every formula directly inside ``expr``."""
    if isinstance(expr, Apply):  # most are
        return expr.operands
    match expr:
        case Const() | Local():
            return ()
        case Position():
            return values_of(expr.index)
        case Load():
            inside = values_of(expr.index)
            return inside if expr.mask is None else (*inside, expr.mask)
        case Reduce():
            return (expr.body,)


def walk(expr: Expr) -> tuple[Expr, ...]:
    """Each node of the graph once, operands before what uses them, ``expr`` last."""
    if not isinstance(expr, Inner):
        return (expr,)
    if expr.inside is None:
        object.__setattr__(expr, "inside", tuple(_walk(expr))[:-1])
    assert expr.inside is not None
    return (*expr.inside, expr)


def walk_all(exprs: Iterable[Expr]) -> Iterator[Expr]:
    """``walk`` over several formulas that may share nodes."""
    seen: set[int] = set()
    for root in exprs:
        for node in walk(root):
            if id(node) not in seen:
                seen.add(id(node))
                yield node


def _walk(root: Expr) -> Iterator[Expr]:
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((inner, False) for inner in reversed(operands_of(node)))


def map_expr(expr: Expr, fn: Callable[[Expr], Expr]) -> Expr:
    """Rebuild bottom up: ``fn`` gets each node with its operands already replaced, once."""
    new: dict[int, Expr] = {}
    for node in walk(expr):
        new[id(node)] = fn(_rebuild(node, lambda inner: new[id(inner)]))
    return new[id(expr)]


def _rebuild(node: Expr, get: Callable[[Expr], Expr]) -> Expr:
    """``node`` with each operand replaced by ``get(operand)``; itself if none changes."""
    if isinstance(node, Apply):  # most are
        operands = tuple([get(inner) for inner in node.operands])
        same = all(map(operator.is_, operands, node.operands))
        return node if same else Apply(node.fn, operands, node.dtype)
    if all(get(inner) is inner for inner in operands_of(node)):
        return node
    match node:
        case Const() | Local():
            return node
        case Position():
            return Position(_map_values(node.index, get))
        case Load():
            mask = None if node.mask is None else get(node.mask)
            return Load(node.buffer, _map_values(node.index, get), node.dtype, mask)
        case Reduce():
            return Reduce(node.kind, node.axes, get(node.body))


def value_index(expr: Expr, lo: int, hi: int) -> Index:
    """An index that depends on data: ``weight[value(tokens[i]) * D + j]``."""
    return Value(expr, lo, hi, axes_of(expr), structure(expr)).as_index


def _map_values(index: Index, get: Callable[[Expr], Expr]) -> Index:
    """``index`` with the formula of each value replaced."""

    def replaced(value: Value) -> Index:
        return value_index(get(formula_of(value)), value.lo, value.hi)

    return replace_values(index, replaced)


def substitute_index(index: Index, mapping: Mapping[Axis, IndexLike]) -> Index:
    """``index`` with axes replaced, in the formulas of its values too."""

    def replaced(value: Value) -> Index:
        return value_index(substitute(formula_of(value), mapping), value.lo, value.hi)

    return replace_axes(index, mapping, replaced)


def substitute(expr: Expr, mapping: Mapping[Axis, IndexLike]) -> Expr:
    """``expr`` with free axes replaced by indices:  ``x[4*i + j]`` with i -> 2 gives ``x[8 + j]``.

    Axes bound by a reduce inside must not be in ``mapping``.
    """
    new: dict[int, Expr] = {}

    def get(inner: Expr) -> Expr:
        return new[id(inner)]

    def on_value(value: Value) -> Index:
        return value_index(get(formula_of(value)), value.lo, value.hi)

    for node in walk(expr):
        match node:
            case Position():
                index = replace_axes(node.index, mapping, on_value)
                new[id(node)] = node if index is node.index else Position(index)
            case Load():
                index = replace_axes(node.index, mapping, on_value)
                mask = None if node.mask is None else get(node.mask)
                same = index is node.index and mask is node.mask
                new[id(node)] = node if same else Load(node.buffer, index, node.dtype, mask)
            case _:
                new[id(node)] = _rebuild(node, get)
    return new[id(expr)]


def conjuncts(condition: Expr) -> Iterator[Expr]:
    """The conditions that hold together where ``condition`` does: ``a and (b and c)``."""
    if isinstance(condition, Apply) and condition.fn == "and":
        for operand in condition.operands:
            yield from conjuncts(operand)
    else:
        yield condition


def loads(expr: Expr) -> tuple[Load, ...]:
    """The distinct loads, those in masks and indices included, in the order of ``walk``."""
    if not isinstance(expr, Inner):
        return ()
    if expr.reads is None:
        inside = tuple(_distinct_loads(walk(expr)[:-1]))
        object.__setattr__(expr, "reads", inside)
    assert expr.reads is not None
    if isinstance(expr, Load):
        return tuple(_distinct_loads((*expr.reads, expr))) if expr.reads else (expr,)
    return expr.reads


def _distinct_loads(nodes: Iterable[Expr]) -> Iterable[Load]:
    found: dict[tuple[object, ...], Load] = {}
    for node in nodes:
        if isinstance(node, Load):
            found.setdefault((node.buffer, node.index, node.dtype, id(node.mask)), node)
    return found.values()


def buffers_in(expr: Expr) -> tuple[str, ...]:
    """The buffers that are read, each once, in the order of ``walk``."""
    return tuple(dict.fromkeys([load.buffer for load in loads(expr)]))


def rename_buffers(expr: Expr, names: Mapping[str, str]) -> Expr:
    """``expr`` with its buffers called as ``names`` says; those it does not know stay."""

    def renamed(node: Expr) -> Expr:
        if not isinstance(node, Load):
            return node
        name = names.get(node.buffer, node.buffer)
        return node if name == node.buffer else Load(name, node.index, node.dtype, node.mask)

    return map_expr(expr, renamed)


def axes_of(expr: Expr) -> frozenset[Axis]:
    """The free axes: those of every index, without the ones a reduce binds."""
    free: dict[int, frozenset[Axis]] = {}
    for node in walk(expr):
        axes = frozenset[Axis]().union(*(free[id(inner)] for inner in operands_of(node)))
        if isinstance(node, Position | Load):
            axes |= node.index.axes
        if isinstance(node, Reduce):
            axes -= frozenset(node.axes)
        free[id(node)] = axes
    return free[id(expr)]


def structure(expr: Expr) -> Key:
    """A nested tuple that is equal for equal formulas however they share nodes."""
    numbers: dict[Key, int] = {}
    of: dict[int, int] = {}
    for node in walk(expr):
        key = _node_key(node, lambda inner: of[id(inner)])
        of[id(node)] = numbers.setdefault(key, len(numbers))
    return tuple(numbers)


class HashConsing:
    """Gives equal nodes one object (hash-consing), for as long as this table lives."""

    def __init__(self) -> None:
        self._nodes: dict[Key, Expr] = {}

    def node(self, node: Expr) -> Expr:
        """The one object equal to ``node``, whose operands this table gave."""
        return self._nodes.setdefault(_node_key(node, id), node)


def _node_key(node: Expr, number: Callable[[Expr], int]) -> Key:
    """One node with its operands as numbers. Tells -0.0 from 0.0, which ``==`` does not."""
    match node:
        case Const():
            return "const", f"{node.value!r}:{node.dtype}", (), ()
        case Local():
            return "local", f"{node.name}:{node.dtype}", (), ()
        case Position():
            return "position", "", (), (node.index.key,)
        case Load():
            mask = () if node.mask is None else (number(node.mask),)
            return "load", f"{node.buffer}:{node.dtype}", mask, (node.index.key,)
        case Apply():
            operands = tuple(number(inner) for inner in node.operands)
            return "apply", f"{node.fn}:{node.dtype}", operands, ()
        case Reduce():
            serials = tuple(axis.serial for axis in node.axes)
            return "reduce", str(node.kind), (number(node.body), *serials), ()
