"""The decision for each activation, with its reason, in readable rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import operation_name
from treadle.graph.core.types import show_type
from treadle.passes.memory.classify import SaveCandidates, classify, is_result, must_save
from treadle.passes.memory.cost import Kind
from treadle.passes.memory.order import Facts, Order
from treadle.util.sizes import format_bytes
from treadle.util.wording import layer_of


@dataclass(frozen=True, slots=True)
class Decision:
    """``save``, ``recompute`` or ``offload`` for one forward value that a later phase needs."""

    name: str
    operation: str
    type: str
    size: int
    module: str
    where: str
    decision: str
    why: str


def decisions(
    order: Order,
    saved: frozenset[int],
    bans: Sequence[str] = (),
    away: frozenset[int] = frozenset(),
) -> tuple[Decision, ...]:
    """One entry per forward value that is kept or computed again, in forward order; ``bans``: those
    by which it was planned; ``away``: what is on the host between its uses."""
    facts = order.facts
    again = {i for i, second in zip(order.origin, order.again, strict=True) if second}
    claims = classify(facts, bans)
    there = (i for i in saved | claims.needed if i not in again)
    kept = {i for i in there if facts.new_bytes(_made_by(facts, i))}
    table: list[Decision] = []
    for i in sorted(kept | again):
        if facts.kinds[i] is not Kind.VIEW or (i in kept and is_result(facts, i)):
            made = _decision(facts, claims, i, i in again)
            table.append(replace(made, decision="offload", why=_AWAY) if i in away else made)
    return tuple(table)


_AWAY = "on the host between its uses"


def _made_by(facts: Facts, i: int) -> int:
    """The operation that ``i`` is one of several results of, or itself."""
    return facts.operands[i][0] if is_result(facts, i) else i


def _decision(facts: Facts, claims: SaveCandidates, i: int, again: bool) -> Decision:
    node, maker = facts.nodes[i], _made_by(facts, i)
    if again:
        verdict, why = "recompute", "cheaper to recompute than to keep"
    else:
        once = must_save(facts, maker, products=True, banned=claims.banned)
        verdict, why = "save", once or _why_saved(facts, i)
    return Decision(
        str(node),
        operation_name(facts.nodes[maker].target),
        show_type(value_of(node)),
        facts.held_bytes(i),
        info(node).module,
        info(node).where,
        verdict,
        why,
    )


def _why_saved(facts: Facts, i: int) -> str:
    maker = _made_by(facts, i)
    sources = (facts.kinds[operand] for operand in facts.operands[maker])
    if Kind.RANDOM in sources:
        return "random: drawn once, kept in few bytes"
    if i in facts.returned:
        return "a result of the step"
    if facts.kinds[maker] is Kind.PRODUCT:
        return "a product: more expensive to recompute than to keep"
    return "keeping it is cheaper than keeping what it is computed from"


@dataclass(frozen=True, slots=True)
class Row:
    """Decisions that differ only in a layer's number: ``decision`` with ``*`` in its module."""

    count: int
    decision: Decision

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.count * self.decision.size


def rows(table: Sequence[Decision]) -> list[Row]:
    """Equal layers folded, the largest total first."""
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for decision in table:
        layer = layer_of(decision.module)
        key = (
            decision.decision,
            decision.operation,
            decision.type,
            layer,
            decision.where,
            decision.why,
        )
        groups.setdefault(key, []).append(replace(decision, module=layer))
    rows_ = [Row(len(same), same[0]) for same in groups.values()]
    return sorted(rows_, key=lambda row: -row.total)


def shown(row: Row) -> str:
    """``12 x  save  6.00 MiB  f32[..]  blocks.*.mlp  mul: why  (where)``."""
    decision = row.decision
    where = f"  ({decision.where})" if decision.where else ""
    return (
        f"{row.count:3} x {decision.decision:9} {format_bytes(decision.size):>10} "
        f"{decision.type:20} {decision.module or '-'}  {decision.operation}: {decision.why}{where}"
    )


def folded(table: Sequence[Decision]) -> list[str]:
    """Equal layers as one line, the largest total first."""
    return [shown(row) for row in rows(table)]
