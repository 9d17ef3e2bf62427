"""GPT-2 with a length that changes at every call, in random order: how often is it compiled, and
what does a call take beside the step that is compiled for its length alone.

    python benchmarks/shapes.py                             on a GPU 128 to 2048 in steps of 8
    python benchmarks/shapes.py --low 8 --high 64 --step 4 --layers 2     smaller
    python benchmarks/shapes.py --count 40                  so many of the lengths
    python benchmarks/shapes.py --only declared             or found, torch.compile, eager

``declared``: with ``treadle.dynamic``; ``found``: treadle finds the length that changes by itself;
torch.compile of the model and of ``optimizer.step``, with ``dynamic=None``. Each rival is a process
with a cache of its own. ``compiles``: of treadle's step, or graphs of torch.compile. ``first
call``: CPU seconds in all threads, without compilers that are processes of their own. ``first
pass``: seconds of all lengths in random order, what is compiled on the way included; ``second``: in
another order. ``beside static``: of some lengths, a call in the second pass, then the fastest of
some calls with this length in a row, each over the fastest of the step that treadle compiles for
that length alone. ``peak``: GiB of the second pass on a GPU; in brackets what treadle promises of
any call.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

import treadle

RIVALS = ("declared", "found", "torch.compile", "eager")
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Lengths in the order of a pass, and the model that meets them."""

    lengths: tuple[int, ...]
    layers: int
    batch: int
    samples: int
    device: torch.device

    @property
    def sampled(self) -> list[int]:
        """Some of the lengths, from the shortest to the longest."""
        known = sorted(self.lengths)
        last = max(1, self.samples - 1)
        return sorted({known[at * (len(known) - 1) // last] for at in range(self.samples)})

    def order(self, seed: int) -> list[int]:
        return random.Random(seed).sample(self.lengths, len(self.lengths))

    def tokens(self, length: int) -> torch.Tensor:
        words = 50257 if self.device.type == "cuda" else 257
        return torch.randint(0, words, (self.batch, length), device=self.device)


def trained(run: Run) -> tuple[torch.nn.Module, torch.optim.Optimizer, Step]:
    longest = max(run.lengths)
    small = {"n_embd": 64, "n_head": 4, "vocab_size": 257}
    config = transformers.GPT2Config(
        n_layer=run.layers,
        n_positions=longest,
        bos_token_id=None,
        eos_token_id=None,
        **({} if run.device.type == "cuda" else small),
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, train


def compiled(run: Run, rival: str) -> Step:
    model, optimizer, train = trained(run)
    if rival == "eager":
        return train
    if rival == "torch.compile":
        model.compile()
        optimizer.step = torch.compile(optimizer.step)
        return train
    shapes = None
    if rival == "declared":
        ends = max(2, min(run.lengths)), max(run.lengths)
        shapes = treadle.dynamic({"tokens": (None, "time")}, time=ends)
    options = treadle.Options(dynamic=rival == "found")
    return treadle.compile(train, model=model, optimizer=optimizer, shapes=shapes, options=options)


def seconds_of(run: Run, step: Step, length: int) -> float:
    tokens = run.tokens(length)
    _wait(run)
    began = time.perf_counter()
    step(tokens)
    _wait(run)
    return time.perf_counter() - began


def fastest(run: Run, step: Step, length: int) -> float:
    return min(seconds_of(run, step, length) for _ in range(8))


def _wait(run: Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def compiles_of(rival: str, step: Step) -> int:
    if rival == "torch.compile":
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return len(step.recompiles) + (rival != "declared") if isinstance(step, treadle.Step) else 0


def one(rival: str, run: Run) -> None:
    """One rival, in a process of its own."""
    step = compiled(run, rival)
    began, busy = time.perf_counter(), time.process_time()
    seconds_of(run, step, run.order(1)[0])
    busy = time.process_time() - busy
    for length in run.order(1)[1:]:
        seconds_of(run, step, length)
    first = time.perf_counter() - began
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    passed = {length: seconds_of(run, step, length) for length in run.order(2)}
    peak = torch.cuda.max_memory_allocated(run.device) if run.device.type == "cuda" else 0
    again = {length: fastest(run, step, length) for length in run.sampled}
    promised = ""
    if isinstance(step, treadle.Step):
        promised = f" ({step.summary().peak_of_any_call_bytes / 2**30:.3f})"
    print(
        f"{rival:14}{compiles_of(rival, step):3} compiles, first call {busy:6.2f}, first pass "
        f"{first:7.1f}, second {sum(passed.values()):7.2f} s, "
        f"peak {peak / 2**30:.3f}{promised} GiB",
        flush=True,
    )
    for length in run.sampled:
        alone = fastest(run, compiled(run, "static"), length)
        print(
            f"  {length:5}: {1e3 * alone:8.2f} ms static, beside static "
            f"{passed[length] / alone:5.2f} {again[length] / alone:5.2f}",
            flush=True,
        )


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--low", type=int, default=128 if gpu else 16)
    parser.add_argument("--high", type=int, default=2048 if gpu else 64)
    parser.add_argument("--step", type=int, default=8)
    parser.add_argument("--count", type=int, help="so many of the lengths, chosen at random")
    parser.add_argument("--layers", type=int, default=12 if gpu else 2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument(
        "--only", choices=RIVALS, action="append", help="may be given several times"
    )
    parser.add_argument("--one", choices=RIVALS, help="in this process alone")
    given = parser.parse_args()
    every = range(given.low, given.high + 1, given.step)
    lengths = tuple(every)
    if given.count is not None and given.count < len(every):
        inner = random.Random(0).sample(every[1:-1], max(0, given.count - 2))
        lengths = (every[0], *inner, every[-1])
    run = Run(lengths, given.layers, given.batch, given.samples, torch.device(given.device))
    if given.one:
        one(given.one, run)
        return
    print(f"{len(lengths)} lengths from {min(lengths)} to {max(lengths)}, {run.layers} layers")
    for rival in given.only or RIVALS:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TREADLE_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
            asked = [sys.executable, __file__, *sys.argv[1:], "--one", rival]
            subprocess.run(asked, env=os.environ | caches, check=True)


if __name__ == "__main__":
    main()
