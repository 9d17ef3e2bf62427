"""Peaks and times of a step that accumulates gradients over micro-batches, over eager's.

::

    python benchmarks/micro_batches.py [--device cuda] [--repeats 20]

Peaks are of all tensor memory in a step; times medians of steps in turns, in one process. The
second table is of a model with a large vocabulary that treadle splits (``micro_batch=``), in its
smallest plan: what that promises, and what was measured. Eager's loop has as many rows at a time.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
    return *(each / 1e6 for each in peaks), *in_turns((eager, ours), (x, y), repeats)


class Vocabulary(nn.Module):
    """An embedding, two layers, and the embedding again."""

    def __init__(self, words: int = 32768, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.hidden = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.hidden(self.words(x)), self.words.weight)


def split(rows: int, device: str, repeats: int) -> tuple[float, ...]:
    """Of eight rows, so many at a time: MB of eager's loop, promised and measured; and times."""
    torch.manual_seed(0)
    ids = torch.randint(32768, (8, 64), device=device)
    models = [Vocabulary().to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]

    def loss_of(model: nn.Module, part: Tensor) -> Tensor:
        return F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())

    def eager(ids: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        for part in ids.split(rows):
            loss = loss_of(models[0], part) * (len(part) / len(ids))
            loss.backward()
            total = total + loss.detach()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return total

    def whole(ids: Tensor) -> Tensor:
        loss = loss_of(models[1], ids)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        return loss.detach()

    ours = treadle.compile(
        whole, model=models[1], optimizer=optimizers[1], micro_batch=rows, memory=0.0
    )
    for _ in range(2):
        torch.testing.assert_close(ours(ids), eager(ids), rtol=1e-4, atol=1e-5)
    held: list[Any] = [ids, *models[0].parameters()]
    held += [each for state in optimizers[0].state.values() for each in state.values()]
    peaks = (
        measure_peak(lambda: eager(ids), held).peak_bytes,
        ours.summary().peak_predicted_bytes,
        ours.measure(ids).peak_bytes,
    )
    return *(each / 1e6 for each in peaks), *in_turns((eager, ours), (ids,), repeats)


def in_turns(
    steps: Sequence[Callable[..., Tensor]], batch: Sequence[Tensor], repeats: int
) -> Iterator[float]:
    """The median of the milliseconds of each."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for run, found in zip(steps, taken, strict=True):
            start = time.perf_counter()
            run(*batch).item()
            found.append(1e3 * (time.perf_counter() - start))
    return map(statistics.median, taken)


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
    print("\n| rows at a time, of 8 | eager, MB | promised, MB | ours, MB | ms | ours, ms |")
    print("|---|---|---|---|---|---|")
    for rows in (8, 4, 2, 1):
        eager_mb, promised, mb, eager_ms, ms = split(rows, given.device, given.repeats)
        print(
            f"| {rows} | {eager_mb:.2f} | {promised:.2f} | {mb:.2f} | {eager_ms:.1f} | {ms:.1f} |"
        )


if __name__ == "__main__":
    main()
