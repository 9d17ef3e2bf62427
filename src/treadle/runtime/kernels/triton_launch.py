"""Loads generated Triton modules and launches their functions.

Device code is compiled for each class of arguments (of addresses: aligned or not; of sizes:
multiples of 16 or not), never for each size, and kept on disk by its content (``device_code.py``,
and Triton's own cache): for the launches of an artifact when it is loaded (``triton_ahead.py``),
for other classes at their first launch.

Host scalars (0-dim tensors on the CPU) are mirrored to the device before each launch that reads
them, at an address that does not change.
"""

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict, final

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from treadle.algebra.extents import sample_of
from treadle.runtime.kernels.device_code import DeviceCodeStore
from treadle.runtime.kernels.driver_launch import (
    ALIGNED,
    DriverLaunch,
    KernelArguments,
    KernelRow,
    KernelRunner,
    Pointers,
    cuda_library,
    kernel_runner,
)
from treadle.runtime.kernels.loader import Functions
from treadle.runtime.kernels.prepared_launch import (
    Class,
    FunctionCode,
    LaunchStage,
    PreparedLaunch,
    class_of,
    options_of,
    part_of,
)
from treadle.runtime.kernels.triton_ahead import CompileJob, compile_ahead, workers_ahead
from treadle.runtime.kernels.triton_modules import module_of
from treadle.runtime.replay.tables import Tables
from treadle.runtime.store.artifact import Launch, Source
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.registry import target_for

Storages = Sequence[Sequence[Tensor]]
Sizes = Sequence[Sequence[int]]


def launcher(cache: Cache) -> "TritonLauncher":
    """The launcher of this process; its module files are in the cache directory."""
    library = None if knobs.runtime.interpret else cuda_library()
    runner = kernel_runner(str(cache.directory), library)
    return TritonLauncher(cache.directory / "triton", runner)


@dataclass(frozen=True, slots=True)
class TritonLauncher:
    """Loads Triton modules; a ``Loader`` of ``runtime/kernels/loader.py``. ``runner`` launches
    kernels without Triton."""

    folder: Path
    runner: KernelRunner | None = None

    @property
    def identity(self) -> str:
        """The version of Triton."""
        return f"triton {triton.__version__}"

    def ahead(self, operations: int) -> AbstractContextManager[None]:
        """Start the workers, if device code is compiled here."""
        return nullcontext() if knobs.runtime.interpret else workers_ahead(operations)

    def load(
        self,
        sources: Sequence[Source],
        launches: Sequence[Launch] = (),
        tables: Tables | None = None,
    ) -> Functions:
        """The functions that the sources name, and the device code of ``launches``. Same text, same
        module."""
        tables = Tables() if tables is None else tables
        functions: dict[str, DeviceLaunch] = {}
        homes: dict[str, tuple[ModuleType, int]] = {}
        store = DeviceCodeStore(Cache(self.folder, warn=False))
        for source in sources:
            module = module_of(self.folder, source.text)
            for name in source.functions:
                entry: Entry = module.FUNCTIONS[name]
                code = FunctionCode(_home(module, name), store, self.runner)
                functions[name] = DeviceLaunch(entry, tables, code)
                homes[name] = module, len(source.function(name))
        self._compile_ahead(homes, launches)
        joiners = () if self.runner is None else (self.runner,)
        return Functions({}, functions, None, tables, joiners)

    def _compile_ahead(
        self, homes: Mapping[str, tuple[ModuleType, int]], launches: Sequence[Launch]
    ) -> None:
        """Compile what no process with this cache has compiled. ``homes``: the module of each
        function and the length of its text."""
        if knobs.runtime.interpret:
            return
        jobs = {
            part: job
            for launch in sorted(launches, key=lambda launch: -homes[launch.function][1])
            for part, job in _jobs(homes[launch.function][0], launch)
        }
        cache = Cache(self.folder, warn=False)
        store = DeviceCodeStore(cache)
        with cache.lock(content_key(*sorted(jobs))):  # the ranks of a machine have the same
            # Without a runner Triton launches, from its own cache, which may have been emptied.
            is_kept = self.runner is not None or Path(knobs.cache.dir).is_dir()
            parts = {job.line: part for part, job in jobs.items()}
            missing = [job for part, job in jobs.items() if not (is_kept and store.has(part))]
            if len(missing) < 2:
                return
            known: Any = driver.active.get_current_target()
            target = (known.backend, known.arch, known.warp_size)
            for job, code in compile_ahead(missing, target):
                store.keep(parts[job.line], code)

    def keys(self, sources: Sequence[Source]) -> list[str]:
        """None: Triton keeps its own cache."""
        return []


class Entry(TypedDict):
    """A function of a generated module. ``sizes``: the names of the sizes that it takes. ``table``:
    whether it takes the addresses of buffers, and ``n`` of each kernel, from a table."""

    table: bool
    types: Sequence[str]
    sizes: Sequence[str]
    stages: Sequence[LaunchStage]


