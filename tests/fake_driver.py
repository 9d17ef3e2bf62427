"""A driver of GPUs that writes down what it is asked, kernels for it, and launches of them."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from treadle.runtime.execute.bindings import Bindings
from treadle.runtime.kernels.c_library import load_c
from treadle.runtime.kernels.driver_launch import (
    DriverLibrary,
    KernelRunner,
    kernel_runner,
    parameters_of,
)
from treadle.runtime.kernels.prepared_launch import FunctionCode
from treadle.runtime.kernels.triton_launch import DeviceLaunch
from treadle.runtime.replay.tables import Tables
from treadle.runtime.store.artifact import BufferSpec, Storage

DRIVER = """
typedef unsigned long long word;
static word asked[4096], count, failure;

/* A function: the number of its parameters, and the bytes of each. */
int cuFuncGetParamInfo(const word *function, word at, word *offset, word *bytes) {
  if (at >= function[0]) return 1;
  *offset = 8 * at;
  *bytes = function[1 + at];
  return 0;
}

int cuLaunchKernel(const word *function, unsigned gx, unsigned gy, unsigned gz, unsigned x,
                   unsigned y, unsigned z, unsigned shared, void *stream, void **parameters,
                   void **extra) {
  if (failure) return (int)failure;
  word *to = asked + count, *start = to;
  *to++ = (word)function;
  *to++ = gx, *to++ = gy * gz * y * z, *to++ = x, *to++ = shared, *to++ = (word)stream;
  for (word at = 0; at < function[0]; at++)
    *to++ = function[1 + at] == 4 ? *(unsigned *)parameters[at] : *(word *)parameters[at];
  *to++ = extra == 0;
  count += to - start;
  return 0;
}

void fail(int with) { failure = with; }

word take(word *to) {
  word taken = count;
  for (count = 0; count < taken; count++) to[count] = asked[count];
  count = 0;
  return taken;
}
"""
PLAIN = {
    "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
    "profile_scratch_size": 0, "shared": 0, "num_warps": 4,
}  # fmt: skip


class Driver:
    """The driver, and what it was asked to launch."""

    def __init__(self, directory: str) -> None:
        names = ("cuLaunchKernel", "cuFuncGetParamInfo", "take", "fail")
        self._functions = load_c(DRIVER, names, directory, keeps_lock=False)
        if not self._functions:
            pytest.skip("there is no C compiler")
        library = DriverLibrary.of(self._functions)
        runner = kernel_runner(directory, library)
        assert runner is not None
        self.runner: KernelRunner = runner
        self.stream = 7

    def taken(self) -> list[int]:
        """Of each launch in a row: function, grid, threads, shared, stream, parameters."""
        numbers = (ctypes.c_uint64 * 4096)()
        return numbers[: self._functions["take"](numbers)]

    def fail(self) -> None:
        """From now on."""
        self._functions["fail"](700)


class Kernel:
    """A compiled kernel. Without a GPU it notes the launches that Triton makes."""

    def __init__(self, log: list[tuple[object, ...]], signature, **metadata) -> None:
        self.src = SimpleNamespace(signature=dict(enumerate(signature)))
        self.metadata = SimpleNamespace(**PLAIN | metadata)
        self.name, self.asm = "kernel", {"cubin": b"code"}
        widths = [parameter.nbytes for parameter in parameters_of(signature) or ()]
        self.words = (ctypes.c_uint64 * (1 + len(widths)))(len(widths), *widths)
        self.function = ctypes.addressof(self.words)
        self._log = log

    def __getitem__(self, grid):
        return lambda *args: self._log.append((self, *args))


class Jit:
    """A function of Triton's, with another kernel for each class of arguments."""

    def __init__(self, *signature: str, **metadata) -> None:
        self.log: list[tuple[object, ...]] = []
        self.kernels: list[Kernel] = []
        self._signature, self._metadata = signature, metadata

    def __getitem__(self, grid):
        def call(*args, **options):
            kernel = Kernel(self.log, self._signature, **self._metadata)
            self.kernels.append(kernel)
            kernel[grid](*args)
            return kernel

        return call

    def entry(self, programs=lambda n: n // 16, *, table: bool = False):
        stage = {"jit": self, "programs": programs, "warps": 4, "pipeline": 0}
        return {"stages": [stage], "types": (), "sizes": ("n",), "table": table}

    def taken(self) -> int:
        """How often Triton launched."""
        count = len(self.log)
        self.log.clear()
        return count


class Bound:
    """One launch on buffers that can be bound elsewhere."""

    def __init__(
        self, cuda: Driver, entry, sizes, rows: int = 1, width: int = 2, store=None
    ) -> None:
        names = tuple(tuple(f"{i}_{j}" for j in range(width)) for i in range(rows))
        self.specs = {
            name: BufferSpec(name, torch.float32, (8,), (1,), Storage.INPUT)
            for row in names
            for name in row
        }
        self.bindings = Bindings(self.specs)
        function = DeviceLaunch(entry, Tables(), FunctionCode("home", store, cuda.runner))
        self.launch = function(self.bindings.storages(names), sizes, self.bindings.pointers(names))
        self.at: dict[str, int] = {}
        for name in self.specs:
            self.bind(name)

    def bind(self, name: str, offset: int = 0) -> None:
        self.held = getattr(self, "held", [])
        memory = torch.zeros(32)
        start = -(memory.data_ptr() // 4) % 4 + offset
        self.held.append(memory)
        tensor = memory[start : start + 8]
        self.bindings.uses[name].bind(tensor, self.specs[name])
        self.at[name] = tensor.data_ptr()

    @property
    def addresses(self) -> list[int]:
        return list(self.at.values())
