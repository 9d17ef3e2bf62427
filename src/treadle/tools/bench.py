"""``treadle bench``: a user's step by several compilers, interleaved in one run.

Each contestant trains its own job, created from the same seed, and takes its turn in every round,
so that other work on the machine slows all of them equally. A ratio is the median over the rounds
of the contestant's time over eager's in the same round.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from treadle.api import Step
from treadle.capture.python_state.flatten import flatten
from treadle.capture.refuse import named_models, named_optimizers
from treadle.compat.dynamo import captured_graphs
from treadle.runtime.meter import PeakReport, measure_peak
from treadle.targets.registry import target_for
from treadle.tools.commands import Budget, compiled, progress
from treadle.tools.entry_point import EntryPoint, TrainingJob
from treadle.util.errors import PlanError, TreadleError
from treadle.util.package import VERSION
from treadle.util.sizes import format_bytes

EAGER, OURS, TORCH = "eager", "treadle", "torch.compile"
WARMUP = 3
"""Rounds left out of the times: first touches of memory, and caches of other compilers."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant. ``loss_distance``: the largest distance of a result from eager's in the
    same round, over all rounds; ``None`` where the step returns no numbers. ``compile_s``: until
    its first step was done, less the time of a step."""

    name: str
    step_ms_median: float
    step_ms_low: float
    step_ms_high: float
    ratio_to_eager: float
    peak_bytes: int
    predicted_peak_bytes: int | None
    peak_ratio_to_eager: float
    compile_s: float
    loss_first: float | None
    loss_last: float | None
    loss_distance: float | None
    step_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A run of the benchmark; times low and high are the quartiles."""

    target: str
    steps: int
    warmup_steps: int
    device: str
    threads: int
    torch: str
    treadle: str
    machine: str
    memory: Budget
    contestants: tuple[Figures, ...]


@dataclass
class Contestant:
    """A job of its own, how it is run, and what was seen of it. ``random``: where its generators
    stand, on the CPU and on each GPU. ``captured``: graphs that ``torch.compile`` made in its
    turns."""

    name: str
    job: TrainingJob
    run: Callable[..., object]
    random: tuple[Tensor, list[Tensor]]
    seconds: list[float] = field(default_factory=list[float])
    losses: list[float | None] = field(default_factory=list[float | None])
    gaps: list[Tensor] = field(default_factory=list[Tensor])
    compile_s: float = 0.0
    captured: int = 0

    def turn(self, batch: tuple[object, ...]) -> list[Tensor]:
        """One step, timed to its end, with random numbers as if nobody else drew any."""
        state, devices = self.random
        torch.set_rng_state(state)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        graphs, start = captured_graphs(), time.perf_counter()
        result = self.run(*batch)
        _wait()
        self.seconds.append(time.perf_counter() - start)
        self.captured += captured_graphs() - graphs
        self.random = random_state()
        numbers = _numbers(result)
        self.losses.append(next((number.item() for number in numbers if number.numel() == 1), None))
        return numbers


def random_state() -> tuple[Tensor, list[Tensor]]:
    """Where the process's generators stand, on the CPU and on each GPU."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), devices


def take_turns(
    contestants: Sequence[Contestant], number: int, batch: tuple[object, ...] | None = None
) -> None:
    """Everyone's turn in round ``number``; every other round from the last to the first. ``batch``:
    of the round; else each has its own."""
    order = contestants if number % 2 == 0 else contestants[::-1]
    results = {each.name: each.turn(each.job.batch if batch is None else batch) for each in order}
    for contestant in contestants:
        pairs = zip(results[contestant.name], results[EAGER], strict=True)
        contestant.gaps += [_gap(a, b) for a, b in pairs if a.numel()]


def run_bench(
    target: str,
    *,
    console: Console,
    memory: Budget = None,
    steps: int = 20,
    against: Sequence[str] = (EAGER,),
) -> Result:
    """Time the target's step, and print a table."""
    entry_point = EntryPoint(target)
    unknown = [name for name in against if name not in (EAGER, TORCH)]
    if unknown:
        raise TreadleError(
            f"bench cannot compare with {unknown[0]!r}",
            code="TR-001",
            remedy=f"--against {EAGER} or --against {EAGER},{TORCH}",
        )
    result = bench(entry_point, memory=memory, steps=steps, with_torch=TORCH in against)
    print_table(console, result)
    return result


