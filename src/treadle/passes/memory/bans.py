"""Which values the bans that a planner names keep from being recomputed, and why.

Recomputation has a price, so a plan needs no ban to be good. They are for whoever knows better: to
never run a product twice whatever the budget, or to plan by the rules of other partitioners.

::

    compute-intensive    a product, a convolution or attention
    library-calls        another library call: a sort, a factorisation, an operation of the user's
    small-reductions     a reduction whose result has under a quarter of the bytes that it reads
    materialised         a formula that a call after the forward pass reads: it is written again
    used-far-apart       a formula that the forward pass reads behind a later call, so it is in
                         memory anyway: a residual stream
    long-chains=n        every n-th formula in a row
    far-from-backward=n  what more than n operations separate from the rest of the step

Random draws and effects happen once, whatever is named; what a checkpoint marks must-recompute is
recomputed, whatever is named.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from treadle.graph.core.node_info import info
from treadle.passes.memory.cost import CALLS, FUSIBLE, Kind, bytes_of
from treadle.passes.memory.fused import stages_of, stored_in, used_later
from treadle.passes.memory.order import Facts
from treadle.util.planning.bans import bound_of

_QUARTER = 4

_Rule = Callable[[Facts, int], Iterator[int]]


def banned_values(facts: Facts, bans: Sequence[str]) -> dict[int, str]:
    """The forward values that are never recomputed, each with the first ban that says so."""
    found: dict[int, str] = {}
    for ban in bans:
        name, bound = bound_of(ban)
        rule, why = _RULES[name]
        words = f"ban {ban}: {why}"
        for i in rule(facts, bound):
            if facts.phases[i] == 0 and info(facts.nodes[i]).asked != "must_recompute":
                found.setdefault(i, words)
    return found


def _of_kind(kind: Kind, facts: Facts, bound: int) -> Iterator[int]:
    return (i for i, each in enumerate(facts.kinds) if each is kind)


def _formulas(facts: Facts, chosen: Sequence[bool]) -> Iterator[int]:
    return (i for i, kind in enumerate(facts.kinds) if kind in FUSIBLE and chosen[i])


def _small_reductions(facts: Facts, bound: int) -> Iterator[int]:
    for i in _of_kind(Kind.REDUCTION, facts, bound):
        node = facts.nodes[i]
        if _QUARTER * bytes_of(node) < sum(map(bytes_of, node.all_input_nodes)):
            yield i


def _materialised(facts: Facts, bound: int) -> Iterator[int]:
    return _formulas(facts, stored_in(facts, stages_of(facts), phase=1))


def _used_far_apart(facts: Facts, bound: int) -> Iterator[int]:
    return _formulas(facts, used_later(facts, stages_of(facts)))


def _long_chains(facts: Facts, bound: int) -> Iterator[int]:
    """``length[i]`` formulas in a row end with ``i``."""
    length: list[int] = []
    for kind, operands in zip(facts.kinds, facts.operands, strict=True):
        before = max((length[operand] for operand in operands), default=0)
        ends = kind in CALLS or kind is Kind.INPUT
        length.append(0 if ends else before + (kind in FUSIBLE))
    return _formulas(facts, [n > 0 and n % bound == 0 for n in length])


def _far_from_backward(facts: Facts, bound: int) -> Iterator[int]:
    """``distance[i]``: operations from ``i`` to the nearest one of a later phase that needs it."""
    far = len(facts.nodes) + 1
    distance = [0 if phase else far for phase in facts.phases]
    for i in range(len(facts.nodes) - 1, -1, -1):
        for operand in facts.operands[i]:
            distance[operand] = min(distance[operand], distance[i] + 1)
    computed = (i for i, kind in enumerate(facts.kinds) if kind not in (Kind.INPUT, Kind.VIEW))
    return (i for i in computed if bound < distance[i] < far)


_RULES: Mapping[str, tuple[_Rule, str]] = {
    "compute-intensive": (functools.partial(_of_kind, Kind.PRODUCT), "a product"),
    "library-calls": (functools.partial(_of_kind, Kind.LIBRARY), "a call of a library"),
    "small-reductions": (_small_reductions, "it reads over four times the bytes of its result"),
    "materialised": (_materialised, "a later call reads it, so it would be written again"),
    "used-far-apart": (_used_far_apart, "the forward pass keeps it for a later call"),
    "long-chains": (_long_chains, "so many formulas in a row end with it"),
    "far-from-backward": (_far_from_backward, "more operations separate it from its reader"),
}
