"""Loads generated Triton modules and launches their functions.

A module's text goes to a file named by its hash (the Triton compiler reads the source back from
there) and is imported once. Device code is compiled for each class of arguments (of addresses:
aligned or not; of sizes: multiples of 16 or not), never for each size, and kept by Triton's own
cache on disk, by its content: for the launches of an artifact when it is loaded
(``triton_ahead.py``), for other classes at their first launch.

Host scalars (0-dim tensors on the CPU) are mirrored to the device before each launch that reads
them, at an address that does not change.
"""

import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypedDict, final

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from treadle.algebra.extents import sample_of
from treadle.runtime.kernels.loader import Functions
from treadle.runtime.kernels.triton_ahead import CompileJob, compile_ahead, workers_ahead
from treadle.runtime.replay.tables import Tables
from treadle.runtime.store.artifact import Launch, Source
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.registry import target_for
from treadle.util.errors import RuntimeFailure

Class = tuple[object, ...]
"""What the compiled code of a function depends on."""

Storages = Sequence[Sequence[Tensor]]
Sizes = Sequence[Sequence[int]]

_ALIGNED = 16
"""Bytes; addresses and sizes that are multiples of it allow wide loads."""

_modules: dict[str, ModuleType] = {}


def launcher(cache: Cache) -> "TritonLauncher":
    """The launcher of this process; its module files lie in the cache directory."""
    return TritonLauncher(cache.directory / "triton")


@dataclass(frozen=True, slots=True)
class TritonLauncher:
    """Loads Triton modules; a ``Loader`` of ``runtime/kernels/loader.py``."""

    folder: Path

    @property
    def identity(self) -> str:
        """The version of Triton."""
        return f"triton {triton.__version__}"

    def ahead(self, operations: int) -> AbstractContextManager[None]:
        """Workers start, where device code is compiled."""
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
        for source in sources:
            module = _module(self.folder, source.text)
            for name in source.functions:
                entry: Entry = module.FUNCTIONS[name]
                functions[name] = DeviceLaunch(entry, tables)
                homes[name] = module, len(source.function(name))
        self._compile_ahead(homes, launches)
        return Functions({}, functions, None, tables)

    def _compile_ahead(
        self, homes: Mapping[str, tuple[ModuleType, int]], launches: Sequence[Launch]
    ) -> None:
        """Once for all processes with this cache, unless Triton's own was emptied meanwhile.
        ``homes``: of each function its module and the length of its text."""
        jobs = {
            job.line: job
            for launch in sorted(launches, key=lambda launch: -homes[launch.function][1])
            for job in _jobs(homes[launch.function][0], launch)
        }
        if len(jobs) < 2 or knobs.runtime.interpret:
            return
        known: Any = driver.active.get_current_target()
        target = (known.backend, known.arch, known.warp_size)
        cache = Cache(self.folder, warn=False)
        kept = Path(knobs.cache.dir)
        key = content_key("compiled ahead", self.identity, str(target), str(kept), *sorted(jobs))
        with cache.lock(key):  # the ranks of a machine have the same to compile
            if kept.is_dir() and cache.get(key) is not None:
                return
            if compile_ahead(list(jobs.values()), target):
                cache.put(key, b"")

    def keys(self, sources: Sequence[Source]) -> list[str]:
        """None: Triton keeps its own cache."""
        return []


def _module(folder: Path, text: str) -> ModuleType:
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    if digest not in _modules:
        path = _write(folder, f"triton_{digest}.py", text)
        _modules[digest] = _import(f"treadle_triton_{digest}", path)
    return _modules[digest]


def _write(folder: Path, name: str, text: str) -> Path:
    """Atomically, since other processes may write the same file; elsewhere if we may not."""
    path = folder / name
    if path.exists() and path.read_text() == text:
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    except OSError:
        return _write(Path(tempfile.mkdtemp(prefix="treadle-")), name, text)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(temporary).replace(path)
    return path


def _import(name: str, path: Path) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise RuntimeFailure(
            f"the generated module {path} cannot be imported: {error}",
            code="TR-431",
            remedy="install triton; it comes with CUDA builds of PyTorch",
        ) from error
    return module


