"""What ``treadle explain`` and ``treadle report`` do with a user's step."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.api import Step, compile
from treadle.options import from_environment
from treadle.report.progress import ProgressLine
from treadle.report.stages import Clock, Watcher
from treadle.tools.entry_point import EntryPoint, TrainingJob
from treadle.util.files import can_be_live, check_output

Budget = str | int | float | None
"""Bytes, ``"12GiB"``, a ratio, or ``None`` for the fastest plan."""
_STEPS = 2
"""Run before anything is timed: first touches of memory, and state that the optimizer makes."""


def compiled(target: EntryPoint, memory: Budget) -> tuple[TrainingJob, Step[..., Any]]:
    """A new job of the user's file, and its step; nothing is compiled before it is called."""
    job = target.make()
    return job, compile(
        job.step,
        model=job.model,
        optimizer=job.optimizer,
        memory=memory,
        options=from_environment(),
    )


@contextmanager
def progress() -> Generator[Clock]:
    """Stages of this clock are shown while they last; silent where the output is not a terminal."""
    wanted = from_environment().progress and can_be_live(sys.stderr)
    watcher = ProgressLine(sys.stderr) if wanted else Watcher()
    try:
        yield Clock(watcher)
    finally:
        watcher.closes()


def observed(target: EntryPoint, memory: Budget) -> Step[..., Any]:
    """The target's step after a few calls, with its kernels timed and its peak measured."""
    job, step = compiled(target, memory)
    step.prepare(*job.batch)  # shows its own stages
    with progress() as clock:
        with clock.stage(f"run {_STEPS} steps"):
            for _ in range(_STEPS):
                step(*job.batch)
        with clock.stage("time each kernel"):
            step.profile(*job.batch)
        with clock.stage("measure the peak"):
            step.measure(*job.batch)
    return step


def write_report(target: str, path: Path, memory: Budget) -> Path:
    """Run the target's step and write what became of it to ``path``."""
    entry_point = EntryPoint(target)
    check_output(path)
    step = observed(entry_point, memory)
    with progress() as clock, clock.stage("plan for other budgets"):
        return step.report(path)
