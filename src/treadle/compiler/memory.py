"""Memory plans by exact peaks: those of the kernels and calls of each candidate."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from treadle.compiler.cleaning import cleaned, cleaning_of, rewritten, without
from treadle.compiler.communication import timed
from treadle.compiler.loops import bodies_in, with_rounds
from treadle.compiler.measured.operation_times import OperationTimes
from treadle.compiler.measured.workspaces import with_workspaces
from treadle.compiler.micro_batches import groups_of
from treadle.compiler.regions import with_regions
from treadle.compiler.request import request_of
from treadle.compiler.target import Target, build_for
from treadle.graph.analysis.dynamic import dims_of_graph
from treadle.graph.core.signature import StepGraph
from treadle.graph.regions.loop_bodies import LoopBody
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.loop.expr import Array
from treadle.loop.kernel import KernelPlan
from treadle.loop.program import Program
from treadle.loop.simplify import simplify_program
from treadle.lower.graph import lower
from treadle.lower.reuse import LoweredNodes
from treadle.options import Options
from treadle.passes.memory.apply import require_same
from treadle.passes.memory.choose import MemoryPlan, Plans, fastest_plan, plan_memory
from treadle.passes.taken_branches import RunTakenBranches
from treadle.report.stages import Watcher
from treadle.runtime.store.cache import Cache
from treadle.schedule.build import KnownKernels
from treadle.schedule.plan import schedule
from treadle.schedule.workers import workers_for
from treadle.util.sizes import FRONTIER_POINTS


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step as loops, and as kernels in an order; ``bodies``: what its loops run in each round."""

    program: Program
    plan: KernelPlan
    bodies: "Mapping[LoopBody, ScheduledBody]" = field(
        default_factory=dict["LoopBody", "ScheduledBody"]
    )


@dataclass(frozen=True, slots=True)
class ScheduledBody:
    """A function of a loop: its graph as it was lowered, and its schedule."""

    step: StepGraph
    scheduled: Scheduled


@dataclass(frozen=True, slots=True)
class LoweringCache:
    """What nodes and formulas of one step have become: for their like in other blocks, and in other
    candidates of its plan."""

    nodes: LoweredNodes = field(default_factory=LoweredNodes)
    formulas: dict[Array, Array] = field(default_factory=dict[Array, Array])
    kernels: KnownKernels = field(default_factory=KnownKernels)
    bodies: dict[LoopBody, ScheduledBody] = field(default_factory=dict[LoopBody, ScheduledBody])


def known_of(step: StepGraph) -> LoweringCache | None:
    """``None`` where calls decide sizes, which have no value that nodes could be compared by."""
    return None if dims_of_graph(step.graph) else LoweringCache()


def planned(step: StepGraph, target: Target, known: LoweringCache | None = None) -> Scheduled:
    """The step lowered and scheduled: its kernels, their order, and its exact peak. ``known``: of
    other candidates for the plan of the same step."""
    known = known or known_of(step)
    program = lowered(step, target, known)
    if target.workspaces is not None:
        program = with_workspaces(program, target.workspaces)
    bodies = _bodies(program, target, known)
    allocator = target.hardware.allocator
    if bodies:
        plans = {body: scheduled_body.scheduled.plan for body, scheduled_body in bodies.items()}
        program = with_rounds(program, plans, allocator)
    plan = schedule(
        program,
        fuse=target.options.fuse,
        allocator=allocator,
        workers=workers_for(target.record.workers, rounds_once=target.rounds_once),
        known=known.kernels if known else None,
    )
    return Scheduled(program, plan, bodies)


def _bodies(
    program: Program, target: Target, known: LoweringCache | None
) -> dict[LoopBody, ScheduledBody]:
    """The functions of the program's loops, cleaned, lowered and scheduled like steps. They have no
    budget of their own: nothing of a round is there in the next one but its results."""
    bodies = known.bodies if known else dict[LoopBody, ScheduledBody]()
    wanted = dict.fromkeys(body for host_step in program.steps for body in bodies_in(host_step))
    own = replace(target, options=replace(target.options, memory=None))
    for body in wanted:
        if body not in bodies:
            step = cleaned(body.step(), own.options)
            bodies[body] = ScheduledBody(step, planned(step, own))
    return {body: bodies[body] for body in wanted}


