"""The request of a compile: one object, which is all that the stages see, and its digest."""

import json
from dataclasses import dataclass, replace

from treadle.algebra.guards import Guard, GuardSet
from treadle.algebra.polynomial import to_data
from treadle.compat.operators.operator_facts import facts_of
from treadle.compiler.communication import communication_costs
from treadle.compiler.target import Target, facts_beside, target_of
from treadle.graph.analysis.dynamic import dims_of_graph, guards_of
from treadle.graph.core.operators import OpOverload
from treadle.graph.core.signature import StepGraph
from treadle.graph.text.canonical import CanonicalStep, canonical, text_of_value
from treadle.options import Options
from treadle.passes.memory.cost import flops_of
from treadle.runtime.kernels.build import Build
from treadle.runtime.kernels.tune import Trials
from treadle.runtime.machine import Machine
from treadle.runtime.store.cache import Cache


@dataclass(frozen=True)
class CompileRequest:
    """A step, the guards on its sizes so far, where it is to run, and on what.

    The stages get this and nothing else: a step without a fact that is not in its digest, and
    options without those that decide nothing. So equal keys are equal artifacts.
    """

    canonical: CanonicalStep
    guards: tuple[Guard, ...]
    target: Target
    machine: Machine

    @property
    def step(self) -> StepGraph:
        """The step to compile, which the stages change."""
        return self.canonical.step

    @property
    def facts(self) -> dict[str, str]:
        """Everything an artifact depends on, by name; graph and constants by their digests."""
        return {
            "graph": self.canonical.digest,
            "constants": self.canonical.constants,
            "sizes": ", ".join(f"{dim!r}" for dim in dims_of_graph(self.step.graph)),
            "guards": json.dumps([[to_data(g.formula), g.sign, g.answer] for g in self.guards]),
            "costs": _foreign_costs(self.step),
            **facts_beside(self.target, self.machine),
        }


def request_of(
    step: StepGraph,
    device: str,
    options: Options,
    build: Build,
    *,
    cache: Cache,
    kept: int = 0,
    guards: GuardSet | None = None,
) -> CompileRequest:
    """The request for ``step`` on ``device``; ``kept``: as of the target; ``guards``: what its
    sizes were taken to be, where the graph does not know."""
    target, here = target_of(device, options, build, cache=cache, kept=kept)
    costs = communication_costs(step, device, target.hardware, cache, measure=options.measure)
    target = replace(target, communication=costs)
    if options.tune and not target.library:
        target = replace(target, trials=Trials(build, cache, here.identity))
    known = guards_of(step.graph) if guards is None else guards
    return CompileRequest(canonical(step), tuple(known.guards), target, here)


def _foreign_costs(step: StepGraph) -> str:
    """What users' operations cost by the formulas that are registered for them."""
    costs: dict[str, object] = {}
    for node in step.graph.nodes:
        if isinstance(node.target, OpOverload) and not facts_of(node.target).native:
            flops = flops_of(node)
            if flops:
                costs[node.name] = flops
    return text_of_value(costs)
