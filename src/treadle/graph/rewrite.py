"""Local rewrites: what to find, when the rewrite is right, and what to put there."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import fx

from treadle.graph.alias import leaves_step
from treadle.graph.arguments import map_nodes
from treadle.graph.joined_bytes import JoinedBytes, Replaced
from treadle.graph.matching import Match, NoMatch, attempts, only_match
from treadle.graph.node_info import forget, value_of
from treadle.graph.operators import is_mutable, is_random, may_drop
from treadle.graph.passes import Contract, GraphPass
from treadle.graph.pattern import (
    Program,
    any_of,
    anything,
    constant,
    list_of,
    number,
    returned_by,
    roots_of,
    shared,
    traced,
    users,
)
from treadle.graph.rule_index import RuleIndex
from treadle.graph.signature import StepGraph
from treadle.graph.types import (
    TensorType,
    is_tensor,
    show_type,
    tensors_in,
    type_of,
    type_of_tensor,
)
from treadle.graph.values import inherit, refresh
from treadle.util.errors import VerifyError, require
from treadle.util.extents import size_key

Bindings = Mapping[str, Any]

_MOST_SWEEPS = 100


def _always(**types: object) -> None:
    """The check of a rule that is right wherever it matches."""


@final
class Builder:
    """Makes the operations that a rule puts in place of what it found."""

    def __init__(self, graph: fx.Graph, like: fx.Node, rule: str) -> None:
        self._graph = graph
        self._like = like
        self._rule = rule
        self.made: list[fx.Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of ``target``, an operation that neither writes nor draws; its value is known."""
        node = self._graph.call_function(target, args, kwargs)
        return self._placed(node)

    def copied(self, program: Program, inputs: Bindings) -> Any:
        """The operations of a program; ``inputs``: what its variables stand for."""
        result = returned_by(program)
        if isinstance(result, fx.Node) and str(result.target) in inputs:
            return inputs[str(result.target)]
        values: dict[fx.Node, Any] = {}
        for each in traced(program).nodes:
            match each.op:
                case "placeholder":
                    known = str(each.target) in inputs
                    words = f"{self._rule} puts {each.target} there, which it does not find"
                    require(known, VerifyError, words)
                    values[each] = inputs[str(each.target)]
                case "output":
                    break
                case _:
                    node = self._graph.node_copy(each, values.__getitem__)
                    forget(node)
                    values[each] = self._placed(node)
        return map_nodes(values.__getitem__, result)

    def type_of(self, value: fx.Node) -> TensorType:
        """The type of a value that is one tensor."""
        return type_of(value)

    def undo(self) -> None:
        """Nothing was made."""
        for node in reversed(self.made):
            self._graph.erase_node(node)
        self.made.clear()

    def _placed(self, node: fx.Node) -> fx.Node:
        self.made.append(node)
        plain = not is_mutable(node) and not is_random(node)
        require(plain, VerifyError, f"{self._rule} puts {node} there, which writes or draws")
        inherit(node, self._like)
        return node


@final
@dataclass(frozen=True)
class Lowering:
    """A replacement that is built by a function instead of traced: ``build(builder, **bindings)``
    gets what the variables stand for, makes operations with ``builder.call``, and returns a value
    for each that the pattern returns. ``NoMatch`` from within leaves the graph as it was."""

    build: Callable[..., Any]


def lowering(build: Callable[..., Any]) -> Lowering:
    """A replacement that ``build(builder, **bindings)`` makes, node by node."""
    return Lowering(build)


@dataclass(frozen=True)
class Rule:
    """Put ``replacement`` where ``pattern`` stands, unless ``check`` raises ``NoMatch``.

    The three share their variables: two are ordinary programs over them, and ``check`` gets
    their types (constants as they are, lists of values as lists of types). No part of a rule
    sees the graph; a replacement that no program can say is a ``lowering``. In a pattern,

    - ``shared(x)`` lets ``x`` be used outside the match, ``users(x, 2)`` counts all its users;
    - ``any_of(op, ...)(x)`` is a call of any of the operations;
    - ``anything`` is an argument that is ignored, ``...`` are all those that follow;
    - ``number(n)`` and ``constant(c)`` are no values of the graph, and may have a test;
    - ``list_of(item, xs)`` is a list of any length.

    A pattern that returns a tuple is found as a whole: the replacement returns as many values. All
    must stand where the last of them may be computed, ahead of whoever reads the others.
    """

    name: str
    pattern: Program = field(repr=False)
    replacement: Program | Lowering = field(repr=False)
    check: Callable[..., None] = field(default=_always, repr=False)


