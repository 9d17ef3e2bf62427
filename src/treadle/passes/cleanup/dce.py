"""Remove what nobody reads."""

from dataclasses import dataclass

from treadle.graph.core.operators import may_drop
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import Contract, GraphPass


@dataclass(frozen=True)
class RemoveDeadCode(GraphPass):
    """Erase values that no output depends on.

    before:  a = relu(x); b = neg(x); return [b]
    after:   b = neg(x); return [b]

    ``keep_random`` keeps unread random operations: eager would have advanced the generator,
    and the numbers drawn after them depend on it. Inputs stay; so do operations with effects.
    """

    contract = Contract()

    keep_random: bool = True

    def run(self, step: StepGraph) -> int:
        erased = 0
        for node in reversed(step.graph.nodes):
            if not node.users and may_drop(node, keep_random=self.keep_random):
                step.graph.erase_node(node)
                erased += 1
        return erased