def bench(target: EntryPoint, *, memory: Budget, steps: int, with_torch: bool) -> Result:
    """Every contestant ``steps`` times after a warm-up, in turns. Eager is always among them."""
    contestants = [_eager(target), _ours(target, memory)]
    with progress() as clock:
        if with_torch:
            contestants.append(_torch(target))
        _require_own_models(contestants)
        for number in range(WARMUP + steps):
            with clock.stage(f"round {number + 1} of {WARMUP + steps}"):
                take_turns(contestants, number)
                require_captured(contestants)
        with clock.stage("measure the peaks"):
            peaks = [peak_of(contestant) for contestant in contestants]
    figures = [
        _figures(contestant, contestants[0], peaks[i]) for i, contestant in enumerate(contestants)
    ]
    ratios = [
        replace(figure, peak_ratio_to_eager=figure.peak_bytes / peaks[0]) for figure in figures
    ]
    return Result(
        target.text,
        steps,
        WARMUP,
        _device(contestants[0].job),
        torch.get_num_threads(),
        torch.__version__,
        VERSION,
        platform.machine(),
        memory,
        tuple(ratios),
    )


def _require_own_models(contestants: Sequence[Contestant]) -> None:
    """``PlanError`` TR-203 where two would train the same model."""
    owned = [
        {p for model in named_models(contestant.job.model).values() for p in model.parameters()}
        for contestant in contestants
    ]
    if len(set[nn.Parameter]().union(*owned)) < sum(map(len, owned)):
        raise PlanError(
            "the function returns the same model each time it is called",
            code="TR-203",
            remedy="create the model inside the function: each contestant trains its own",
        )


def _eager(target: EntryPoint) -> Contestant:
    job = target.make()
    return Contestant(EAGER, job, job.step, random_state())


def _ours(target: EntryPoint, memory: Budget) -> Contestant:
    job, step = compiled(target, memory)
    contestant = Contestant(OURS, job, step, random_state())
    start = time.perf_counter()
    step.prepare(*job.batch)
    contestant.compile_s = time.perf_counter() - start
    return contestant


def _torch(target: EntryPoint) -> Contestant:
    """Its models compiled in place, which leaves the step as it is."""
    job = target.make()
    for model in named_models(job.model).values():
        compile_in_place(model)
    return Contestant(TORCH, job, job.step, random_state())


def compile_in_place(model: nn.Module) -> None:
    """``torch.compile`` for the ``forward`` of ``model``, so that every caller runs it.

    ``model.compile()`` compiles nothing where ``forward`` is a function of PyTorch's own, as that
    of ``nn.Sequential``; called from a function of ours it is captured as any other."""
    inner = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        return inner(*args, **kwargs)

    model.forward = torch.compile(forward)


def require_captured(contestants: Sequence[Contestant]) -> None:
    """TR-006 where a row would be called ``torch.compile``, and nothing of it was compiled."""
    for contestant in contestants:
        if contestant.name == TORCH and not contestant.captured:
            raise TreadleError(
                "torch.compile captured nothing of this model: its row would show eager's times",
                code="TR-006",
                remedy=f"compare with {EAGER} only, or call the model in the step",
            )


