"""The matcher against a search that tries everything: random graphs, random patterns in them."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, trace
from treadle.graph.analysis.alias import analyse
from treadle.graph.rewrite.pattern_programs import roots_of
from treadle.graph.rewrite.rule_index import RuleIndex
from treadle.graph.rewrite.rules import NoMatch, Rewrite, Rule, find

aten = torch.ops.aten
UNARY = (aten.neg.default, aten.abs.default, aten.relu.default)
BINARY = (aten.maximum.default, aten.mul.Tensor)
X = torch.linspace(-1, 1, 5)


def random_program(seed: int, size: int) -> Callable[..., object]:
    """Operations on one another; the values nobody reads and some others are returned."""

    def program(x, y):
        choose = random.Random(seed)
        values = [x, y]
        for _ in range(size):
            near = values[-5:]
            if choose.random() < 0.5:
                values.append(choose.choice(UNARY)(choose.choice(near)))
            else:
                values.append(choose.choice(BINARY)(choose.choice(near), choose.choice(near)))
        return [values[-1], values[-2], choose.choice(values[2:])]

    return program


# A term is a variable's name, or an operation with terms; a pattern is a tuple of terms.


def random_term(choose: random.Random, depth: int, parts: list[object]) -> object:
    if depth == 0 or choose.random() < 0.15:
        return choose.choice("abc")
    if parts and choose.random() < 0.2:
        return choose.choice(parts)  # the same part once more: one value
    op = choose.choice(UNARY + BINARY)
    count = 1 if op in UNARY else 2
    made = Term(op, [random_term(choose, depth - 1, parts) for _ in range(count)])
    parts.append(made)
    return made


class Term:
    """A call in a pattern; each object is one value."""

    def __init__(self, op: object, operands: list[object]) -> None:
        self.op, self.operands = op, operands


def random_pattern(seed: int) -> list[Term]:
    choose = random.Random(seed)
    roots: list[object] = []
    while not roots or not isinstance(roots[-1], Term):
        roots = [random_term(choose, choose.randrange(1, 3), [])]
    if choose.random() < 0.5:
        parts: list[object] = []
        _collect(roots[0], parts)
        other = Term(choose.choice(UNARY), [choose.choice(parts)])
        roots.append(other)
    return roots  # type: ignore[return-value]


def _collect(term: object, into: list[object]) -> None:
    into.append(term)
    if isinstance(term, Term):
        for each in term.operands:
            _collect(each, into)


def as_program(roots: list[Term]) -> Callable[..., object]:
    """The pattern as a rule has it."""

    def program(a, b, c):
        made: dict[object, object] = {"a": a, "b": b, "c": c}

        def value(term):
            if term not in made:
                made[term] = term.op(*map(value, term.operands))
            return made[term]

        results = tuple(map(value, roots))
        return results if len(results) > 1 else results[0]

    return program


def laid(roots: list[Term], nodes: list[object]) -> dict[object, object] | None:
    """What the terms stand for if the roots are these nodes, or None: the definition."""
    values: dict[object, object] = {}

    def lay(term, node):
        if term in values:
            return values[term] is node
        values[term] = node
        if not isinstance(term, Term):
            return True
        if getattr(node, "target", None) is not term.op:
            return False
        return all(map(lay, term.operands, node.args))

    return values if all(map(lay, roots, nodes)) else None


def fits(roots: list[Term], chosen: list[object]) -> bool:
    values = laid(roots, chosen)
    if values is None or len(set(chosen)) < len(chosen):
        return False
    covered = {node for term, node in values.items() if isinstance(term, Term)}
    inside = covered - set(chosen)
    if any(user not in covered for node in inside for user in node.users):
        return False
    if len(chosen) == 1:
        return True
    bound = [node for term, node in values.items() if not isinstance(term, Term)]
    readers = [user for node in chosen for user in node.users if user not in covered]
    first = min([max(chosen), *readers])
    return all(node < first and node not in covered for node in bound)


def by_trying_everything(roots: list[Term], node: object) -> bool:
    """Whether the pattern can be laid with ``node`` as its last root."""
    nodes = [each for each in node.graph.nodes if each.op == "call_function"]
    choices = itertools.product(nodes, repeat=len(roots))
    return any(max(each) is node and fits(roots, list(each)) for each in choices)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(3, 14))
def test_finds_what_trying_everything_finds(graph_seed, rule_seed, size):
    step = trace(random_program(graph_seed, size), X, X.flip(0))
    roots = random_pattern(rule_seed)
    rule = Rule("random", as_program(roots), lambda a: aten.exp.default(a))
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        try:
            find(rule, node)
            found = True
        except NoMatch:
            found = False
        assert found == by_trying_everything(roots, node)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_the_index_misses_no_match_and_keeps_the_order(graph_seed, seeds):
    step = trace(random_program(graph_seed, 25), X, X.flip(0))
    rules = [
        Rule(str(at), as_program(random_pattern(seed)), lambda a: aten.exp.default(a))
        for at, seed in enumerate(seeds)
    ]
    index = RuleIndex([(rule, [roots_of(rule.pattern)]) for rule in rules])
    for node in step.graph.nodes:
        offered = index.at(node)
        assert [int(each.name) for each in offered] == sorted(int(each.name) for each in offered)
        for rule in rules:
            if node.op == "call_function" and rule not in offered:
                with pytest.raises(NoMatch):
                    find(rule, node)


PLANTED = (
    Rule(
        "relu-of-neg",
        lambda x: aten.relu.default(aten.neg.default(x)),
        lambda x: aten.neg.default(aten.clamp_max.default(x, 0)),
    ),
    Rule(
        "abs-of-neg",
        lambda x: aten.abs.default(aten.neg.default(x)),
        lambda x: aten.abs.default(x),
    ),
    Rule(
        "twice-abs",
        lambda x: aten.abs.default(aten.abs.default(x)),
        lambda x: aten.abs.default(x),
    ),
    Rule("neg-neg", lambda x: aten.neg.default(aten.neg.default(x)), lambda x: x),
    Rule(
        "both-signs",
        lambda x: (aten.relu.default(x), aten.neg.default(x)),
        lambda x: (aten.clamp_min.default(x, 0), aten.mul.Tensor(x, -1)),
    ),
    Rule(
        "larger-of-one",
        lambda x: aten.maximum.default(x, x),
        lambda x: x,
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 30), st.permutations(range(len(PLANTED))))
def test_rewriting_keeps_the_numbers_and_finds_nothing_twice(seed, size, order):
    program = random_program(seed, size)
    step = trace(program, X, X.flip(0))
    shared_before = aliases(step)
    each = Rewrite(tuple(PLANTED[at] for at in order))
    each.run(step)
    step.graph.lint()
    check_numbers(step, program, (X, X.flip(0)), exact=False)
    assert aliases(step) <= shared_before
    assert each.run(step) == 0


def aliases(step) -> set[tuple[int, int]]:
    """Pairs of results, and of results and inputs (negative), that share bytes."""
    facts = analyse(step)
    values = [*enumerate(step.returned), *((-1 - i, p) for i, p in enumerate(step.placeholders))]
    return {
        (i, j)
        for (i, left), (j, right) in itertools.combinations(values, 2)
        if facts.share(left, right)
    }
