"""Patterns of rules: written as programs, compiled to a small language over nodes of a graph.

::

    Pattern   =  Variable x              a value or a constant, everywhere the same
              |  Call f                  a call of one operation of a set, its arguments Patterns
              |  List [Pattern, ...]     a list of as many
              |  Each Pattern            a list of any length, each of them a Pattern
              |  Constant                no value of the graph: a dtype, a dim, or a number
              |  Exactly v               that constant
              |  Anything
              |  Read Pattern            and how many others may read it
              |  Chain f ... Pattern     any number of calls of a set, of one value each, none too
              |  Named x Call            whatever call it is, under a name

A Call that a program uses twice is one Call, and matches one value.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import fx

from treadle.compat.operators.schemas import schema_of
from treadle.compat.tracing import TRACING
from treadle.graph.core.arguments import Argument
from treadle.graph.core.operators import OpOverload, arguments_of, operation_name
from treadle.util.errors import VerifyError, require

Program: TypeAlias = Callable[..., object]
Test: TypeAlias = Callable[[Any], bool]


@final
@dataclass(frozen=True, slots=True)
class PatternVariable:
    """Whatever stands there, under a name."""

    name: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class PatternCall:
    """A call of one of the operations that are the keys; values: arguments by name. ``rest``:
    whether others are ignored. ``words``: the operations. ``exchanged``: the same with the first
    two arguments in the other order, if either will do."""

    arguments: "Mapping[object, Mapping[str, Pattern]]"
    rest: bool
    words: str
    exchanged: "Mapping[object, Mapping[str, Pattern]] | None" = None

    def __str__(self) -> str:
        return self.words


@final
@dataclass(frozen=True, slots=True)
class ListPattern:
    """A list or tuple of these."""

    items: "tuple[Pattern, ...]"


@final
@dataclass(frozen=True, slots=True)
class Each:
    """A list or tuple of any length. ``names``: the variables of ``item``, each with that of the
    rule which is the list of what it stands for."""

    item: "Pattern"
    names: tuple[tuple[str, str], ...]


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """What is not a value of the graph and passes ``test``, or with ``number`` is one number
    everywhere. ``name``: the variable that is it from then on."""

    test: Test | None
    words: str
    number: bool
    name: str = ""

    def __call__(self, variable: object) -> Any:
        return _marked(self, variable)


@final
@dataclass(frozen=True, slots=True)
class Exactly:
    """This constant, of this type."""

    value: object


@final
@dataclass(frozen=True, slots=True)
class Anything:
    """What is ignored."""


@final
@dataclass(frozen=True, slots=True)
class Read:
    """``inner``, which others may read; ``count``: as often as that, matched readers included."""

    inner: "Pattern"
    count: int | None


@final
@dataclass(frozen=True, slots=True)
class ChainPattern:
    """``inner`` through calls of ``targets``, each of the value before it, as many as there are.
    ``name``: the variable that is the list of them, the last first."""

    targets: frozenset[object]
    inner: "Pattern"
    name: str = ""


@final
@dataclass(frozen=True, slots=True)
class NamedCall:
    """``call``, which the variable ``name`` stands for."""

    call: "PatternCall"
    name: str


Pattern: TypeAlias = (
    PatternVariable
    | PatternCall
    | ListPattern
    | Each
    | Constant
    | Exactly
    | Anything
    | Read
    | ChainPattern
    | NamedCall
)


# What users write in a pattern.


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
class _Readers:
    count: int | None

    def __call__(self, value: object) -> Any:
        return _marked(self, value)


@final
@dataclass(frozen=True)
class _Through:
    targets: frozenset[object]

    def __call__(self, value: object, *chain: object) -> Any:
        return _marked(self, value, *chain)


@final
@dataclass(frozen=True)
class _Naming:
    def __call__(self, variable: object, call: object) -> Any:
        return _marked(self, variable, call)


@final
@dataclass(frozen=True)
class _CallOf:
    targets: tuple[object, ...]

    def __call__(self, variable: object) -> Any:
        return _marked(self, variable)


@final
@dataclass(frozen=True)
class _ListOf:
    item: Program

    def __call__(self, *collected: object) -> Any:
        return _marked(self, *collected)


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
    return _Naming()(variable, call)


def call_of(variable: object, *targets: object) -> Any:
    """In a pattern: a call of any of these operators, with any arguments, bound to ``variable``."""
    return _CallOf(targets)(variable)


def through(targets: Iterable[object], value: object, chain: object = None) -> Any:
    """In a pattern: ``value``, seen through a chain of any number of calls of ``targets`` with one
    operand each, including none. ``chain``: a variable of the rule to bind the list of calls to,
    last first.

    ``mm(x, through(VIEWS, exp(w), views))``  fits  ``mm(x, t(exp(w)))``, ``views=[t]``
    """
    return _Through(frozenset(targets))(value, *([] if chain is None else [chain]))


def shared(value: object) -> Any:
    """Mark a value of a pattern that may have readers outside the match; if it has, it stays."""
    return _Readers(None)(value)


def users(value: object, count: int) -> Any:
    """In a pattern: a value that ``count`` operations read, in the match or not."""
    return _Readers(count)(value)


def list_of(item: Program, *collected: object) -> Any:
    """In a pattern: a list of any length whose values all match ``item``. Each variable in
    ``collected`` is bound to the list of values of the parameter of ``item`` at the same position.

    ``cat(list_of(lambda x: neg(x), xs), dim)``  fits  ``cat([neg(a), neg(b)], 1)``, ``xs=[a, b]``
    """
    return _ListOf(item)(*collected)


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
    return made if variable is None else made(variable)


def _marked(mark: Callable[..., object], *values: object) -> fx.Proxy:
    proxy = next((each for each in values if isinstance(each, fx.Proxy)), None)
    require(proxy is not None, VerifyError, f"{mark} marks no value of a pattern")
    assert proxy is not None
    return proxy.tracer.create_proxy("call_function", mark, values, {}, name="mark")


# Programs, and what they compile to.


@final
@dataclass(frozen=True, slots=True)
class Roots:
    """What a pattern ends in, in the order of its return; ``calls`` without what is said of their
    readers. ``shared``: whether all its values may have readers elsewhere."""

    patterns: tuple[Pattern, ...]
    calls: tuple[PatternCall, ...]
    shared: bool = False


class _Tracer(fx.Tracer):
    def create_arg(self, a: object) -> Any:
        return a if isinstance(a, Anything | Constant) else super().create_arg(a)


@functools.cache
def traced(program: Program) -> fx.Graph:
    """The program as a graph, made once and only read. Every call in it takes a variable."""
    with TRACING:
        graph = _Tracer().trace(program)
    constants = any(node.op == "get_attr" for node in graph.nodes)
    require(not constants, VerifyError, f"{program} makes a tensor from no variable")
    return graph


@functools.cache
def returned_by(program: Program) -> object:
    """What a program returns, as nodes of ``traced``."""
    return result_of(traced(program))


def result_of(graph: fx.Graph) -> Argument:
    """What a traced program returns."""
    (output,) = graph.find_nodes(op="output")
    return output.args[0]


@functools.cache
def roots_of(program: Program) -> Roots:
    """What the pattern ``program`` looks for; ``VerifyError`` if it does not end in operations."""
    return compiled(traced(program), str(program))


@functools.cache
def pattern_of(program: Program) -> Pattern:
    """What ``program`` returns as one pattern."""
    return _Compiler(Exactly).pattern(returned_by(program))


def compiled(graph: fx.Graph, name: str, plain: Callable[[object], Pattern] = Exactly) -> Roots:
    """A traced program as patterns; ``plain``: the pattern for a constant. ``VerifyError`` for
    what does not end in operations, or in some that have nothing to do with each other."""
    compiler = _Compiler(plain)
    result = result_of(graph)
    several = isinstance(result, list | tuple)
    patterns = tuple(compiler.pattern(each) for each in (result if several else (result,)))
    calls = tuple(each for each in map(inner_of, patterns) if isinstance(each, PatternCall))
    ends = len(calls) == len(patterns) > 0
    require(ends, VerifyError, f"{name} does not end in an operation")
    require(len(set(calls)) == len(calls), VerifyError, f"{name} returns one value twice")
    require(_connected(calls), VerifyError, f"what {name} returns has no value in common")
    return Roots(patterns, calls)


class _Compiler:
    """Nodes of a traced program to patterns, each node once."""

    def __init__(self, plain: Callable[[object], Pattern]) -> None:
        self._plain = plain
        self._made: dict[fx.Node, Pattern] = {}

    def pattern(self, leaf: object) -> Pattern:
        match leaf:
            case fx.Node():
                if leaf not in self._made:
                    self._made[leaf] = self._of_node(leaf)
                return self._made[leaf]
            case list() | tuple():
                return ListPattern(tuple(map(self.pattern, leaf)))
            case Anything() | Constant():
                return leaf
            case _:
                return self._plain(leaf)

    def _of_node(self, node: fx.Node) -> Pattern:
        target: Any = node.target
        match target:
            case str():
                return PatternVariable(target)
            case AnyOf(targets, commutes):
                return self._call(targets, node, commutes=commutes)
            case _Through(targets):
                value, *chain = node.args
                return ChainPattern(targets, self.pattern(value), *map(_name, chain))
            case _Naming():
                variable, call = node.args
                pattern = self.pattern(call)
                assert isinstance(pattern, PatternCall), f"{call} is not an operation"
                return NamedCall(pattern, _name(variable))
            case _CallOf(targets):
                words = " or ".join(map(operation_name, targets))
                call = PatternCall({each: {} for each in targets}, rest=True, words=words)
                return NamedCall(call, _name(node.args[0]))
            case _Readers(count):
                return Read(self.pattern(node.args[0]), count)
            case Constant(test, words, number):
                return Constant(test, words, number, _name(node.args[0]))
            case _ListOf(item):
                return self._each(item, [_name(each) for each in node.args])
            case _:
                return self._call((target,), node)

    def _call(
        self, targets: tuple[object, ...], node: fx.Node, *, commutes: bool = False
    ) -> PatternCall:
        rest = any(each is ... for each in node.args)
        require(not rest or node.args[-1] is ..., VerifyError, f"... is not last in {node}")
        words = " or ".join(map(operation_name, targets))
        args = node.args[:-1] if rest else node.args
        given = {each: self._arguments(each, node, args, rest) for each in targets}
        if not commutes:
            return PatternCall(given, rest, words)
        args = (args[1], args[0], *args[2:])
        exchanged = {each: self._arguments(each, node, args, rest) for each in targets}
        return PatternCall(given, rest, words, exchanged)

    def _each(self, item: Program, outer: list[str]) -> Each:
        inner = [str(each.target) for each in traced(item).find_nodes(op="placeholder")]
        paired = len(inner) == len(outer)
        require(paired, VerifyError, f"list_of has {len(outer)} variables for {inner}")
        pattern = _Compiler(self._plain).pattern(returned_by(item))
        return Each(pattern, tuple(zip(inner, outer, strict=True)))

    def _arguments(
        self, target: object, node: fx.Node, args: tuple[Argument, ...], rest: bool
    ) -> dict[str, Pattern]:
        """By the names of the schema of ``target``; with ``rest`` what is not said is ignored."""
        kwargs = node.kwargs
        if not isinstance(target, OpOverload):
            given: dict[str, Argument] = {str(i): each for i, each in enumerate(args)}
            given |= kwargs
        else:
            names = [each.name for each in schema_of(target).arguments]
            known = len(args) <= len(names) and set(kwargs) <= set(names)
            require(known, VerifyError, f"{target} does not take what {node} gives it")
            given = dict(zip(names, args, strict=False)) | dict(kwargs)
            given = given if rest else arguments_of(target, (), given)
        return {name: self.pattern(each) for name, each in given.items()}


def _name(variable: object) -> str:
    named = isinstance(variable, fx.Node) and variable.op == "placeholder"
    require(named, VerifyError, f"{variable} is not a variable of the rule")
    assert isinstance(variable, fx.Node)
    return str(variable.target)


def inner_of(pattern: Pattern) -> Pattern:
    """The pattern without what is said of its readers, and without its name."""
    match pattern:
        case Read(inner, _):
            return inner_of(inner)
        case NamedCall(call, _):
            return call
        case _:
            return pattern


def parts_of(pattern: Pattern) -> Iterator[Pattern]:
    """The patterns that it is directly made of. What a list of any length is made of is none."""
    match pattern:
        case PatternCall(arguments):
            for each in arguments.values():
                yield from each.values()
        case ListPattern(items):
            yield from items
        case Read(inner, _) | ChainPattern(inner=inner):
            yield inner
        case NamedCall(call, _):
            yield call
        case _:
            pass


def _leaves(pattern: Pattern) -> set[object]:
    """Its variables and calls, which another part of the rule may have as well."""
    own: set[object] = {pattern} if isinstance(pattern, PatternVariable | PatternCall) else set()
    return own.union(*map(_leaves, parts_of(pattern)))


def _connected(calls: Sequence[PatternCall]) -> bool:
    """Whether each can be found from the first through values that two of them have in common."""
    reached = _leaves(calls[0])
    pending = [_leaves(each) for each in calls[1:]]
    while near := [each for each in pending if each & reached]:
        pending = [each for each in pending if not each & reached]
        reached = reached.union(*near)
    return not pending
