"""Device code is compiled in other processes, under the keys that launches ask for."""

import importlib
import os
import selectors
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_kernels as make
from test_triton_compile import dtypes_of
from test_triton_sizes import SIZED, pattern
from triton_run import rendered

from fake_driver import Driver, Kernel
from treadle.loop.program import Buffer, BufferKind
from treadle.runtime.kernels import device_code, prepared_launch, triton_ahead, triton_launch
from treadle.runtime.kernels.device_code import DeviceCode
from treadle.runtime.kernels.triton_ahead import CompileJob, compile_ahead
from treadle.runtime.kernels.triton_launch import TritonLauncher
from treadle.runtime.store.artifact import step_at
from treadle.runtime.store.cache import _read

pytest.importorskip("triton")
TARGET = ("cuda", 90, 32)
KERNELS = {
    "many": [
        make.softmax(64, 1000),
        make.adamw(768, "0"),
        make.adamw(2304 * 768, "1"),
        make.column_sums(16384, 768),  # two stages
        make.layer_norm(16384, 768, torch.bfloat16),
    ],
    "not a multiple of 16": [make.adamw(1003), make.transpose(100, 77)],
}


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Triton's cache, of a process that sees an H100, where few functions are worth workers."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    folder = tmp_path / "kept"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(triton_ahead, "_FUNCTIONS_PER_WORKER", 1)
    seen = SimpleNamespace(
        get_current_target=lambda: GPUTarget(*TARGET),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", seen)
    return folder


def programs(kernels):
    """The source of ``kernels``, and its launches."""
    buffers = {
        name: Buffer(name, dtype, (1,), (1,), BufferKind.TEMPORARY)
        for kernel in kernels
        for name, dtype in dtypes_of(kernel).items()
    }
    source, launches, _ = rendered(kernels, buffers)
    return source, launches


def entries(folder):
    """What Triton has compiled for a GPU."""
    return {path.parent.name for path in folder.glob("*/*.cubin")}


def launched(function, launch):
    """Compiles what a launch on aligned tensors runs, as the launch does."""
    sizes = triton_launch._Sizes.of(function.entry, launch.sizes)
    for stage in function.entry["stages"]:
        if function.entry["table"]:
            types = (torch.int64, sizes.kind, torch.int32)
            numbers, constants = sizes.dims, {"ALIGN": 16, "UNIT": sizes.unit}
        else:
            types = tuple(getattr(torch, name) for name in function.entry["types"])
            numbers, constants = launch.sizes[0], {}
        tensors = [torch.empty(64, dtype=dtype) for dtype in types]
        options = prepared_launch.options_of(stage)
        stage["jit"].run(*tensors, *numbers, grid=(1,), warmup=True, **constants, **options)


class Recorded(subprocess.Popen):
    """Keeps the processes that were started."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        started.append(self)


started = []


@pytest.fixture
def recorded(monkeypatch):
    started.clear()
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return started


@pytest.mark.parametrize("name", KERNELS)
def test_a_launch_finds_what_a_worker_compiled(name, kept, tmp_path):
    source, launches = programs(KERNELS[name])
    functions = TritonLauncher(tmp_path / "modules").load([source], launches).device
    compiled = entries(kept)
    assert len(compiled) >= len(functions)
    for launch in launches:
        launched(functions[launch.function], launch)
    assert entries(kept) == compiled


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_worker_compiled_is_launched_without_triton(name, kept, tmp_path, monkeypatch):
    source, launches = programs(KERNELS[name])
    cuda = Driver(str(tmp_path))
    functions = TritonLauncher(tmp_path / "modules", cuda.runner).load([source], launches).device
    loaded = []

    def load_binary(name, binary, shared, device):
        assert binary.startswith(b"\x7fELF")
        code = next(each for each in codes if each.binary == binary)
        loaded.append(Kernel([], code.signature))
        return 0, loaded[-1].function, 32, 0, 1024

    payloads = [_read(path) or b"" for path in (tmp_path / "modules").glob("??/*")]
    codes = [DeviceCode.parse(payload) for payload in payloads if b"ELF" in payload]
    assert len(codes) >= len(functions)
    active = importlib.import_module("triton.runtime.driver").driver.active
    active.utils = SimpleNamespace(load_binary=load_binary)
    monkeypatch.setattr(device_code, "_kernels", {})
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", None)
    for launch in launches:
        entry = functions[launch.function].entry
        kinds = [torch.float32] if entry["table"] else [getattr(torch, t) for t in entry["types"]]
        rows = [[torch.empty(64, dtype=kind) for kind in kinds] for _ in launch.sizes]
        functions[launch.function](rows, launch.sizes)()
    assert len(loaded) == len(codes)


def test_of_sizes_that_calls_say_both_classes_are_compiled(kept, tmp_path):
    kernels, buffers = pattern(SIZED["adamw"])
    source, (launch,), _ = rendered(kernels, buffers)
    functions = TritonLauncher(tmp_path / "modules").load([source], [launch]).device
    compiled = entries(kept)
    assert len(compiled) == 2
    for size in (1024, 4099):
        launched(functions[launch.function], step_at(launch, {"n": size}))
    assert entries(kept) == compiled


def test_another_process_with_the_same_caches_starts_no_worker(kept, tmp_path, monkeypatch):
    source, launches = programs([make.softmax(64, 1000), make.transpose(100, 77)])
    TritonLauncher(tmp_path / "modules").load([source], launches)
    asked = []
    monkeypatch.setattr(
        triton_launch, "compile_ahead", lambda jobs, target: asked.append(jobs) or []
    )
    TritonLauncher(tmp_path / "modules").load([source], launches)
    assert not asked
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "emptied"))
    TritonLauncher(tmp_path / "modules").load([source], launches)
    assert len(asked) == 1


def jobs_of(tmp_path, monkeypatch, kernels):
    """The jobs of ``kernels``, of which none has run."""
    asked = []
    monkeypatch.setattr(
        triton_launch, "compile_ahead", lambda jobs, target: asked.extend(jobs) or []
    )
    source, launches = programs(kernels)
    TritonLauncher(tmp_path / "modules").load([source], launches)
    return asked


def test_a_worker_that_fails_at_one_function_goes_on_with_others(kept, tmp_path, monkeypatch):
    kernels = [make.softmax(64, 1000), make.transpose(100, 77), make.adamw(1003)]
    jobs = jobs_of(tmp_path, monkeypatch, kernels)
    failing = [replace(job, arguments=job.arguments[:-1]) for job in jobs[:1]]
    compiled = compile_ahead(failing * 4 + jobs, TARGET)
    assert {job.line for job, _ in compiled} == {job.line for job in jobs}
    assert len(entries(kept)) == len(jobs)


def test_workers_that_end_are_not_waited_for(kept, tmp_path, monkeypatch):
    jobs = jobs_of(tmp_path, monkeypatch, [make.softmax(64, 1000), make.transpose(100, 77)])
    monkeypatch.setattr(triton_ahead, "_WORKER", str(tmp_path / "nothing.py"))
    assert not compile_ahead(jobs, TARGET)


def test_no_worker_is_left_after_an_interrupt(kept, tmp_path, monkeypatch, recorded):
    jobs = jobs_of(tmp_path, monkeypatch, [make.softmax(64, 1000), make.transpose(100, 77)])

    def interrupted(selector, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(selectors.DefaultSelector, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_ahead(jobs, TARGET)
    assert len(recorded) == 2
    assert all(worker.poll() is not None for worker in recorded)


def test_a_program_that_is_no_python_is_not_started(kept, tmp_path, monkeypatch):
    jobs = jobs_of(tmp_path, monkeypatch, [make.softmax(64, 1000), make.transpose(100, 77)])
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not compile_ahead(jobs, TARGET)
    assert not entries(kept)


def test_workers_start_while_functions_are_generated(kept, tmp_path, monkeypatch, recorded):
    jobs = jobs_of(tmp_path, monkeypatch, [make.softmax(64, 1000), make.transpose(100, 77)])
    with triton_ahead.workers_ahead(2 * triton_ahead._OPERATIONS_PER_WORKER):
        assert len(recorded) == 2
        assert len(compile_ahead(jobs, TARGET)) == len(jobs)
        assert len(recorded) == 2
        again = compile_ahead(jobs, TARGET)
        assert len(again) == len(jobs), "those that have ended are not asked again"
        assert len(recorded) == 4
    assert all(worker.poll() is not None for worker in recorded)


def test_workers_that_nothing_was_asked_of_end(kept, recorded):
    def fails():
        with triton_ahead.workers_ahead(2 * triton_ahead._OPERATIONS_PER_WORKER):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert len(recorded) == 2
    assert all(worker.poll() is not None for worker in recorded)


def test_a_small_graph_starts_no_worker(kept, recorded):
    with triton_ahead.workers_ahead(2 * triton_ahead._OPERATIONS_PER_WORKER - 1):
        assert not recorded


@pytest.mark.parametrize(("count", "each"), [(1, 1), (7, 4)])
def test_what_one_worker_would_compile_is_left_to_its_launches(kept, monkeypatch, count, each):
    monkeypatch.setattr(triton_ahead, "_FUNCTIONS_PER_WORKER", each)
    monkeypatch.setattr(subprocess, "Popen", None)
    job = CompileJob("m", "/nowhere", "f", 0, ("float32",), {})
    assert not compile_ahead([job] * count, TARGET)
