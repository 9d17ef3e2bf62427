"""A device function with its grid, ready to be launched.

The code for a class of arguments is looked up in the cheapest place first: what this process has
launched, then the cache (``device_code.py``), then Triton.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict, final

from torch import Tensor

from treadle.runtime.kernels.device_code import DeviceCode, DeviceCodeStore
from treadle.runtime.kernels.driver_launch import (
    ALIGNED,
    DriverKernel,
    KernelArguments,
    KernelRow,
    KernelRunner,
    is_watched,
    metadata_of,
)

Class = tuple[object, ...]
"""What the compiled code of a function depends on."""


class Jit(Protocol):
    """A function of Triton's: ``jit[grid](*arguments, **options)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


class LaunchStage(TypedDict):
    """One device function of an entry, and the number of its ``programs``, as a function of its
    sizes."""

    jit: Jit
    programs: Callable[..., int]
    warps: int
    pipeline: int


def options_of(stage: LaunchStage) -> dict[str, int | bool]:
    """The options for Triton, apart from arguments."""
    # The printer writes where a product and a sum round once: ``codegen.contraction``.
    options: dict[str, int | bool] = {"num_warps": stage["warps"], "enable_fp_fusion": False}
    if stage["pipeline"]:
        options["num_stages"] = stage["pipeline"]
    return options


def class_of(
    kind: Class, sizes: Sequence[int], constants: Sequence[int], aligned: Sequence[bool]
) -> Class:
    """The class of a launch with these ``sizes``, ``constants``, and tensors at addresses that are
    ``aligned`` or not; ``kind``: what it depends on beside them."""
    return (*kind, *map(_size_class, sizes), *constants, *aligned)


def _size_class(size: int) -> tuple[bool, bool, bool]:
    """The class of numbers for which Triton generates the same code."""
    return size % ALIGNED == 0, size == 1, size >= 2**31


@final
@dataclass(frozen=True, slots=True)
class _Kernel:
    """Code of one class. ``triton``: what Triton launches; ``None`` for code from the cache.
    ``driver``: what the driver launches; ``None`` where Triton has to."""

    triton: Any
    driver: DriverKernel | None


@final
@dataclass(frozen=True, slots=True)
class FunctionCode:
    """The code of a function, by classes. ``home``: the module that has it, by its content, and its
    name. ``runner``: launches without Triton."""

    home: str
    store: DeviceCodeStore | None
    runner: KernelRunner | None
    known: dict[Class, _Kernel] = field(default_factory=dict[Class, _Kernel])

    def find(self, key: Class) -> _Kernel | None:
        """The kernel that this process has launched, or else that in the cache."""
        known = self.known.get(key)
        if known is not None or self.runner is None or self.store is None:
            return known
        stored = self.store.find(part_of(self.home, key), self.runner.library)
        return None if stored is None else self.known.setdefault(key, _Kernel(None, stored))

    def launched(self, key: Class, kernel: Any) -> _Kernel:
        """Note that Triton has launched ``kernel``, and compiled it if its own cache did not have
        it."""
        driver = None
        if self.runner is not None:
            driver = DriverKernel.of_triton(self.runner.library, kernel)
            if self.store is not None:
                self.store.keep(part_of(self.home, key), _code_of(kernel))
        made = self.known[key] = _Kernel(kernel, driver)
        return made


def part_of(home: str, key: Class) -> str:
    """The part of a cache key that names the function and its class."""
    return f"{home} {key!r}"


def _code_of(kernel: Any) -> DeviceCode | None:
    signature = list(kernel.src.signature.values())
    return DeviceCode.of(kernel.name, signature, metadata_of(kernel), kernel.asm["cubin"])


@final
@dataclass(slots=True)
class PreparedLaunch:
    """A device function with its grid and the sizes that it is told. After the first launch of a
    class, Triton's dispatch (which inspects every argument) is bypassed. ``kind``: what the class
    depends on beside the arguments; ``row``: the table row that then holds the kernel."""

    stage: LaunchStage
    programs: int
    sizes: tuple[int, ...]
    code: FunctionCode
    kind: Class
    row: KernelRow | None

    def __post_init__(self) -> None:
        if self.row is not None and not self.programs:
            self.row.launches_nothing()

    def launch(
        self,
        tensors: Sequence[Tensor],
        constants: Mapping[str, int] | None = None,
        *,
        once: bool = False,
    ) -> None:
        """``once``: no other launch takes these tensors."""
        if not self.programs:
            return
        extra = dict(constants or {})
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = [address % ALIGNED == 0 for address in addresses]
        key = class_of(self.kind, self.sizes, tuple(extra.values()), aligned)
        kernel = self.code.find(key)
        if kernel is not None and kernel.triton is not None:
            kernel.triton[(self.programs, 1, 1)](*tensors, *self.sizes, *extra.values())
        elif kernel is None or not self._by_driver(kernel, addresses):
            kernel = self._by_triton(key, tensors, extra)
        if kernel is None or self.row is None or once:
            return
        if kernel.driver is None:
            self.row.waits()
        else:
            self.row.holds(kernel.driver, self.programs)

    def _by_driver(self, kernel: _Kernel, addresses: Sequence[int]) -> bool:
        """Whether the driver launched it. Hooks on Triton's launches must still observe the
        launch."""
        runner = self.code.runner
        if kernel.driver is None or runner is None or is_watched():
            return False
        pointers = (c_void_p * len(addresses))(*addresses)
        return runner.launch(kernel.driver, self.programs, KernelArguments(pointers, self.sizes))

    def _by_triton(
        self, key: Class, tensors: Sequence[Tensor], extra: Mapping[str, int]
    ) -> _Kernel | None:
        """The kernel that Triton launched; ``None`` from Triton's interpreter, which compiles
        nothing."""
        call = self.stage["jit"][(self.programs,)]
        kernel = call(*tensors, *self.sizes, **extra, **options_of(self.stage))
        return None if kernel is None else self.code.launched(key, kernel)
