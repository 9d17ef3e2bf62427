"""The stages in the order of ``report/stages.py``, which says why; nothing else decides an order.

::

    stage                what is done                        its passes
    capture              before this, by ``capture``
    extend               graph -> graph                      ``cleaning.extending``
    look up              graph -> key; if found, on to build
    clean                graph -> graph                      ``cleaning.cleaning_of``
    plan memory          graph -> plan -> graph              those of the plan: ``memory/apply.py``
    lower and schedule   graph -> loops -> kernels
    tune                 kernels -> kernels
    generate code        kernels -> sources
    build                sources -> what runs
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import torch

from treadle.algebra.guards import GuardSet
from treadle.capture.captured import Captured
from treadle.codegen.host import artifact_of
from treadle.compiler.carrying import carried_steps
from treadle.compiler.chunks import without_chunks
from treadle.compiler.cleaning import extending
from treadle.compiler.compiled import Built, Carrying, Compiled, KeptResults
from treadle.compiler.loops import name_of, with_bodies
from treadle.compiler.memory import (
    Scheduled,
    applied,
    lowered,
    plan_within,
    planned,
    prepared,
)
from treadle.compiler.regions import with_regions
from treadle.compiler.request import CompileRequest, request_of
from treadle.compiler.saved_log import saved_bytes
from treadle.compiler.specialization import require_unspecialized
from treadle.compiler.stored_build import (
    executable_of,
    may_run,
    read_artifact,
    replay_policy,
    told_later,
    with_lines,
)
from treadle.compiler.target import Target, build_for, key_of
from treadle.compiler.tune import tuned
from treadle.graph.analysis.dynamic import dims_of_graph, guards_of, symbols_of_graph
from treadle.graph.analysis.index_check import IndexCheck
from treadle.graph.core.operators import may_draw
from treadle.graph.core.signature import StepGraph
from treadle.graph.regions.loop_bodies import LoopBody
from treadle.loop.kernel import Kernel
from treadle.loop.verify import verify_kernel, verify_program
from treadle.options import Options
from treadle.passes.comm.simulate import simulate_communication
from treadle.passes.registered import registered_late
from treadle.report.log import CompileLog
from treadle.report.stages import Clock
from treadle.runtime.execute.arena import Arena
from treadle.runtime.store.artifact import Artifact
from treadle.runtime.store.cache import Cache
from treadle.schedule.launches import launches_of
from treadle.util.collector import without_collector
from treadle.util.errors import internal_errors
from treadle.util.frames.data_stack import with_room


def compile_graph(
    captured: Captured,
    options: Options,
    *,
    cache: Cache,
    clock: Clock | None = None,
    known: Iterable[Compiled] = (),
    arena: Arena | None = None,
) -> Compiled:
    """A captured step to something that runs: of the same graph as one of ``known``, the very same
    that runs for it. ``arena``: what the variants of a step take turns in. Raises what the
    stages raise; changes nothing."""
    steps = carried_steps(captured, options) if options.carries else None
    if steps is None:
        alike = {compiled.key: compiled for compiled in known if may_run(compiled, captured)}
        return _compiled(captured, options, cache, clock, arena, alike)
    first = _compiled(replace(captured, step=steps.first), options, cache, clock, arena)
    steady = _compiled(replace(captured, step=steps.steady), options, cache, clock, arena)
    flush = _compiled(captured.between_calls(steps.flush), options, cache, clock, arena)
    first.kept = KeptResults(steps.results, len(steps.carried))
    carrying = Carrying(first, steady, flush, steps.flushed)
    return replace(steady, captured=captured, carrying=carrying)


@final
@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a graph does not know of the step that it is the graph of. ``generators``: the user's
    that it draws from; ``kept``: bytes beside its own; ``guards``: of the sizes of its trace, which
    the graph may not know where no value of it has them. ``known``: by their keys, what may be
    returned as it is. ``arena``: what it takes turns in with others."""

    generators: Sequence[torch.Generator] = ()
    kept: int = 0
    guards: GuardSet | None = None
    known: Mapping[str, Built] = field(default_factory=dict[str, Built])
    arena: Arena | None = None