@dataclass(frozen=True, slots=True)
class DeviceLaunch:
    """A function of a module: ``function(storages, sizes)`` makes one launch of it. ``code``:
    shared by the launches of all sizes."""

    entry: Entry
    tables: Tables
    code: FunctionCode

    def __call__(
        self, storages: Storages, sizes: Sizes, pointers: Pointers | None = None, /
    ) -> "_Bound":
        return _Bound(self, storages, sizes, pointers)


@final
class _Bound(DriverLaunch):
    """One launch. What does not change from call to call (grids, block tables) is computed at the
    first call, when the storages exist."""

    __slots__ = ("_function", "_pointers", "_prepared", "_sizes", "_storages", "rows")

    def __init__(
        self, function: DeviceLaunch, storages: Storages, sizes: Sizes, pointers: Pointers | None
    ) -> None:
        self._function, self._storages, self._sizes = function, storages, sizes
        self._pointers, runner = pointers, function.code.runner
        stages = function.entry["stages"] if pointers is not None else ()
        self.rows = () if runner is None else tuple(KernelRow() for _ in stages)
        self._prepared: _One | _Many | None = None

    @property
    def fills_tables(self) -> bool:
        """Whether it takes its buffers from a table."""
        return self._function.entry["table"]

    def __call__(self) -> None:
        self._first_prepared()(self._storages)

    def by_triton(self, at: int) -> None:
        """Launch one of its stages by Triton."""
        self._first_prepared()(self._storages, at)

    def is_recorded(self) -> bool:
        """Whether launches on its device are recorded now."""
        return self._function.tables.is_recording(self._device())

    def _device(self) -> torch.device:
        tensors = (tensor for row in self._storages for tensor in row)
        return next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))

    def _first_prepared(self) -> "_One | _Many":
        if self._prepared is None:
            function, device = self._function, self._device()
            make = _Many if self.fills_tables else _One
            mirrors = _Mirrors(device)
            self._prepared = make(function, self._sizes, mirrors, self.rows)
            if self._pointers is not None and not mirrors.are_needed(self._storages):
                self._prepared.join(self._pointers)
        return self._prepared


class _Mirrors:
    """Copies of host scalars on the device, one for each place that takes such a scalar."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[tuple[int, int], Tensor] = {}

    def are_needed(self, instances: Storages) -> bool:
        """Whether any of these is not on the device."""
        on_host = target_for(self.device).on_host
        return not on_host and any(t.is_cpu for row in instances for t in row)

    def of(self, instances: Storages) -> Storages:
        """The same tensors, all on the device."""
        if not self.are_needed(instances):
            return instances
        return [
            [self._copy((i, j), t) if t.is_cpu else t for j, t in enumerate(row)]
            for i, row in enumerate(instances)
        ]

    def _copy(self, place: tuple[int, int], tensor: Tensor) -> Tensor:
        if place not in self._copies:
            self._copies[place] = torch.empty_like(tensor, device=self.device)
        return self._copies[place].copy_(tensor)


class _One:
    """A launch of one instance: buffers are plain arguments. Stages run one after another."""

    def __init__(
        self, function: DeviceLaunch, sizes: Sizes, mirrors: _Mirrors, rows: Sequence[KernelRow]
    ) -> None:
        self._mirrors = mirrors
        self._told = tuple(sizes[0])
        self._rows = rows
        self._stages = [
            PreparedLaunch(
                stage, stage["programs"](*self._told), self._told, function.code, (at,), row
            )
            for at, (stage, row) in enumerate(zip_longest(function.entry["stages"], rows))
        ]

    def join(self, pointers: Pointers) -> None:
        """Let rows hold its kernels from now on, for buffers at ``pointers``."""
        for row in self._rows:
            row.reads(KernelArguments(pointers, self._told), pointers, exact=False)

    def __call__(self, instances: Storages, stage: int | None = None) -> None:
        """All stages, or one."""
        (tensors,) = self._mirrors.of(instances)
        for each in self._stages if stage is None else self._stages[stage : stage + 1]:
            each.launch(tensors)


@final
@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes that a launch of many instances takes. ``flat``: the number of elements of each
    instance, as integers of ``kind``; ``unit``: a common divisor of them; ``dims``: the sizes that
    all share."""

    flat: tuple[int, ...]
    dims: tuple[int, ...]

    @staticmethod
    def of(entry: Entry, sizes: Sizes) -> "_Sizes":
        is_flat = "n" in entry["sizes"]
        flat = tuple(size[0] if is_flat else 0 for size in sizes)
        return _Sizes(flat, tuple(sizes[0][is_flat:]))

    @property
    def kind(self) -> torch.dtype:
        return torch.int32 if max(self.flat) < 2**31 else torch.int64

    @property
    def unit(self) -> int:
        return ALIGNED if all(size % ALIGNED == 0 for size in self.flat) else 1


def _home(module: ModuleType, function: str) -> str:
    """The name of a function, by the content of its module."""
    return f"{module.__name__} {function}"


