"""What functions of numbers take on a CPU, of float64 if not told otherwise, beside eager.

::

    OMP_NUM_THREADS=1 python benchmarks/doubles.py [--only NAME ...] [--dtype float32]

One kernel that reads 262,144 numbers, computes one function of each and writes them: nanoseconds of
the CPU for an element, the best of ten rounds in turns.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import treadle

NAMES = (
    *("exp", "expm1", "log", "log1p", "log2", "sigmoid", "tanh", "erf", "erfc", "sin", "cos"),
    *("sinh", "cosh", "asinh", "acosh", "atanh", "atan", "asin", "acos"),
)
COUNT = 1 << 18
ROUNDS = 10


def seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def inputs(name: str) -> Tensor:
    """Numbers for which the function is one."""
    x = torch.randn(COUNT, dtype=torch.float64)
    match name:
        case "acosh":
            return 1 + x.abs()
        case "log" | "log2" | "log1p":
            return x.abs()
        case "asin" | "acos" | "atanh":
            return x.tanh()
        case _:
            return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--dtype", default="float64")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print("| function | treadle, ns | eager, ns |\n|---|---|---|")
    for name in options.only:
        function, x = getattr(torch, name), inputs(name).to(dtype)
        step = treadle.compile(lambda x, function=function: function(x), model=nn.Linear(1, 1))
        with torch.no_grad():
            step(x)
            best = [
                min(seconds(partial(run, x)) for _ in range(ROUNDS)) for run in (step, function)
            ]
        ours, eager = (1e9 * each / COUNT for each in best)
        print(f"| {name} | {ours:.1f} | {eager:.1f} |", flush=True)


if __name__ == "__main__":
    main()
