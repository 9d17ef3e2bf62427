"""Runs generated Triton modules under the interpreter, in a process of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forks import Forks
from treadle.codegen.triton.text import TritonPrinter
from treadle.loop.interpret import interpret_kernel
from treadle.loop.kernel import Kernel, KernelPlan
from treadle.loop.nest import live
from treadle.loop.program import Buffer, BufferKind
from treadle.runtime.store.artifact import Launch, Source
from treadle.schedule.launches import launches_of
from treadle.schedule.plan import noting_overlap
from treadle.schedule.workers import PROGRAMS, scratch_buffers

_SCRIPT = """
import pathlib, sys, torch
from treadle.runtime.store.artifact import Source
from treadle.runtime.kernels.triton_launch import TritonLauncher
folder = pathlib.Path(sys.argv[1])
for job in torch.load(folder / "jobs.pt"):
    source = Source("triton", job["text"], tuple(job["functions"]))
    functions = TritonLauncher(folder).load([source]).device
    for function, rows, sizes in job["launches"]:
        storages = [[job["tensors"][name] for name in row] for row in rows]
        functions[function](storages, sizes)()
    torch.save(job["tensors"], folder / job["result"])
"""


@dataclass(frozen=True)
class Case:
    """Kernels and the 1-D storages they start from."""

    name: str
    kernels: Sequence[Kernel]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Job:
    """Launches of a module, and the tensors that they run on, scratch among them."""

    source: Source
    launches: Sequence[Launch]
    tensors: Mapping[str, Tensor]


def buffers_of(tensors: Mapping[str, Tensor]) -> dict[str, Buffer]:
    return {
        name: Buffer(name, t.dtype, tuple(t.shape), t.stride(), BufferKind.TEMPORARY)
        for name, t in tensors.items()
    }


def rendered(
    kernels: Sequence[Kernel],
    buffers: Mapping[str, Buffer],
    offsets: Mapping[str, int] | None = None,
    *,
    contract: bool = True,
) -> tuple[Source, list[Launch], dict[str, Buffer]]:
    """The module of these kernels as a run, its launches, and the buffers with all scratch."""
    ready = [PROGRAMS.scheduled(part) for each in kernels for part in prepared(each)]
    ready = [noting_overlap(each, {**buffers}, offsets or {}) for each in ready]
    everything = {**buffers, **scratch_buffers(ready, PROGRAMS, device="")}
    plan = KernelPlan(tuple(ready), everything, offsets or {}, 0, 0, (), ())
    printer = TritonPrinter(everything, contract)
    launches = [printer.launch(each) for each in launches_of(plan)]
    (source,) = printer.sources()
    return source, launches, everything


def prepared(kernel: Kernel) -> tuple[Kernel, ...]:
    body = live(kernel.body)
    return PROGRAMS.prepared(replace(kernel, body=body)) if body else ()


def scratch_tensors(
    tensors: Mapping[str, Tensor], buffers: Mapping[str, Buffer]
) -> dict[str, Tensor]:
    """Room for what kernels add up in parts, filled with what nobody may read."""
    return {
        name: torch.full(each.shape, 77, dtype=each.dtype)
        for name, each in buffers.items()
        if name not in tensors
    }


def job_of(case: Case) -> Job:
    """The module of a case, and what it runs on."""
    source, launches, buffers = rendered(case.kernels, buffers_of(case.tensors))
    return Job(source, launches, {**case.tensors, **scratch_tensors(case.tensors, buffers)})


def results_of(jobs: Sequence[Job], folder: Path, interpreted: Forks) -> list[dict[str, Tensor]]:
    """Every job's tensors after the generated code."""
    given = [
        {
            "text": job.source.text,
            "functions": job.source.functions,
            "launches": [(x.function, x.buffers, x.sizes) for x in job.launches],
            "tensors": {name: t.clone() for name, t in job.tensors.items()},
            "result": f"result{i}.pt",
        }
        for i, job in enumerate(jobs)
    ]
    torch.save(given, folder / "jobs.pt")
    done = interpreted.run(_SCRIPT, str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"result{i}.pt") for i in range(len(jobs))]


def run_cases(cases: Sequence[Case], folder: Path, interpreted: Forks) -> None:
    """Every case's tensors after the generated code equal those after the interpreter."""
    compare(cases, results_of([job_of(case) for case in cases], folder, interpreted))


def comparable(tensor: Tensor) -> Tensor:
    """Numbers of float8 as those of float32, which they are exactly."""
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def compare(
    cases: Sequence[Case],
    results: Sequence[Mapping[str, Tensor]],
    *,
    rtol: float = 2e-5,
    atol: float = 2e-5,
) -> None:
    """What ran equals what the interpreter makes of the kernels."""
    for case, found in zip(cases, results, strict=True):
        expected = {name: t.clone() for name, t in case.tensors.items()}
        for kernel in case.kernels:
            interpret_kernel(kernel, expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(
                comparable(found[name]),
                comparable(tensor),
                rtol=rtol if tensor.dtype != torch.bfloat16 else 1e-2,
                atol=atol,
                equal_nan=True,
                msg=lambda text, c=case, n=name: f"{c.name}.{n}: {text}",
            )
