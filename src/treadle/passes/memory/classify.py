"""Which forward values the rest of the step reads, and which of them may be recomputed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import is_item
from treadle.graph.core.signature import Role
from treadle.passes.memory.bans import banned_values
from treadle.passes.memory.cost import Kind
from treadle.passes.memory.order import Facts

_NOTHING: Mapping[int, str] = {}


@dataclass(frozen=True)
class SaveCandidates:
    """Positions of nodes, by what claims them. Phases and roles decide, never names.

    ``forward``: operations of the forward pass, in order. ``needed``: those that backward or
    the optimizer read directly. ``candidates``: what can be kept, ``needed`` and everything a
    needed value is computed from. ``roles``: the placeholders of each role. ``banned``: what is
    never computed again, with the ban that says so.
    """

    forward: tuple[int, ...]
    needed: frozenset[int]
    candidates: frozenset[int]
    roles: dict[Role, tuple[int, ...]]
    banned: Mapping[int, str] = field(default_factory=dict[int, str])


def classify(facts: Facts, bans: Sequence[str] = ()) -> SaveCandidates:
    """What may be kept of a step, and for whom. ``bans``: the names of those in force."""
    work = [i for i, kind in enumerate(facts.kinds) if kind is not Kind.INPUT]
    forward = tuple(i for i in work if facts.phases[i] == 0)
    inside = set(forward)
    needed = frozenset(
        operand
        for i in work
        if facts.phases[i] > 0
        for operand in facts.operands[i]
        if operand in inside
    )
    candidates = set(needed)
    for i in reversed(forward):
        if i in candidates:
            candidates.update(operand for operand in facts.operands[i] if operand in inside)
    banned = banned_values(facts, bans)
    return SaveCandidates(forward, needed, frozenset(candidates), _roles(facts), banned)


def _roles(facts: Facts) -> dict[Role, tuple[int, ...]]:
    index = {node: i for i, node in enumerate(facts.nodes)}
    roles: dict[Role, tuple[int, ...]] = {}
    for node, step_input in facts.step.inputs():
        roles[step_input.role] = (*roles.get(step_input.role, ()), index[node])
    return roles


def must_save(facts: Facts, i: int, *, products: bool, banned: Mapping[int, str] = _NOTHING) -> str:
    """Why node ``i`` is never computed again; empty if it may be.

    Randomness is drawn once: forward and backward must see the same numbers, so that what
    dropout drops has exactly zero gradient.
    """
    kind = facts.kinds[i]
    if facts.keep[i]:
        return "random: drawn once" if kind is Kind.RANDOM else "has an effect"
    asked = info(facts.nodes[i]).asked
    if asked == "must_recompute":
        return ""
    if asked == "must_save" and can_keep(facts, i):
        return "marked must-save"
    if i in banned:
        return banned[i]
    if kind is Kind.PRODUCT and not products:
        return "products are kept at this budget"
    return ""


def can_keep(facts: Facts, i: int) -> bool:
    """Whether ``i`` is a tensor with bytes of its own: no view, nor an operation with several
    results, of which each is kept or not."""
    node = facts.nodes[i]
    if isinstance(value_of(node), tuple | list):
        return False
    return facts.kinds[i] is not Kind.VIEW or is_result(facts, i)


def is_result(facts: Facts, i: int) -> bool:
    """One unpacked result of an operation with several."""
    return is_item(facts.nodes[i])
