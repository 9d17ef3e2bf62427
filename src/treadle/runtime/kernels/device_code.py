"""Compiled kernels in the cache: a process launches what another one compiled, without a dispatch
of Triton's, whose first one imports a second language and digests the compiler's files
(``docs/reference/measurements.md`` has the time).

::

    entry  =  JSON of name, signature, warps, shared memory  "\\n"  binary
              nothing, for a kernel that Triton has to launch

The key of an entry says the generated module by its content, the function in it, the class of
arguments, the GPU, and the compiler: its files, and the variables of the environment that it reads.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import triton
from triton import knobs
from triton.compiler import compiler
from triton.runtime.driver import driver

from treadle.runtime.kernels.driver_launch import (
    WARP,
    DriverKernel,
    DriverLibrary,
    is_plain,
    parameters_of,
)
from treadle.runtime.store.cache import Cache, content_key

_FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
"""Settings of Triton that decide what it compiles a function to."""
_NO_CODE = b""
_HOOKS = ("jit_cache_hook", "jit_post_compile_hook", "add_stages_inspection_hook")
"""Hooks of users, which observe or change compiles."""


@final
@dataclass(frozen=True, slots=True)
class DeviceCode:
    """A kernel for one class of arguments. ``signature``: of each argument its type, in Triton's
    words; ``shared``: bytes."""

    name: str
    signature: tuple[str, ...]
    warps: int
    shared: int
    binary: bytes

    @staticmethod
    def of(
        name: str, signature: Sequence[object], metadata: Mapping[str, Any], binary: bytes
    ) -> "DeviceCode | None":
        """Made from Triton's metadata of a kernel; ``None`` for a kernel that Triton has to launch
        itself."""
        if parameters_of(signature) is None or not is_plain(metadata):
            return None
        kinds = tuple(map(str, signature))
        return DeviceCode(name, kinds, metadata["num_warps"], metadata["shared"], binary)

    def entry(self) -> bytes:
        """The bytes in the cache."""
        head = [self.name, self.signature, self.warps, self.shared]
        return json.dumps(head).encode() + b"\n" + self.binary

    @staticmethod
    def parse(entry: bytes) -> "DeviceCode":
        """The inverse of ``entry``."""
        head, _, binary = entry.partition(b"\n")
        name, signature, warps, shared = json.loads(head)
        return DeviceCode(name, tuple(signature), warps, shared, binary)

    def loaded(self, library: DriverLibrary) -> DriverKernel | None:
        """The kernel on the current device; ``None`` if its driver rejects the code."""
        active: Any = driver.active
        try:
            _, function, _, _, threads = active.utils.load_binary(
                self.name, self.binary, self.shared, active.get_current_device()
            )
        except RuntimeError:  # Triton compiles it, and says what is wrong in its own words
            return None
        kernel = DriverKernel.of(library, function, self.signature, self.warps, self.shared)
        return kernel if self.warps * WARP <= threads else None


@final
class DeviceCodeStore:
    """Device code by the text of a function and the class of its arguments, kept in ``cache``."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def has(self, part: str) -> bool:
        """Whether some process compiled it."""
        key = _key(part)
        return key is not None and self._cache.get(key) is not None

    def find(self, part: str, library: DriverLibrary) -> DriverKernel | None:
        """The kernel on the current device, if it is in the cache and Triton is not needed."""
        key = _key(part)
        return None if key is None else _loaded(self._cache, key, library)

    def keep(self, part: str, code: DeviceCode | None) -> None:
        """Store a kernel for other processes. ``None``: Triton has to launch it."""
        key = _key(part)
        if key is not None:
            self._cache.put(key, _NO_CODE if code is None else code.entry())


_kernels: dict[tuple[int, str], DriverKernel] = {}
"""By device and key, for the life of the process: a recording may launch them."""


def _loaded(cache: Cache, key: str, library: DriverLibrary) -> DriverKernel | None:
    active: Any = driver.active
    place = active.get_current_device(), key
    known = _kernels.get(place)
    if known is None:
        entry = cache.get(key)
        known = DeviceCode.parse(entry).loaded(library) if entry else None
        if known is not None:
            _kernels[place] = known
    return known


def _key(part: str) -> str | None:
    """``None`` if Triton must be asked in any case, because hooks observe or change what it
    compiles."""
    if any(getattr(knobs.runtime, name, None) for name in _HOOKS):
        return None
    compilation = knobs.compilation
    if compilation.listener or compilation.always_compile:
        return None
    if compilation.override or compilation.dump_ir:
        return None
    active: Any = driver.active
    target = active.get_current_target()
    named = {name: text for name, text in os.environ.items() if name.startswith("TRITON_")}
    variables = sorted((named | compiler.get_cache_invalidating_env_vars()).items())
    own = str((target.backend, target.arch, target.warp_size)), str(variables)
    return content_key("device code", _compiler(), *own, str(Path(knobs.cache.dir)), part)


@functools.cache
def _compiler() -> str:
    """Triton's version, and the size and date of each file that decides what it makes: Triton's own
    digest reads them all."""
    root = str(Path(triton.__file__).parent)
    facts: list[tuple[str, int, int]] = []
    for folder in _FOLDERS:
        for place, folders, names in os.walk(f"{root}/{folder}"):
            folders[:] = [each for each in folders if each != "__pycache__"]
            for name in names:
                found = os.stat(f"{place}/{name}")
                facts.append((f"{place}/{name}", found.st_size, found.st_mtime_ns))
    return content_key(triton.__version__, str(sorted(facts)))
