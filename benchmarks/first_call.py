"""Where the time of a first call goes: seconds of each stage, and what lies in no stage.

``python benchmarks/first_call.py --layers 12`` takes transformers' GPT-2 with small layers under
AdamW with clipping, one thread and an empty cache. Run it twice: the first run of a checkout may
compile modules to byte code as well.
"""

import argparse
import gc
import tempfile
import time

import torch
from start import model_of, training

import treadle


def step_of(layers: int, cache: str) -> treadle.Step:
    """A step of GPT-2 with ``layers`` blocks of width 64, not compiled yet."""
    model = model_of(torch.device("cpu"), layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return treadle.compile(
        training(model, optimizer),
        model=model,
        optimizer=optimizer,
        options=treadle.Options(cache_dir=cache),
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        step = step_of(parser.parse_args().layers, cache)
        tokens = torch.randint(0, 257, (2, 32))
        collections = Collections()
        gc.callbacks.append(collections)
        wall, cpu = time.perf_counter(), time.process_time()
        step(tokens)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        gc.callbacks.remove(collections)
    for stage, seconds in step.compiled.seconds.items():
        print(f"{stage:20}{seconds:6.2f} s")
    rest = wall - sum(step.compiled.seconds.values())
    print(f"{'in no stage':20}{rest:6.2f} s, of which {collections.seconds:.2f} collect garbage")
    print(f"{'first call':20}{wall:6.2f} s, {cpu:.2f} of this process's CPU")


main()
