"""What the loss over a large vocabulary in chunks of rows costs, and what memory it saves.

    python benchmarks/chunked_loss.py
    python benchmarks/chunked_loss.py --device cuda --vocabulary 50257 --width 768 --rows 16384 \\
        --bfloat16 --chunks 1 2 4 8 16 32

One step: rows of ``width`` through a linear layer and a norm, the product over the vocabulary,
cross-entropy, backward, AdamW. ``chosen`` is what the compiler does by itself. The peak is what the
plan promises.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.options import from_environment


class Head(nn.Module):
    """The end of a language model."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layer(x)))


def make_step(given: argparse.Namespace) -> tuple[Callable[..., Any], Head, Any]:
    """The step, its model and its optimizer, from one seed."""
    torch.manual_seed(0)
    model = Head(given.width, given.vocabulary).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def milliseconds(step: Callable[..., Any], batch: tuple[torch.Tensor, ...], repeats: int) -> float:
    """The median of ``repeats`` steps, after three that warm up."""
    wait = torch.cuda.synchronize if batch[0].is_cuda else lambda: None
    for _ in range(3):
        step(*batch)
    times: list[float] = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        step(*batch)
        wait()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def measure(given: argparse.Namespace, chunks: int | None) -> str:
    """A line: milliseconds, peak, and the loss of the first step. ``None``: as chosen."""
    step, model, optimizer = make_step(given)
    x = torch.randn(given.rows, given.width, device=given.device)
    labels = torch.randint(given.vocabulary, (given.rows,), device=given.device)
    itemsize = 2 if given.bfloat16 else 4
    total = given.rows * given.vocabulary * itemsize
    wanted = {None: None, 1: 0}.get(chunks, -(-given.rows // (chunks or 1)) * (total // given.rows))
    options = replace(from_environment(), chunk_logits=wanted)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    loss = compiled(x, labels).item()
    took = milliseconds(compiled, (x, labels), given.repeats)
    peak = compiled.compiled.artifact.peak_bytes / 2**20
    name = "chosen" if chunks is None else str(chunks)
    return f"{name:>7}  {took:9.2f} ms  {peak:10.1f} MiB  loss {loss:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--bfloat16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--eager", action="store_true", help="eager as well")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    print(" chunks       step            peak")
    for chunks in (None, *given.chunks):
        print(measure(given, chunks), flush=True)
        gc.collect()  # the model and the state of the last one
    if given.eager:
        step, _, _ = make_step(given)
        x = torch.randn(given.rows, given.width, device=given.device)
        labels = torch.randint(given.vocabulary, (given.rows,), device=given.device)
        print(f"  eager  {milliseconds(step, (x, labels), given.repeats):9.2f} ms")


if __name__ == "__main__":
    main()
