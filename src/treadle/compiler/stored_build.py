"""The executable of an artifact; and one that another process built, found without its graph."""

import functools
import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from treadle.capture.captured import Captured
from treadle.compat.switches import clear_workspaces
from treadle.compiler.compiled import Compiled, StartRecord, StoredBuild
from treadle.compiler.target import build_for, facts_beside, key_of, target_of
from treadle.graph.analysis.index_check import IndexCheck
from treadle.graph.core.signature import Role, Signature
from treadle.graph.text.canonical import SourceLines
from treadle.guards.watching import watch_inputs
from treadle.options import Options
from treadle.report.stages import Clock
from treadle.runtime.execute.arena import Arena
from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build
from treadle.runtime.replay.replay_policy import ReplayPolicy
from treadle.runtime.store.artifact import Artifact, CallStep
from treadle.runtime.store.cache import Cache
from treadle.runtime.store.serialize import artifact_from_dict
from treadle.util.errors import RuntimeFailure

if TYPE_CHECKING:  # read when somebody asks
    from treadle.report.log import CompileLog

_ROOM = 1 << 20
"""Bytes that copies of the batch and of results may always take, where no budget is given."""


def built_again(
    captured: Captured,
    stored: StoredBuild,
    start_key: str,
    options: Options,
    *,
    cache: Cache,
    clock: Clock,
    known: Iterable[Compiled] = (),
    arena: Arena | None = None,
) -> Compiled | None:
    """What another process compiled of the same step, found in the cache without its graph;
    ``None`` if it is not there, or if anything that it depends on is another here. ``start_key``:
    where the cache has what was captured. ``known``: what may run for it as well."""
    device = captured.device
    with clock.stage("look up"):
        build_ = build_for(device, options, cache)
        target, here = target_of(device, options, build_, cache=cache, kept=captured.kept_bytes)
        if any(stored.facts.get(name) != fact for name, fact in facts_beside(target, here).items()):
            return None
        key = key_of(stored.facts)
        alike = next((each for each in known if each.key == key and may_run(each, captured)), None)
        start = StartRecord((start_key,), is_found=True)
        if alike is not None:
            return replace(alike, captured=captured, start=start)
        entry = cache.get(key)
        artifact = None if entry is None else read_artifact(entry)
        if entry is None or artifact is None:
            return None
    lines = SourceLines(stored.lines)
    artifact = with_lines(artifact, lines)
    policy = replay_policy(captured.step.signature, artifact, options)
    with clock.stage("build"):
        executable = executable_of(artifact, build_, stored.checks, policy, arena=arena)
    told = told_later(entry, lines)
    return Compiled(
        *(key, stored.facts, entry, lines, artifact, executable, told, clock.seconds),
        *(True, target.library, stored.checks, target.hardware, None, stored.draws),
        captured=captured,
        options=options,
        start=start,
    )


def read_artifact(blob: bytes) -> Artifact | None:
    """``None`` for what another version wrote, or anything else."""
    try:
        return artifact_from_dict(json.loads(blob)["artifact"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeFailure):
        return None


def with_lines(artifact: Artifact, lines: SourceLines) -> Artifact:
    """With the source lines of this run in place of their numbers."""
    steps = tuple(replace(step, origin=lines.fill(step.origin)) for step in artifact.steps)
    return replace(artifact, steps=steps)


def told_later(
    entry: bytes,
    lines: SourceLines,
    log: "CompileLog | None" = None,
    earlier: "CompileLog | None" = None,
) -> Callable[[], "CompileLog"]:
    """The log of a compile when somebody asks: ``log``, or what the cache's ``entry`` has, with the
    source lines of this run; after what was heard ``earlier`` of it."""

    def told() -> "CompileLog":
        from treadle.compiler.saved_log import log_with_lines, read_log  # late: few ask

        filled = log_with_lines(read_log(entry) if log is None else log, lines)
        return filled if earlier is None else filled.after(earlier)

    return functools.cache(told)


def may_run(known: Compiled, captured: Captured) -> bool:
    """Whether what runs for one may run for another of the same key."""
    whole = known.pattern is None and known.carrying is None
    return whole and known.captured.generators == captured.generators


def executable_of(
    artifact: Artifact,
    build_: Build,
    checks: IndexCheck,
    policy: ReplayPolicy,
    generators: Sequence[torch.Generator] = (),
    arena: Arena | None = None,
) -> Executable:
    """``generators``: the user's that it draws from; ``arena``: what it takes turns in."""
    _register_operators(artifact)
    return Executable(
        artifact,
        build_,
        generators=generators,
        first=checks.launch,
        policy=policy,
        arena=arena,
    )


def _register_operators(artifact: Artifact) -> None:
    """Make PyTorch know operators of ours that the artifact calls: where nothing was traced, nobody
    has imported them."""
    calls = [step for step in artifact.steps if isinstance(step, CallStep)]
    if any(step.op.startswith("treadle.") for step in calls):
        importlib.import_module("treadle.graph.custom_ops.table")
    for body in artifact.bodies.values():
        _register_operators(body)


def replay_policy(signature: Signature, artifact: Artifact, options: Options) -> ReplayPolicy:
    """What recording the launches of a step has to know."""
    batch = {at for at, input_ in enumerate(signature.inputs) if input_.role is Role.BATCH}
    written = {output.writes for output in signature.outputs if output.writes is not None}
    peak, budget = artifact.peak_bytes, options.budget
    if budget is None:
        room = _ROOM + peak // 16
    else:  # a ratio leaves none by its meaning
        room = 0 if budget.nbytes is None else budget.nbytes - peak
    return ReplayPolicy(
        frozenset(batch),
        frozenset(written),
        room,
        clear_workspaces,
        watch_inputs,
        records=options.replay,
    )
