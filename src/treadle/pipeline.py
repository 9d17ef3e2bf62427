"""The order of everything, and nothing else.

capture -> clean -> plan memory -> lower -> simplify -> schedule -> generate code -> build
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from treadle.capture.step import Captured
from treadle.capture.torch_private import clear_workspaces
from treadle.capture.watching import watch_tensors
from treadle.codegen.host import artifact_of, call_step, spec_of
from treadle.compiler.request import CompileRequest, Target, key_of, request_of
from treadle.generality import require_general
from treadle.graph.dynamic import dims_of_graph
from treadle.graph.lookups import IndexCheck
from treadle.graph.operator_facts import CostClass, facts_of, follows_seed
from treadle.graph.operators import arguments_of
from treadle.graph.passes import GraphPass, run_passes
from treadle.graph.signature import Role, StepGraph
from treadle.loop.kernel import Kernel, Plan
from treadle.loop.program import Call, Program, TensorRef
from treadle.loop.simplify import simplify_program
from treadle.loop.verify import verify_kernel, verify_program
from treadle.lower.graph import lower
from treadle.lower.site import buffers_read
from treadle.options import Options
from treadle.passes.checkpoints import SettleCheckpoints, as_marked
from treadle.passes.counted import CountDraws
from treadle.passes.cse import RemoveCommonSubexpressions
from treadle.passes.dce import RemoveDeadCode
from treadle.passes.dropout import ExpandDropout
from treadle.passes.memory.choose import MemoryPlan, fastest_plan, plan_memory
from treadle.passes.memory.search import frontier
from treadle.passes.noops import RemoveNoOps
from treadle.passes.registered import registered
from treadle.runtime.artifact import Artifact, call_at, spec_at
from treadle.runtime.cache import Cache
from treadle.runtime.execute import Build, Executable, build, resolve
from treadle.runtime.replay import Terms
from treadle.runtime.workspace import Workspaces
from treadle.schedule.plan import schedule
from treadle.stages import Clock, Story, Watcher, Watchers, read_saved, saved_bytes, with_lines
from treadle.util.collector import without_collector
from treadle.util.errors import internal_errors
from treadle.util.extents import Domain, dims_in
from treadle.util.sizes import parse_bytes

CLEAN: tuple[GraphPass, ...] = (
    ExpandDropout(),
    RemoveNoOps(),  # first: it makes equal what only a no-op told apart
    RemoveCommonSubexpressions(),
    RemoveDeadCode(),  # last: the others leave nodes without users
)
COUNTED: tuple[GraphPass, ...] = (
    ExpandDropout(everywhere=True),  # first: it shows the draw inside a fused dropout
    CountDraws(),
    *CLEAN,
)


_ROOM = 1 << 20
"""Bytes that copies of the batch and of results may always take, where no budget is given."""


@dataclass(slots=True)
class Compiled:
    """One compiled variant of a step, and how it came about.

    ``key`` names the artifact in the cache; ``facts`` are what the key is made of, and ``entry`` is
    what the cache holds: the artifact and its story without this run's source lines. ``library``:
    no compiler was found or wanted, all is PyTorch's kernels. ``checks``: what a call's inputs must
    be before anything runs.
    """

    captured: Captured
    options: Options
    key: str
    facts: Mapping[str, str]
    entry: bytes
    artifact: Artifact
    executable: Executable
    story: Story
    seconds: Mapping[str, float]
    from_cache: bool
    library: bool
    checks: IndexCheck
    measured_peak: int | None = None
    has_run: bool = False
    draws: bool = True  # whether a call may take random numbers of the process'
    kernel_seconds: tuple[float, ...] = ()
    pattern: Artifact | None = None  # the artifact for many shapes that this one was made from


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step as loops, and as kernels in an order."""

    program: Program
    plan: Plan


def compile_graph(
    captured: Captured, options: Options, *, cache: Cache, clock: Clock | None = None
) -> Compiled:
    """A captured step to something that runs. Raises what the stages raise; changes nothing."""
    built = compile_step(
        captured.step,
        captured.device,
        options,
        cache=cache,
        clock=clock,
        domain=captured.domain,
        generators=captured.generators,
        kept=captured.kept_bytes,
    )
    draws = captured.draws or bool(registered())
    return Compiled(captured, options, draws=draws, **vars(built))


@dataclass(frozen=True)
class Built:
    """What the stages make of a step; the fields are those of ``Compiled``."""

    key: str
    facts: Mapping[str, str]
    entry: bytes
    artifact: Artifact
    executable: Executable
    story: Story
    seconds: Mapping[str, float]
    from_cache: bool
    library: bool
    checks: IndexCheck


