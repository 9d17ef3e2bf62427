"""Whole training steps on CPU cores: treadle against eager, and each kernel against a plain copy.

::

    python benchmarks/cpu_step.py [--model gpt,conv,conv-last] [--repeats 25]
        [--profiles 7] [--rows 12]

Eager and compiled steps alternate in one run, on models of their own from one seed, so that other
work on the machine slows both alike. ``ratio`` is the median compiled step over the median eager
step; ``paired`` the median over the pairs of compiled over eager, with its quartiles. The floor of
a kernel is the time in which a plain copy of as many bytes, again and again, moves them: from
the cache where they fit. The gap is the rest of its time.
"""

import argparse
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.runtime.store.artifact import Launch

Step = Callable[[Tensor, Tensor], Tensor]
Setup = tuple[nn.Module, torch.optim.Optimizer, Step, Iterator[tuple[Tensor, Tensor]]]
Row = tuple[float, str, int, float, float, float]
WARMUP = 3
LARGE = 2**29
"""Bytes of a copy that no cache holds."""


class Residual(nn.Module):
    """``relu(x + norm(conv(relu(norm(conv(x))))))``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


def conv(order: torch.memory_format = torch.contiguous_format) -> Setup:
    """A small residual network: 16 pictures of 3 x 32 x 32, SGD with momentum; ``conv-last``: with
    channels-last weights and pictures."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10)]
    model = nn.Sequential(*stem, *(Residual(32) for _ in range(4)), *tail)
    model = model.to(memory_format=order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step, _pictures(order)


def _pictures(order: torch.memory_format) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(16, 3, 32, 32, generator=generator)
        yield x.contiguous(memory_format=order), torch.randint(10, (16,), generator=generator)


def gpt() -> Setup:
    """The model of ``treadle demo``: 3.2 M parameters, 1,024 tokens, dropout, AdamW."""
    example = _example()
    torch.manual_seed(0)
    config = example.Config()
    model = example.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = example.batches(example.corpus(), config, 10_000)
    return model, optimizer, example.training_step(model, optimizer), batches


def _example() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_of_the_demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS: dict[str, Callable[[], Setup]] = {
    "gpt": gpt,
    "conv": conv,
    "conv-last": functools.partial(conv, torch.channels_last),
}


@functools.cache
def copy_seconds(size: int) -> float:
    """The time in which a plain copy moves ``size`` bytes, read and written: the best of 20."""
    source, target = torch.ones(max(size // 8, 1)), torch.zeros(max(size // 8, 1))
    return min(_timed(lambda: target.copy_(source)) for _ in range(20))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, repeats: int) -> treadle.Step:
    """Alternate eager and compiled steps and print their ratio. Returns the compiled step."""
    _, _, eager, batches = MODELS[name]()
    model, optimizer, function, _ = MODELS[name]()
    step = treadle.compile(function, model=model, optimizer=optimizer)
    times: dict[str, list[float]] = {"eager": [], "treadle": []}
    worst = 0.0
    for _ in range(repeats + WARMUP):
        batch = next(batches)
        losses: list[float] = []
        state = torch.get_rng_state()
        for kind, run in (("eager", eager), ("treadle", step)):
            torch.set_rng_state(state)  # both drop the same elements
            start = time.perf_counter()
            losses.append(run(*batch).item())
            times[kind].append(time.perf_counter() - start)
        worst = max(worst, abs(losses[0] - losses[1]))
    ours, theirs = times["treadle"][WARMUP:], times["eager"][WARMUP:]
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)])
    mid_ours, mid_theirs = statistics.median(ours), statistics.median(theirs)
    print(
        f"{name}: eager {1e3 * mid_theirs:.1f} ms, treadle {1e3 * mid_ours:.1f} ms, "
        f"ratio {mid_ours / mid_theirs:.3f}, paired {middle:.3f} ({low:.3f} to {high:.3f}), "
        f"{repeats} pairs, largest loss difference {worst:.1e}"
    )
    return step


def measure_kernels(step: treadle.Step, batch: tuple[Tensor, Tensor], profiles: int) -> list[Row]:
    """Rows ``(ms, name, launches, MiB, GB/s, floor in ms)``, the slowest first.

    Each host step's time is the best of ``profiles`` profiled steps."""
    runs: list[tuple[float, ...]] = []
    for _ in range(profiles):
        step.profile(*batch)
        runs.append(step.compiled.kernel_seconds)
    found: dict[str, list[tuple[float, int]]] = {}
    for host, times in zip(step.compiled.artifact.steps, zip(*runs, strict=True), strict=True):
        name, moved = (
            (host.function, host.bytes_moved) if isinstance(host, Launch) else (host.op, 0)
        )
        found.setdefault(name, []).append((min(times), moved))
    rows: list[Row] = []
    for name, each in found.items():
        ms, moved = 1e3 * sum(seconds for seconds, _ in each), sum(size for _, size in each)
        floor = 1e3 * sum(copy_seconds(size) for _, size in each if size)
        rows.append((ms, name, len(each), moved / 2**20, moved / ms / 1e6, floor))
    return sorted(rows, reverse=True)


def print_kernels(rows: list[Row], shown: int) -> None:
    """A table of the slowest, and the sums of kernels and library calls."""
    print(f"{'':36} {'ms':>8} {'x':>4} {'MiB':>8} {'GB/s':>6} {'floor':>7} {'gap':>7}")
    for ms, name, count, mib, gbs, floor in rows[:shown]:
        facts = f"{mib:8.1f} {gbs:6.1f} {floor:7.2f} {ms - floor:7.2f}" if mib else ""
        print(f"{name:36} {ms:8.2f} {count:4} {facts}".rstrip())
    kernels = [row for row in rows if row[3]]
    ours, floor = sum(row[0] for row in kernels), sum(row[5] for row in kernels)
    rest = sum(row[0] for row in rows if not row[3])
    print(f"generated kernels {ours:.1f} ms (floor {floor:.1f} ms), library calls {rest:.1f} ms\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt,conv")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--profiles", type=int, default=7)
    parser.add_argument("--rows", type=int, default=12)
    options = parser.parse_args()
    rate = LARGE / copy_seconds(LARGE) / 1e9
    print(
        f"{torch.get_num_threads()} threads, a copy of far more than the cache: {rate:.1f} GB/s\n"
    )
    for name in options.model.split(","):
        step = compare(name, options.repeats)
        _, _, _, batches = MODELS[name]()
        print_kernels(measure_kernels(step, next(batches), options.profiles), options.rows)


if __name__ == "__main__":
    main()
