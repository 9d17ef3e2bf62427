"""``treadle.plan``: whether a step fits, and its frontier, before anything runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from treadle.capture.refuse import device_of, named_models, named_optimizers, with_loose
from treadle.capture.step import capture
from treadle.compat.fake import is_fake
from treadle.compiler.memory import plans_of, prepared
from treadle.compiler.regions import with_regions
from treadle.compiler.target import Target, build_for, target_of
from treadle.graph.text.canonical import canonical
from treadle.options import Options, options_with
from treadle.passes.memory.choose import ChosenPlan, Plans, choose
from treadle.runtime.store.cache import Cache
from treadle.targets.cpu import CPU, CPU_MODEL
from treadle.targets.cuda import CUDA
from treadle.targets.model import DeviceModel
from treadle.targets.registry import model_for
from treadle.util.collector import without_collector
from treadle.util.errors import TreadleError
from treadle.util.sizes import FRONTIER_POINTS, Budget, format_bytes, milliseconds


@dataclass(frozen=True, slots=True)
class Point:
    """One plan on the frontier: predicted peak, and estimated time of a step. ``bound_bytes``: a
    proved lower bound of the peak of every plan whose estimated time is no longer.
    ``optimum_bytes``: with ``exact=True``, the smallest simulated peak of those plans that run the
    library calls after the forward pass in the same order; otherwise ``None``."""

    peak_bytes: int
    step_ms: float
    bound_bytes: int
    optimum_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Whether a step fits. ``peak_bytes`` and ``step_ms`` are those of the fastest plan that fits,
    or of the smallest plan if none fits. ``limit``: the budget, or the memory of the GPU; ``None``
    on a CPU without a budget.
    ``micro_batches``: with ``Options.micro_batch``, which ones, and why."""

    fits: bool
    peak_bytes: int
    step_ms: float
    device: str
    limit: int | None
    points: tuple[Point, ...]
    micro_batches: str = ""

    def frontier(self) -> tuple[Point, ...]:
        """From the fastest plan to the smallest."""
        return self.points

    def table(self) -> str:
        """The verdict and the frontier as text, one line per plan; ``at least`` is its
        ``bound_bytes``, ``optimum`` its ``optimum_bytes``."""
        exact = any(point.optimum_bytes is not None for point in self.points)
        within = "" if self.limit is None else f" {format_bytes(self.limit)}"
        verdict = f"fits{within}" if self.fits else f"does not fit{within}"
        peak = f"predicted peak {format_bytes(self.peak_bytes)}"
        time = milliseconds(self.step_ms / 1e3)
        lines = [
            f"{verdict} on {self.device}: {peak}, estimated {time} per step",
            *([f"micro-batches: {self.micro_batches}"] if self.micro_batches else []),
            f"{'peak':>12}  {'estimate':>13}  {'at least':>12}" + f"  {'optimum':>12}" * exact,
        ]
        for point in self.points:
            fits = "" if self.limit is None or point.peak_bytes > self.limit else "  fits"
            bound = format_bytes(point.bound_bytes)
            figures = (
                f"{format_bytes(point.peak_bytes):>12}  {milliseconds(point.step_ms / 1e3):>13}"
            )
            best = point.optimum_bytes
            optimum = "" if best is None else f"  {format_bytes(best):>12}"
            lines.append(f"{figures}  {bound:>12}{optimum}{fits}")
        return "\n".join(lines)


