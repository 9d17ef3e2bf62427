"""The passes that need a plan: they see what is kept and what is recomputed.

A plan is evaluated by the graph that runs. So these passes run on every candidate before it is
evaluated, and again, visibly, on the step for which the plan was chosen.
"""

from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.passes.registered import registered

AFTER: tuple[GraphPass, ...] = ()
"""In their order, each with the reason why it needs the plan; none so far."""


def passes_after() -> tuple[GraphPass, ...]:
    """These, and then what users registered for the stage."""
    return (*AFTER, *registered("plan memory"))


def finished(step: StepGraph) -> StepGraph:
    """``step``, a candidate's graph of its own, after these passes."""
    passes = passes_after()
    if passes:
        run_passes(step, passes)
    return step