class Jit(Protocol):
    """A function of Triton's: ``jit[grid](*arguments, **options)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


class LaunchStage(TypedDict):
    """One device function of an entry, and how it is launched: so many ``programs``, by its
    sizes."""

    jit: Jit
    programs: Callable[..., int]
    warps: int
    pipeline: int


class Entry(TypedDict):
    """A function of a generated module. ``sizes``: the names of those that it is told. ``table``:
    whether it takes the addresses of buffers, and ``n`` of each kernel, from a table."""

    table: bool
    types: Sequence[str]
    sizes: Sequence[str]
    stages: Sequence[LaunchStage]


@dataclass(frozen=True, slots=True)
class DeviceLaunch:
    """A function of a module: ``function(storages, sizes)`` is one launch of it. ``compiled``: by
    classes of arguments, for the launches of all sizes."""

    entry: Entry
    tables: Tables
    compiled: dict[Class, Any] = field(default_factory=dict[Class, Any])

    def __call__(self, storages: Storages, sizes: Sizes) -> "_Bound":
        return _Bound(self, storages, sizes)


@dataclass(slots=True)
class _Bound:
    """One launch. What does not change from call to call (grids, block tables) is worked out at the
    first, when the storages are there."""

    function: DeviceLaunch
    storages: Storages
    sizes: Sizes
    prepared: "_One | _Many | None" = None

    def __call__(self) -> None:
        if self.prepared is None:
            tensors = (tensor for row in self.storages for tensor in row)
            device = next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))
            self.prepared = (
                _Many(self.function, self.sizes, device)
                if self.function.entry["table"]
                else _One(self.function, self.sizes, device)
            )
        self.prepared(self.storages)


class _Mirrors:
    """Copies of host scalars on the device, one per place that takes one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[tuple[int, int], Tensor] = {}

    def of(self, instances: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
        """The same tensors, all on the device."""
        if target_for(self._device).on_host or not any(t.is_cpu for row in instances for t in row):
            return instances
        return [
            [self._copy((i, j), t) if t.is_cpu else t for j, t in enumerate(row)]
            for i, row in enumerate(instances)
        ]

    def _copy(self, place: tuple[int, int], tensor: Tensor) -> Tensor:
        if place not in self._copies:
            self._copies[place] = torch.empty_like(tensor, device=self._device)
        return self._copies[place].copy_(tensor)


class _One:
    """One instance: buffers are plain arguments. Stages run one after the other."""

    def __init__(self, function: DeviceLaunch, sizes: Sizes, device: torch.device) -> None:
        self._mirrors = _Mirrors(device)
        told = tuple(sizes[0])
        self._stages = [
            _Prepared(stage, stage["programs"](*told), told, function.compiled, (at,))
            for at, stage in enumerate(function.entry["stages"])
        ]

    def __call__(self, instances: Sequence[Sequence[Tensor]]) -> None:
        (tensors,) = self._mirrors.of(instances)
        for stage in self._stages:
            stage.launch(tensors)


@final
@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a launch of many instances is told: ``flat``, of each the number of its elements, as
    numbers of ``kind``; ``unit``: what all of them are multiples of; ``dims``, those of all."""

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
        return _ALIGNED if all(size % _ALIGNED == 0 for size in self.flat) else 1


def _jobs(module: ModuleType, launch: Launch) -> list[CompileJob]:
    """The functions that a launch runs, for tensors at aligned addresses."""
    entry: Entry = module.FUNCTIONS[launch.function]
    of = functools.partial(CompileJob, module.__name__, str(module.__file__), launch.function)
    return [
        of(at, _arguments(entry, sizes), _options(stage))
        for sizes in _classes(launch.sizes)
        for at, stage in enumerate(entry["stages"])
        if any(stage["programs"](*each) for each in sizes)
    ]


def _arguments(entry: Entry, sizes: Sizes) -> tuple[str | int, ...]:
    """Those of a launch, as a job has them."""
    if not entry["table"]:
        return (*entry["types"], *sizes[0])
    told = _Sizes.of(entry, sizes)
    kind = str(told.kind).removeprefix("torch.")
    return ("int64", kind, "int32", *told.dims, _ALIGNED, told.unit)


def _classes(sizes: Sizes) -> list[Sizes]:
    """Sizes as they are; of those that each call says a sample, and the multiple of 16 above it."""
    if all(type(size) is int for each in sizes for size in each):
        return [sizes]
    samples = [[sample_of(size) for size in each] for each in sizes]
    return [samples, [[-(-size // _ALIGNED) * _ALIGNED for size in each] for each in samples]]


class _Many:
    """Many instances: a table of addresses, of each the number of its elements, and for each
    program its instance. Sizes that the call says are those of all.

    ::

        blocks[2 * program] = instance      blocks[2 * program + 1] = program of the instance
    """

    def __init__(self, function: DeviceLaunch, sizes: Sizes, device: torch.device) -> None:
        self._tables = function.tables
        self._mirrors = _Mirrors(device)
        (stage,) = function.entry["stages"]
        counts = [stage["programs"](*size) for size in sizes]
        pairs = [(i, p) for i, count in enumerate(counts) for p in range(count)]
        told = _Sizes.of(function.entry, sizes)
        self._device = device
        self._blocks = torch.tensor(pairs, dtype=torch.int32, device=device).reshape(-1)
        self._sizes = torch.tensor(told.flat, dtype=told.kind, device=device)
        self._unit = told.unit
        kind = (str(told.kind),)
        self._stage = _Prepared(stage, len(pairs), told.dims, function.compiled, kind)
        self._addresses: list[int] = []
        self._table = torch.empty(0, dtype=torch.int64, device=device)
        self._spare: list[Tensor] = []  # for a recording

    def __call__(self, instances: Sequence[Sequence[Tensor]]) -> None:
        rows = self._mirrors.of(instances)
        addresses = [tensor.data_ptr() for tensors in rows for tensor in tensors]
        align = _ALIGNED if all(a % _ALIGNED == 0 for a in addresses) else 1
        constants = {"ALIGN": align, "UNIT": self._unit}
        if self._tables.is_recording(self._device):
            table = self._spare.pop()
            self._tables.fill_later(table, addresses)
            self._stage.launch((table, self._sizes, self._blocks), constants)
            return
        if not self._spare:  # not while recording: that memory is written by every replay
            self._spare.append(torch.empty(len(addresses), dtype=torch.int64, device=self._device))
        if addresses != self._addresses:
            self._table, self._addresses = self._tables.of(addresses, self._device), addresses
        self._stage.launch((self._table, self._sizes, self._blocks), constants)


@dataclass(slots=True)
class _Prepared:
    """A device function with its grid and the sizes that it is told. After the first launch of a
    class, Triton's dispatch (which inspects every argument) is passed by. ``kind``: what
    the class depends on beside the arguments."""

    stage: LaunchStage
    programs: int
    sizes: tuple[int, ...]
    compiled: dict[Class, Any]
    kind: Class

    def __post_init__(self) -> None:
        self.kind = (*self.kind, *map(_class_of, self.sizes))

    def launch(self, tensors: Sequence[Tensor], constants: Mapping[str, int] | None = None) -> None:
        if not self.programs:
            return
        extra = dict(constants or {})
        aligned = (tensor.data_ptr() % _ALIGNED == 0 for tensor in tensors)
        key = (*self.kind, *extra.values(), *aligned)
        ready = self.compiled.get(key)
        if ready is not None:
            ready[(self.programs, 1, 1)](*tensors, *self.sizes, *extra.values())
            return
        call = self.stage["jit"][(self.programs,)]
        kernel = call(*tensors, *self.sizes, **extra, **_options(self.stage))
        if kernel is not None:  # the interpreter compiles nothing
            self.compiled[key] = kernel


def _options(stage: LaunchStage) -> dict[str, int | bool]:
    """What Triton is told beside arguments."""
    # The printer writes where a product and a sum round once: ``codegen.contraction``.
    options: dict[str, int | bool] = {"num_warps": stage["warps"], "enable_fp_fusion": False}
    if stage["pipeline"]:
        options["num_stages"] = stage["pipeline"]
    return options


def _class_of(size: int) -> tuple[bool, bool, bool]:
    """For which numbers Triton makes the same code."""
    return size % _ALIGNED == 0, size == 1, size >= 2**31
