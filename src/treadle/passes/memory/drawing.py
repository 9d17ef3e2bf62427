"""A cut that failed, as DOT text: the values between an input and the rest of the step of which
none can be kept and none computed again."""

from collections.abc import Mapping, Sequence

from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import operation_name
from treadle.graph.core.types import show_type
from treadle.passes.memory.classify import SaveCandidates, can_keep, must_save
from treadle.passes.memory.order import Facts
from treadle.util.errors import VerifyError


class CutFailure(VerifyError):
    """No choice of values to keep serves the rest of the step. ``values``: the names of a chain of
    them that cannot be cut; ``dot``: a drawing of it as DOT text, with what it is made of."""

    def __init__(self, message: str, values: Sequence[str] = (), dot: str = "") -> None:
        super().__init__(message)
        self.values, self.dot = tuple(values), dot


def cut_failure(
    facts: Facts, claims: SaveCandidates, chain: Sequence[int], *, products: bool
) -> CutFailure:
    """The error for a chain of positions that cannot be cut, the first of which happens once."""
    first, last = (facts.nodes[chain[at]] for at in (0, -1))
    why = must_save(facts, chain[0], products=products, banned=claims.banned)
    message = (
        f"a value that must not be saved cannot be recomputed either: {last} is read after the "
        f"forward pass, and is made of {first} ({why or 'computed once'}); none of "
        f"{', '.join(str(facts.nodes[i]) for i in chain)} can be saved. The error's dot draws them"
    )
    names = [str(facts.nodes[i]) for i in chain]
    return CutFailure(message, names, dot_of(facts, claims, chain, products=products))


def dot_of(facts: Facts, claims: SaveCandidates, chain: Sequence[int], *, products: bool) -> str:
    """The chain in red, its operands, and which of them the rest of the step reads, as DOT text."""
    drawn = dict.fromkeys([*chain, *(o for i in chain for o in facts.operands[i])])
    lines = ["digraph cut {", "  rankdir=TB; node [shape=box];"]
    for i in sorted(drawn):
        colour = ", color=red" if i in chain else ""
        lines.append(f"  n{i} [label={_label(facts, claims, i, products=products)}{colour}];")
    for i in sorted(drawn):
        edges: Mapping[int, None] = dict.fromkeys(o for o in facts.operands[i] if o in drawn)
        lines += [f"  n{operand} -> n{i};" for operand in edges]
    lines += [f"  n{i} -> later;" for i in sorted(drawn) if i in claims.needed]
    return "\n".join([*lines, '  later [label="backward, optimizer", shape=ellipse];', "}"])


def _label(facts: Facts, claims: SaveCandidates, i: int, *, products: bool) -> str:
    node = facts.nodes[i]
    once = must_save(facts, i, products=products, banned=claims.banned)
    again = once or "may be computed again"
    if can_keep(facts, i) and info(node).asked != "must_recompute":
        kept = f"{facts.held_bytes(i)} bytes to keep"
    else:
        kept = "cannot be kept"
    parts = [f"{node}: {operation_name(node.target)}", show_type(value_of(node)), kept, again]
    text = "\\n".join(filter(None, (*parts, info(node).where)))
    return '"' + text.replace('"', "'") + '"'