_ALONE = BuildContext()


def _compiled(
    captured: Captured,
    options: Options,
    cache: Cache,
    clock: Clock | None,
    arena: Arena | None,
    known: Mapping[str, Built] | None = None,
) -> Compiled:
    context = BuildContext(
        captured.generators, captured.kept_bytes, captured.guards, known or {}, arena
    )
    built = compile_step(
        captured.step, captured.device, options, cache=cache, clock=clock, context=context
    )
    if isinstance(built, Compiled):  # one of those known
        return replace(built, captured=captured)
    if captured.optimizers.eager:  # their code runs in each call, and may draw
        built = replace(built, draws=True)
    return Compiled(**vars(built), captured=captured, options=options)


@with_room
@without_collector()
def compile_step(
    step: StepGraph,
    device: str,
    options: Options,
    *,
    cache: Cache,
    clock: Clock | None = None,
    context: BuildContext = _ALONE,
) -> Built:
    """A graph to something that runs on ``device``."""
    guards = guards_of(step.graph) if context.guards is None else context.guards
    clock = clock or Clock()
    step, extension = _extended(step, device, options, clock)
    checks = _checks_of(step)
    with clock.stage("look up"):
        build_ = build_for(device, options, cache)
        request = request_of(
            step, device, options, build_, cache=cache, kept=context.kept, guards=guards
        )
        facts = request.facts
        key = key_of(facts)
        looks = not (registered_late() or options.watched)  # who watches wants to see it done
        if looks and key in context.known:
            return context.known[key]
        entry = cache.get(key) if looks else None
        artifact = None if entry is None else read_artifact(entry)
    from_cache, log, draws = artifact is not None, None, may_draw(step.graph)
    with nullcontext() if from_cache else build_.ahead(len(step.graph.nodes)):
        if entry is None or artifact is None:  # what another version wrote is written again
            artifact, log, drawn = _generate(request, guards, clock)
            draws = draws or drawn
            with clock.stage("keep"):
                entry = saved_bytes(artifact, log)
        lines = request.canonical.lines
        artifact = with_lines(artifact, lines)
        policy = replay_policy(step.signature, artifact, options)
        with clock.stage("build"):
            executable = executable_of(
                artifact, build_, checks, policy, context.generators, context.arena
            )
    if not from_cache and not registered_late() and options.method.is_named:
        with clock.stage("keep"):
            cache.put(key, entry)
    target, told = request.target, told_later(entry, lines, log, extension)
    return Built(
        *(key, facts, entry, lines, artifact, executable, told, clock.seconds),
        *(from_cache, target.library, checks, target.hardware, target.communication, draws),
    )


def plan_graph(step: StepGraph, device: str, options: Options, clock: Clock) -> StepGraph:
    """The stages up to the memory plan alone, for a joint graph that is cut in two before the rest;
    the halves go through all stages. Changes nothing."""
    cache = Cache(options.cache_dir)
    step, _ = _extended(step, device, options, clock)
    library = not build_for(device, options, cache).generates
    target = Target(device, without_chunks(options), library=library)
    planned_step, _ = _graph_to_graph(step.copy(), target, clock)
    return planned_step


def _extended(
    step: StepGraph, device: str, options: Options, clock: Clock
) -> tuple[StepGraph, CompileLog]:
    """The step after what users registered and asked of its regions, and what was heard of that."""
    heard = CompileLog()
    if not extending(options) and not options.regions.chooses:
        return step, heard
    clock = clock.heard_by(heard)
    heard.note_size("captured", step)
    with clock.stage("extend"):
        step = with_regions(step, device, options, clock.watcher)
    heard.note_size("extend", step)
    return step, heard


