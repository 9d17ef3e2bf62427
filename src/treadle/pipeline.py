"""The order of everything, and nothing else.

capture -> clean -> plan memory -> lower -> schedule -> generate code -> build
"""

import hashlib
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from treadle.capture.step import Captured
from treadle.codegen.host import artifact_of
from treadle.graph.passes import GraphPass, Observer, run_passes
from treadle.graph.printing import show
from treadle.graph.signature import StepGraph
from treadle.loop.kernel import Plan
from treadle.lower.graph import lower
from treadle.options import Options
from treadle.passes.cse import RemoveCommonSubexpressions
from treadle.passes.dce import RemoveDeadCode
from treadle.passes.memory.cost import Device, device_for
from treadle.passes.memory.search import MemoryPlan, fastest_plan, plan_memory
from treadle.passes.noops import RemoveNoOps
from treadle.runtime.artifact import Artifact
from treadle.runtime.cache import Cache
from treadle.runtime.execute import Build, Executable, build
from treadle.runtime.serialize import artifact_from_bytes, artifact_to_bytes
from treadle.schedule.plan import schedule
from treadle.util.sizes import parse_bytes

FORMAT = 3
"""Raised whenever the same graph and options may give another artifact."""

CLEAN: tuple[GraphPass, ...] = (
    RemoveNoOps(),  # first: it makes equal what only a no-op told apart
    RemoveCommonSubexpressions(),
    RemoveDeadCode(),  # last: the others leave nodes without users
)


@dataclass(slots=True)
class Compiled:
    """One compiled variant of a step, and how it came about.

    ``plan``, ``memory`` and ``stages`` are empty when the artifact came from the cache.
    """

    captured: Captured
    artifact: Artifact
    executable: Executable
    from_cache: bool
    seconds: Mapping[str, float]
    stages: Mapping[str, StepGraph]
    plan: Plan | None = None
    memory: MemoryPlan | None = None
    measured_peak: int | None = None


@dataclass
class Clock:
    """Seconds per stage, in the order the stages ran."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


def compile_graph(
    captured: Captured, options: Options, *, device: str, observer: Observer | None = None
) -> Compiled:
    """A captured step to something that runs. Raises what the stages raise; changes nothing."""
    clock, cache = Clock(), Cache(options.cache_dir)
    stages = {"captured": captured.step}
    build_ = build(cache, device=device) if options.codegen else Build.without_compiler(device)
    key = artifact_key(captured.step, options, device, build_)
    blob = cache.get(key)
    artifact = artifact_from_bytes(blob) if blob else None
    clock.lap("look up")
    plan = memory = None
    if artifact is None:
        step = clean(captured.step, observer)
        stages["clean"] = step
        clock.lap("clean")
        memory = plan_within(step, options, device)
        stages["planned"] = memory.step
        clock.lap("plan memory")
        plan = planned(stages["planned"], options, device)
        clock.lap("lower and schedule")
        artifact = artifact_of(plan, device=device)
        clock.lap("generate code")
    executable = Executable(artifact, build_)
    clock.lap("build")
    if blob is None:
        cache.put(key, artifact_to_bytes(artifact))
    return Compiled(
        captured, artifact, executable, blob is not None, clock.seconds, stages, plan, memory
    )


def clean(step: StepGraph, observer: Observer | None = None) -> StepGraph:
    """A cleaned copy of the captured graph."""
    result = step.copy()
    if observer is None:
        run_passes(result, CLEAN)
    else:
        run_passes(result, CLEAN, observer)
    return result


def plan_within(step: StepGraph, options: Options, device: str) -> MemoryPlan:
    """The fastest plan; with a budget, of those whose exact peak, after fusion and packing, is
    within it."""
    if options.memory is None:
        return fastest_plan(step, hardware(device))
    budget = options.memory
    size = budget if isinstance(budget, float) else parse_bytes(budget)

    def judge(candidate: StepGraph) -> int:
        return planned(candidate, options, device).peak_bytes

    return plan_memory(step, size, hardware(device), judge)


def planned(step: StepGraph, options: Options, device: str) -> Plan:
    """The step lowered and scheduled: its kernels, their order, and its exact peak."""
    program = lower(step, device=device)
    return schedule(program, fuse=options.fuse, reserve=hardware(device).reserve)


def hardware(device: str) -> Device:
    """The description that costs are estimated with."""
    return device_for(device)


def artifact_key(step: StepGraph, options: Options, device: str, build_: Build) -> str:
    """Same graph, same options, same software: same artifact, in every process."""
    facts = {
        "format": FORMAT,
        "graph": show(step),
        "memory": repr(options.memory),
        "codegen": options.codegen,
        "fuse": options.fuse,
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "build": build_.identity,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
