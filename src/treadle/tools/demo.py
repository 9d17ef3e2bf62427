"""``treadle demo``: a real training run, eager and compiled, side by side and in turns.

The model is ``examples/gpt.py`` (a copy of that file ships in the package as
``treadle.examples_gpt``); the corpus is the source of Python's own standard library.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from treadle.api import Step, compile
from treadle.options import from_environment
from treadle.tools.bench import Contestant, eager_peak, peak_of, random_state, take_turns
from treadle.tools.entry_point import TrainingJob
from treadle.util.files import can_be_live
from treadle.util.package import PACKAGE
from treadle.util.sizes import format_bytes

BUDGET = 0.6
"""The budgeted run's share of eager's measured peak."""
COMPARED = 50
"""Steps over which losses are compared one by one."""
WARMUP = 3
"""Steps left out of the step time: first touches of memory."""
_LINES = 10
"""Lines that tell of the training where the output is not a terminal."""

Tell = Callable[[int, str], object]
"""That so many steps are done, and how it stands."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run. Times in ms and s, sizes in bytes; eager predicts nothing.
    ``ratio_to_eager``: the median over the steps of its time over eager's for the same batch."""

    name: str
    loss_first: float
    loss_last: float
    step_ms: float
    ratio_to_eager: float
    peak_bytes: int
    predicted_peak_bytes: int | None
    compile_s: float
    kernels: int
    fallbacks: int


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The three runs, and the largest distance of a compiled loss from eager's in the first
    ``COMPARED`` steps."""

    runs: tuple[TrainingRun, ...]
    max_loss_diff_50: float


def run_demo(*, steps: int, console: Console) -> DemoResult:
    """Train three times from the same seed, each step of all three before the next one, and print
    a table."""
    gpt = _example()
    with _progress(console, steps) as tell:
        tell(0, "measure eager's peak")
        budget = int(BUDGET * _eager_peak(gpt))
        contestants = [_contestant(gpt, "eager", steps)]
        for name, memory in (("compiled", None), ("budget", budget)):
            tell(0, f"compile: {name}")
            contestants.append(_compiled(gpt, name, steps, memory))
        _train(gpt, contestants, steps, tell)
        tell(steps, "measure the peaks")
        runs = tuple(_run_of(contestant, contestants[0]) for contestant in contestants)
    gaps = [float(gap) for each in contestants[1:] for gap in each.gaps[:COMPARED]]
    result = DemoResult(runs, max(gaps))
    _print(console, result, steps)
    console.print(f"budget: {format_bytes(budget)}, {BUDGET:.0%} of eager's peak")
    compiled = contestants[1].run
    if isinstance(compiled, Step) and compiled.compiled.library:
        console.print(
            "no working C++ compiler was found: the compiled runs used PyTorch's kernels. "
            "Install g++ or clang++ for generated ones; `treadle doctor` shows what was found."
        )
    return result


def _example() -> ModuleType:
    """The example's module: the file in the checkout, or its copy in an installed wheel."""
    package = PACKAGE
    for path in (package.parent.parent / "examples" / "gpt.py", package / "examples" / "gpt.py"):
        if path.exists():
            spec = importlib.util.spec_from_file_location("treadle_demo_gpt", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise FileNotFoundError("examples/gpt.py is neither in a checkout nor in the package")


def _job(gpt: ModuleType, steps: int) -> TrainingJob:
    """A new model from seed 0, its optimizer and the first batch."""
    torch.manual_seed(0)
    config = gpt.Config()
    model = gpt.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = next(iter(gpt.batches(gpt.corpus(), config, steps)))
    return TrainingJob(gpt.training_step(model, optimizer), model, optimizer, tuple(first))


def _eager_peak(gpt: ModuleType) -> int:
    """Of the second step: the first one makes the optimizer's state."""
    job = _job(gpt, 1)
    job.step(*job.batch)
    return eager_peak(job.step, job.model, job.optimizer, job.batch).peak_bytes


def _contestant(gpt: ModuleType, name: str, steps: int) -> Contestant:
    job = _job(gpt, steps)
    return Contestant(name, job, job.step, random_state())


def _compiled(gpt: ModuleType, name: str, steps: int, memory: int | None) -> Contestant:
    contestant = _contestant(gpt, name, steps)
    job, options = contestant.job, replace(from_environment(), memory=memory)
    step = compile(job.step, model=job.model, optimizer=job.optimizer, options=options)
    start = time.perf_counter()
    step.prepare(*job.batch)
    contestant.compile_s = time.perf_counter() - start
    contestant.run = step
    return contestant


def _train(gpt: ModuleType, contestants: Sequence[Contestant], steps: int, tell: Tell) -> None:
    torch.manual_seed(0)
    batches = gpt.batches(gpt.corpus(), gpt.Config(), steps)
    for number, batch in enumerate(batches):
        take_turns(contestants, number, tuple(batch))
        losses = ", ".join(f"{each.name} {each.losses[-1]:.4f}" for each in contestants)
        tell(number + 1, f"loss {losses}")


def _run_of(contestant: Contestant, eager: Contestant) -> TrainingRun:
    losses = [loss for loss in contestant.losses if loss is not None]
    seconds, base = contestant.seconds[WARMUP:], eager.seconds[WARMUP:]
    seconds, base = (seconds, base) if seconds else (contestant.seconds, eager.seconds)
    artifact = contestant.run.compiled.artifact if isinstance(contestant.run, Step) else None
    return TrainingRun(
        name=contestant.name,
        loss_first=losses[0],
        loss_last=statistics.mean(losses[-10:]),
        step_ms=1e3 * statistics.median(seconds),
        ratio_to_eager=statistics.median(a / b for a, b in zip(seconds, base, strict=True)),
        peak_bytes=peak_of(contestant),
        predicted_peak_bytes=artifact and artifact.peak_bytes,
        compile_s=contestant.compile_s,
        kernels=artifact.kernel_count if artifact else 0,
        fallbacks=len(artifact.fallbacks) if artifact else 0,
    )


@contextmanager
def _progress(console: Console, steps: int) -> Generator[Tell]:
    """A bar on a terminal; some lines where the output is none, such as a file or a pipe."""
    if not from_environment().progress:
        yield lambda done, words: None
    elif can_be_live(console.file):
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[words]}"), console=console) as progress:
            task = progress.add_task("", total=steps, words="")
            yield lambda done, words: progress.update(task, completed=done, words=words)
    else:
        every = max(1, steps // _LINES)

        def tell(done: int, words: str) -> None:
            if not done or done % every == 0 or done == steps:
                text = f"step {done} of {steps}: {words}" if done else words
                console.print(text, highlight=False, soft_wrap=True)

        yield tell


def _print(console: Console, result: DemoResult, steps: int) -> None:
    title = f"{steps} steps of a byte-level GPT on Python's standard library, in turns"
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in (
        "run",
        "loss",
        "ms/step",
        "peak",
        "predicted",
        "compile",
        "kernels",
        "fallbacks",
    ):
        side = "left" if column == "run" else "right"
        table.add_column(column, justify=side, no_wrap=True)
    for run in result.runs:
        predicted = run.predicted_peak_bytes
        table.add_row(
            run.name,
            f"{run.loss_first:.3f} → {run.loss_last:.3f}",
            f"{run.step_ms:.1f}",
            format_bytes(run.peak_bytes),
            format_bytes(predicted) if predicted is not None else "",
            f"{run.compile_s:.1f} s",
            str(run.kernels),
            str(run.fallbacks),
        )
    console.print(table)
    compared = min(COMPARED, steps)
    console.print(
        f"largest loss difference over the first {compared} steps: {result.max_loss_diff_50:.2e}"
    )
    eager, *others = result.runs
    for run in others:
        console.print(
            f"{run.name}: {run.ratio_to_eager:.2f} x eager's step time, "
            f"{run.peak_bytes / eager.peak_bytes:.2f} x its peak"
        )
