"""Cross entropy and its gradient over long rows: milliseconds, and the share of the bandwidth.

::

    python benchmarks/long_rows.py [--rows 16384] [--classes 50257,32000,128256,151936]
        [--variants]

The floor reads the logits once and writes their gradient once, both in bfloat16. Rows lie 8
elements apart at least, as products of treadle leave them. ``--variants``: other loops beside the
chosen one: passes over a row, elements of a tile, warps, tiles loaded ahead, tiles between two
scalings of a running sum.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.loop.kernel import Kernel, KernelSchedule, LoopForm
from treadle.schedule import workers
from treadle.schedule.programs import choose

DEVICE = "cuda"
CALLS = 5  # between two events: the host is ahead of the GPU then
VARIANTS = (
    (3, 2048, 4, 0, 1),
    (2, 2048, 4, 0, 1),
    (2, 1024, 4, 0, 1),
    (2, 1024, 4, 4, 1),
    (2, 2048, 8, 0, 1),
    (2, 4096, 16, 0, 1),
    (2, 4096, 16, 0, 2),
    (2, 4096, 16, 4, 2),
    (2, 2048, 16, 0, 4),
)


def gradient(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x.float(), labels), x)[0]


def milliseconds(step: treadle.Step, *batch: torch.Tensor) -> float:
    times: list[float] = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            step(*batch)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times[2:])


def copying(x: torch.Tensor) -> float:
    """Bytes a second of a plain copy."""
    step = treadle.compile(lambda x: x * 2, model=nn.Linear(1, 1, device=DEVICE), options=options())
    return 2 * x.nbytes / milliseconds(step, x) * 1e3


def as_a_variant(variant: tuple[int, int, int, int, int]) -> workers.Workers:
    """Programs that loop over rows like this."""
    passes, lanes, count, stages, unrolled = variant

    def chosen(kernel: Kernel) -> KernelSchedule:
        how = choose(kernel)
        if how.form is not LoopForm.LOOPED:
            return how
        running = how.running if passes == 2 else ()
        how = replace(how, running=running, unrolled=unrolled)
        return replace(how, cols=lanes, warps=count, stages=stages)

    return replace(workers.PROGRAMS, choose=chosen)


def options() -> treadle.Options:
    return treadle.Options(cache_dir=Path(tempfile.mkdtemp()), progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--classes", default="50257,32000,128256,151936")
    parser.add_argument("--variants", action="store_true", help="other loops as well")
    args = parser.parse_args()
    for classes in map(int, args.classes.split(",")):
        room = torch.randn(args.rows, -(-classes // 8) * 8, device=DEVICE, dtype=torch.bfloat16)
        x = room[:, :classes]
        labels = torch.randint(classes, (args.rows,), device=DEVICE)
        step = treadle.compile(gradient, model=nn.Linear(1, 1, device=DEVICE), options=options())
        taken, floor = milliseconds(step, x, labels), 2 * x.nbytes / copying(room) * 1e3
        print(f"{args.rows} x {classes}: {taken:.2f} ms, floor {floor:.2f}", flush=True)
        for variant in VARIANTS if args.variants else ():
            with mock.patch.dict(workers.WORKERS, {"programs": as_a_variant(variant)}):
                step = treadle.compile(
                    gradient, model=nn.Linear(1, 1, device=DEVICE), options=options()
                )
                print(f"    {variant}: {milliseconds(step, x, labels):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
