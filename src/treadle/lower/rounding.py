"""Products that round by themselves: those of updates, and gradients that updates read.

::

    g = a * b;  w' = w - lr * g          g = rounded(a * b);  w' = w - rounded(lr * g)

Elsewhere a sum takes in a product where both are in one kernel. Which kernels an update shares is
not its own matter: it may run in the next call (``passes/comm/carry``), ahead of other operations.
So that it gives the same bits there, it rounds as eager does, and so does what is carried to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

from torch import fx

from treadle.compat.operators.operator_facts import facts_of
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import OpOverload, is_item
from treadle.loop.expr import Apply, Array, Expr, Reduce
from treadle.loop.program import Compute, Step
from treadle.loop.traverse import map_expr, walk


@final
@dataclass(frozen=True, slots=True)
class Rounding:
    """The nodes of a graph whose products round by themselves."""

    nodes: frozenset[fx.Node]
    _known: dict[Array, Array] = field(default_factory=dict[Array, Array])

    @classmethod
    def of(cls, graph: fx.Graph) -> "Rounding":
        """Updates, what they read, and what that is a view of."""
        found: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if node.op != "call_function":
                continue
            if info(node).phase == "optimizer":
                found.update((node, *node.all_input_nodes))
            elif info(node).rounds:
                found.add(node)
            if node in found and _shows_operand(node):
                found.update(node.all_input_nodes)
        return cls(frozenset(found))

    def rounded(self, steps: Sequence[Step]) -> list[Step]:
        """The steps of one of the nodes."""
        return [self._step(step) if isinstance(step, Compute) else step for step in steps]

    def _step(self, step: Compute) -> Compute:
        template = step.template
        if template not in self._known:
            self._known[template] = _rounded(template)
        return replace(step, template=self._known[template])


def _shows_operand(node: fx.Node) -> bool:
    """A view, or one result of several."""
    target = node.target
    return is_item(node) or (isinstance(target, OpOverload) and not facts_of(target).allocates)


def _rounded(array: Array) -> Array:
    """``a + b * c  ->  a + rounded(b * c)``. What is summed up is rounded anyway."""
    if any(isinstance(expr, Reduce) for expr in walk(array.body)):
        return array
    body = map_expr(array.body, _rounded_product)
    return array if body is array.body else replace(array, body=body)


def _rounded_product(expr: Expr) -> Expr:
    is_product = isinstance(expr, Apply) and expr.fn == "mul" and expr.dtype.is_floating_point
    return Apply("rounded", (expr,), expr.dtype) if is_product else expr
