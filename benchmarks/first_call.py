"""Where the time of a first call goes: this process's CPU seconds of each stage, and what lies in
no stage.

    python benchmarks/first_call.py --layers 12               transformers' GPT-2, small layers
    python benchmarks/first_call.py --layers 12 --memory 0.3  within a budget
    python benchmarks/first_call.py --small 20                two layers of a perceptron, 20 times

All under AdamW, the first with clipping; one thread and an empty cache. ``--small`` compiles in a
warm process, as tests do, and prints medians. Compilers of C++ are processes of their own, and not
counted. Run the others twice: the first run of a checkout may compile modules to byte code as well.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from start import model_of, training
from torch import nn

import treadle
from treadle.report import stages

Make = Callable[[str], tuple[treadle.Step, tuple[torch.Tensor, ...]]]
"""A step that is not compiled yet, and its batch; the argument is an empty cache's folder."""


def gpt2(layers: int, memory: float | None) -> Make:
    """Blocks of width 64."""

    def make(cache: str) -> tuple[treadle.Step, tuple[torch.Tensor, ...]]:
        model = model_of(torch.device("cpu"), layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = treadle.compile(
            training(model, optimizer),
            model=model,
            optimizer=optimizer,
            options=treadle.Options(cache_dir=cache, memory=memory),
        )
        return step, (torch.randint(0, 257, (2, 32)),)

    return make


def perceptron(cache: str) -> tuple[treadle.Step, tuple[torch.Tensor, ...]]:
    """Two layers: what a compile costs however small its step is."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    options = treadle.Options(cache_dir=cache)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    return step, (torch.randn(8, 16), torch.randn(8, 4))


class Collections:
    """The CPU seconds that the garbage collector takes while it is registered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        now = time.process_time()
        if phase == "start":
            self._start = now
        else:
            self.seconds += now - self._start


def measured(make: Make) -> dict[str, float]:
    """CPU seconds by stage, of the collector and in all."""
    with tempfile.TemporaryDirectory() as cache:
        step, batch = make(cache)
        collections = Collections()
        gc.callbacks.append(collections)
        start = time.process_time()
        step(*batch)
        spent = time.process_time() - start
        gc.callbacks.remove(collections)
    known = dict(step.compiled.seconds)
    rest = spent - sum(known.values())
    return {**known, "in no stage": rest, "collects garbage": collections.seconds, "in all": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--memory", type=float)
    parser.add_argument("--small", type=int, metavar="TIMES")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stages.time = SimpleNamespace(perf_counter=time.process_time)  # other work has the cores too
    make = perceptron if args.small else gpt2(args.layers, args.memory)
    if args.small:
        measured(make)
    runs = [measured(make) for _ in range(args.small or 1)]
    for name in runs[-1]:
        print(f"{name:20}{statistics.median(run.get(name, 0.0) for run in runs):8.3f} s")


if __name__ == "__main__":
    main()
