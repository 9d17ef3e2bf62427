"""What users write in the pattern of a rule, besides calls of operators: ``any_of``, ``named``,
``through``, ``list_of``.

Each leaves a mark in the traced program, which ``pattern_programs.py`` reads.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import fx

from treadle.graph.rewrite.pattern import Anything, Constant, Test
from treadle.util.errors import VerifyError, require

Program: TypeAlias = Callable[..., object]
"""A pattern as users write it: a function of variables."""


@final
@dataclass(frozen=True)
class AnyOf:
    """A call of one of ``targets``, in a pattern; ``commutes``: of its first two arguments in
    either order."""

    targets: tuple[object, ...]
    commutes: bool = False

    def __call__(self, *args: object, **kwargs: object) -> fx.Proxy:
        proxy = next(each for each in args if isinstance(each, fx.Proxy))
        return proxy.tracer.create_proxy("call_function", self, args, kwargs, name="any_of")


@final
@dataclass(frozen=True)
class ReadersMark:
    """A value, and how many read it; ``None`` for any number."""

    count: int | None

    def __call__(self, value: object) -> Any:
        return _marked(self, value)


@final
@dataclass(frozen=True)
class ThroughMark:
    """A value behind calls of ``targets``, and the variable for the list of them."""

    targets: frozenset[object]

    def __call__(self, value: object, *chain: object) -> Any:
        return _marked(self, value, *chain)


@final
@dataclass(frozen=True)
class NameMark:
    """A variable for a call."""

    def __call__(self, variable: object, call: object) -> Any:
        return _marked(self, variable, call)


@final
@dataclass(frozen=True)
class CallMark:
    """A variable for a call of one of ``targets`` with any arguments."""

    targets: tuple[object, ...]

    def __call__(self, variable: object) -> Any:
        return _marked(self, variable)


@final
@dataclass(frozen=True)
class ListMark:
    """A list of what ``item`` matches, and the variables for what its parameters stand for."""

    item: Program

    def __call__(self, *collected: object) -> Any:
        return _marked(self, *collected)


@final
@dataclass(frozen=True)
class ConstantMark:
    """A variable for a constant."""

    constant: Constant

    def __call__(self, variable: object) -> Any:
        return _marked(self, variable)


anything = Anything()
"""In a pattern: an argument that is ignored. ``...`` after the others ignores all that follow."""


def any_of(*targets: object) -> AnyOf:
    """In a pattern: a call of any of these operators."""
    return AnyOf(targets)


def commuting(*targets: object) -> AnyOf:
    """In a pattern: a call of any of these operators, its first two arguments in either order."""
    return AnyOf(targets, commutes=True)


def named(variable: object, call: object) -> Any:
    """In a pattern: ``call``, bound to ``variable``."""
    return NameMark()(variable, call)


def call_of(variable: object, *targets: object) -> Any:
    """In a pattern: a call of any of these operators, with any arguments, bound to ``variable``."""
    return CallMark(targets)(variable)


def through(targets: Iterable[object], value: object, chain: object = None) -> Any:
    """In a pattern: ``value``, seen through a chain of any number of calls of ``targets`` with one
    operand each, including none. ``chain``: a variable of the rule to bind the list of calls to,
    last first.

    ``mm(x, through(VIEWS, exp(w), views))``  fits  ``mm(x, t(exp(w)))``, ``views=[t]``
    """
    return ThroughMark(frozenset(targets))(value, *([] if chain is None else [chain]))


def shared(value: object) -> Any:
    """Mark a value of a pattern that may have readers outside the match; if it has, it stays."""
    return ReadersMark(None)(value)


def users(value: object, count: int) -> Any:
    """In a pattern: a value that ``count`` operations read, in the match or not."""
    return ReadersMark(count)(value)


def list_of(item: Program, *collected: object) -> Any:
    """In a pattern: a list of any length whose values all match ``item``. Each variable in
    ``collected`` is bound to the list of values of the parameter of ``item`` at the same position.

    ``cat(list_of(lambda x: neg(x), xs), dim)``  fits  ``cat([neg(a), neg(b)], 1)``, ``xs=[a, b]``
    """
    return ListMark(item)(*collected)


def constant(variable: object = None, test: Test | None = None, words: str = "a constant") -> Any:
    """In a pattern: an argument that is not a value of the graph, such as a dim or a dtype, and
    that passes ``test``. ``variable``: a variable of the rule to bind it to. ``words``: what was
    expected, for messages."""
    return _constant(Constant(test, words, number=False), variable)


def number(variable: object = None, test: Test | None = None, words: str = "a number") -> Any:
    """In a pattern: a number that passes ``test``, or a tensor filled with one, such as ``full``
    creates. ``variable``: a variable of the rule to bind the number to."""
    return _constant(Constant(test, words, number=True), variable)


def _constant(made: Constant, variable: object) -> Any:
    return made if variable is None else ConstantMark(made)(variable)


def _marked(mark: Callable[..., object], *values: object) -> fx.Proxy:
    proxy = next((each for each in values if isinstance(each, fx.Proxy)), None)
    require(proxy is not None, VerifyError, f"{mark} marks no value of a pattern")
    assert proxy is not None
    return proxy.tracer.create_proxy("call_function", mark, values, {}, name="mark")
