"""A ``torch.while_loop`` over a cell: its rounds as generated kernels, as PyTorch's kernels inside
the compiled step, and Python's own loop in eager.

::

    python benchmarks/while_loops.py [--rounds 50] [--rows 64] [--width 64] [--calls 30]

Each line is what is asked of the loop (its result, or a training step) and a cell: the medians of
calls made in turns, in ms, and the largest measured peak of one call.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.options import RegionRule, Regions
from treadle.runtime.meter import measure_peak

Step = Callable[[Tensor, Tensor], Tensor]


class Perceptron(nn.Module):
    """Two products, and what stands between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """(rows, width) to the same."""
        y = h + 0.1 * self.down(F.gelu(self.up(h)))
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


class Pointwise(nn.Module):
    """No product: one step of a damped oscillator in each element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rate, self.damp = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        """(rows, width) to the same."""
        force = -self.rate.sigmoid() * h - 0.1 * self.damp.exp() * torch.tanh(h)
        return h + 0.05 * force + 0.01 * torch.sin(h * 3) * torch.exp(-h.square())


def plain_while(
    condition: Callable[..., Tensor], body: Callable[..., Any], carried: Sequence[Tensor]
) -> Sequence[Tensor]:
    """What ``torch.while_loop`` means."""
    while bool(condition(*carried)):
        carried = body(*carried)
    return carried


def steps_of(cell: nn.Module, folder: Path, train: bool) -> dict[str, Step]:
    """The three ways of the same function."""
    optimizer = torch.optim.SGD(cell.parameters(), lr=1e-4)

    def run(loop: Any, x: Tensor, rounds: Tensor) -> Tensor:
        body = lambda i, h: (i + 1, cell(h))  # noqa: E731
        _, h = loop(lambda i, h: i < rounds, body, (torch.zeros((), dtype=torch.int64), x))
        loss = h.square().mean()
        if train:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def eager(x: Tensor, rounds: Tensor) -> Tensor:
        with torch.set_grad_enabled(train):
            return run(plain_while, x, rounds)

    def compiled(**options: Any) -> Step:
        function = lambda x, rounds: run(torch.while_loop, x, rounds)  # noqa: E731
        chosen = treadle.Options(cache_dir=folder, **options)
        return treadle.compile(function, model=cell, optimizer=optimizer, options=chosen)

    kernels = Regions(rules=(RegionRule("eager", "*while_loop*"),))
    return {
        "eager": eager,
        "PyTorch's kernels": compiled(regions=kernels),
        "generated": compiled(),
    }


def medians(steps: dict[str, Step], given: tuple[Tensor, Tensor], calls: int) -> dict[str, float]:
    """Milliseconds of each, called in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step(*given)
    for _ in range(calls):
        for name, step in steps.items():
            begin = time.perf_counter()
            step(*given)
            seconds[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(each) for name, each in seconds.items()}


def peak_of(step: Step, given: tuple[Tensor, Tensor], held: Sequence[Tensor]) -> int:
    """Bytes of tensors alive at once in one call, ``held`` among them."""
    return measure_peak(lambda: step(*given), held).peak_bytes


def main() -> None:
    """Both cells, both questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("rounds", 50), ("rows", 64), ("width", 64), ("calls", 30)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    given = torch.randn(asked.rows, asked.width), torch.tensor(asked.rounds)
    with tempfile.TemporaryDirectory() as folder:
        for cell in (Perceptron(asked.width), Pointwise(asked.width)):
            for train in (False, True):
                steps = steps_of(cell, Path(folder), train)
                times = medians(steps, given, asked.calls)
                held = [*cell.parameters(), *given]
                peaks = [peak_of(step, given, held) for step in steps.values()]
                pairs = zip(times.items(), peaks, strict=True)
                told = ", ".join(
                    f"{name} {ms:.2f} ms {peak / 2**20:.2f} MiB" for (name, ms), peak in pairs
                )
                what = "training step" if train else "result"
                print(f"{type(cell).__name__:10} {what:13} {told}", flush=True)


if __name__ == "__main__":
    main()
