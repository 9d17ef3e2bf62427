"""Generated Triton is compiled for a GPU that is not there, and must keep all in registers."""

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton_kernels as make
from test_triton_sizes import SIZED, pattern
from triton_run import rendered

from treadle.loop.expr import Apply, Load
from treadle.loop.kernel import Definition, Kernel, KernelKind
from treadle.loop.program import Buffer, BufferKind
from treadle.loop.traverse import loads
from treadle.runtime.kernels import triton_worker
from treadle.runtime.kernels.triton_launch import TritonLauncher
from treadle.schedule.programs import choose

triton = pytest.importorskip("triton")
NAMES = {
    "float16": "fp16",
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "bool": "i1",
    "int64": "i64",
    "int32": "i32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


def dtypes_of(kernel: Kernel) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for item in kernel.body:
        if hasattr(item, "expr"):
            found |= {load.buffer: load.dtype for load in loads(item.expr)}
        else:
            found.setdefault(item.buffer, item.value.dtype)
    return found


def compile_kernels(
    kernels: list[Kernel], folder: Path, *, contract: bool = True
) -> list[dict[str, Any]]:
    """Texts, shared memory, registers and spilled bytes of each function, on capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", 90, 32)
    gpu = triton_worker._Driver(target)  # whom kernels ask what there is
    buffers = {
        name: Buffer(name, dtype, (1,), (1,), BufferKind.TEMPORARY)
        for kernel in kernels
        for name, dtype in dtypes_of(kernel).items()
    }
    source, _, _ = rendered(kernels, buffers, contract=contract)
    found = []
    for name, function in TritonLauncher(folder).load([source]).device.items():
        entry = function.entry
        for stage in entry["stages"]:
            signature, constants = _signature(entry, stage["jit"].arg_names)
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, kind in enumerate(signature.values())
                if kind != "constexpr"
            }
            ast = ASTSource(stage["jit"], signature, constants, aligned)
            options = {"num_warps": stage["warps"], "enable_fp_fusion": False}
            with mock.patch.object(driver, "_active", gpu):
                built = triton.compile(ast, target=target, options=options)
            texts = {"text": source.text, "ptx": built.asm["ptx"]}
            texts["shared"] = built.metadata.shared
            found.append({"name": name, **texts, **usage(built, folder)})
    return found


def _signature(entry, names):
    if entry["table"]:
        kinds = dict(zip(names, ("*i64", "*i32", "*i32", "constexpr", "constexpr"), strict=True))
        return kinds, {(3,): 16, (4,): 16}
    kinds = [f"*{NAMES[kind]}" for kind in entry["types"]] + ["i32"] * len(entry["sizes"])
    return dict(zip(names, kinds, strict=True)), {}


def usage(built, folder: Path) -> dict[str, int]:
    from triton.backends.nvidia.compiler import get_ptxas

    path = folder / "kernel.ptx"
    path.write_text(built.asm["ptx"])
    arch = re.search(r"\.target (sm_\w+)", built.asm["ptx"])[1]
    command = [get_ptxas(90).path, "-v", f"--gpu-name={arch}", str(path), "-o", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores", text)
    return {"registers": int(registers[1]), "spills": int(spills[1])}


CASES = {
    "softmax": [make.softmax(64, 1000)],
    "softmax, vocabulary": [make.softmax(64, 50257)],
    "softmax, vocabulary, many rows": [make.softmax(2048, 50257)],
    "softmax, whole vectors, many rows": [make.softmax(2048, 128256)],
    "softmax, longest row in registers": [make.softmax(64, 16384)],
    "layer norm": [make.layer_norm(16384, 768, torch.bfloat16)],
    "layer norm, short rows": [make.layer_norm(1000, 60)],
    "adamw": [make.adamw(50257 * 768)],
    "adamw, many": [make.adamw(768, "0"), make.adamw(2304 * 768, "1")],
    "column sums": [make.column_sums(16384, 768)],
    "norm backward": [make.norm_backward(16384, 1024, torch.bfloat16)],
    "norm backward, wide rows": [make.norm_backward(32768, 2048)],
    "norm backward, ragged": [make.norm_backward(16411, 768)],
    "norm backward, heads": [make.norm_backward(65536, 128)],
    "every reduction": [make.every_reduction(300, 30000, KernelKind.ROWS)],
    "every reduction, columns": [make.every_reduction(3000, 300, KernelKind.COLUMNS)],
    "embedding": [make.embedding(100, 768, 50257)],
    "transpose": [make.transpose(100, 77)],
    "e4m3": [make.float8(1024, 4096, torch.float8_e4m3fn)],
    "one e4m3": [make.float8(1, 1, torch.float8_e4m3fn)],
    "one e5m2": [make.float8(1, 1, torch.float8_e5m2)],
    "e5m2": [make.float8(1024, 4096, torch.float8_e5m2)],
    "total norm": [make.total_norm(10**7)],
}


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper_without_spills(name, tmp_path):
    for each in compile_kernels(CASES[name], tmp_path):
        assert each["spills"] == 0, each
        if not name.startswith("every"):
            assert each["registers"] <= 128, each


@pytest.mark.parametrize("name", ["e4m3", "one e4m3", "e5m2", "one e5m2"])
def test_float8_has_instructions_of_its_own(name, tmp_path):
    (found,) = compile_kernels(CASES[name], tmp_path)
    assert f"cvt.rn.satfinite.{name[-4:]}x2.f32" in found["ptx"]


def test_loops_down_columns_load_tiles_ahead(tmp_path):
    """Copies into shared memory that nothing waits for; not where many tiles leave no room."""
    sums, every = make.column_sums(16384, 768), make.every_reduction(3000, 300, KernelKind.COLUMNS)
    few, *_ = compile_kernels([sums], tmp_path)
    assert re.search(r"num_stages=3", few["text"])
    assert "cp.async.wait_group" in few["ptx"]
    assert 0 < few["shared"] <= 48 << 10
    tall = replace(every, body=tuple(map(_wide, every.body)))
    assert choose(every).stages == 3
    assert choose(tall).stages == 0


def _wide(item):
    """The item with what it reads ten times over, ever further on."""
    if not isinstance(item, Definition) or not isinstance(item.expr, Load):
        return item
    load = item.expr
    further = [replace(load, index=load.index + n) for n in range(10)]
    total = functools.reduce(lambda a, b: Apply("add", (a, b), load.dtype), further)
    return replace(item, expr=total)


@pytest.mark.parametrize("name", SIZED)
def test_one_text_of_all_sizes_compiles_without_spills(name, tmp_path):
    kernels, _ = pattern(SIZED[name])
    for each in compile_kernels(kernels, tmp_path):
        assert each["spills"] == 0, each


def test_four_floats_at_once_of_a_size_that_is_a_multiple_of_16(tmp_path):
    kernels, _ = pattern(SIZED["adamw"])
    (built,) = compile_kernels(kernels, tmp_path)
    assert re.search(r"ld\.global\S*\.v4\.b32", built["ptx"])


@pytest.mark.parametrize("name", ["adamw", "adamw, many"])
def test_loads_four_floats_at_once(name, tmp_path):
    (built,) = compile_kernels(CASES[name], tmp_path)
    assert re.search(r"ld\.global\S*\.v4\.b32", built["ptx"])


def of_three(formula, dtype=torch.float32):
    """A kernel that stores what ``formula(k, a, b, c)`` gives, with ``k.define`` for names."""
    k = make.Build(1, 4096)
    for at, value in enumerate(formula(k, *(make.load(n, k.cols, dtype) for n in "abc"))):
        k.store(f"out{at}", value, k.cols)
    return k.kernel("of_three")


def used_again(k, a, b, c):
    product = k.define(make.fn("mul", a, b))
    return k.define(make.fn("sub", product, c)), k.define(make.fn("neg", product))


def itself(k, a, b, c):
    product = k.define(make.fn("mul", a, b))
    return [k.define(make.fn("sub", product, product))]


def with_a_name(k, a, b, c):
    product = k.define(make.fn("mul", a, b))
    return k.define(make.fn("sub", product, c)), k.define(make.fn("sub", c, product))


SUMS = {
    "sum": (lambda k, a, b, c: [k.define(make.fn("add", make.fn("mul", a, b), c))], 1),
    "difference": (lambda k, a, b, c: [k.define(make.fn("sub", make.fn("mul", a, b), c))], 1),
    "taken away": (lambda k, a, b, c: [k.define(make.fn("sub", c, make.fn("mul", a, b)))], 1),
    "two products": (
        lambda k, a, b, c: [k.define(make.fn("add", make.fn("mul", a, b), make.fn("mul", b, c)))],
        1,
    ),
    "with a name": (with_a_name, 0),
    "used again": (used_again, 0),
    "less itself": (itself, 0),
}
"""By name a formula and how many sums of it take in a product."""


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(
    ("dtype", "contract"),
    [(torch.float32, True), (torch.float64, True), (torch.bfloat16, True), (torch.float32, False)],
    ids=str,
)
def test_only_what_is_written_rounds_once(name, dtype, contract, tmp_path):
    formula, sums = SUMS[name]
    (found,) = compile_kernels([of_three(formula, dtype)], tmp_path, contract=contract)
    want = sums if contract and dtype is not torch.bfloat16 else 0
    assert found["text"].count("tl.fma(") == want
    assert ("fma.rn" in found["ptx"]) == (want > 0)
