"""Local rewrites: the pattern to find, the condition under which the rewrite is correct, and the
replacement."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import fx

from treadle.graph.analysis.joined_bytes import JoinedBytes
from treadle.graph.core.copying import copied
from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of_tensor
from treadle.graph.core.values import refresh
from treadle.graph.rewrite.matching import (
    PatternMatch,
    attempts,
    only_match,
    require_one_region,
    unify,
)
from treadle.graph.rewrite.node_rewrite import NodeRewrite
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.graph.rewrite.pattern import Roots
from treadle.graph.rewrite.pattern_programs import pattern_of, returned_by, roots_of
from treadle.graph.rewrite.pattern_words import (
    Program,
    any_of,
    anything,
    call_of,
    commuting,
    constant,
    list_of,
    named,
    number,
    shared,
    through,
    users,
)
from treadle.graph.rewrite.replacement import (
    Bindings,
    Lowering,
    Replacement,
    ReplacementBuilder,
    built,
    fitting,
    lowering,
    put_in,
)
from treadle.graph.rewrite.rule_index import RuleIndex
from treadle.graph.rewrite.torch_programs import TorchProgram, TorchReplacement, TracedPattern
from treadle.util.errors import VerifyError
from treadle.util.refusals import NoMatch, attempt

_MOST_SWEEPS = 100


def _always(**types: object) -> None:
    """The check of a rule that is correct wherever it matches."""


@dataclass(frozen=True)
class Rule:
    """Replace each match of ``pattern`` by ``replacement``, unless ``check`` raises ``NoMatch``.

    The three share their variables: two are ordinary programs over them, and ``check`` receives
    their types (constants unchanged, lists of values as lists of types). No part of a rule sees the
    graph; a replacement that cannot be written as a program is a ``lowering``. In a pattern,

    - ``shared(x)`` lets ``x`` be used outside the match, ``users(x, 2)`` counts all its users;
    - ``any_of(op, ...)(x)`` is a call of any of the operations, ``commuting(op)(x, y)`` a call with
      its operands in either order, ``call_of(c, op, ...)`` any call of these, bound to ``c``;
    - ``named(c, mm(x, y))`` is a call that is bound to ``c``;
    - ``through(VIEWS, x)`` is ``x`` through any number of calls of these, none included;
    - ``anything`` is an argument that is ignored, ``...`` are all those that follow;
    - ``number(n)`` and ``constant(c)`` are not values of the graph, and may have a test;
    - ``list_of(item, xs)`` is a list of any length.

    A pattern that returns a tuple matches as a whole, and the replacement returns as many values.
    The new values are computed where the last of the old ones can be, before any reader of the
    others.
    """

    name: str
    pattern: Program | TorchProgram = field(repr=False)
    replacement: Replacement = field(repr=False)
    check: Callable[..., None] = field(default=_always, repr=False)
    one_region: bool = field(default=False, repr=False)
    """Whether a checkpointed region, or what its policy asks for, may not end inside the match;
    otherwise a policy may be that of the last node."""

    @staticmethod
    def from_functions(
        name: str,
        search: Callable[..., object],
        replace: Callable[..., object] | Lowering,
        examples: Sequence[Sequence[object]],
        check: Callable[..., None] = _always,
        *,
        shared: bool = False,
    ) -> "Rule":
        """A rule of ordinary functions of PyTorch's, which share the names of their parameters.

        ``examples``: arguments of ``search``, once for each form it is to be found in, such as
        tensors of two dims and of three; only the operations count, their sizes do not matter.
        What is found is compared with ``search`` for the types found there, constants and all, and
        ``replace`` is traced for those. Numbers among the arguments are variables too: give some
        that are no constants of ``search``. ``shared``: its inner values may be read elsewhere, as
        a backward pass does; they then stay.
        """
        given = TorchProgram(search, tuple(map(tuple, examples)), shared)
        put = replace if isinstance(replace, Lowering) else TorchReplacement(replace)
        return Rule(name, given, put, check)

    def patterns(self) -> tuple[Roots, ...]:
        """The patterns of the rule: one, or one for each variant of a function."""
        if isinstance(self.pattern, TorchProgram):
            return tuple(form.roots for form in self.pattern.traced_patterns)
        return (roots_of(self.pattern),)


@dataclass(frozen=True)
class Rewrite(GraphPass):
    """Apply the first rule that fits at each node, last node first, results included.

    Each rule must make progress: a rule that undoes another would run forever. Rules are looked up
    by the operations around the node where they end, so the cost grows with the number of matches.
    Later outputs come first, then rules in their order; other passes with rules run after this one.
    Another walk finds the matches that a replacement makes possible after it. Nothing is replaced
    if an output would then share bytes with an input or another output and did not before.
    """

    contract = Contract()

    rules: tuple[Rule, ...]

    def run(self, step: StepGraph) -> int:
        total = 0
        for _ in range(_MOST_SWEEPS):
            sweep = RuleSweep(step.graph, self.rules)
            for node in reversed(step.graph.nodes):
                sweep.visit(node)
            changes = sweep.finish()
            total += changes
            if not changes:
                return total
        raise VerifyError(f"{self} finds no end: one of its rules undoes what another does")


class RulePass(GraphPass):
    """Rules under the name of a pass: each node once, first node first."""

    rules: ClassVar[tuple[Rule, ...]]

    def run(self, step: StepGraph) -> int:
        total = changes = self._once(step)
        while changes and self.may_go_on(step):
            changes = self._once(step)
            total += changes
        return total

    def may_go_on(self, step: StepGraph) -> bool:
        """Whether another walk may find more after a walk that changed something."""
        return False

    def _once(self, step: StepGraph) -> int:
        sweep = RuleSweep(step.graph, self.rules)
        for node in step.graph.nodes:
            sweep.visit(node)
        return sweep.finish()


class RuleSweep:
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
        attempts = (attempt(self.apply, rule, node) for rule in self._index.at(node))
        return any(not isinstance(each, NoMatch) for each in attempts)

    def apply(self, rule: Rule, node: fx.Node) -> None:
        """Apply a rule where it ends in ``node``; raises ``NoMatch``."""
        match = _find(rule, node)
        if self._bytes is None:  # before anything is replaced
            self._bytes = JoinedBytes(self._graph)
        replaced = built(rule.name, rule.replacement, match, self._bytes)
        self._moved += [new for old, new in replaced if self._bytes.join(old, new)]
        put_in(replaced)
        self._count += 1

    def refusal(self, node: fx.Node) -> str | None:
        """What is in the way of the first rule at ``node``; ``None`` if none ends in such."""
        first = next(iter(self._index.at(node)), None)
        return None if first is None else in_words(attempt(self.apply, first, node))

    def finish(self) -> int:
        """The number of replacements; values of their readers are up to date."""
        refresh(self._graph, self._moved)
        return self._count


@functools.lru_cache(maxsize=64)
def _index_of(rules: tuple[Rule, ...]) -> RuleIndex[Rule]:
    return RuleIndex([(rule, rule.patterns()) for rule in rules])


def explain(rewrite: "Rule | RulePass | NodeRewrite[Any]", node: fx.Node) -> str:
    """Why ``rewrite`` does or does not apply at ``node``, as text. A matching rule is tried on a
    copy of the graph, so the replacement and its shared bytes are checked as well. Rules of a pass
    also change the nodes before ``node`` in the copy, as the pass does."""
    match rewrite:
        case NodeRewrite():
            return in_words(attempt(rewrite.find, node))
        case RulePass(rules=rules):
            sweep, twins = _swept_until(node, rules)
            return sweep.refusal(twins[node]) or f"no rule of {rewrite} ends in {node}"
        case Rule():
            try:
                return in_words(attempt(_tried, rewrite, node))
            except VerifyError as fault:  # a rule that is wrong there
                return fault.message


def _tried(rule: Rule, node: fx.Node) -> None:
    """Apply ``rule`` on a copy."""
    _find(rule, node)
    copy, twins = copied(node.graph)
    RuleSweep(copy, (rule,)).apply(rule, twins[node])


def _swept_until(
    node: fx.Node, rules: tuple[Rule, ...]
) -> tuple[RuleSweep, dict[fx.Node, fx.Node]]:
    """A copy after what a pass of ``rules`` does ahead of ``node``, and which node is which."""
    copy, twins = copied(node.graph)
    sweep = RuleSweep(copy, rules)
    for each in node.graph.nodes:
        if each is node:
            break
        sweep.visit(twins[each])
    return sweep, twins


def in_words(attempted: object) -> str:
    """What became of an attempt: its refusal, or that something applies."""
    return attempted.message if isinstance(attempted, NoMatch) else "applies"


def explain_all(rule: Rule, step: StepGraph) -> dict[str, str]:
    """``explain`` for every node whose operation ends the pattern of ``rule``, by name."""
    calls = [call for roots in rule.patterns() for call in roots.calls]
    targets = {target for call in calls for target in call.arguments}
    asked = [node for node in step.graph.nodes if node.target in targets]
    return {node.name: explain(rule, node) for node in asked}


def find(rule: Rule, node: fx.Node) -> Bindings:
    """The variables of ``rule`` when its pattern ends at ``node``; raises ``NoMatch``."""
    match = _find(rule, node)
    if not isinstance(rule.replacement, Lowering | TorchReplacement):
        result = returned_by(rule.replacement)
        if isinstance(result, fx.Node) and result.op == "placeholder":
            kept = fitting(rule.name, node, match.bindings[str(result.target)], made=False)
            JoinedBytes(node.graph).require_no_new([(node, kept)])
    return match.bindings


def bindings_of(pattern: Program, value: fx.Node) -> Bindings:
    """The variables of ``pattern``, which may end in a chain, matched at ``value``, no matter who
    else reads the matched values; raises ``NoMatch``."""
    match = PatternMatch(value)
    unify(match, pattern_of(pattern), value)
    return match.bindings


def _find(rule: Rule, node: fx.Node) -> PatternMatch:
    """The first way to lay a pattern of the rule that its check agrees to."""
    if isinstance(rule.pattern, TorchProgram):
        return _find_form(rule, rule.pattern, node)
    roots = roots_of(rule.pattern)
    if len(roots.calls) == 1:
        return _checked(rule, only_match(roots, node))
    return _first(roots, node, partial(_checked, rule))


def _find_form(rule: Rule, program: TorchProgram, node: fx.Node) -> PatternMatch:
    """The first of the forms that is there; of the refusals one of a form that was, if any."""
    misses: list[NoMatch] = []
    close: list[NoMatch] = []
    for form in program.traced_patterns:

        def confirmed(match: PatternMatch, form: TracedPattern = form) -> PatternMatch:
            refusal = attempt(program.confirm, form, match)
            found = refusal or attempt(_checked, rule, match)
            if isinstance(found, NoMatch):
                close.append(found)
                raise found
            return found

        found = attempt(_first, form.roots, node, confirmed)
        if not isinstance(found, NoMatch):
            return found
        misses.append(found)
    raise next(iter(close + misses), NoMatch(f"{rule.name} has no examples"))


def _first(
    roots: Roots, node: fx.Node, confirmed: Callable[[PatternMatch], PatternMatch]
) -> PatternMatch:
    """The first way to lay a pattern with which ``confirmed`` finds nothing wrong."""
    miss = NoMatch(f"{node} is not {' or '.join(map(str, roots.calls))}")
    for laid in attempts(roots, node):
        found = laid if isinstance(laid, NoMatch) else attempt(confirmed, laid)
        if not isinstance(found, NoMatch):
            return found
        miss = found
    raise miss


def _checked(rule: Rule, match: PatternMatch) -> PatternMatch:
    if rule.one_region:
        require_one_region(match.covered)
    if rule.check is not _always:
        rule.check(**{name: _known(value) for name, value in match.bindings.items()})
    return match


def _known(value: object) -> object:
    match value:
        case fx.Node():
            held = value_of(value)
            return held if isinstance(held, tuple | list) else type_of_tensor(held)
        case list() | tuple():
            return [_known(each) for each in value]
        case _:
            return value


__all__ = [
    "Lowering",
    "NoMatch",
    "ReplacementBuilder",
    "Rewrite",
    "Rule",
    "RulePass",
    "any_of",
    "anything",
    "bindings_of",
    "call_of",
    "commuting",
    "constant",
    "explain",
    "explain_all",
    "find",
    "list_of",
    "lowering",
    "named",
    "number",
    "shared",
    "through",
    "users",
]