def _jobs(module: ModuleType, launch: Launch) -> Iterator[tuple[str, CompileJob]]:
    """The functions that a launch runs, for tensors at aligned addresses: what the entries of the
    cache are for, and how they are compiled."""
    entry: Entry = module.FUNCTIONS[launch.function]
    home = _home(module, launch.function)
    of = functools.partial(CompileJob, module.__name__, str(module.__file__), launch.function)
    for sizes in _classes(launch.sizes):
        for at, stage in enumerate(entry["stages"]):
            if any(stage["programs"](*each) for each in sizes):
                key, arguments = _class_and_arguments(entry, sizes, at)
                yield part_of(home, key), of(at, arguments, options_of(stage))


def _class_and_arguments(
    entry: Entry, sizes: Sizes, stage: int
) -> tuple[Class, tuple[str | int, ...]]:
    """The class of a launch on aligned tensors, and its arguments as a job has them."""
    if not entry["table"]:
        types, told = tuple(entry["types"]), tuple(sizes[0])
        return class_of((stage,), told, (), [True] * len(types)), (*types, *told)
    many = _Sizes.of(entry, sizes)
    types = ("int64", str(many.kind).removeprefix("torch."), "int32")
    constants = (ALIGNED, many.unit)
    key = class_of((str(many.kind),), many.dims, constants, [True] * len(types))
    return key, (*types, *many.dims, *constants)


def _classes(sizes: Sizes) -> list[Sizes]:
    """The sizes as they are; for sizes that each call decides, a sample and the next multiple of
    16."""
    if all(type(size) is int for each in sizes for size in each):
        return [sizes]
    samples = [[sample_of(size) for size in each] for each in sizes]
    return [samples, [[-(-size // ALIGNED) * ALIGNED for size in each] for each in samples]]


def _blocks(counts: Sequence[int]) -> Tensor:
    """For instances with so many programs each: the instance of each program, and its number within
    the instance."""
    of_each = torch.tensor(counts, dtype=torch.int64)
    instances = torch.arange(len(counts)).repeat_interleave(of_each)
    before = (of_each.cumsum(0) - of_each).repeat_interleave(of_each)
    numbers = torch.arange(len(instances)) - before
    return torch.stack((instances, numbers), 1).to(torch.int32).reshape(-1)


class _Many:
    """A launch of many instances: a table of addresses, the number of elements of each instance,
    and the instance of each program. Sizes that the call decides are common to all.

    ::

        blocks[2 * program] = instance      blocks[2 * program + 1] = program of the instance
    """

    def __init__(
        self, function: DeviceLaunch, sizes: Sizes, mirrors: _Mirrors, rows: Sequence[KernelRow]
    ) -> None:
        self._tables = function.tables
        self._mirrors = mirrors
        self._device = device = mirrors.device
        (stage,) = function.entry["stages"]
        counts = [stage["programs"](*size) for size in sizes]
        told = _Sizes.of(function.entry, sizes)
        self._blocks = _blocks(counts).to(device)
        self._sizes = torch.tensor(told.flat, dtype=told.kind, device=device)
        self._dims, self._unit = told.dims, told.unit
        self._rows = rows
        kind = (str(told.kind),)
        row = next(iter(rows), None)
        self._stage = PreparedLaunch(stage, sum(counts), told.dims, function.code, kind, row)
        self._addresses: list[int] = []
        self._table = torch.empty(0, dtype=torch.int64, device=device)
        self._given = (ctypes.c_void_p * 3)()  # the pointers of the kernel
        self._spare: list[Tensor] = []  # for a recording

    def join(self, pointers: Pointers) -> None:
        """Let a row hold its kernel from now on, for buffers at ``pointers``."""
        for row in self._rows:
            row.reads(KernelArguments(self._given, self._dims), pointers, exact=True)

    def __call__(self, instances: Storages, _stage: int | None = None) -> None:
        rows = self._mirrors.of(instances)
        addresses = [tensor.data_ptr() for tensors in rows for tensor in tensors]
        align = ALIGNED if all(a % ALIGNED == 0 for a in addresses) else 1
        constants = {"ALIGN": align, "UNIT": self._unit}
        if self._tables.is_recording(self._device):
            table = self._spare.pop()
            self._tables.fill_later(table, addresses)
            self._stage.launch((table, self._sizes, self._blocks), constants, once=True)
            for row in self._rows:
                row.waits()  # the next recording needs another table, which is made below
            return
        if not self._spare:  # not while recording: that memory is written by every replay
            self._spare.append(torch.empty(len(addresses), dtype=torch.int64, device=self._device))
        if addresses != self._addresses:
            for row in self._rows:
                row.waits()
            self._table, self._addresses = self._tables.of(addresses, self._device), addresses
        tensors = (self._table, self._sizes, self._blocks)
        self._given[:] = [tensor.data_ptr() for tensor in tensors]
        self._stage.launch(tensors, constants)
