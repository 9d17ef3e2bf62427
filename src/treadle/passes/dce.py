"""Remove what nobody reads."""

from dataclasses import dataclass

from torch import fx

from treadle.graph.operators import has_effect, is_random
from treadle.graph.passes import GraphPass
from treadle.graph.signature import StepGraph


@dataclass(frozen=True)
class RemoveDeadCode(GraphPass):
    """Erase values that no output depends on.

    before:  a = relu(x); b = neg(x); return [b]
    after:   b = neg(x); return [b]

    ``keep_random`` keeps unread random operations: eager would have advanced the generator,
    and the numbers drawn after them depend on it. Inputs stay; so do operations with effects.
    """

    keep_random: bool = True

    def run(self, step: StepGraph) -> int:
        erased = 0
        for node in reversed(step.graph.nodes):
            if not node.users and self._may_go(node):
                step.graph.erase_node(node)
                erased += 1
        return erased

    def _may_go(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "get_attr") or has_effect(node):
            return False
        return not (self.keep_random and is_random(node))
