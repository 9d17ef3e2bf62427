"""Consecutive compiled Triton kernels, launched by one call of a C function.

::

    row   = function, programs, threads, shared memory, parameters; addresses and what they must be
    launch_kernels(rows, count, cuLaunchKernel, stream)  =  cuLaunchKernel(row), one after another

Triton's own launcher is a Python call per kernel, which parses its arguments and queries the driver
about each pointer. Here the parameters are prepared: pointers in the array to which a step is
bound, numbers next to it. The addresses of a row are checked before its launch: code for aligned
addresses accepts no others, and a table is valid only for the addresses that it was filled with. If
they do not match, if the driver refuses, or if a kernel needs more than a grid, threads and shared
memory, Triton launches it as before, and reports errors itself.
"""

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, final

from triton import knobs
from triton.runtime.driver import driver

from treadle.runtime.kernels.c_library import load_c
from treadle.runtime.kernels.launch_table import JoinedLaunchError

_SOURCE = """
typedef unsigned long long word;
typedef unsigned number;
typedef int (*launcher)(void *, number, number, number, number, number, number, number, void *,
                        void **, void **);

struct row {
  number state, programs, threads, shared;
  void *function;
  void **parameters;
  const word *addresses, *expected;
  number count, exact;
};

static int fits(const struct row *row) {
  word differs = 0;
  for (number i = 0; i < row->count; i++) {
    word found = row->exact ? row->addresses[i] : (row->addresses[i] & 15) == 0;
    differs |= found ^ row->expected[i];
  }
  return !differs;
}

long long launch_kernels(const struct row *const *rows, long long count, launcher launch,
                         void *stream) {
  for (long long at = 0; at < count; at++) {
    const struct row *row = rows[at];
    if (row->state == 2) continue;
    if (!row->state || !fits(row)) return at;
    if (launch(row->function, row->programs, 1, 1, row->threads, 1, 1, row->shared, stream,
               row->parameters, 0))
      return at;
  }
  return count;
}
"""
_BY_TRITON, _READY, _NOTHING = range(3)
ALIGNED = 16
"""Bytes; addresses and sizes that are multiples of it allow wide loads."""
_WORD = ctypes.sizeof(ctypes.c_uint64)
WARP = 32
"""Threads."""
_MOST_SHARED = 228 * 1024
"""Bytes for which Triton launches without attributes."""
_SCRATCH = 2
"""Pointers that Triton 3.6 and 3.9 pass after the arguments: for all programs and for profiles."""
_NO_SCRATCH = ctypes.c_uint64(0)
_WIDTHS = {"i32": 4, "i64": 8}

Pointers = ctypes.Array[Any]


@final
@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A parameter of a compiled kernel: its size in bytes, and the number of its ``argument``;
    ``None`` for scratch that the kernel does not use."""

    argument: int | None
    nbytes: int


def parameters_of(signature: Sequence[object]) -> tuple[KernelParameter, ...] | None:
    """The parameters of a kernel whose arguments have these types, by Triton's names; constants are
    part of its code. ``None`` if any is neither a pointer nor a signed integer."""
    kept = [(at, str(kind)) for at, kind in enumerate(signature) if kind != "constexpr"]
    widths = [_WORD if kind.startswith("*") else _WIDTHS.get(kind, 0) for _, kind in kept]
    if not all(widths):
        return None
    own = (KernelParameter(at, width) for (at, _), width in zip(kept, widths, strict=True))
    return (*own, *[KernelParameter(None, _WORD)] * _SCRATCH)


METADATA = (
    "num_ctas",
    "launch_cooperative_grid",
    "launch_pdl",
    "global_scratch_size",
    "profile_scratch_size",
    "shared",
    "num_warps",
)
"""Triton's metadata of a kernel that a launch depends on."""


def metadata_of(kernel: Any) -> dict[str, Any]:
    """That metadata of a ``kernel`` of Triton's."""
    return {name: getattr(kernel.metadata, name) for name in METADATA}


def is_plain(metadata: Mapping[str, Any]) -> bool:
    """Whether a kernel with this ``METADATA`` is launched without attributes and scratch."""
    scratch = metadata["global_scratch_size"] or metadata["profile_scratch_size"]
    attributes = metadata["launch_cooperative_grid"] or metadata["launch_pdl"]
    more = metadata["num_ctas"] != 1 or metadata["shared"] > _MOST_SHARED
    return not (scratch or attributes or more)


