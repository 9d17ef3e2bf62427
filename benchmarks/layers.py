"""What a compile costs by depth: seconds of the processor by stage, for GPT-2 of tiny width.

::

    python benchmarks/layers.py [--layers 12,24,48] [--memory none,0.3] [--repeats 1]
                                [--cache FOLDER] [--profile FILE]

Every cell is the step of a process of its own, after a small step that has everything imported. A
stage's seconds are those of this process: what C++ compilers take is left out. The artifact is
taken out of the cache again, so that the next run compiles anew; the binaries stay, so that only
the first run of a machine waits for them. With ``--repeats`` the smallest of each cell is shown.

``nodes`` are those of the captured graph.

``--profile`` writes a profile of ``cProfile`` for the first depth and budget instead.
"""

import argparse
import cProfile
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import guards
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.capture.step import capture
from treadle.compiler.compiled import Compiled
from treadle.compiler.pipeline import compile_graph
from treadle.report.stages import ORDER, Clock, Watcher
from treadle.runtime.store.cache import Cache

Setup = tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]
_AFTER = tuple(each.name for each in ORDER[1:])


class ProcessorTime(Watcher):
    """Seconds of the processor by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = 0.0

    def begins(self, stage: str) -> None:
        self._begun = time.process_time()

    def ends(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = time.process_time() - self._begun


def gpt2(layers: int) -> Setup:
    """GPT-2 of width 64 with 2 heads, 2 x 32 tokens, AdamW."""
    return guards.gpt2(layers, width=64, vocabulary=211, length=32)


def small() -> Setup:
    """A step that has everything imported that any step needs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer, (torch.randn(4, 8), torch.randint(4, (4,)))


def compiled(setup: Setup, memory: float | None, cache: Cache) -> tuple[Compiled, dict[str, float]]:
    """A step that is captured and compiled, and what each stage took."""
    function, model, optimizer, batch = setup
    options = treadle.Options(memory=memory, cache_dir=cache.directory, progress=False)
    watcher = ProcessorTime()
    clock = Clock(watcher)
    with clock.stage("capture"):
        captured = capture(
            function, models={"": model}, optimizers={"": optimizer}, args=batch, kwargs={}
        )
    made = compile_graph(captured, options, cache=cache, clock=clock)
    entry = cache.path(made.key, "")
    if entry is not None:
        entry.unlink()
    return made, watcher.seconds


def measure(layers: int, memory: float | None, folder: str, profile: str) -> dict[str, float]:
    """One cell of the table, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cache = Cache(folder)
    compiled(small(), memory, cache)
    setup = gpt2(layers)
    if not profile:
        made, seconds = compiled(setup, memory, cache)
        return {**seconds, "nodes": float(len(made.captured.step.graph.nodes))}
    with cProfile.Profile() as profiler:
        compiled(setup, memory, cache)
    profiler.dump_stats(profile)
    return {}


def in_a_process(layers: int, memory: str, folder: str) -> dict[str, float]:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--layers", str(layers), "--memory", memory, "--one"]
    command += ["--cache", folder]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(layers: list[int], memory: str, cells: list[dict[str, float]]) -> None:
    """A table of one budget: a row for each stage, a column for each depth."""
    print(f"\nmemory={memory}: CPU seconds at {', '.join(map(str, layers))} layers")
    for cell in cells:
        cell["all after capture"] = sum(cell.get(each, 0.0) for each in _AFTER)
    for name in ("capture", *_AFTER, "all after capture"):
        row = "".join(f"{cell.get(name, 0.0):10.2f}" for cell in cells)
        growth = cells[-1].get(name, 0.0) / max(cells[0].get(name, 0.0), 1e-3)
        print(f"{name:22}{row}{growth:9.1f} x")
    print(f"{'nodes':22}" + "".join(f"{cell['nodes']:10.0f}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", default="12,24,48")
    parser.add_argument("--memory", default="none,0.3")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "treadle-layers"))
    parser.add_argument("--profile", default="")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    layers = [int(each) for each in given.layers.split(",")]
    budgets = given.memory.split(",")
    if given.one or given.profile:
        memory = None if budgets[0] == "none" else float(budgets[0])
        print(json.dumps(measure(layers[0], memory, given.cache, given.profile)))
        return
    for memory in budgets:
        cells: list[dict[str, float]] = []
        for depth in layers:
            runs = [in_a_process(depth, memory, given.cache) for _ in range(given.repeats)]
            names = [name for name in runs[0] if isinstance(runs[0][name], float)]
            cells.append({name: min(run[name] for run in runs) for name in names})
        show(layers, memory, cells)


if __name__ == "__main__":
    main()
