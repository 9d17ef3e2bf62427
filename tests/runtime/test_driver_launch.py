"""Kernels of Triton's that follow each other are launched by one call of C, as Triton launches
them; here on a driver that writes down what it is asked."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from fake_driver import Bound, Driver, Jit, Kernel
from treadle.runtime.execute.actions import Actions
from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build
from treadle.runtime.kernels.driver_launch import (
    KernelParameter,
    is_plain,
    metadata_of,
    parameters_of,
)
from treadle.runtime.kernels.loader import Functions
from treadle.runtime.kernels.prepared_launch import FunctionCode
from treadle.runtime.kernels.triton_launch import DeviceLaunch
from treadle.runtime.replay.tables import Tables
from treadle.runtime.store.artifact import Artifact, BufferSpec, Launch, Source, Storage
from treadle.util.errors import RuntimeFailure


@pytest.fixture
def cuda(tmp_path, monkeypatch) -> Driver:
    found = Driver(str(tmp_path))
    active = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda device: found.stream + device
    )
    monkeypatch.setattr(driver, "_active", active)
    return found


ADD = ("*fp32", "*fp32", "i32")


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        (("*fp32", "*bf16", "i32", "i64"), [(0, 8), (1, 8), (2, 4), (3, 8), (None, 8), (None, 8)]),
        (("*i64", "constexpr", "i32"), [(0, 8), (2, 4), (None, 8), (None, 8)]),
        (("*i64", "*i32", "*i32", "constexpr"), [(0, 8), (1, 8), (2, 8), (None, 8), (None, 8)]),
        ((), [(None, 8), (None, 8)]),
    ],
)
def test_parameters_are_arguments_without_constants_and_then_scratch(signature, expected):
    assert parameters_of(signature) == tuple(KernelParameter(*each) for each in expected)


@pytest.mark.parametrize(
    "kind", ["fp32", "u64", "i1", "nvTmaDesc", "tensordesc<fp32[8]>", ("i32",)]
)
def test_other_types_are_left_to_triton(kind):
    assert parameters_of(("*fp32", kind)) is None


@triton.jit
def _scaled(x, y, n, wide, one, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n) * one + wide, at < n)


def test_compiled_code_takes_these_parameters(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", seen)
    tensors = [MockTensor(torch.float32)] * 2
    kernel = _scaled.warmup(*tensors, 1000, 2**40, 1, BLOCK=64, grid=(1,), enable_fp_fusion=False)
    signature = list(kernel.src.signature.values())
    assert signature == ["*fp32", "*fp32", "i32", "i64", "constexpr", "constexpr"]
    head = kernel.asm["ptx"].partition(".entry")[2].partition(")")[0]
    widths = [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head)]
    found = parameters_of(signature)
    assert found is not None
    assert widths == [parameter.nbytes for parameter in found]
    assert is_plain(metadata_of(kernel))


@pytest.mark.parametrize(
    "needed",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"shared": 300_000},
    ],
)
def test_a_kernel_that_needs_more_is_always_launched_by_triton(cuda, needed):
    jit = Jit(*ADD, **needed)
    bound = Bound(cuda, jit.entry(), [(32,)])
    table = cuda.runner.together([bound.launch])
    for _ in range(3):
        table()
    assert jit.taken() == 3
    assert len(jit.kernels) == 1
    assert not cuda.taken()


def test_a_kernel_that_takes_something_else_than_its_signature_says_as_well(cuda):
    jit = Jit(*ADD)
    bound = Bound(cuda, jit.entry(), [(32,)])
    table = cuda.runner.together([bound.launch])
    own = Kernel.__init__

    def with_one_more(self, *args, **kwargs):
        own(self, *args, **kwargs)
        self.words = (ctypes.c_uint64 * 9)(self.words[0] + 1, *self.words[1:], 8)
        self.function = ctypes.addressof(self.words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__init__", with_one_more)
        table()
    table()
    assert jit.taken() == 2
    assert not cuda.taken()


def test_first_triton_launches_and_then_the_driver(cuda):
    first, second = Jit(*ADD, num_warps=8, shared=512), Jit("*fp32", "*fp32", "i64")
    bounds = [
        Bound(cuda, first.entry(), [(32,)]),
        Bound(cuda, second.entry(), [(2**40,)]),
    ]
    table = cuda.runner.together([bound.launch for bound in bounds])
    table()
    assert (first.taken(), second.taken()) == (1, 1)
    for stream in (7, 0):
        cuda.stream = stream
        table()
        assert (first.taken(), second.taken()) == (0, 0)
        one, other = first.kernels[0].function, second.kernels[0].function
        grid = 2**36 % 2**32
        assert cuda.taken() == [
            one, 2, 1, 256, 512, stream + 3, *bounds[0].addresses, 32, 0, 0, 1,
            other, grid, 1, 128, 0, stream + 3, *bounds[1].addresses, 2**40, 0, 0, 1,
        ]  # fmt: skip


def test_buffers_are_where_they_are_bound_at_the_time(cuda):
    jit = Jit(*ADD)
    bound = Bound(cuda, jit.entry(), [(32,)])
    table = cuda.runner.together([bound.launch])
    table()
    bound.bind("0_1")
    table()
    assert jit.taken() == 1
    assert cuda.taken()[6:8] == bound.addresses


def test_code_for_aligned_addresses_takes_no_others(cuda):
    jit = Jit(*ADD)
    bound = Bound(cuda, jit.entry(), [(32,)])
    table = cuda.runner.together([bound.launch])
    table()
    bound.bind("0_1", offset=1)
    table()
    table()
    assert jit.taken() == 2
    assert len(jit.kernels) == 2
    assert cuda.taken()[0] == jit.kernels[1].function
    bound.bind("0_1")
    table()
    table()
    assert jit.taken() == 1
    assert len(jit.kernels) == 2
    assert cuda.taken()[0] == jit.kernels[0].function


def test_stages_are_launched_in_order_and_empty_grids_are_not(cuda):
    parts = [Jit(*ADD), Jit(*ADD), Jit(*ADD)]
    entry = parts[0].entry()
    entry["stages"] += [
        {**entry["stages"][0], "jit": parts[1], "programs": lambda n: 0},
        {**entry["stages"][0], "jit": parts[2], "programs": lambda n: 5},
    ]
    bound = Bound(cuda, entry, [(32,)])
    empty = Bound(cuda, Jit(*ADD).entry(), [(0,)])
    table = cuda.runner.together([bound.launch, empty.launch])
    table()
    table()
    assert [part.taken() for part in parts] == [1, 0, 1]
    taken = cuda.taken()
    functions = [parts[0].kernels[0].function, parts[2].kernels[0].function]
    assert [taken[0], taken[12]] == functions
    assert [taken[1], taken[13]] == [2, 5]
    assert len(taken) == 24


def many(cuda) -> tuple[Jit, Bound]:
    jit = Jit("*i64", "*i32", "*i32", "constexpr", "constexpr")
    return jit, Bound(cuda, jit.entry(table=True), [(32,), (64,)], rows=2)


def test_a_table_of_addresses_is_filled_again_where_one_moves(cuda):
    jit, bound = many(cuda)
    table = cuda.runner.together([bound.launch])
    for moved in (None, "1_0", "0_0"):
        if moved is not None:
            bound.bind(moved)
        table()
        assert jit.taken() == 1
        assert not cuda.taken()
        table()
        assert not jit.taken()
        taken = cuda.taken()
        assert taken[:4] == [jit.kernels[0].function, 6, 1, 128]
        filled = (ctypes.c_uint64 * 4).from_address(taken[6])
        assert list(filled) == bound.addresses
    assert len(jit.kernels) == 1


def test_while_launches_are_recorded_tables_are_filled_for_the_recording(cuda, monkeypatch):
    jit, bound = many(cuda)
    table = cuda.runner.together([bound.launch])
    for _ in range(2):  # each recording has a table of its own, which a usual call makes
        table()
        with monkeypatch.context() as patch:
            patch.setattr(Tables, "is_recording", lambda self, device: True)
            patch.setattr("treadle.runtime.replay.tables._fill", lambda table, addresses: None)
            table()
        assert jit.taken() == 2
        assert not cuda.taken()
    table()
    assert jit.taken() == 1
    table()
    assert not jit.taken()
    assert list((ctypes.c_uint64 * 4).from_address(cuda.taken()[6])) == bound.addresses


def test_whoever_hears_of_launches_hears_of_all(cuda):
    jit = Jit(*ADD)
    table = cuda.runner.together([Bound(cuda, jit.entry(), [(32,)]).launch])
    table()

    def hook(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        table()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert jit.taken() == 2
    assert not cuda.taken()


def test_what_the_driver_refuses_fails_in_triton_and_names_the_step(cuda):
    jits = [Jit(*ADD) for _ in range(3)]
    launches = [Bound(cuda, jit.entry(), [(32,)]).launch for jit in jits]
    artifact = Artifact(
        "cpu", (), {}, tuple(Launch(f"step{at}", (), ()) for at in range(3)), (), (), (),
        arena_bytes=0, peak_bytes=0,
    )  # fmt: skip
    actions = Actions(artifact, (cuda.runner,))
    for at, launch in enumerate(launches):
        actions.add(at, [launch])
    actions.run()
    actions.run()
    assert [jit.taken() for jit in jits] == [1, 1, 1]
    cuda.taken()
    cuda.fail()

    class Failing(list):
        def append(self, _launch):
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    jits[1].kernels[0]._log = Failing()
    with pytest.raises(RuntimeFailure, match=r"step1 failed: .* illegal memory access"):
        actions.run()
    assert jits[0].taken() == 1
    assert not jits[2].taken()


def test_a_step_launches_what_its_inputs_are(cuda):
    jits = {"f": Jit(*ADD), "g": Jit(*ADD)}
    specs = {n: BufferSpec(n, torch.float32, (8,), (1,), Storage.INPUT) for n in ("x", "y")}
    steps = Launch("f", (("x", "y"),), ((32,),)), Launch("g", (("y", "x"),), ((48,),))
    artifact = Artifact(
        "cpu", (Source("fake", "", ("f", "g")),), specs, steps, (), ("x", "y"), (),
        arena_bytes=0, peak_bytes=0,
    )  # fmt: skip

    def load(sources, launches, tables):
        device = {
            name: DeviceLaunch(jit.entry(), tables, FunctionCode(name, None, cuda.runner))
            for name, jit in jits.items()
        }
        return Functions({}, device, None, tables, (cuda.runner,))

    step = Executable(artifact, Build("fake", {"fake": SimpleNamespace(load=load)}))
    step.run([torch.zeros(8), torch.zeros(8)])
    for _ in range(3):
        inputs = [torch.zeros(8), torch.zeros(8)]
        step.run(inputs)
        x, y = (tensor.data_ptr() for tensor in inputs)
        taken = cuda.taken()
        assert taken[6:9] == [x, y, 32]
        assert taken[18:21] == [y, x, 48]
    assert [jit.taken() for jit in jits.values()] == [1, 1]
