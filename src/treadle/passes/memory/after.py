"""The passes that need a plan: they see what is kept and what is computed again.

A plan is judged by what runs. So these run on every candidate before it is judged, and again, where
they are seen, on the step that the plan was chosen for.
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
