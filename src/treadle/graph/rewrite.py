"""Local rewrites: what to find, when the rewrite is right, and what to put there."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import fx

from treadle.compat.operators import schema_of
from treadle.graph.alias import leaves_step
from treadle.graph.node_info import info, value_of, with_info
from treadle.graph.operators import OpOverload, arguments, is_random, operation_name
from treadle.graph.passes import GraphPass
from treadle.graph.signature import StepGraph
from treadle.graph.types import show_type, type_of_tensor
from treadle.graph.values import inherit, refresh
from treadle.util.errors import TreadleError, VerifyError, require

Bindings = Mapping[str, Any]


class NoMatch(TreadleError):
    """Why a rule does not apply at a node."""


def _always(**types: object) -> None:
    """The check of a rule that is right wherever it matches."""


@dataclass(frozen=True)
class Rule:
    """Put ``replacement`` where ``pattern`` stands, unless ``check`` raises ``NoMatch``.

    The three share their variables: two are ordinary programs over them, and ``check`` gets
    their types (constants as they are, lists of values as lists of types). No part of a rule
    sees the graph. In a pattern, ``shared(x)`` lets ``x`` be used outside the match, and
    ``any_of(op, ...)(x)`` stands for a call of any of the operations.
    """

    name: str
    pattern: Callable[..., Any] = field(repr=False)
    replacement: Callable[..., Any] = field(repr=False)
    check: Callable[..., None] = field(default=_always, repr=False)


@final
@dataclass(frozen=True)
class AnyOf:
    """A call of one of ``targets``, in a pattern."""

    targets: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = next(each for each in args if isinstance(each, fx.Proxy))
        return proxy.tracer.create_proxy("call_function", self, args, kwargs, name="any_of")


def any_of(*targets: object) -> AnyOf:
    """In a pattern: a call of any of these operators."""
    return AnyOf(targets)


def shared(value: object) -> fx.Proxy:
    """Mark a value of a pattern that may have readers outside the match; it then stays."""
    assert isinstance(value, fx.Proxy), "shared() marks the result of an operation in a pattern"
    with_info(value.node, shared=True)
    return value


@dataclass(frozen=True)
class Rewrite(GraphPass):
    """Apply the first rule that fits at each node, last node first, results included.

    Each rule must make progress: a rule that undoes another would run forever. Rules are
    found by the operation they end in, so that cost grows with matches.
    """

    rules: tuple[Rule, ...]

    def run(self, step: StepGraph) -> int:
        rules = _by_root(self.rules)
        changed: list[fx.Node] = []
        for node in reversed(step.graph.nodes):
            result = _rewrite_at(node, rules.get(node.target, ()))
            if result is not None:
                changed.append(result)
        refresh(step.graph, changed)
        return len(changed)


def _by_root(rules: Sequence[Rule]) -> Mapping[Any, Sequence[Rule]]:
    index: defaultdict[Any, list[Rule]] = defaultdict(list)
    for rule in rules:
        root = _result(rule.pattern)
        require(isinstance(root, fx.Node), NoMatch, f"{rule.name} does not end in an operation")
        for target in _targets(root):
            index[target].append(rule)
    return index


def explain(rule: Rule, node: fx.Node) -> str:
    """Why ``rule`` does or does not apply at ``node``, in words."""
    try:
        find(rule, node)
    except NoMatch as miss:
        return miss.message
    return "applies"


def find(rule: Rule, node: fx.Node) -> Bindings:
    """The variables of ``rule`` when its pattern ends at ``node``; raises ``NoMatch``."""
    match = _Match(node)
    match.unify(_result(rule.pattern), node)
    rule.check(**{name: _known(value) for name, value in match.bindings.items()})
    _require_no_new_alias(rule, node)
    return match.bindings


def _require_no_new_alias(rule: Rule, node: fx.Node) -> None:
    """A replacement that is one of its variables may join bytes that the caller can see."""
    result = _result(rule.replacement)
    joins = isinstance(result, fx.Node) and result.op == "placeholder"
    words = f"{node} is returned and would share the bytes of {result}"
    require(not (joins and leaves_step(node)), NoMatch, words)


def _rewrite_at(node: fx.Node, rules: Sequence[Rule]) -> fx.Node | None:
    for rule in rules:
        try:
            bindings = find(rule, node)
        except NoMatch:
            continue
        return _replace(node, rule, bindings)
    return None


def _replace(node: fx.Node, rule: Rule, bindings: Bindings) -> fx.Node:
    graph, program = node.graph, _traced(rule.replacement)
    inputs = {
        variable: bindings[variable.name] for variable in program.find_nodes(op="placeholder")
    }
    last = node.prev
    with graph.inserting_before(node):
        result = graph.graph_copy(program, inputs)
    assert isinstance(result, fx.Node), f"{rule.name} does not end in a value"
    while last.next is not node:
        last = last.next
        inherit(last, node)
    new, old = value_of(result), value_of(node)
    if (new.dtype, new.shape, new.device) != (old.dtype, old.shape, old.device):
        raise VerifyError(f"{rule.name} turned {show_type(old)} into {show_type(new)} at {node}")
    node.replace_all_uses_with(result)
    _erase_dead(node)
    return result


def _erase_dead(root: fx.Node) -> None:
    """Erase ``root`` and the operands that only it kept; random operations stay."""
    worklist = [root]
    while worklist:
        node = worklist.pop()
        if node.users or node.op != "call_function" or (node is not root and is_random(node)):
            continue
        operands = node.all_input_nodes
        node.graph.erase_node(node)
        worklist += operands


class _Match:
    """One attempt to lay a pattern over the graph: variables, and nodes already laid."""

    def __init__(self, root: fx.Node) -> None:
        self.bindings: dict[str, Any] = {}
        self._root = root
        self._laid: dict[fx.Node, fx.Node] = {}

    def unify(self, pattern: Any, value: Any) -> None:
        match pattern:
            case fx.Node(op="placeholder"):
                bound = self.bindings.setdefault(pattern.name, value)
                same = bound is value or (not isinstance(bound, fx.Node) and bound == value)
                require(same, NoMatch, f"{pattern.name} is both {bound} and {value}")
            case fx.Node():
                self._unify_call(pattern, value)
            case list() | tuple():
                fits = isinstance(value, list | tuple) and len(value) == len(pattern)
                require(fits, NoMatch, f"expected {len(pattern)} values, found {value}")
                for inner, operand in zip(pattern, value, strict=True):
                    self.unify(inner, operand)
            case _:
                same = type(pattern) is type(value) and pattern == value
                require(same, NoMatch, f"expected {pattern}, found {value}")

    def _unify_call(self, pattern: fx.Node, value: Any) -> None:
        if pattern in self._laid:
            same = self._laid[pattern] is value
            require(same, NoMatch, f"{value} and {self._laid[pattern]} are not one value")
            return
        wanted = _targets(pattern)
        words = " or ".join(map(operation_name, wanted))
        require(
            isinstance(value, fx.Node) and value.target in wanted,
            NoMatch,
            f"{value} is not {words}",
        )
        self._check_inside(pattern, value)
        self._laid[pattern] = value
        given, expected = arguments(value), _arguments_as(pattern, value.target)
        for name, inner in expected.items():
            self._unify_argument(name, inner, given.get(name), value)

    def _unify_argument(self, name: str, inner: object, operand: object, value: fx.Node) -> None:
        if isinstance(inner, fx.Node | list | tuple):
            self.unify(inner, operand)
            return
        same = type(inner) is type(operand) and inner == operand
        require(same, NoMatch, f"{value} has {name}={operand}, not {inner}")

    def _check_inside(self, pattern: fx.Node, value: fx.Node) -> None:
        require(not is_random(value), NoMatch, f"{value} draws random numbers")
        if value is self._root:
            return
        region, root = info(value).region, info(self._root).region
        require(region == root, NoMatch, f"{value} is in region {region}, not {root}")
        readers = len(pattern.users)
        lone = len(value.users) <= readers or info(pattern).shared
        require(lone, NoMatch, f"{value} is used outside the match")


def _arguments_as(pattern: fx.Node, target: object) -> dict[str, Any]:
    """The pattern's arguments by the names of ``target``'s schema, which it may stand for."""
    if pattern.target is target or not isinstance(target, OpOverload):
        return arguments(pattern)
    names = [each.name for each in schema_of(target).arguments]
    return dict(zip(names, pattern.args, strict=False)) | dict(pattern.kwargs)


def _targets(pattern: fx.Node) -> tuple[Any, ...]:
    return pattern.target.targets if isinstance(pattern.target, AnyOf) else (pattern.target,)


def _result(program: Callable[..., object]) -> Any:
    (output,) = _traced(program).find_nodes(op="output")
    return output.args[0]


@functools.cache
def _traced(program: Callable[..., object]) -> fx.Graph:
    """The program as a graph, made once and only read. Every call in it takes a variable."""
    graph = fx.Tracer().trace(program)
    constants = any(node.op == "get_attr" for node in graph.nodes)
    require(not constants, VerifyError, f"{program} makes a tensor from no variable")
    return graph


def _known(value: object) -> Any:
    match value:
        case fx.Node():
            held = value_of(value)
            return held if isinstance(held, tuple | list) else type_of_tensor(held)
        case list() | tuple():
            return [_known(each) for each in value]
        case _:
            return value