def compile_step(
    step: StepGraph,
    device: str,
    options: Options,
    *,
    cache: Cache,
    clock: Clock | None = None,
    domain: Domain | None = None,
    generators: Sequence[torch.Generator] = (),
    kept: int = 0,
) -> Built:
    """A graph to something that runs on ``device``. ``domain``: what was asked of its sizes;
    ``generators``: the user's that it draws from; ``kept``: bytes beside its own."""
    clock = clock or Clock()
    step = extended(step, clock.watcher)
    dims = dims_of_graph(step.graph)
    checks = IndexCheck(step, {dim.name: dim.sample for dim in dims})
    if not dims:  # otherwise each call's sizes have a check of their own
        checks.require_fixed()
    with clock.stage("look up"):
        build_ = build(cache, device=device) if options.codegen else Build.without_compiler(device)
        asked = domain or Domain()
        request = request_of(
            step, device, options, build_, cache=cache, asked=tuple(asked.questions), kept=kept
        )
        facts = request.facts
        key = key_of(facts)
        entry = None if options.watched else cache.get(key)
        found = None if entry is None else read_saved(entry)
    lines = request.canonical.lines
    if entry is None or found is None:  # what another version wrote is written again
        internal = internal_errors("compiling the step")
        with lines.in_errors(), internal, without_collector(), asked.noting():
            made = _generate(request, clock)
        found = replace(made[0], questions=tuple(asked.questions)), made[1]
        entry = saved_bytes(*found)
        from_cache = False
    else:
        from_cache = True
    artifact, story = with_lines(*found, lines)
    with clock.stage("build"):
        terms = _terms(step, artifact, options)
        executable = Executable(artifact, build_, generators=generators, terms=terms)
    if not from_cache:
        cache.put(key, entry)
    return Built(
        key,
        facts,
        entry,
        artifact,
        executable,
        story,
        clock.seconds,
        from_cache=from_cache,
        library=request.target.library,
        checks=checks,
    )


def _terms(step: StepGraph, artifact: Artifact, options: Options) -> Terms | None:
    """What recording the launches of a step has to know; ``None`` where it is not wanted."""
    if not options.replay:
        return None
    signature = step.signature
    batch = {at for at, each in enumerate(signature.inputs) if each.role is Role.BATCH}
    written = {each.writes for each in signature.outputs if each.writes is not None}
    match options.memory:
        case None:
            room = _ROOM + artifact.peak_bytes // 16
        case float():
            room = 0  # a ratio leaves none by its meaning
        case budget:
            room = parse_bytes(budget) - artifact.peak_bytes
    return Terms(frozenset(batch), frozenset(written), room, clear_workspaces, watch_tensors)


def _generate(request: CompileRequest, clock: Clock) -> tuple[Artifact, Story]:
    """Every stage between the captured graph and the artifact. They see the request alone."""
    target = request.target
    story = Story()
    watcher = Watchers([story, clock.watcher])
    watcher.locates(request.canonical.lines)
    watcher.made("captured", request.step)
    with clock.stage("clean"):
        step = settled(request.step, target.options, watcher)
    watcher.made("clean", step)
    with clock.stage("plan memory"):
        memory, judged = plan_within(step, target)
    watcher.made("planned", memory.step)
    watcher.made("decisions", memory.table)
    with clock.stage("lower and schedule"):
        scheduled = judged or planned(memory.step, target)
        _verify(scheduled)
        require_general(memory.step, scheduled.program, partial(lowered, target=target))
    watcher.made("loops", scheduled.program)
    watcher.made("kernels", scheduled.plan)
    with clock.stage("generate code"):
        artifact = artifact_of(scheduled.plan, device=target.device, contract=target.rounds_once)
    watcher.made("sources", artifact)
    return artifact, story


def extended(step: StepGraph, watcher: Watcher | None = None) -> StepGraph:
    """The step after what users registered. Before the cache is asked: their code may change."""
    passes = registered()
    if not passes:
        return step
    result = clean(step)
    run_passes(result, passes, watcher or Watcher())
    return result


def settled(step: StepGraph, options: Options, watcher: Watcher | None = None) -> StepGraph:
    """A cleaned copy, ready to be planned, in which what checkpointing asks for is decided: its
    wishes give way to a budget."""
    budgeted = options.memory is not None
    result = step.copy()
    run_passes(result, (SettleCheckpoints(budgeted),))
    result = clean(result, watcher, counted=options.rng == "counter")
    return as_marked(result, budgeted=budgeted)


