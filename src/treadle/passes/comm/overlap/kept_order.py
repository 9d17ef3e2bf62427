"""What keeps its order when collectives and their readers move, without a data dependency.

::

    d = rand(...); e = check(d); f = mine(x)       as many as there are: one behind the other
    r = all_reduce(g)                              stays on its side of ``f``, and of no other

Random numbers, checks and users' operators keep their order among each other. Collectives and their
waits also stay on their side of every operation that may communicate in an unknown way: so the set
of concurrent communications, and the order of their starts, do not change.
"""

from collections import defaultdict

from torch import fx

from treadle.graph.core.collectives import collective_of, communicates_otherwise, is_wait
from treadle.graph.core.operators import has_effect, is_in_order, is_mutable
from treadle.graph.core.signature import Role, StepGraph
from treadle.graph.rewrite.order import Earlier


def is_fence(node: fx.Node) -> bool:
    """Whether no collective and no wait may pass the node: a user's operator, which may hold
    anything, communication of another kind, a write."""
    return communicates_otherwise(node) or is_mutable(node)


def communicates(node: fx.Node) -> bool:
    """Whether the node starts a collective that is known, or waits for one."""
    return is_wait(node) or collective_of(node) is not None


def kept_order(graph: fx.Graph) -> Earlier:
    """For each node that may not pass others: nodes that must stay before it. The order of all
    others follows from these pairs."""
    earlier: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    pinned: fx.Node | None = None
    fence: fx.Node | None = None
    since: list[fx.Node] = []  # collectives and waits behind the last fence
    for node in graph.nodes:
        if communicates(node):
            since.append(node)
            if fence is not None:
                earlier[node].append(fence)
        elif is_in_order(node) or has_effect(node):
            if pinned is not None:
                earlier[node].append(pinned)
            pinned = node
            if is_fence(node):
                earlier[node] += since
                fence, since = node, []
    return dict(earlier)


def updates_in(step: StepGraph) -> list[fx.Node]:
    """New values of parameters and of their state, in order. Nothing is written before the last
    wait of a call, so that a dead rank leaves nothing half-done (``lower/write_back.py``). What is
    computed element by element is computed where it is written, behind that wait."""
    written = {
        node
        for node, output in step.outputs()
        if node is not None
        and output.writes is not None
        and step.signature.inputs[output.writes].role in (Role.PARAMETER, Role.STATE)
    }
    return [node for node in step.graph.nodes if node in written and node.op == "call_function"]
