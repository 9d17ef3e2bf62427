"""Matching a pattern against a graph: the bindings of its variables, and the nodes that it
covers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import fx

from treadle.algebra.extents import Size, size_key
from treadle.compat.operators.operator_facts import MATTERS, Effect
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments, effects_of, operand_of
from treadle.graph.rewrite.filled import number_everywhere
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
    parts_of,
)
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt


@final
@dataclass
class PatternMatch:
    """A pattern over a graph. ``roots``: the nodes of what it ends in, in the order of its return;
    ``anchor``: the last of them in the graph. ``covered``: all nodes of its calls; ``open``: those
    that may have readers elsewhere, and stay where they have. ``place``: the node that the
    replacement is to stand before."""

    anchor: fx.Node
    bindings: dict[str, Any] = field(default_factory=dict[str, Any])
    laid: dict[PatternCall, fx.Node] = field(default_factory=dict[PatternCall, fx.Node])
    covered: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    open: set[fx.Node] = field(default_factory=set[fx.Node])
    roots: tuple[fx.Node, ...] = ()
    place: fx.Node = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.anchor

    def become(self, other: "PatternMatch") -> None:
        """Go on where ``other``, a copy, has come to."""
        self.bindings.update(other.bindings)
        self.laid.update(other.laid)
        self.covered.update(other.covered)
        self.open.update(other.open)

    def copy(self) -> "PatternMatch":
        """The same, which can go on in another way."""
        return PatternMatch(
            self.anchor,
            dict(self.bindings),
            dict(self.laid),
            dict(self.covered),
            set(self.open),
        )


def attempts(roots: Roots, node: fx.Node) -> Iterator[PatternMatch | NoMatch]:
    """Every way to lay the pattern so that the last of its roots in the graph is ``node``; instead
    of a way that fails, why. The last root of the pattern is tried first there."""
    for at in reversed(range(len(roots.calls))):
        if node.target in roots.calls[at].arguments:
            yield from _anchored(roots, at, node)


def only_match(roots: Roots, node: fx.Node) -> PatternMatch:
    """The one way to lay a pattern that ends in one value; raises ``NoMatch``."""
    match = PatternMatch(node)
    unify(match, roots.patterns[0], node)
    return _closed(match, roots)


def _anchored(roots: Roots, at: int, node: fx.Node) -> Iterator[PatternMatch | NoMatch]:
    match = PatternMatch(node)
    refusal = attempt(unify, match, roots.patterns[at], node)
    if isinstance(refusal, NoMatch):
        yield refusal
        return
    others = [i for i in range(len(roots.calls)) if i != at]
    yield from _completed(match, roots, others)


def _completed(
    match: PatternMatch, roots: Roots, missing: list[int]
) -> Iterator[PatternMatch | NoMatch]:
    """The ways to find the roots that are missing."""
    if not missing:
        yield attempt(_closed, match, roots)
        return
    routes = {at: _route(roots.calls[at], match) for at in missing}
    near = [each for each in missing if routes[each]]
    at = min(near or missing, key=lambda each: len(routes[each]))
    rest = [each for each in missing if each != at]
    yield NoMatch(f"no {roots.calls[at]} stands before {match.anchor} and belongs to it")
    for candidate in _candidates(routes[at], match):
        trial = match.copy()
        refusal = attempt(unify, trial, roots.patterns[at], candidate)
        if isinstance(refusal, NoMatch):
            yield refusal
        else:
            yield from _completed(trial, roots, rest)


def _route(pattern: Pattern, match: PatternMatch) -> list[object]:
    """The shortest way up to a root from what is known: a node, and the calls above it."""
    if isinstance(pattern, PatternCall) and pattern in match.laid:
        return [match.laid[pattern]]
    if isinstance(pattern, PatternVariable):
        bound = match.bindings.get(pattern.name)
        return [bound] if isinstance(bound, fx.Node) else []
    below = [_route(each, match) for each in parts_of(pattern)]
    best = min((each for each in below if each), key=len, default=[])
    return [*best, pattern] if best and isinstance(pattern, PatternCall) else best


def _candidates(route: list[Any], match: PatternMatch) -> list[fx.Node]:
    """The nodes at the end of a route that stand before the anchor, the last of them first."""
    level: set[fx.Node] = set(route[:1])
    for call in route[1:]:
        level = {user for node in level for user in node.users if user.target in call.arguments}
    return sorted((each for each in level if each < match.anchor), reverse=True)


def _closed(match: PatternMatch, roots: Roots) -> PatternMatch:
    """The complete match, if nobody else reads what it covers."""
    match.roots = tuple(match.laid[call] for call in roots.calls)
    if roots.shared:
        match.open.update(match.covered)
    for node in match.covered:
        if node in match.roots or node in match.open:
            continue
        if any(user not in match.covered for user in node.users):
            raise NoMatch(f"{node} is used outside the match")
    if len(match.roots) > 1:
        _require_together(match.roots)
        match.place = _place(match)
    return match


def _require_together(roots: tuple[fx.Node, ...]) -> None:
    """Several values that are replaced at one place."""
    names = " and ".join(map(str, roots))
    require(len(set(roots)) == len(roots), NoMatch, f"{names} are not different")
    phases = {info(root).phase for root in roots}
    require(len(phases) == 1, NoMatch, f"{names} are of {' and '.join(sorted(phases))}")


def _place(match: PatternMatch) -> fx.Node:
    """What the replacement is to stand before: after what it reads, and ahead of its readers."""
    gone = {node for node in match.covered if node in match.roots or node not in match.open}
    readers = [user for root in match.roots for user in root.users if user not in gone]
    first = min([match.anchor, *readers])
    for value in _nodes_in(list(match.bindings.values())):
        require(value not in gone, NoMatch, f"{value} is read by what would replace it")
        words = f"{first} reads a part of the match before {value} is there"
        require(value < first, NoMatch, words)
    return first


def unify(match: PatternMatch, pattern: Pattern, value: object) -> None:
    """Lay ``pattern`` over ``value``, or raise ``NoMatch``."""
    match pattern:
        case PatternVariable(name):
            _bind(match, name, value)
        case PatternCall():
            _unify_call(match, pattern, value)
        case ListPattern(items):
            if not isinstance(value, list | tuple) or len(value) != len(items):
                raise NoMatch(f"expected {len(items)} values, found {value}")
            for inner, operand in zip(items, value, strict=True):
                unify(match, inner, operand)
        case Each():
            _unify_each(match, pattern, value)
        case Constant():
            _unify_constant(match, pattern, value)
        case Exactly(expected):
            require(_same(expected, value), NoMatch, f"expected {expected}, found {value}")
        case Anything():
            pass
        case Read(inner, count):
            unify(match, inner, value)
            _count_readers(match, value, count)
        case ChainPattern():
            _unify_chain(match, pattern, value)
        case NamedCall(call, name):
            _unify_call(match, call, value)
            _bind(match, name, value)


def _bind(match: PatternMatch, name: str, value: object) -> None:
    bound = match.bindings.setdefault(name, value)
    if bound is not value and not _same(bound, value):
        raise NoMatch(f"{name} is both {bound} and {value}")


def _same(left: object, right: object) -> bool:
    """Whether two arguments are one value, or equal constants of one type: 1, 1.0 and True differ,
    and so do 0.0 and -0.0."""
    match left, right:
        case fx.Node(), _:
            return left is right
        case ((list() | tuple()), (list() | tuple())):
            return len(left) == len(right) and all(map(_same, left, right))
        case Size(), Size():
            return size_key(left) == size_key(right)
        case ((float() | complex()), _):
            return type(left) is type(right) and repr(left) == repr(right)
        case _:
            return type(left) is type(right) and left == right


def _unify_constant(match: PatternMatch, pattern: Constant, value: object) -> None:
    found = number_everywhere(value) if pattern.number else value
    plain = found is not None if pattern.number else not _has_node(value)
    if not plain or not (pattern.test is None or pattern.test(found)):
        raise NoMatch(f"{value} is not {pattern.words}")
    if pattern.name:
        _bind(match, pattern.name, found)


def _has_node(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_node, value))
    return isinstance(value, fx.Node)


def _unify_each(match: PatternMatch, pattern: Each, value: Any) -> None:
    require(isinstance(value, list | tuple), NoMatch, f"{value} is not a list")
    found: dict[str, list[object]] = {outer: [] for _, outer in pattern.names}
    for operand in value:
        one = PatternMatch(match.anchor, covered=match.covered, open=match.open)
        unify(one, pattern.item, operand)
        for inner, outer in pattern.names:
            require(inner in one.bindings, NoMatch, f"{inner} stands for nothing in {operand}")
            found[outer].append(one.bindings[inner])
    for name, values in found.items():
        _bind(match, name, values)


def _unify_chain(match: PatternMatch, pattern: ChainPattern, value: object) -> None:
    chain: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.target in pattern.targets:
        _require_movable(match, value)
        match.covered[value] = None
        chain.append(value)
        value = operand_of(value)
    unify(match, pattern.inner, value)
    if pattern.name:
        _bind(match, pattern.name, chain)


def _count_readers(match: PatternMatch, value: object, count: int | None) -> None:
    if not isinstance(value, fx.Node):
        return
    many = len(value.users)
    require(count is None or many == count, NoMatch, f"{value} has {many} users, not {count}")
    match.open.add(value)


def _unify_call(match: PatternMatch, pattern: PatternCall, value: object) -> None:
    if pattern in match.laid:
        same = match.laid[pattern] is value
        require(same, NoMatch, f"{value} and {match.laid[pattern]} are not one value")
        return
    if not isinstance(value, fx.Node) or value.target not in pattern.arguments:
        raise NoMatch(f"{value} is not {pattern}")
    _require_movable(match, value)
    match.laid[pattern] = value
    match.covered[value] = None
    if pattern.exchanged is None:
        _unify_arguments(match, pattern, pattern.arguments[value.target], value)
        return
    orders = [each[value.target] for each in (pattern.arguments, pattern.exchanged)]
    trials = [match.copy() for _ in orders]
    refusals = [
        attempt(_unify_arguments, trial, pattern, order, value)
        for trial, order in zip(trials, orders, strict=True)
    ]
    fitting = [trial for trial, each in zip(trials, refusals, strict=True) if each is None]
    if not fitting:
        furthest = max(range(2), key=lambda at: len(trials[at].covered))
        raise refusals[furthest] or NoMatch(f"{value} is not {pattern}")
    match.become(fitting[0])


def _unify_arguments(
    match: PatternMatch, pattern: PatternCall, expected: Mapping[str, Pattern], value: fx.Node
) -> None:
    given = arguments(value)
    for name, inner in expected.items():
        operand = given.get(name)
        if not isinstance(inner, Exactly):
            unify(match, inner, operand)
        elif not _same(inner.value, operand):
            raise NoMatch(f"{value} has {name}={operand}, not {inner.value}")
    if not pattern.rest and len(given) > len(expected):
        raise NoMatch(f"{value} has more arguments than the pattern")


def _require_movable(match: PatternMatch, node: fx.Node) -> None:
    """What a match covers becomes something else at the place of its last root: nothing may be
    covered whose place or number of calls matters."""
    effects = effects_of(node)
    if Effect.DRAWS in effects:
        raise NoMatch(f"{node} draws random numbers")
    if node is match.anchor:
        return
    require(not effects & MATTERS, NoMatch, f"{node} has an effect, and keeps its place")
    region, last = info(node).region, info(match.anchor).region
    require(region == last, NoMatch, f"{node} is in region {region}, not {last}")


def require_one_region(nodes: Iterable[fx.Node]) -> None:
    """``NoMatch`` unless what checkpointing asks for is the same of all of them."""
    first, *others = nodes
    for each in others:
        one, other = info(first), info(each)
        alike = (one.region, one.checkpoint, one.asked) == (
            other.region,
            other.checkpoint,
            other.asked,
        )
        require(alike, NoMatch, f"{first} and {each} are of several regions")


def _nodes_in(value: object) -> Iterable[fx.Node]:
    """The nodes among what a variable stands for."""
    if isinstance(value, list | tuple):
        return [node for each in value for node in _nodes_in(each)]
    return [value] if isinstance(value, fx.Node) else []