@final
@dataclass(frozen=True, slots=True)
class DriverLibrary:
    """``launch``: the address of cuLaunchKernel. ``param_info``: cuFuncGetParamInfo."""

    launch: int
    param_info: Callable[..., int]

    @staticmethod
    def of(library: Any) -> "DriverLibrary | None":
        """``None`` for a driver before CUDA 12.4, which does not report the parameters of a
        kernel."""
        try:
            launch, info = library["cuLaunchKernel"], library["cuFuncGetParamInfo"]
        except AttributeError:
            return None
        info.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
        address = ctypes.cast(launch, ctypes.c_void_p).value
        assert address is not None
        return DriverLibrary(address, info)

    def widths(self, function: int, most: int) -> list[int]:
        """The sizes in bytes of a kernel's parameters, ``most`` of them at most."""
        offset, nbytes = ctypes.c_size_t(), ctypes.c_size_t()
        places = ctypes.byref(offset), ctypes.byref(nbytes)
        asked = (self.param_info(function, at, *places) for at in range(most))
        return [nbytes.value for _ in takewhile(lambda status: not status, asked)]


@final
@dataclass(frozen=True, slots=True)
class DriverKernel:
    """A kernel on a device that cuLaunchKernel launches: the driver's handle of its ``function``,
    and its parameters. ``shared``: bytes."""

    function: int
    parameters: tuple[KernelParameter, ...]
    threads: int
    shared: int

    @staticmethod
    def of(
        library: DriverLibrary, function: int, signature: Sequence[object], warps: int, shared: int
    ) -> "DriverKernel | None":
        """``None`` if the parameters that the driver reports differ from the ``signature``."""
        parameters = parameters_of(signature)
        if parameters is None:
            return None
        widths = library.widths(function, len(parameters) + 1)
        if widths != [parameter.nbytes for parameter in parameters]:
            return None
        return DriverKernel(function, parameters, WARP * warps, shared)

    @staticmethod
    def of_triton(library: DriverLibrary, kernel: Any) -> "DriverKernel | None":
        """A ``kernel`` that Triton has launched; ``None`` for one that it has to launch."""
        metadata = metadata_of(kernel)
        if not is_plain(metadata):
            return None
        signature = list(kernel.src.signature.values())
        own = metadata["num_warps"], metadata["shared"]
        return DriverKernel.of(library, kernel.function, signature, *own)