def _figures(contestant: Contestant, eager: Contestant, peak: int) -> Figures:
    times, base = contestant.seconds[WARMUP:], eager.seconds[WARMUP:]
    low, middle, high = _quartiles(times)
    compile_s = contestant.compile_s
    if contestant.name == TORCH:
        compile_s = max(0.0, contestant.seconds[0] - middle)
    return Figures(
        name=contestant.name,
        step_ms_median=1e3 * middle,
        step_ms_low=1e3 * low,
        step_ms_high=1e3 * high,
        ratio_to_eager=statistics.median(a / b for a, b in zip(times, base, strict=True)),
        peak_bytes=peak,
        predicted_peak_bytes=(
            contestant.run.compiled.artifact.peak_bytes
            if isinstance(contestant.run, Step)
            else None
        ),
        peak_ratio_to_eager=1.0,
        compile_s=compile_s,
        loss_first=contestant.losses[0],
        loss_last=contestant.losses[-1],
        loss_distance=torch.stack(contestant.gaps).max().item()
        if contestant.gaps
        else None,  # a NaN wins
        step_ms=tuple(1e3 * seconds for seconds in times),
    )


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, _, high = statistics.quantiles(times, method="inclusive")
    return low, statistics.median(times), high


def _numbers(result: object) -> list[Tensor]:
    """What a step returned that is a number or has numbers, as float64 copies."""
    leaves = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor | int | float)]
    tensors = [torch.as_tensor(leaf).detach() for leaf in leaves]
    return [tensor.double().cpu() for tensor in tensors if not tensor.is_complex()]


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """The largest distance; NaN where one of the two is NaN and the other is not."""
    same = (a == b) | (a.isnan() & b.isnan())  # infinities as well
    return torch.where(same, 0.0, (a - b).abs()).max()


def peak_of(contestant: Contestant) -> int:
    """The measured peak of one more step. On a GPU the meter sees the memory of all contestants:
    the memory of the others is subtracted."""
    job, there = contestant.job, torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    if isinstance(contestant.run, Step):
        report = contestant.run.measure(*job.batch)
    else:
        report = eager_peak(contestant.run, job.model, job.optimizer, job.batch)
    others = 0 if target_for(report.device).on_host else there - report.before_bytes
    return report.peak_bytes - others


def eager_peak(
    run: Callable[..., object], models: object, optimizers: object, batch: tuple[object, ...]
) -> PeakReport:
    """The peak of ``run(*batch)``: parameters, gradients, state and batch counted."""
    modules: Sequence[nn.Module] = list(named_models(models).values())
    parameters = [parameter for model in modules for parameter in model.parameters()]
    held = [*parameters, *(buffer for model in modules for buffer in model.buffers())]
    held += [parameter.grad for parameter in parameters if parameter.grad is not None]
    for optimizer in named_optimizers(optimizers).values():
        for entries in optimizer.state.values():
            held += [value for value in entries.values() if isinstance(value, Tensor)]
    held += [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]
    return measure_peak(lambda: run(*batch), held)


def _device(job: TrainingJob) -> str:
    models = named_models(job.model).values()
    return str(next((p.device for model in models for p in model.parameters()), "cpu"))


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def print_table(console: Console, result: Result) -> None:
    """A row for each contestant, 80 columns wide at most."""
    table = Table(
        title=f"{result.target}: {result.steps} steps each, in turns, on {result.device}",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    eager, distance = "x\neager", "loss\ndistance"
    columns = ("", "ms/step", "quartiles", eager, "peak", eager, "compile", distance)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for contestant in result.contestants:
        gap = contestant.loss_distance
        table.add_row(
            contestant.name,
            _four_digits(contestant.step_ms_median),
            f"{_four_digits(contestant.step_ms_low)} to {_four_digits(contestant.step_ms_high)}",
            f"{contestant.ratio_to_eager:.2f}",
            format_bytes(contestant.peak_bytes),
            f"{contestant.peak_ratio_to_eager:.2f}",
            f"{contestant.compile_s:.1f} s",
            "" if gap is None else f"{gap:.1e}",
        )
    console.print(table, highlight=False)


def _four_digits(milliseconds: float) -> str:
    """``"9.87"``, ``"98.70"``, ``"987.0"``, ``"9870"``: a table fits into 80 columns."""
    decimals = 2 if milliseconds < 100 else 1 if milliseconds < 1000 else 0
    return f"{milliseconds:.{decimals}f}"
