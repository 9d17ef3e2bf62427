"""Turns the sources of an artifact into functions on this machine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from treadle.runtime.kernels.compilers import (
    Compiler,
    compile_cpp,
    library_key,
    load_functions,
    remembered_cxx,
    thread_setter,
)
from treadle.runtime.kernels.launch_table import launch_runner
from treadle.runtime.kernels.loader import Functions, Loader, MakeLoader
from treadle.runtime.replay.tables import Tables
from treadle.runtime.store.artifact import Launch, Source
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.cpu import CPP
from treadle.targets.cuda import TRITON
from treadle.targets.registry import target_for
from treadle.util.errors import RuntimeFailure, TreadleError


@dataclass(frozen=True, slots=True)
class CppLoader:
    """C++ through a compiler of this machine."""

    cache: Cache
    compiler: Compiler

    @property
    def identity(self) -> str:
        """The compiler and its flags."""
        return self.compiler.identity

    def ahead(self, operations: int) -> AbstractContextManager[None]:
        """A compiler has nothing to load ahead."""
        return nullcontext()

    def load(
        self, sources: Sequence[Source], launches: Sequence[Launch], tables: Tables
    ) -> Functions:
        """Compile, or find compiled, and load."""
        functions: dict[str, Callable[..., None]] = {}
        setter = None
        libraries = compile_cpp([s.text for s in sources], self.cache, self.compiler)
        for source, library in zip(sources, libraries, strict=True):
            functions |= load_functions(library, source.functions)
            setter = setter or thread_setter(library)
        runner = launch_runner(str(self.cache.directory))
        joiners = () if runner is None else (runner,)
        return Functions(functions, {}, setter, tables, joiners)

    def keys(self, sources: Sequence[Source]) -> list[str]:
        """The key of each library in the cache."""
        return [library_key(source.text, self.compiler) for source in sources]


def _cpp(cache: Cache) -> Loader | None:
    compiler = remembered_cxx(cache)
    return None if compiler is None else CppLoader(cache, compiler)


def _triton(cache: Cache) -> Loader | None:
    try:
        from treadle.runtime.kernels.triton_launch import launcher
    except ImportError:
        return None
    return launcher(cache)


_LOADERS: dict[str, MakeLoader] = {CPP: _cpp, TRITON: _triton}


def add_loader(language: str, loader: MakeLoader) -> None:
    """Let sources of another language be loaded; ``TreadleError`` TR-001 for one that can be."""
    if language in _LOADERS:
        raise TreadleError(f"there is a loader of {language} already", code="TR-001")
    _LOADERS[language] = loader


@dataclass(frozen=True, slots=True)
class Build:
    """The loaders of this process, one for each language that it can load. ``language`` is that of
    generated kernels; without it, an artifact that has only library calls still runs."""

    language: str = ""
    loaders: Mapping[str, Loader] = field(default_factory=dict[str, Loader])

    @staticmethod
    def without_compiler() -> "Build":
        """For artifacts without sources."""
        return Build()

    @property
    def generates(self) -> bool:
        """Can generated code run here? If not, plan with library calls only."""
        return self.language in self.loaders

    @property
    def identity(self) -> str:
        """Changes whenever the same source may give another binary."""
        parts = (f"{name} {loader.identity}" for name, loader in sorted(self.loaders.items()))
        return content_key(self.language, *parts)

    def ahead(self, operations: int) -> AbstractContextManager[None]:
        """A context from now to ``load``, in which a graph of so many operations is compiled; the
        compilers of its sources can start meanwhile."""
        loader = self.loaders.get(self.language)
        return nullcontext() if loader is None else loader.ahead(operations)

    def library_keys(self, sources: Sequence[Source]) -> list[str]:
        """Where in the cache the compiled code of these sources is, once it is compiled."""
        grouped = _by_language(sources)
        known = [name for name in grouped if name in self.loaders]
        return [key for name in known for key in self.loaders[name].keys(grouped[name])]

    def load(self, sources: Sequence[Source], launches: Sequence[Launch] = ()) -> Functions:
        """Compile (or find compiled) and load every function of ``sources``, ready for
        ``launches``."""
        functions = Functions()
        for language, group in _by_language(sources).items():
            if language not in self.loaders:
                raise _missing(language)
            names = {name for source in group for name in source.functions}
            theirs = [launch for launch in launches if launch.function in names]
            loaded = self.loaders[language].load(group, theirs, functions.tables)
            functions = functions.joined(loaded)
        return functions


_NEEDED = {CPP: "C++ compiler", TRITON: "triton"}


def _missing(language: str) -> RuntimeFailure:
    what = _NEEDED.get(language, f"loader of {language}")
    return RuntimeFailure(
        f"this step contains generated code, but there is no {what} here",
        code="TR-402",
        remedy="install g++ or clang++ (CPU) or triton (CUDA), or compile with codegen=False",
    )


def _by_language(sources: Sequence[Source]) -> dict[str, list[Source]]:
    grouped: dict[str, list[Source]] = {}
    for source in sources:
        grouped.setdefault(source.language, []).append(source)
    return grouped


def build(cache: Cache, *, device: str, target: str = "") -> Build:
    """The build of this machine for steps on ``device``, or for the target of that name."""
    language = target_for(device, target).language
    make = _LOADERS.get(language)
    loader = None if make is None else make(cache)
    return Build(language, {} if loader is None else {language: loader})