class _Row(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_uint32),
        ("programs", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("expected", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("exact", ctypes.c_uint32),
    )


@final
@dataclass(frozen=True, slots=True)
class KernelArguments:
    """The arguments of a kernel: the array that holds its pointers at each launch, followed by
    numbers."""

    pointers: Pointers
    numbers: tuple[int, ...]

    def packed(self, parameters: Sequence[KernelParameter]) -> tuple[Pointers, Pointers]:
        """The address of each of ``parameters``, and the array that holds the numbers."""
        slots = (ctypes.c_int64 * max(1, len(self.numbers)))(*self.numbers)
        first, count = ctypes.addressof(self.pointers), len(self.pointers)
        places: list[int] = []
        for parameter in parameters:
            at = parameter.argument
            if at is None:
                places.append(ctypes.addressof(_NO_SCRATCH))
            elif at < count:
                places.append(first + _WORD * at)
            else:  # of a number of 32 bits the first half, as on all hosts that CUDA has
                places.append(ctypes.addressof(slots) + _WORD * (at - count))
        return (ctypes.c_void_p * len(places))(*places), slots


@final
class KernelRow:
    """One kernel of a launch. Triton launches it first; once the row holds the kernel (``holds``),
    C does."""

    __slots__ = ("_addresses", "_arguments", "_expected", "_kernel", "_packed", "row")

    def __init__(self) -> None:
        self.row = _Row()
        self._addresses: Pointers | None = None
        self._arguments: KernelArguments | None = None
        self._kernel: DriverKernel | None = None
        self._packed: tuple[Pointers, Pointers] | None = None  # C reads them, as ``_expected``
        self._expected: Pointers | None = None

    def launches_nothing(self) -> None:
        """Launch nothing from now on, since the grid is empty."""
        self.row.state = _NOTHING

    def reads(self, arguments: KernelArguments, addresses: Pointers, *, exact: bool) -> None:
        """Called once: its kernels get ``arguments``. A kernel is valid for exactly the
        ``addresses`` of its first launch, or for all addresses that are aligned like those."""
        self._arguments, self._addresses = arguments, addresses
        self.row.addresses, self.row.count = ctypes.addressof(addresses), len(addresses)
        self.row.exact = exact

    def waits(self) -> None:
        """Hold no kernel until ``holds`` is called again, because the arguments change."""
        self.row.state = _BY_TRITON

    def holds(self, kernel: DriverKernel, programs: int) -> None:
        """Launch ``kernel`` from now on."""
        if self._addresses is None or self._arguments is None:
            return
        if kernel is not self._kernel:
            self._kernel, self._packed = kernel, self._arguments.packed(kernel.parameters)
            row = self.row
            row.function, row.parameters = kernel.function, ctypes.addressof(self._packed[0])
            row.programs, row.threads, row.shared = programs, kernel.threads, kernel.shared
        now: list[int] = [address or 0 for address in self._addresses]
        expected = now if self.row.exact else [address % ALIGNED == 0 for address in now]
        self._expected = (ctypes.c_uint64 * len(now))(*expected)
        self.row.expected = ctypes.addressof(self._expected)
        self.row.state = _READY


class DriverLaunch(ABC):
    """A launch of one or more kernels. ``rows``: one for each, in order; ``fills_tables``: whether
    a recording needs tables of its own."""

    __slots__ = ()
    rows: tuple[KernelRow, ...]

    @property
    @abstractmethod
    def fills_tables(self) -> bool: ...

    @abstractmethod
    def __call__(self) -> None:
        """Launch all kernels as Triton does."""

    @abstractmethod
    def by_triton(self, at: int) -> None:
        """Launch the kernel of one row by Triton; the row may hold it from then on."""

    @abstractmethod
    def is_recorded(self) -> bool:
        """Whether launches are recorded now instead of run."""


@final
class KernelTable:
    """Launches that run as one call of C, except the rows that Triton has to launch."""

    def __init__(self, runner: "KernelRunner", launches: Sequence[DriverLaunch]) -> None:
        self._runner = runner
        self._launches = tuple(launches)
        self._places = [
            (at, row) for at, launch in enumerate(launches) for row in range(len(launch.rows))
        ]
        rows = [ctypes.addressof(row.row) for launch in launches for row in launch.rows]
        self._rows = (ctypes.c_void_p * len(rows))(*rows)
        self._fills_tables = any(launch.fills_tables for launch in launches)

    def __call__(self) -> None:
        if is_watched() or (self._fills_tables and self._launches[0].is_recorded()):
            for at, launch in enumerate(self._launches):
                self._try(at, launch)
            return
        stream = _current_stream()
        first, count, at = ctypes.addressof(self._rows), len(self._rows), 0
        run, launch_kernel = self._runner.run, self._runner.library.launch
        while (at := at + run(first + _WORD * at, count - at, launch_kernel, stream)) < count:
            which, row = self._places[at]
            self._try(which, functools.partial(self._launches[which].by_triton, row))
            at += 1

    def _try(self, at: int, launch: Callable[[], None]) -> None:
        try:
            launch()
        except Exception as error:
            raise JoinedLaunchError(at, error) from error


def _current_stream() -> int:
    active: Any = driver.active
    return active.get_current_stream(active.get_current_device())


def is_watched() -> bool:
    """Whether hooks observe each launch of Triton's."""
    hooks: tuple[Any, ...] = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(hook.calls if isinstance(hook, knobs.HookChain) else hook for hook in hooks)


@final
@dataclass(frozen=True, slots=True)
class KernelRunner:
    """Makes one action of consecutive launches."""

    run: Callable[[int, int, int, int], int]
    library: DriverLibrary

    def takes(self, action: object) -> bool:
        """Whether it can run this launch."""
        return isinstance(action, DriverLaunch) and bool(action.rows)

    def launch(self, kernel: DriverKernel, programs: int, arguments: KernelArguments) -> bool:
        """Launch one kernel now; whether the driver accepted it."""
        row = KernelRow()
        row.reads(arguments, arguments.pointers, exact=True)
        row.holds(kernel, programs)
        rows = (ctypes.c_void_p * 1)(ctypes.addressof(row.row))
        launched = self.run(ctypes.addressof(rows), 1, self.library.launch, _current_stream())
        return launched == 1

    def together(self, launches: Sequence[DriverLaunch]) -> KernelTable:
        """Runs them one after another."""
        return KernelTable(self, launches)


def kernel_runner(directory: str, library: DriverLibrary | None) -> KernelRunner | None:
    """Compiled once per cache; ``None`` without a C compiler or the driver's ``library``. Calls
    release the interpreter lock, because the driver blocks when too many launches are queued."""
    found: Mapping[str, Any] = {}
    if library is not None:
        found = load_c(_SOURCE, ("launch_kernels",), directory, keeps_lock=False)
    if library is None or not found:
        return None
    run = found["launch_kernels"]
    run.restype = ctypes.c_int64
    run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return KernelRunner(run, library)


@functools.cache
def cuda_library() -> DriverLibrary | None:
    """The driver of this machine; it exists wherever a kernel can be launched."""
    try:
        return DriverLibrary.of(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