def clean(step: StepGraph, watcher: Watcher | None = None, *, counted: bool = False) -> StepGraph:
    """A cleaned copy of the captured graph. ``counted``: without draws that have an order."""
    result = step.copy()
    run_passes(result, COUNTED if counted else CLEAN, watcher or Watcher())
    return result


def plan_within(step: StepGraph, target: Target) -> tuple[MemoryPlan, Scheduled | None]:
    """The fastest plan; with a budget, of those whose exact peak, after fusion and packing, is
    within it: then it has been scheduled already."""
    budget = target.options.memory
    if budget is None:
        return fastest_plan(step, target.hardware), None
    size = budget if isinstance(budget, float) else parse_bytes(budget)
    judge = Judge(target)
    memory = plan_memory(step, size, target.hardware, judge)
    return memory, judge.seen[id(memory.step)][1]


def frontier_points(
    step: StepGraph, device: str, options: Options, cache: Cache
) -> tuple[tuple[int, float], ...]:
    """Predicted peak and estimated seconds of plans from the fastest to the smallest. Peaks are
    exact at both ends; between them those of the simulator are moved onto the line of the two."""
    budgeted = replace(options, memory=1.0)
    build_ = build(cache, device=device) if options.codegen else Build.without_compiler(device)
    target = request_of(extended(step), device, budgeted, build_, cache=cache).target
    found = frontier(settled(extended(step), budgeted), target.hardware)
    first, last = (planned(each.step, target).plan.peak_bytes for each in (found[0], found[-1]))
    high, low = found[0].predicted_peak, found[-1].predicted_peak
    slope = (first - last) / max(high - low, 1)
    points = [(round(last + (each.predicted_peak - low) * slope), each.seconds) for each in found]
    return tuple(dict.fromkeys([(max(first, last), found[0].seconds), *points[1:]]))


@dataclass
class Judge:
    """The exact peak of a candidate, and what was made to learn it."""

    target: Target
    seen: dict[int, tuple[StepGraph, Scheduled]] = field(
        default_factory=dict[int, tuple[StepGraph, Scheduled]]
    )  # by the identity of the step, which is held as well

    def __call__(self, step: StepGraph) -> int:
        scheduled = planned(step, self.target)
        self.seen[id(step)] = step, scheduled
        return scheduled.plan.peak_bytes


def planned(step: StepGraph, target: Target) -> Scheduled:
    """The step lowered and scheduled: its kernels, their order, and its exact peak."""
    program = lowered(step, target)
    if target.workspaces is not None:
        program = with_workspaces(program, target.workspaces)
    allocator = target.hardware.allocator
    return Scheduled(program, schedule(program, fuse=target.options.fuse, allocator=allocator))


def lowered(step: StepGraph, target: Target) -> Program:
    """The step as formulas and library calls."""
    program = lower(step, device=target.device, library=target.library, pad=target.rounds_once)
    return simplify_program(program)


def _verify(scheduled: Scheduled) -> None:
    verify_program(scheduled.program)
    for step in scheduled.plan.steps:
        if isinstance(step, Kernel):
            verify_kernel(step, scheduled.plan.buffers)


def with_workspaces(program: Program, workspaces: Workspaces) -> Program:
    """The program with the measured workspace on every call that allocates its own results;
    of dynamic shapes the largest."""
    every = [size for each in program.buffers.values() for size in each.shape]
    largest = {dim.name: dim.high for each in dims_in(every) for dim in each.formula.dims}
    specs = {name: spec_at(spec_of(b, {}), largest) for name, b in program.buffers.items()}
    calls = {
        at: step
        for at, step in enumerate(program.steps)
        if isinstance(step, Call)
        and not step.out
        and not _is_unsized(step, program)
        and _may_measure(step)
    }
    sizes = workspaces.of([call_at(call_step(each), largest) for each in calls.values()], specs)
    steps = list(program.steps)
    for (at, step), size in zip(calls.items(), sizes, strict=True):
        steps[at] = replace(step, workspace=size)
    return replace(program, steps=tuple(steps))


def _is_unsized(call: Call, program: Program) -> bool:
    """Whether only a run of the step can tell the sizes of a call."""
    named = [*buffers_read(call.args), *buffers_read(call.kwargs), *filter(None, call.outputs)]
    return any(program.buffers[name].unsized for name in named)


def _may_measure(call: Call) -> bool:
    """Whether the call may run on invented numbers. Whole numbers cannot be divided by zero."""
    op = resolve(call.op)
    facts = facts_of(op)
    given = arguments_of(op, call.args, call.kwargs)
    whole = any(isinstance(x, TensorRef) and _is_whole(x.dtype) for x in given.values())
    if facts.cost is CostClass.POINTWISE and whole:
        return False
    return facts.measurable and not follows_seed(op, given)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