@dataclass(frozen=True)
class Rewrite(GraphPass):
    """Apply the first rule that fits at each node, last node first, results included.

    Each rule must make progress: a rule that undoes another would run forever. Rules are
    found by the operations around the node where they end, so that cost grows with matches: later
    outputs come first, then rules in their order; other passes with rules run after this one.
    What a replacement makes possible behind it is found by another walk.
    Where a replacement would make an output share bytes with an input or another output, which it
    did not before, nothing is replaced.
    """

    contract = Contract()

    rules: tuple[Rule, ...]

    def run(self, step: StepGraph) -> int:
        total = 0
        for _ in range(_MOST_SWEEPS):
            sweep = Sweep(step.graph, self.rules)
            for node in reversed(step.graph.nodes):
                sweep.visit(node)
            changes = sweep.finish()
            total += changes
            if not changes:
                return total
        raise VerifyError(f"{self} finds no end: one of its rules undoes what another does")


class Sweep:
    """One walk over a graph with rules: ``visit`` each node, then ``finish``."""

    def __init__(self, graph: fx.Graph, rules: tuple[Rule, ...]) -> None:
        self._graph = graph
        self._index = _index_of(rules)
        self._bytes: JoinedBytes | None = None
        self._moved: list[fx.Node] = []
        self._count = 0

    def visit(self, node: fx.Node) -> bool:
        """Apply the first rule that fits where it ends in ``node``; whether one did."""
        if node.op != "call_function":
            return False
        for rule in self._index.at(node):
            try:
                self.apply(rule, node)
            except NoMatch:
                continue
            return True
        return False

    def apply(self, rule: Rule, node: fx.Node) -> None:
        """Apply a rule where it ends in ``node``; raises ``NoMatch``."""
        match = _find(rule, node)
        if self._bytes is None:  # before anything is replaced
            self._bytes = JoinedBytes(self._graph)
        replaced = _built(rule, match, self._bytes)
        self._moved += [new for old, new in replaced if self._bytes.join(old, new)]
        _put_in_place(replaced)
        self._count += 1

    def refusal(self, node: fx.Node) -> str | None:
        """What is in the way of the first rule at ``node``; ``None`` if none ends in such."""
        for rule in self._index.at(node):
            try:
                self.apply(rule, node)
            except NoMatch as miss:
                return miss.message
            return "applies"
        return None

    def finish(self) -> int:
        """The number of replacements; values of their readers are up to date."""
        refresh(self._graph, self._moved)
        return self._count


@functools.lru_cache(maxsize=64)
def _index_of(rules: tuple[Rule, ...]) -> RuleIndex[Rule]:
    return RuleIndex([(rule, roots_of(rule.pattern)) for rule in rules])


def explain(rule: Rule, node: fx.Node) -> str:
    """Why ``rule`` does or does not apply at ``node``, in words. It is tried on a copy of the
    graph, so what is built and what it would share bytes with count too."""
    copy, twins = copied(node.graph)
    try:
        Sweep(copy, (rule,)).apply(rule, twins[node])
    except (NoMatch, VerifyError) as miss:
        return miss.message
    return "applies"


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph once more over the same values, and which node became which."""
    twins: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph(owning_module=graph.owning_module)
    copy.output(copy.graph_copy(graph, twins))
    return copy, twins


def find(rule: Rule, node: fx.Node) -> Bindings:
    """The variables of ``rule`` when its pattern ends at ``node``; raises ``NoMatch``."""
    match = _find(rule, node)
    if not isinstance(rule.replacement, Lowering):
        result = returned_by(rule.replacement)
        if isinstance(result, fx.Node) and result.op == "placeholder":
            kept = _fitting(rule, node, match.bindings[str(result.target)], made=False)
            JoinedBytes(node.graph).require_no_new([(node, kept)])
    return match.bindings


def _find(rule: Rule, node: fx.Node) -> Match:
    """The first way to lay the pattern that the rule's check agrees to."""
    roots = roots_of(rule.pattern)
    if len(roots.calls) == 1:
        return _checked(rule, only_match(roots, node))
    miss: NoMatch | None = None
    for attempt in attempts(roots, node):
        if isinstance(attempt, NoMatch):
            miss = attempt
            continue
        try:
            return _checked(rule, attempt)
        except NoMatch as refused:
            miss = refused
    raise miss or NoMatch(f"{node} is not {' or '.join(map(str, roots.calls))}")