@without_collector()
def plan(
    function: Callable[..., object],
    *batch: object,
    model: object = None,
    optimizer: object = (),
    memory: str | int | float | None = None,
    device: str | None = None,
    points: int = FRONTIER_POINTS,
    exact: bool = False,
    options: Options | None = None,
) -> Plan:
    """Predict the peak and the memory/time frontier of a step. Nothing runs and nothing changes.

    - ``device``: the hardware to plan for (``cpu``, ``h200``, ``h100``, ``a100``, ``rtx4090``),
      which need not be present. Default: the device of the model.
    - ``model``, ``optimizer``, ``batch`` may be on the meta device or fake: nothing is allocated.
    - ``memory``: a budget, as for ``compile``. Default: the memory of the GPU; none on a CPU.
    - ``points``: the number of budgets on the frontier, evenly spaced; at least two. Several
      budgets may lead to the same plan.
    - ``exact``: for each plan, also solve for the smallest peak of plans that are as fast. That
      takes seconds to minutes for a small step; a large one is refused (TR-208).
    - ``options``: those of the compile. Default: those of the environment.
    """
    _require_two(points)
    options = options_with(options, memory=memory)
    budget = options.budget
    optimizers = named_optimizers(optimizer)
    models = with_loose(named_models(model), optimizers)
    here = device_of(models)
    name = device or ("cpu" if here.type == "meta" else str(here))
    hardware = model_for(name)
    place = _place(hardware)
    captured = capture(
        function,
        models=models,
        optimizers=optimizers,
        args=batch,
        kwargs={},
        place=place,
        eight_bits=options.eight_bits,
    )
    at = _device_of(hardware, captured.device)
    is_here = at == captured.device and here.type == place.type
    if is_here and not any(_is_described(module) for module in models.values()):
        cache = Cache(options.cache_dir)  # the step could run here: what it would be
        build_ = build_for(at, options, cache)
        target, _ = target_of(at, options, build_, cache=cache, kept=captured.kept_bytes)
        target = replace(target, like=device or "")
    else:
        chosen = options.target if at == captured.device else ""  # one for this machine's device
        target = Target(at, replace(options, target=chosen), like=name, kept=captured.kept_bytes)
    budgeted = replace(target, options=replace(target.options, memory=1.0))
    step = canonical(with_regions(captured.step, at, options)).step
    chosen = _chosen(plans_of(prepared(step, budgeted), budgeted), hardware, budget)
    plans = chosen.plans
    shown = sorted({*plans.spread(points), chosen.index})
    return Plan(
        chosen.fits,
        chosen.peak_bytes,
        1e3 * chosen.plan.seconds,
        hardware.name,
        chosen.limit,
        tuple(_point(plans, i, exact=exact) for i in shown),
        chosen.version.why,
    )


def _require_two(points: object) -> None:
    if not isinstance(points, int) or points < 2:
        raise TreadleError(
            f"points={points!r} is not an integer of at least 2: a frontier has two ends",
            code="TR-001",
            remedy="pass at least points=2",
        )


def _chosen(groups: Iterator[Plans], hardware: DeviceModel, budget: Budget | None) -> ChosenPlan:
    """What a compile chooses, without a budget if that fits the device."""
    if budget is None:
        first = next(groups)
        index, memory = first.without_budget(), hardware.memory or None
        if memory is None or first.exact(index) <= memory:
            return ChosenPlan(first, index, memory, fits=True)
        groups, budget = chain((first,), groups), Budget(memory)
    return choose(groups, budget)


def _point(plans: Plans, i: int, *, exact: bool) -> Point:
    optimum = plans.optimum(i) if exact else None
    return Point(plans.exact(i), 1e3 * plans.points[i].seconds, plans.bound(i), optimum)


def _place(hardware: DeviceModel) -> torch.device:
    """Where to capture: a GPU's graph needs a GPU; without one the CPU's stands for it."""
    on_gpu = hardware is not CPU_MODEL and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _device_of(hardware: DeviceModel, captured: str) -> str:
    """Where the step is planned to run, of one that was captured ``captured``: its kernels are
    those of the hardware's kind of device, there or not."""
    kind = CPU.device if hardware is CPU_MODEL else CUDA.device
    return captured if torch.device(captured).type == kind else kind


def _is_described(model: nn.Module) -> bool:
    return any(parameter.is_meta or is_fake(parameter) for parameter in model.parameters())