def lowered(step: StepGraph, target: Target, known: LoweringCache | None = None) -> Program:
    """The step as formulas and library calls."""
    program = lower(
        step,
        device=target.device,
        target=target.record,
        library=target.library,
        pad=target.rounds_once,
        known=known.nodes if known else None,
    )
    return simplify_program(program, known.formulas if known else None)


@dataclass
class ScheduledPeaks:
    """The ``PeakEvaluator`` of planning, and the programs that were made to find the peaks. A node
    that several candidates share is lowered and placed once; with dynamic sizes, each candidate is
    separate."""

    target: Target
    known: LoweringCache | None = None
    _seen: list[tuple[StepGraph, Scheduled]] = field(
        default_factory=list[tuple[StepGraph, Scheduled]]
    )

    def __call__(self, step: StepGraph) -> int:
        scheduled = planned(step, self.target, self.known)
        self._seen.append((step, scheduled))
        return scheduled.plan.peak_bytes

    def scheduled(self, step: StepGraph) -> Scheduled:
        """What was made of a candidate that was evaluated."""
        return next(result for seen, result in self._seen if seen is step)


def plan_within(step: StepGraph, target: Target) -> tuple[MemoryPlan, Scheduled | None]:
    """The fastest plan; with a budget, of those whose exact peak, after fusion and packing, is
    within it: then it has been scheduled already."""
    budget, method, times = target.options.budget, target.options.method, _times(target)
    groups = groups_of(step, target)
    if budget is None:
        return fastest_plan(next(groups), target.hardware, method, times), None
    evaluator = ScheduledPeaks(target, known_of(step))
    memory = plan_memory(groups, budget, target.hardware, evaluator, method, times)
    return memory, evaluator.scheduled(memory.step)


def applied(step: StepGraph, memory: MemoryPlan, watcher: Watcher | None = None) -> StepGraph:
    """The step after the plan's passes. A plan that was evaluated leaves ``step`` as it is:
    ``VerifyError`` if the passes give another graph than the one that was evaluated."""
    if not memory.evaluated:
        run_passes(step, memory.passes, watcher or Watcher())
        return step
    result = rewritten(step, memory.passes, watcher)
    require_same(result, memory.step)
    return result


def frontier_points(
    step: StepGraph, device: str, options: Options, cache: Cache, kept: int
) -> tuple[tuple[int, float, int], ...]:
    """Exact peak, estimated seconds and lower bound of what budgets choose, from the fastest plan
    to the smallest; ``kept``: bytes beside the step's own."""
    budgeted = replace(options, memory=1.0)
    build_ = build_for(device, options, cache)
    step = with_regions(step, device, options)
    request = request_of(step, device, budgeted, build_, cache=cache, kept=kept)
    plans = next(plans_of(prepared(request.step, request.target), request.target))
    chosen = plans.spread(FRONTIER_POINTS)
    return tuple((plans.exact(i), plans.points[i].seconds, plans.bound(i)) for i in chosen)


def prepared(step: StepGraph, target: Target, watcher: Watcher | None = None) -> StepGraph:
    """The step as its memory is planned: cleaned, with its collectives where they are hidden.
    Changes ``step``."""
    watcher = watcher or Watcher()
    run_passes(step, (*cleaning_of(target.options), *_branching(target)), watcher)
    if target.communication is None:
        return step
    return timed(step, target.options, target.communication, target.hardware, watcher)


def _branching(target: Target) -> tuple[GraphPass, ...]:
    """Last of the cleaning: branches become programs of their own. Not within a budget, whose plan
    computes again what is in them."""
    if target.library or target.options.memory is not None:
        return ()
    return without((RunTakenBranches(target.hardware),), target.options.skip)


def plans_of(step: StepGraph, target: Target) -> Iterator[Plans]:
    """The plans of a step, which is ``prepared``, for whatever budget; by the size of their
    micro-batches, the largest first."""
    budgeted = replace(target, options=replace(target.options, memory=1.0))
    evaluator, method = ScheduledPeaks(budgeted, known_of(step)), target.options.method
    for versions in groups_of(step, budgeted):
        yield Plans.of(versions, target.hardware, evaluator, method, _times(target))


def _times(target: Target) -> OperationTimes | None:
    """How long calls take, where that may decide: ranks that meet would measure different times."""
    return target.times if target.communication is None else None
