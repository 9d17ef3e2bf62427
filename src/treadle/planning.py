"""``treadle.plan``: does a step fit, and in how much, before anything runs."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.options import Options
from treadle.passes.memory.cost import device_for
from treadle.passes.memory.search import frontier
from treadle.pipeline import Target, clean, planned
from treadle.util.errors import PlanError
from treadle.util.sizes import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Point:
    """One plan on the frontier: predicted peak in bytes, estimated time in seconds."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Whether a step fits a budget; ``points`` from fastest to smallest."""

    fits: bool
    peak_bytes: int
    step_ms: float
    points: tuple[Point, ...]

    def table(self) -> str:
        """The frontier as text, one line per plan."""
        rows = [
            f"{format_bytes(p.peak_bytes):>12}  {1e3 * p.seconds:10.2f} ms" for p in self.points
        ]
        verdict = "fits" if self.fits else "does not fit"
        head = f"{verdict}: predicted peak {format_bytes(self.peak_bytes)}"
        return "\n".join([head, f"{'peak':>12}  {'estimate':>13}", *rows])


def plan(
    function: Callable[..., Any],
    *batch: Any,
    model: Any,
    optimizer: Any,
    memory: str | int | None = None,
    device: str | None = None,
) -> StepPlan:
    """Predict the peak and the memory/time frontier of a step; run and change nothing.

    ``device`` names the hardware that times are estimated for; default: where the model is.
    """
    budget = math.inf if memory is None else parse_bytes(memory)
    captured = capture(
        function,
        models=named_models(model),
        optimizers=named_optimizers(optimizer),
        args=batch,
        kwargs={},
    )
    target = Target(captured.device, Options())
    points = tuple(
        Point(planned(each.step, target).plan.peak_bytes, each.seconds)
        for each in frontier(clean(captured.step), device_for(device or target.device))
    )
    fitting = [point for point in points if point.peak_bytes <= budget]
    chosen = (
        min(fitting, key=lambda p: p.seconds)
        if fitting
        else min(points, key=lambda p: p.peak_bytes)
    )
    return StepPlan(bool(fitting), chosen.peak_bytes, 1e3 * chosen.seconds, points)


def plan_command(target: str, memory: str | None) -> str:
    """``FILE:FUNCTION``, whose result is ``(step, model, optimizer, batch)``, as a table."""
    path, _, name = target.rpartition(":")
    if not path or not Path(path).is_file():
        raise PlanError(
            f"{target!r} does not name a function in a file",
            code="TR-203",
            remedy="write FILE:FUNCTION; the function returns (step, model, optimizer, batch)",
        )
    spec = importlib.util.spec_from_file_location("treadle_plan_target", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name not in vars(module):
        raise PlanError(f"{path} has no function {name!r}", code="TR-203")
    step, model, optimizer, batch = vars(module)[name]()
    with torch.random.fork_rng():
        result = plan(step, *batch, model=model, optimizer=optimizer, memory=memory)
    return result.table()


__all__ = ["Point", "StepPlan", "plan", "plan_command"]
