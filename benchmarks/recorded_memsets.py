"""What memsets between the kernels of a recording cost, and kernels instead of them.

::

    python benchmarks/recorded_memsets.py [--rows 16384] [--width 1024] [--count 100]

A recording of a cast and a product, ``count`` times: cuBLAS zeroes four bytes before each product
of that size on an H200. Milliseconds of a replay, as recorded by CUDA and as treadle leaves it.
"""

import argparse
import statistics
import time
from unittest import mock

import torch
from torch import Tensor

from treadle.runtime.replay import cuda_graph
from treadle.runtime.replay.cuda_graph import CudaRecorder, memsets_as_kernels


def milliseconds(rows: int, width: int, count: int) -> float:
    x, out = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(width, width, device="cuda")
    cast = weight.bfloat16()

    def launches() -> dict[str, Tensor]:
        for _ in range(count):
            cast.copy_(weight)
            torch.mm(x, cast.t(), out=out)
        return {}

    launches()
    recorder = CudaRecorder(x.device, lambda: None)
    recorder.start()
    _, replay = recorder.record(launches)
    times: list[float] = []
    for _ in range(18):
        torch.cuda.synchronize()
        start = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--count", type=int, default=100)
    given = vars(parser.parse_args())
    with mock.patch.object(cuda_graph, "memsets_as_kernels", return_value=0):
        print(f"as recorded  {milliseconds(**given):8.3f} ms", flush=True)
    replaced: list[int] = []

    def counted(graph: int, driver: object) -> int:
        replaced.append(memsets_as_kernels(graph, driver))
        return replaced[-1]

    with mock.patch.object(cuda_graph, "memsets_as_kernels", counted):
        print(f"kernels      {milliseconds(**given):8.3f} ms, {sum(replaced)} memsets replaced")


if __name__ == "__main__":
    main()
