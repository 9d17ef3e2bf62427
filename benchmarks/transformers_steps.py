"""Twelve architectures of ``transformers``, small and random: what becomes of each training step.

::

    python benchmarks/transformers_steps.py      prints the table of docs/reference/architectures.md

Step times are medians of 10 on this machine, eager and compiled in turns.
"""

import copy
import statistics
import sys
import time
from pathlib import Path

import torch

import treadle
from treadle.runtime.store.artifact import CallStep

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))
from architectures import ALL


def training(model, optimizer):
    def step(**batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def row(make) -> str:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, twin)]
    step = treadle.compile(training(model, optimizers[0]), model=model, optimizer=optimizers[0])
    eager = training(twin, optimizers[1])
    step(**batch)
    eager(**batch)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(10):
        for which, run in enumerate((step, eager)):
            start = time.perf_counter()
            run(**batch)
            times[which].append(time.perf_counter() - start)
    artifact = step.compiled.artifact
    calls = sum(isinstance(each, CallStep) for each in artifact.steps)
    ratio = statistics.median(times[0]) / statistics.median(times[1])
    nodes = len(step.compiled.captured.step.graph.nodes)
    seconds = sum(step.compiled.seconds.values())
    fallbacks = ", ".join(sorted({each.op for each in artifact.fallbacks})) or "none"
    counts = f"{nodes} | {artifact.kernel_count} | {calls} | {fallbacks}"
    return f"| {make.__name__} | {counts} | {ratio:.2f} | {seconds:.1f} |"


def main() -> None:
    print("| model | nodes | launches | library calls | fallbacks | step, x eager | compile s |")
    print("|---|---|---|---|---|---|---|")
    for make in ALL:
        print(row(make), flush=True)


if __name__ == "__main__":
    main()
