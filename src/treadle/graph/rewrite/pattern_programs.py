"""Programs of rules, traced and compiled to patterns.

::

    lambda x, w: aten.mm.default(aten.exp.default(x), w)
    ->  Call mm {self: Call exp {self: Variable x}, mat2: Variable w}
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from treadle.compat.operators.schemas import schema_of
from treadle.compat.tracing import TRACING
from treadle.graph.core.arguments import Argument
from treadle.graph.core.operators import OpOverload, arguments_of, operation_name
from treadle.graph.rewrite.pattern import (
    Anything,
    ChainPattern,
    Constant,
    Each,
    Exactly,
    ListPattern,
    NamedCall,
    Pattern,
    PatternCall,
    PatternVariable,
    Read,
    Roots,
    inner_of,
    parts_of,
)
from treadle.graph.rewrite.pattern_words import (
    AnyOf,
    CallMark,
    ConstantMark,
    ListMark,
    NameMark,
    Program,
    ReadersMark,
    ThroughMark,
)
from treadle.util.errors import VerifyError, require


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
            case ThroughMark(targets):
                value, *chain = node.args
                return ChainPattern(targets, self.pattern(value), *map(_name, chain))
            case NameMark():
                variable, call = node.args
                pattern = self.pattern(call)
                assert isinstance(pattern, PatternCall), f"{call} is not an operation"
                return NamedCall(pattern, _name(variable))
            case CallMark(targets):
                words = " or ".join(map(operation_name, targets))
                call = PatternCall({each: {} for each in targets}, rest=True, words=words)
                return NamedCall(call, _name(node.args[0]))
            case ReadersMark(count):
                return Read(self.pattern(node.args[0]), count)
            case ConstantMark(constant):
                return replace(constant, name=_name(node.args[0]))
            case ListMark(item):
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