def _checks_of(step: StepGraph) -> IndexCheck:
    """What a call's inputs must be; a fixed size for which that is never so is refused."""
    checks = IndexCheck.of(step)
    if symbols_of_graph(step.graph) is None:  # otherwise each call's sizes have checks of their own
        checks.require_fixed()
    return checks


def _generate(
    request: CompileRequest, guards: GuardSet, clock: Clock
) -> tuple[Artifact, CompileLog, bool]:
    """The artifact, with the guards on sizes that the stages have asked for, its log, and whether
    registered passes may have added operations that draw random numbers."""
    internal = internal_errors("compiling the step")
    with request.canonical.lines.in_errors(), internal:
        artifact, log, draws = _through_stages(request, clock)
    return replace(artifact, guards=tuple(guards.guards)), log, draws


def _through_stages(request: CompileRequest, clock: Clock) -> tuple[Artifact, CompileLog, bool]:
    """Every stage between the captured graph and the artifact; the result is that of
    ``_generate``. They see the request alone, whose step becomes the planned one: a copy of a graph
    takes as long as ten passes over it."""
    target = request.target
    log = CompileLog()
    clock = clock.heard_by(log)
    watcher = clock.watcher
    watcher.locates(request.canonical.lines)
    step, evaluated = _graph_to_graph(request.step, target, clock)
    with clock.stage("lower and schedule"):
        scheduled = evaluated or planned(step, target)
        _verify(scheduled, guards_of(step.graph))
        require_unspecialized(step, scheduled.program, partial(lowered, target=target))
    if target.trials is not None:
        with clock.stage("tune"):
            scheduled = tuned(scheduled, target, target.trials)
            _verify(scheduled, guards_of(step.graph))
    with clock.stage("generate code"):
        watcher.produced("loops", scheduled.program)
        watcher.produced("kernels", scheduled.plan)
        artifact = _generated(scheduled, target, log)
        watcher.produced("sources", artifact)
    return artifact, log, bool(registered_late()) and may_draw(step.graph)


def _graph_to_graph(
    step: StepGraph, target: Target, clock: Clock
) -> tuple[StepGraph, Scheduled | None]:
    """The planned graph, and what was made of it if its plan was evaluated. Changes ``step``."""
    watcher = clock.watcher
    with clock.stage("clean"):
        watcher.produced("captured", step)
        step = prepared(step, target, watcher)
        watcher.produced("clean", step)
    with clock.stage("plan memory"):
        memory, evaluated = plan_within(step, target)
        step = applied(step, memory, watcher)
        watcher.produced("planned", step)
        watcher.produced("decisions", memory.table)
        if memory.bound is not None and not dims_of_graph(step.graph):  # else for the largest sizes
            watcher.bounded(memory.bound.within(memory.seconds))
        if memory.why:
            watcher.split(memory.why)
        if target.communication is not None:
            line = simulate_communication(step, target.communication, target.hardware)
            watcher.simulated(line)
    return step, evaluated


def _generated(scheduled: Scheduled, target: Target, log: CompileLog) -> Artifact:
    """What runs, and what its loops run; ``log``: hears what that is made of."""
    artifact = artifact_of(
        scheduled.plan,
        launches_of(scheduled.plan),
        device=target.device,
        language=target.record.language,
        contract=target.rounds_once,
    )
    bodies: dict[LoopBody, Artifact] = {}
    for body, body_program in scheduled.bodies.items():
        round_of_it = _generated(body_program.scheduled, target, log)
        bodies[body] = replace(round_of_it, untouched=0)  # by then a step has begun
        log.made_inside(name_of(bodies[body]), body_program.step, body_program.scheduled.plan)
    return with_bodies(artifact, bodies)


def _verify(scheduled: Scheduled, guards: GuardSet) -> None:
    verify_program(scheduled.program, guards)
    for step in scheduled.plan.steps:
        if isinstance(step, Kernel):
            verify_kernel(step, scheduled.plan.buffers, guards)
    for body in scheduled.bodies.values():
        _verify(body.scheduled, guards_of(body.step.graph))
