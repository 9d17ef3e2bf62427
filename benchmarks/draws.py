"""Drawing Bernoulli numbers on a CPU: generated code against PyTorch, same numbers.

::

    python benchmarks/draws.py [--elements 1000000] [--repeats 30]

Interleaved, medians; the generator's state is compared afterwards.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from treadle.codegen.cpp.rng import DRAWS
from treadle.runtime.kernels.build import build
from treadle.runtime.kernels.rng import FUNCTION, drawer
from treadle.runtime.store.cache import Cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    machine = build(Cache(Path(tempfile.mkdtemp())), device="cpu")
    ours = drawer(machine.load((DRAWS,)).native[FUNCTION])
    out = torch.empty(options.elements)
    times: dict[str, list[float]] = {"PyTorch": [], "generated": []}
    for number in range(options.repeats):
        torch.manual_seed(number)
        start = time.perf_counter()
        out.bernoulli_(0.9)
        times["PyTorch"].append(time.perf_counter() - start)
        kept, state = out.clone(), torch.get_rng_state()
        torch.manual_seed(number)
        start = time.perf_counter()
        ours(out, 0.9, out=out)
        times["generated"].append(time.perf_counter() - start)
        assert torch.equal(out, kept)
        assert torch.equal(torch.get_rng_state(), state)
    for name, each in times.items():
        print(f"{name:10} {1e9 * statistics.median(each) / options.elements:6.2f} ns an element")


if __name__ == "__main__":
    main()
