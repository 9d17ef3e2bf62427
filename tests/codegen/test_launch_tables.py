"""The bytes that the tables of a launch hold are known before there is code."""

import pytest
import torch

from codegen import triton_kernels as make
from codegen.test_triton_compile import dtypes_of
from codegen.triton_run import prepared, rendered
from treadle.loop.kernel import KernelKind, KernelPlan
from treadle.loop.nest import arguments_of
from treadle.loop.program import Buffer, BufferKind
from treadle.runtime.kernels.triton_launch import TritonLauncher, _blocks, _Sizes
from treadle.schedule.launches import _programs, table_bytes
from treadle.schedule.workers import PROGRAMS
from treadle.util.allocator import Allocator

pytest.importorskip("triton")

KERNELS = {
    "adamw": make.adamw(10_001),
    "adamw of one": make.adamw(1),
    "whole numbers": make.whole_numbers(5000),
    "softmax": make.softmax(203, 96),
    "layer norm": make.layer_norm(61, 768),
    "columns": make.every_reduction(4, 3000, KernelKind.COLUMNS),
    "rows": make.every_reduction(40, 300, KernelKind.ROWS),
    "embedding": make.embedding(100, 768, 50257),
    "transpose": make.transpose(100, 77),
}


def buffers_of(kernels):
    return {
        name: Buffer(name, dtype, (1,), (1,), BufferKind.TEMPORARY)
        for kernel in kernels
        for name, dtype in dtypes_of(kernel).items()
    }


@pytest.mark.parametrize("name", KERNELS)
def test_programs_of_a_kernel(name, tmp_path):
    source, (launch,), _ = rendered([KERNELS[name]], buffers_of([KERNELS[name]]))
    (function,) = TritonLauncher(tmp_path).load([source]).device.values()
    (stage,) = function.entry["stages"]
    (part,) = prepared(KERNELS[name])
    assert _programs(PROGRAMS.scheduled(part)) == stage["programs"](*launch.sizes[0])


@pytest.mark.parametrize("sizes", [(7, 7), (10_001, 333, 50_257), (4096,) * 5])
def test_bytes_of_a_launch_of_several(sizes, tmp_path):
    kernels = [make.adamw(size, f"_{at}") for at, size in enumerate(sizes)]
    buffers = buffers_of(kernels)
    source, (launch,), everything = rendered(kernels, buffers)
    (function,) = TritonLauncher(tmp_path).load([source]).device.values()
    (stage,) = function.entry["stages"]
    told = _Sizes.of(function.entry, launch.sizes)
    addresses = 8 * sum(len(arguments_of(kernel)) for kernel in kernels)
    held = [
        _blocks([stage["programs"](*size) for size in launch.sizes]).nbytes,
        torch.tensor(told.flat, dtype=told.kind).nbytes,
        addresses,
        addresses,
    ]
    ready = tuple(PROGRAMS.scheduled(part) for each in kernels for part in prepared(each))
    plan = KernelPlan(ready, everything, {}, 0, 0, (), ())
    assert table_bytes(plan, Allocator()) == 0
    allocator = Allocator(blocks=True, tables=True)
    assert 0 <= table_bytes(plan, allocator) - sum(map(allocator.taken, held)) <= 512
    assert table_bytes(KernelPlan(ready[:1], everything, {}, 0, 0, (), ()), allocator) == 0
