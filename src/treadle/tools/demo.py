"""``treadle demo``: a real training run, eager and compiled, side by side.

The model is ``examples/gpt.py`` (a copy of that file ships in the package as
``treadle.examples_gpt``); the corpus is the source of Python's own standard library.
"""

import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from treadle.api import Step, compile
from treadle.options import from_environment
from treadle.tools.bench import eager_peak
from treadle.util.files import can_be_live, check_output, write_output
from treadle.util.package import PACKAGE
from treadle.util.sizes import format_bytes

BUDGET = 0.6
"""The budgeted run's share of eager's measured peak."""
COMPARED = 50
"""Steps over which losses are compared one by one."""
WARMUP = 3
"""Steps left out of the step time: first touches, and the compile."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run. Times in ms and s, sizes in bytes; eager predicts nothing."""

    name: str
    loss_first: float
    loss_last: float
    step_ms: float
    peak_bytes: int
    predicted_peak_bytes: int | None
    compile_s: float
    kernels: int
    fallbacks: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The losses of a run beside its summary."""

    run: TrainingRun
    losses: list[float]
    library: bool = False


def run_demo(*, steps: int, json_file: Path | None, console: Console) -> int:
    """Train three times from the same seed, print a table, write ``json_file`` if given."""
    gpt = _example()
    if json_file is not None:
        check_output(json_file)
    with _progress(console) as progress:
        eager = _train(gpt, "eager", steps, progress, None)
        compiled = _train(gpt, "compiled", steps, progress, {"memory": None})
        budget = int(BUDGET * eager.run.peak_bytes)
        small = _train(gpt, "budget", steps, progress, {"memory": budget})
    runs = [eager, compiled, small]
    difference = max(_difference(eager, run) for run in runs[1:])
    _print(console, [run.run for run in runs], difference, steps)
    console.print(f"budget: {format_bytes(budget)}, {BUDGET:.0%} of eager's peak")
    if compiled.library:
        console.print(
            "no working C++ compiler was found: the compiled runs used PyTorch's kernels. "
            "Install g++ or clang++ for generated ones; `treadle doctor` says what is found."
        )
    if json_file is not None:
        data = {"runs": [asdict(run.run) for run in runs], "max_loss_diff_50": difference}
        write_output(json_file, json.dumps(data, indent=2) + "\n")
    return 0


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


def _train(
    gpt: ModuleType,
    name: str,
    steps: int,
    progress: Progress,
    options: dict[str, int | None] | None,
) -> Trained:
    """One run from seed 0; ``options`` of the compiler, ``None`` for eager."""
    torch.manual_seed(0)
    config = gpt.Config()
    model = gpt.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    eager_step = gpt.training_step(model, optimizer)
    batches = list(gpt.batches(gpt.corpus(), config, steps))
    task = progress.add_task(name, total=steps, loss="")
    step: Callable[[Tensor, Tensor], Tensor] = eager_step
    compile_s = 0.0
    if options is not None:
        chosen = replace(from_environment(), memory=options["memory"])
        step = compile(eager_step, model=model, optimizer=optimizer, options=chosen)
        progress.update(task, loss="compiling")
        start = time.perf_counter()
        step.prepare(*batches[0])
        compile_s = time.perf_counter() - start
    losses, times = _loop(step, batches, lambda loss: progress.update(task, advance=1, loss=loss))
    peak = _peak(step, model, optimizer, batches[-1])
    kernels, fallbacks, predicted = _counts(step)
    step_ms = 1e3 * sorted(times[WARMUP:] or times)[len(times[WARMUP:] or times) // 2]
    first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
    run = TrainingRun(name, first, last, step_ms, peak, predicted, compile_s, kernels, fallbacks)
    library = isinstance(step, Step) and step.compiled.library
    return Trained(run, losses, library)


def _loop(
    step: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    report: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    losses: list[float] = []
    times: list[float] = []
    for x, y in batches:
        start = time.perf_counter()
        losses.append(step(x, y).item())
        times.append(time.perf_counter() - start)
        report(f"loss {losses[-1]:.4f}")
    return losses, times


def _peak(
    step: Callable[[Tensor, Tensor], Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
) -> int:
    """The measured peak of one more step, everything alive counted."""
    if isinstance(step, Step):
        return step.measure(*batch).peak_bytes
    return eager_peak(step, model, optimizer, batch).peak_bytes


def _counts(step: Callable[..., Tensor]) -> tuple[int, int, int | None]:
    if not isinstance(step, Step):
        return 0, 0, None
    artifact = step.compiled.artifact
    return artifact.kernel_count, len(artifact.fallbacks), artifact.peak_bytes


def _difference(eager: Trained, other: Trained) -> float:
    pairs = zip(eager.losses[:COMPARED], other.losses[:COMPARED], strict=True)
    return max(abs(a - b) for a, b in pairs)


def _progress(console: Console) -> Progress:
    """Silent where the output is no terminal."""
    return Progress(
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
        disable=not (from_environment().progress and can_be_live(console.file)),
    )


def _print(console: Console, runs: Sequence[TrainingRun], difference: float, steps: int) -> None:
    title = f"{steps} steps of a byte-level GPT on Python's standard library"
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
    for run in runs:
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
    console.print(f"largest loss difference over the first {COMPARED} steps: {difference:.2e}")
    eager, *others = runs
    for run in others:
        console.print(
            f"{run.name}: {run.step_ms / eager.step_ms:.2f} x eager's step time, "
            f"{run.peak_bytes / eager.peak_bytes:.2f} x its peak"
        )