def _checked(rule: Rule, match: Match) -> Match:
    if rule.check is not _always:
        rule.check(**{name: _known(value) for name, value in match.bindings.items()})
    return match


def _built(rule: Rule, match: Match, joined: JoinedBytes) -> list[Replaced]:
    """Each root of the match with its replacement, which stands in the graph and which nobody reads
    yet. After ``NoMatch`` nothing was made."""
    graph = match.anchor.graph
    builder = Builder(graph, match.anchor, rule.name)
    try:
        with graph.inserting_before(match.place):
            results = _results(rule, match, builder)
        replaced: list[Replaced] = []
        for old, new in zip(match.roots, results, strict=True):
            replaced.append((old, _fitting(rule, old, new, new in builder.made)))
        joined.require_no_new(replaced)
    except NoMatch:
        builder.undo()
        raise
    return replaced


def _results(rule: Rule, match: Match, builder: Builder) -> Sequence[Any]:
    if isinstance(rule.replacement, Lowering):
        made = rule.replacement.build(builder, **match.bindings)
    else:
        made = builder.copied(rule.replacement, match.bindings)
    results: Sequence[Any] = made if isinstance(made, list | tuple) else (made,)
    words = f"{rule.name} replaces {len(match.roots)} values by {len(results)}"
    require(len(results) == len(match.roots), VerifyError, words)
    return results


def _fitting(rule: Rule, old: fx.Node, new: Any, made: bool) -> fx.Node:
    """``new``, if all may read it instead of ``old``."""
    require(isinstance(new, fx.Node), NoMatch, f"{new} is not a tensor")
    before, after = value_of(old), value_of(new)
    same = _layouts(before) == _layouts(after)
    if not made:
        require(is_tensor(new), NoMatch, f"{new} is not a tensor")
        if not same:
            types = f"{show_type(after)} to {show_type(before)}"
            raise NoMatch(f"{old} changes {types}, or its strides or device")
    elif _kinds(before) != _kinds(after):
        words = f"{rule.name} turned {show_type(before)} into {show_type(after)} at {old}"
        raise VerifyError(words)
    require(same or not leaves_step(old), NoMatch, f"{old} is returned with other strides")
    return new


def _layouts(value: object) -> list[TensorType]:
    return [type_of_tensor(each) for each in tensors_in(value)]


def _kinds(value: object) -> list[tuple[object, ...]]:
    return [(t.dtype, tuple(map(size_key, t.shape)), t.device) for t in _layouts(value)]


def _put_in_place(replaced: Sequence[Replaced]) -> None:
    """All read the replacements. What was replaced goes, with the operands that only it kept;
    operations that matter even so stay."""
    for old, new in replaced:
        old.replace_all_uses_with(new)
    roots = {old for old, _ in replaced}
    worklist = sorted(roots)
    erased: set[fx.Node] = set()
    while worklist:
        node = worklist.pop()
        if node in erased or node.users or node.op != "call_function":
            continue
        if node in roots or may_drop(node):
            worklist += node.all_input_nodes
            node.graph.erase_node(node)
            erased.add(node)


def _known(value: object) -> Any:
    match value:
        case fx.Node():
            held = value_of(value)
            return held if isinstance(held, tuple | list) else type_of_tensor(held)
        case list() | tuple():
            return [_known(each) for each in value]
        case _:
            return value


__all__ = [
    "Bindings",
    "Builder",
    "Lowering",
    "NoMatch",
    "Rewrite",
    "Rule",
    "any_of",
    "anything",
    "constant",
    "explain",
    "find",
    "list_of",
    "lowering",
    "number",
    "shared",
    "users",
]
