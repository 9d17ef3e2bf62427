"""The order of everything, and nothing else.

capture -> clean -> plan memory -> lower -> schedule -> generate code -> build
"""

import hashlib
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from treadle.capture.step import Captured
from treadle.codegen.host import artifact_of, call_step, spec_of
from treadle.graph.passes import GraphPass, Observer, run_passes
from treadle.graph.printing import show
from treadle.graph.signature import StepGraph
from treadle.loop.kernel import Plan
from treadle.loop.program import Call, Program
from treadle.lower.graph import lower
from treadle.lower.library import RANDOM_NAMES
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
from treadle.runtime.workspace import Workspaces
from treadle.schedule.plan import schedule
from treadle.util.errors import RuntimeFailure
from treadle.util.sizes import parse_bytes

FORMAT = 5
"""Raised whenever the same graph and options may give another artifact."""

CLEAN: tuple[GraphPass, ...] = (
    RemoveNoOps(),  # first: it makes equal what only a no-op told apart
    RemoveCommonSubexpressions(),
    RemoveDeadCode(),  # last: the others leave nodes without users
)


@dataclass(slots=True)
class Compiled:
    """One compiled variant of a step, and how it came about.

    ``plan`` and ``memory`` are empty, and ``stages`` has only the first, when the artifact came
    from the cache. ``library``: no compiler was found or wanted, all is PyTorch's kernels.
    """

    captured: Captured
    options: Options
    artifact: Artifact
    executable: Executable
    from_cache: bool
    seconds: Mapping[str, float]
    stages: Mapping[str, StepGraph]
    plan: Plan | None = None
    memory: MemoryPlan | None = None
    measured_peak: int | None = None
    library: bool = False
    has_run: bool = False


@dataclass(frozen=True)
class Target:
    """Where a step is to run: the device, the options, whether PyTorch's kernels must do
    (``library``), and how to learn what library calls allocate inside (``None``: formulas)."""

    device: str
    options: Options
    library: bool = False
    workspaces: Workspaces | None = None

    @property
    def hardware(self) -> Device:
        """The description that costs are estimated with."""
        return device_for(self.device)


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
    workspaces = Workspaces(cache, device)
    target = Target(device, options, library=not build_.generates, workspaces=workspaces)
    key = artifact_key(captured.step, target, build_)
    blob = cache.get(key)
    artifact = _read(blob)
    clock.lap("look up")
    plan = memory = None
    if artifact is None:
        step = clean(captured.step, observer)
        stages["clean"] = step
        clock.lap("clean")
        memory = plan_within(step, target)
        stages["planned"] = memory.step
        clock.lap("plan memory")
        plan = planned(stages["planned"], target)
        clock.lap("lower and schedule")
        artifact = artifact_of(plan, device=device)
        clock.lap("generate code")
    executable = Executable(artifact, build_)
    clock.lap("build")
    if memory is not None:
        cache.put(key, artifact_to_bytes(artifact))
    return Compiled(
        captured,
        options,
        artifact,
        executable,
        memory is None,
        clock.seconds,
        stages,
        plan,
        memory,
        library=target.library,
    )


def _read(blob: bytes | None) -> Artifact | None:
    """A saved artifact; what another version wrote is a miss, and is written again."""
    try:
        return None if blob is None else artifact_from_bytes(blob)
    except RuntimeFailure:
        return None


def clean(step: StepGraph, observer: Observer | None = None) -> StepGraph:
    """A cleaned copy of the captured graph."""
    result = step.copy()
    if observer is None:
        run_passes(result, CLEAN)
    else:
        run_passes(result, CLEAN, observer)
    return result


def plan_within(step: StepGraph, target: Target) -> MemoryPlan:
    """The fastest plan; with a budget, of those whose exact peak, after fusion and packing, is
    within it."""
    budget = target.options.memory
    if budget is None:
        return fastest_plan(step, target.hardware)
    size = budget if isinstance(budget, float) else parse_bytes(budget)

    def judge(candidate: StepGraph) -> int:
        return planned(candidate, target).peak_bytes

    return plan_memory(step, size, target.hardware, judge)


def planned(step: StepGraph, target: Target) -> Plan:
    """The step lowered and scheduled: its kernels, their order, and its exact peak."""
    program = lower(step, device=target.device, library=target.library)
    if target.workspaces is not None:
        program = with_workspaces(program, target.workspaces)
    return schedule(program, fuse=target.options.fuse, reserve=target.hardware.reserve)


def with_workspaces(program: Program, workspaces: Workspaces) -> Program:
    """The program with the measured workspace on every call that allocates its own results."""
    specs = {name: spec_of(each, {}) for name, each in program.buffers.items()}
    calls = {
        at: step
        for at, step in enumerate(program.steps)
        if isinstance(step, Call) and not step.out and step.op not in RANDOM_NAMES
    }
    sizes = workspaces.of([call_step(each) for each in calls.values()], specs)
    steps = list(program.steps)
    for (at, step), size in zip(calls.items(), sizes, strict=True):
        steps[at] = replace(step, workspace=size)
    return replace(program, steps=tuple(steps))


def artifact_key(step: StepGraph, target: Target, build_: Build) -> str:
    """Same graph, same options, same software: same artifact, in every process."""
    facts = {
        "format": FORMAT,
        "graph": show(step),
        "memory": repr(target.options.memory),
        "library": target.library,
        "fuse": target.options.fuse,
        "device": target.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "build": build_.identity,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
