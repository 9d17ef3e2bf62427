"""Whole steps of recurrent models, compiled and in eager, in one run.

::

    python benchmarks/recurrent.py [cpu | cuda]

A language model of one or two recurrent layers, Adam. Calls alternate; times are medians, and the
ratio is treadle's to eager's.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle

WORDS = 1000
SIZES = {"small": (50, 8, 64), "middle": (100, 20, 200), "wide": (35, 20, 650)}  # T, B, width
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "LSTM": lambda n: nn.LSTM(n, n),
    "LSTM, 2 layers, both ways, dropout": lambda n: nn.LSTM(
        n, n // 2, num_layers=2, bidirectional=True, dropout=0.2
    ),
    "LSTM, projected": lambda n: nn.LSTM(n, n, proj_size=n // 2),
    "GRU": lambda n: nn.GRU(n, n),
    "RNN": lambda n: nn.RNN(n, n),
}


class Model(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module], width: int) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, width), layer(width)
        self.head = nn.LazyLinear(WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


def made(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(ids: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def seconds(step: Callable[[Tensor], Any], ids: Tensor) -> float:
    start = time.perf_counter()
    step(ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(f"{torch.get_num_threads()} threads, {device}")
    print("| layer | size | eager ms | treadle ms | ratio | first call s |")
    print("|---|---|---|---|---|---|")
    for layer, make in LAYERS.items():
        for size, (length, rows, width) in SIZES.items():
            torch.manual_seed(0)
            ids = torch.randint(WORDS, (length + 1, rows), device=device)
            model = Model(make, width).to(device)
            model(ids)
            twin = copy.deepcopy(model)
            function, optimizer = made(model)
            step, (eager, _) = (
                treadle.compile(function, model=model, optimizer=optimizer),
                made(twin),
            )
            first = seconds(step, ids)
            pairs = [(seconds(eager, ids), seconds(step, ids)) for _ in range(12)][2:]
            theirs, ours = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
            cells = f"{theirs:.1f} | {ours:.1f} | {ours / theirs:.2f} | {first:.1f}"
            print(f"| {layer} | {size} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
