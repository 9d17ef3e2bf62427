"""``scan`` and ``map`` over many slices: the first call and training steps, beside Python's own
loop in eager.

::

    python benchmarks/scans.py [--slices 250,2000] [--rows 8] [--width 64] [--calls 10]

Each line is a function and a number of slices: seconds of the first call, in a cache of its own,
and the medians of calls made in turns, in ms.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan

import treadle

Step = Callable[[Tensor], Tensor]
Loss = Callable[["Cell", Tensor, bool], Tensor]


class Cell(nn.Module):
    """A recurrent cell, and a function of single slices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input, self.state = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, width) twice to the next state and a row of the result."""
        new = torch.tanh(self.state(h) + x)
        return new, new.sin()


def plain_scan(body: Callable[..., Any], h: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    """What ``scan`` means."""
    rows: list[Tensor] = []
    for x in xs:
        h, row = body(h, x)
        rows.append(row)
    return h, torch.stack(rows)


def scanned(cell: Cell, x: Tensor, eager: bool) -> Tensor:
    """The state after all slices, and the rows."""
    h, rows = (plain_scan if eager else scan)(cell, torch.zeros_like(x[0]), cell.input(x))
    return h.square().mean() + rows.square().mean()


def mapped(cell: Cell, x: Tensor, eager: bool) -> Tensor:
    """Each slice alone."""
    body = lambda row: torch.tanh(cell.state(row)).sin()  # noqa: E731
    xs = cell.input(x)
    rows = torch.stack([body(row) for row in xs]) if eager else map_over(body, xs)
    return rows.square().mean()


def training(cell: Cell, loss: Loss, eager: bool) -> Step:
    """A step of SGD on ``cell``."""
    optimizer = torch.optim.SGD(cell.parameters(), lr=1e-3)

    def train(x: Tensor) -> Tensor:
        value = loss(cell, x, eager)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if eager:
        return train
    options = treadle.Options(cache_dir=tempfile.mkdtemp())
    return treadle.compile(train, model=cell, optimizer=optimizer, options=options)


def main() -> None:
    """Both functions at each number of slices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", default="250,2000")
    for name, usual in (("rows", 8), ("width", 64), ("calls", 10)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args()
    training(Cell(asked.width), scanned, False)(torch.randn(3, asked.rows, asked.width))  # imports
    for loss in (scanned, mapped):
        for count in map(int, asked.slices.split(",")):
            cell, x = Cell(asked.width), torch.randn(count, asked.rows, asked.width)
            ours, eager = training(cell, loss, False), training(copy.deepcopy(cell), loss, True)
            begin = time.perf_counter()
            ours(x)
            first = time.perf_counter() - begin
            seconds: dict[Step, list[float]] = {ours: [], eager: []}
            for step in (ours, eager) * asked.calls:
                begin = time.perf_counter()
                step(x)
                seconds[step].append(time.perf_counter() - begin)
            medians = [statistics.median(each) * 1e3 for each in seconds.values()]
            words = f"first call {first:5.2f} s, step {medians[0]:8.2f} ms, eager {medians[1]:8.2f}"
            print(f"{loss.__name__:8} {count:6} slices: {words} ms", flush=True)


if __name__ == "__main__":
    main()
