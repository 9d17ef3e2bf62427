"""What turns the sources of an artifact into functions on this machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from treadle.runtime.artifact import Language, Source
from treadle.runtime.cache import Cache, content_key
from treadle.runtime.compilers import (
    Compiler,
    compile_cpp,
    find_cxx,
    library_key,
    load_functions,
    thread_setter,
)
from treadle.runtime.tables import Tables
from treadle.util.errors import RuntimeFailure

DeviceFunction = Callable[[Sequence[Sequence[Tensor]], Sequence[Sequence[int]]], None]
"""One launch: for each instance the storages of its buffers (1-D, stride 1) and its sizes."""


class Launcher(Protocol):
    """Loads modules of one device language. ``identity``: all that the binaries depend on."""

    @property
    def identity(self) -> str: ...

    def load(self, source: Source, tables: Tables) -> Mapping[str, DeviceFunction]:
        """The functions that ``source.functions`` names; ``tables``: where theirs come from."""
        ...


@dataclass(frozen=True, slots=True)
class Functions:
    """Loaded code by name. ``set_threads`` tells its OpenMP runtime how many to use."""

    native: Mapping[str, Callable[..., None]]
    device: Mapping[str, DeviceFunction]
    set_threads: Callable[[int], None] | None = None
    tables: Tables = field(default_factory=Tables)


@dataclass(frozen=True, slots=True)
class Build:
    """The compiler, the launcher and the cache of this process; any may be missing.

    Without them an artifact that has only library calls still runs.
    """

    device: str
    cache: Cache | None = None
    compiler: Compiler | None = None
    launcher: Launcher | None = None

    @staticmethod
    def without_compiler(device: str) -> "Build":
        """For artifacts without sources."""
        return Build(device)

    @property
    def generates(self) -> bool:
        """Can generated code run here? If not, plan with library calls only."""
        return (self.compiler if self.device == "cpu" else self.launcher) is not None

    @property
    def identity(self) -> str:
        """Changes whenever the same source may give another binary."""
        compiler = self.compiler.identity if self.compiler else ""
        return content_key(compiler, self.launcher.identity if self.launcher else "")

    def library_keys(self, sources: Sequence[Source]) -> list[str]:
        """Where in the cache the compiled code of these sources is, once it is compiled."""
        if self.compiler is None:
            return []
        native = [source.text for source in sources if source.language is Language.CPP]
        return [library_key(text, self.compiler) for text in native]

    def load(self, sources: Sequence[Source]) -> Functions:
        """Compile (or find compiled) and load every function of ``sources``."""
        native = [source for source in sources if source.language is Language.CPP]
        others = [source for source in sources if source.language is not Language.CPP]
        functions: dict[str, Callable[..., None]] = {}
        setter = None
        if native:
            if self.compiler is None or self.cache is None:
                raise _missing("C++ compiler")
            libraries = compile_cpp([s.text for s in native], self.cache, self.compiler)
            for source, library in zip(native, libraries, strict=True):
                functions |= load_functions(library, source.functions)
                setter = setter or thread_setter(library)
        device: dict[str, DeviceFunction] = {}
        tables = Tables()
        for source in others:
            if self.launcher is None:
                raise _missing(f"launcher for {source.language}")
            device |= self.launcher.load(source, tables)
        return Functions(functions, device, setter, tables)


def build(cache: Cache, *, device: str, cxx: str = "") -> Build:
    """What this machine has. ``cxx``: a compiler to prefer over the ones on the path."""
    kind = torch.device(device).type
    if kind == "cpu":
        return Build(kind, cache, find_cxx(cxx))
    return Build(kind, cache, None, _triton(cache))


def _triton(cache: Cache) -> Launcher | None:
    try:
        from treadle.runtime.triton_launch import launcher
    except ImportError:
        return None
    return launcher(cache)


def _missing(what: str) -> RuntimeFailure:
    return RuntimeFailure(
        f"this step holds generated code, and there is no {what} here",
        code="TR-402",
        remedy="install g++ or clang++ (CPU) or triton (CUDA), or compile with codegen=False",
    )
