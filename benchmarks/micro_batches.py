"""Peaks and times of a step that accumulates gradients over micro-batches, over eager's.

::

    python benchmarks/micro_batches.py [--device cuda] [--repeats 20]

Peaks are of all tensor memory in a step; times medians of steps in turns, in one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treadle
from treadle.runtime.meter import measure_peak

SIZES = ((8, 256, 4, 1), (256, 256, 4, 1), (2048, 256, 4, 1), (1024, 256, 8, 4), (64, 64, 8, 4))
"""Rows of a micro-batch, width, micro-batches, hidden layers."""


def training(
    width: int, parts: int, layers: int, device: str
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor, Tensor], Tensor]]:
    torch.manual_seed(0)
    hidden = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(part), labels) / parts
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return model, optimizer, step


def compare(size: tuple[int, int, int, int], device: str, repeats: int) -> tuple[float, ...]:
    """Eager's peak and treadle's in MB, eager's milliseconds and treadle's."""
    rows, width, parts, layers = size
    x = torch.randn(rows * parts, width, device=device)
    y = torch.randint(3, (rows * parts,), device=device)
    model, optimizer, eager = training(width, parts, layers, device)
    twin, other, step = training(width, parts, layers, device)
    ours = treadle.compile(step, model=twin, optimizer=other)
    for _ in range(2):
        torch.testing.assert_close(ours(x, y), eager(x, y))
    held: list[Any] = [x, y, *model.parameters()]
    held += [each for state in optimizer.state.values() for each in state.values()]
    peaks = measure_peak(lambda: eager(x, y), held).peak_bytes, ours.measure(x, y).peak_bytes
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(repeats):
        for run, found in zip((eager, ours), taken, strict=True):
            start = time.perf_counter()
            run(x, y).item()
            found.append(1e3 * (time.perf_counter() - start))
    return *(each / 1e6 for each in peaks), *map(statistics.median, taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    print("| micro-batches | peak, MB | ours, MB | x | ms | ours, ms | x |")
    print("|---|---|---|---|---|---|---|")
    for size in SIZES:
        rows, width, parts, layers = size
        eager_mb, mb, eager_ms, ms = compare(size, given.device, given.repeats)
        print(
            f"| {parts} of {rows} x {width}, {layers} hidden | {eager_mb:.2f} | {mb:.2f} "
            f"| {mb / eager_mb:.3f} | {eager_ms:.2f} | {ms:.2f} | {ms / eager_ms:.2f} |"
        )


if __name__ == "__main__":
    main()
