"""What rules that read elements of values have in common: operands, dtypes, choices.

::

    Rule:  (reader, node, arguments, index)  ->  the element at that index, as a formula

Numbers are exact: of whole numbers it is proved that their dtype holds them, floating-point ones
are computed as their dtype computes them. ``NoMatch`` says that an element has no exact formula.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import fx

from treadle.graph.dynamic import layout_of
from treadle.graph.index_formulas import (
    All,
    AnyOne,
    AtMost,
    Condition,
    IndexNumber,
    Linear,
    Numeric,
    Term,
    Unread,
    all_of,
    any_of,
    atoms_in,
    choice,
    equal,
    leaves,
    map_leaves,
    negated,
    truth,
    where_leaves,
)
from treadle.graph.index_proofs import Prover
from treadle.graph.node_info import value_of
from treadle.graph.rewrite import NoMatch
from treadle.graph.types import is_tensor, type_of
from treadle.util.errors import require

At = tuple[Linear, ...]
Given = dict[str, Any]


class ElementReader(Protocol):
    """What a rule reads operands with."""

    @property
    def prover(self) -> Prover:
        """What is asked whether an index is within a value."""
        ...

    def at(self, node: fx.Node, index: Sequence[Linear]) -> Term:
        """The element of ``node`` at ``index``."""
        ...

    def settled(self, condition: Condition) -> Condition:
        """The condition, or what it is everywhere if that is proved."""
        ...


Rule = Callable[[ElementReader, fx.Node, Given, At], Term]
"""The element at an index of what a node gives, from the arguments of the node."""


@final
class Rules:
    """How the results of operations are read, each registered once."""

    def __init__(self) -> None:
        self.by_target: dict[object, Rule] = {}

    def reads(self, *targets: object) -> Callable[[Rule], Rule]:
        """Register how the results of ``targets`` are read."""

        def register(rule: Rule) -> Rule:
            for target in targets:
                assert target not in self.by_target, f"{target} is registered twice"
                self.by_target[target] = rule
            return rule

        return register


def joined(*tables: Rules) -> Mapping[object, Rule]:
    """All rules of several tables, in which no operation stands twice."""
    found: dict[object, Rule] = {}
    for table in tables:
        both = found.keys() & table.by_target.keys()
        assert not both, f"{both} are registered twice"
        found |= table.by_target
    return found


_LEAVES = 24  # of one term, and inequalities of one condition: more would be cases without end
_ATOMS = 200
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EXACT_UP_TO: Mapping[torch.dtype, int] = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
}
"""Every whole number that is not larger is a number of the dtype."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes, with a formula where the call decides."""
    return layout_of(value_of(node))[0]


def stored(term: Term, dtype: torch.dtype) -> Term:
    """``term`` as an element of ``dtype``; ``NoMatch`` where that may be another number."""
    if dtype is torch.bool:
        condition = as_condition(term)
        cases = sum(1 for _ in atoms_in(condition))
        require(cases <= _ATOMS, NoMatch, "there are too many cases")
        return condition
    require(dtype in WHOLE or dtype in _EXACT_UP_TO, NoMatch, f"numbers of {dtype} are not read")
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
        case IndexNumber(value) if dtype in WHOLE:
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


# Operands.


def operand(reader: ElementReader, value: object, at: At) -> Term:
    """An operand as it stands against a result that is read at ``at``."""
    if isinstance(value, fx.Node):
        require(is_tensor(value), NoMatch, f"{value} is no tensor")
        return reader.at(value, at[len(at) - len(shape_of(value)) :])
    return constant(value)


def constant(value: object) -> Term:
    """A number of Python's; ``NoMatch`` for anything else."""
    match value:
        case bool():
            return value
        case int():
            return Linear.of(value)
        case float():
            return IndexNumber(value)
        case _:
            raise NoMatch(f"{value} is no number")


def input_of(given: Given) -> fx.Node:
    """The tensor that an operation reads first."""
    value = given.get("self", given.get("input"))
    require(is_tensor(value), NoMatch, f"{value} is no tensor")
    assert isinstance(value, fx.Node)
    return value


def numeric(reader: ElementReader, value: object, at: At, dtype: torch.dtype) -> Numeric:
    """An operand converted to the dtype that is computed in."""
    found = stored(operand(reader, value, at), dtype)
    assert not isinstance(found, bool | AtMost | All | AnyOne)
    for leaf in leaves(found):
        if isinstance(leaf, Unread):
            raise NoMatch(f"{leaf.node} is known at run time only")
        exact = not isinstance(value, float) or leaf == IndexNumber(value)
        require(exact, NoMatch, f"{value} is no number of {dtype}")
    return found


def dim_of(dim: int, rank: int) -> int:
    """A dim as it is counted from the first."""
    return dim % rank if rank else 0


def either(condition: Condition, yes: Term, no: Term) -> Term:
    """``condition ? yes : no`` of truth values or of numbers."""
    if all(isinstance(each, bool | AtMost | All | AnyOne) for each in (yes, no)):
        return any_of(
            all_of(condition, as_condition(yes)), all_of(negated(condition), as_condition(no))
        )
    return choice(condition, as_numeric(yes), as_numeric(no))


def chosen_by(condition: Condition, yes: Term, no: Term, dtype: torch.dtype) -> Term:
    """What may never be chosen need not be known."""
    if isinstance(condition, bool):
        return yes if condition else no
    return either(condition, *(_kept(each, dtype) for each in (yes, no)))


def _kept(term: Term, dtype: torch.dtype) -> Term:
    """A branch in the dtype of the result. One that is not known stays what it is."""
    return term if isinstance(term, Unread) else stored(term, dtype)


__all__ = [
    "WHOLE",
    "At",
    "ElementReader",
    "Given",
    "Rule",
    "Rules",
    "as_condition",
    "as_numeric",
    "chosen_by",
    "constant",
    "dim_of",
    "either",
    "input_of",
    "joined",
    "numeric",
    "operand",
    "shape_of",
    "stored",
]
