"""What a process has compiled for a GPU another one launches, without Triton's compiler; here on a
driver that writes down what it is asked."""

import ctypes

import pytest

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fake_driver import Bound, Driver, Jit, Kernel
from treadle.runtime.kernels import device_code
from treadle.runtime.kernels.device_code import DeviceCode, DeviceCodeStore
from treadle.runtime.store.cache import Cache

ADD = ("*fp32", "*fp32", "i32")


class Gpu:
    """A GPU whose driver loads code: kernels that take what ``signature`` says."""

    def __init__(self, driver: Driver, signature=ADD) -> None:
        self.signature, self.arch, self.threads = signature, 90, 1024
        self.loaded: list[tuple[object, ...]] = []
        self.kernels: list[Kernel] = []
        self.utils = self
        self._driver = driver

    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> int:
        return self._driver.stream + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def load_binary(self, *asked):
        self.loaded.append(asked)
        if self.threads == 0:
            raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
        self.kernels.append(Kernel([], self.signature))
        return 0, self.kernels[-1].function, 32, 0, self.threads


@pytest.fixture
def cuda(tmp_path) -> Driver:
    return Driver(str(tmp_path))


@pytest.fixture
def gpu(cuda, monkeypatch) -> Gpu:
    found = Gpu(cuda)
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(device_code, "_kernels", {})
    return found


@pytest.fixture
def process(cuda, tmp_path, monkeypatch):
    """``process(jit, size, ...)``: another process with the same cache. Its table, launch, and how
    often Triton launched when it ran once."""

    def begin(jit: Jit, size: int = 32, **bound):
        monkeypatch.setattr(device_code, "_kernels", {})
        store = DeviceCodeStore(Cache(tmp_path / "kept"))
        launch = Bound(cuda, jit.entry(), [(size,)], store=store, **bound)
        table = cuda.runner.together([launch.launch])
        table()
        return table, launch, jit.taken()

    return begin


def test_another_process_launches_by_the_driver_alone(process, cuda, gpu):
    assert process(Jit(*ADD, num_warps=8, shared=512))[2] == 1
    assert not gpu.loaded
    cuda.taken()
    jit = Jit(*ADD)
    table, bound, by_triton = process(jit)
    assert (by_triton, jit.kernels) == (0, [])
    assert gpu.loaded == [("kernel", b"code", 512, 3)]
    launch = [gpu.kernels[0].function, 2, 1, 256, 512, 10, *bound.addresses, 32, 0, 0, 1]
    assert cuda.taken() == launch
    table()
    assert cuda.taken() == launch
    bound.bind("0_1")
    table()
    assert cuda.taken()[6:8] == bound.addresses
    assert len(gpu.loaded) == 1


@pytest.mark.parametrize("size", [33, 1, 2**33])
def test_another_class_of_sizes_is_another_kernel(process, gpu, size):
    process(Jit(*ADD))
    assert process(Jit(*ADD), size=48)[2] == 0
    assert process(Jit(*ADD), size=size)[2] == (1 if size > 16 else 0)  # a grid of 1 // 16 is empty


def test_addresses_that_are_not_aligned_are_another_class(process, cuda, gpu):
    process(Jit(*ADD))
    jit = Jit(*ADD)
    table, bound, _ = process(jit)
    bound.bind("0_1", offset=1)
    table()
    assert jit.taken() == 1
    bound.bind("0_1")
    cuda.taken()
    table()
    assert jit.taken() == 0
    assert cuda.taken()[0] == gpu.kernels[0].function


def test_a_kernel_that_triton_has_to_launch_is_left_to_it(process, gpu, tmp_path):
    assert process(Jit(*ADD, launch_pdl=True))[2] == 1
    assert list((tmp_path / "kept").glob("*/*"))  # it is known
    assert process(Jit(*ADD, launch_pdl=True))[2] == 1
    assert not gpu.loaded


@pytest.mark.parametrize("threads", [0, 64])
def test_a_driver_that_does_not_take_the_code_leaves_it_to_triton(process, gpu, threads):
    process(Jit(*ADD))
    gpu.threads = threads
    jit = Jit(*ADD)
    table, _, by_triton = process(jit)
    table()
    assert (by_triton, jit.taken()) == (1, 0)


def test_code_that_takes_something_else_is_left_to_triton(process, gpu):
    process(Jit(*ADD))
    gpu.signature = ("*fp32", "i32")
    assert process(Jit(*ADD))[2] == 1


def test_a_launch_that_the_driver_refuses_is_triton_s(process, cuda, gpu):
    process(Jit(*ADD))
    cuda.fail()
    assert process(Jit(*ADD))[2] == 1


def changed_arch(gpu, monkeypatch):
    gpu.arch = 100


def changed_environment(gpu, monkeypatch):
    monkeypatch.setenv("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")


def changed_assembler(gpu, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another/ptxas")


def changed_compiler(gpu, monkeypatch):
    monkeypatch.setattr(device_code, "_compiler", lambda: "another")


def changed_folder(gpu, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/another")


def listening(gpu, monkeypatch):
    monkeypatch.setattr(knobs.compilation, "listener", lambda **facts: None)


def hearing(gpu, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: None)


def compiling_always(gpu, monkeypatch):
    monkeypatch.setattr(knobs.compilation, "always_compile", True)


@pytest.mark.parametrize(
    "change",
    [changed_arch, changed_environment, changed_assembler, changed_compiler, changed_folder,
     listening, hearing, compiling_always],
)  # fmt: skip
def test_what_triton_would_make_otherwise_it_is_asked_for(process, gpu, monkeypatch, change):
    process(Jit(*ADD))
    change(gpu, monkeypatch)
    assert process(Jit(*ADD))[2] == 1
    assert not gpu.loaded


def test_whoever_hears_of_launches_hears_of_the_first_as_well(process, cuda, gpu):
    process(Jit(*ADD))
    cuda.taken()

    def hook(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        table, _, by_triton = process(Jit(*ADD))
        table()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert by_triton == 1
    assert not cuda.taken()


def test_a_table_of_addresses_is_passed_as_by_triton(cuda, gpu, tmp_path):
    gpu.signature = signature = ("*i64", "*i32", "*i32", "constexpr", "constexpr")
    store = DeviceCodeStore(Cache(tmp_path / "kept"))
    for by_triton in (1, 0):
        jit = Jit(*signature)
        bound = Bound(cuda, jit.entry(table=True), [(32,), (64,)], rows=2, store=store)
        cuda.runner.together([bound.launch])()
        assert jit.taken() == by_triton
    taken = cuda.taken()
    assert taken[:2] == [gpu.kernels[0].function, 6]
    assert list((ctypes.c_uint64 * 4).from_address(taken[6])) == bound.addresses


def test_an_altered_entry_is_none(process, gpu, tmp_path):
    process(Jit(*ADD))
    for path in (tmp_path / "kept").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert process(Jit(*ADD))[2] == 1


@given(st.text(), st.lists(st.sampled_from(["*fp32", "constexpr"])), st.binary())
def test_an_entry_is_read_as_it_was_written(name, signature, binary):
    code = DeviceCode(name, tuple(signature), 4, 1024, binary)
    assert DeviceCode.parse(code.entry()) == code
