"""Cross entropy and its gradient over long rows: milliseconds, and the share of the bandwidth.

::

    python benchmarks/long_rows.py [--rows 16384] [--classes 50257,32000,128256,151936]

The floor reads the logits once and writes their gradient once, both in bfloat16. Rows lie 8
elements apart at least, as products of treadle leave them.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import treadle

DEVICE = "cuda"


def gradient(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x.float(), labels), x)[0]


def milliseconds(step: treadle.Step, *batch: torch.Tensor) -> float:
    times: list[float] = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(*batch)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def copying(x: torch.Tensor) -> float:
    """Bytes a second of a plain copy."""
    step = treadle.compile(lambda x: x * 2, model=nn.Linear(1, 1, device=DEVICE), options=options())
    return 2 * x.nbytes / milliseconds(step, x) * 1e3


def options() -> treadle.Options:
    return treadle.Options(cache_dir=Path(tempfile.mkdtemp()), progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--classes", default="50257,32000,128256,151936")
    args = parser.parse_args()
    for classes in map(int, args.classes.split(",")):
        room = torch.randn(args.rows, -(-classes // 8) * 8, device=DEVICE, dtype=torch.bfloat16)
        x = room[:, :classes]
        labels = torch.randint(classes, (args.rows,), device=DEVICE)
        step = treadle.compile(gradient, model=nn.Linear(1, 1, device=DEVICE), options=options())
        taken, floor = milliseconds(step, x, labels), 2 * x.nbytes / copying(room) * 1e3
        print(f"{args.rows} x {classes}: {taken:.2f} ms, floor {floor:.2f}", flush=True)


if __name__ == "__main__":
    main()
