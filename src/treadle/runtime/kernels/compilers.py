"""From C++ text to loaded functions.

A process should have one OpenMP runtime: two would have two thread pools that compete for the
cores. So a library is linked with the very file that PyTorch loaded, by its path; the dynamic
linker then finds it loaded already. Clang's own runtime has the GNU entry points, but not the other
way round, so g++ is asked first.
"""

import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from treadle.runtime.store.cache import Cache, content_key
from treadle.util.errors import RuntimeFailure

BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",  # otherwise sqrt is a call
    "-fno-trapping-math",  # otherwise a select of two computed values is a branch
    "-ffp-contract=off",  # ``t_fma`` is written out: GCC 12 and 13 contract selects wrongly
    "-fvisibility=default",
)
LIBRARY = ".so"
"""The suffix of a compiled library in the cache."""
_PROBE = 'extern "C" int probe() { int n = 0;\n#pragma omp parallel\n{ n = 1; }\nreturn n; }\n'
_NAMES = ("g++", "clang++", "c++")
_TOOLS = ("as", "ld")
"""What compilers start."""
_LOOKED_AT = (
    "COMPILER_PATH", "CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
)  # fmt: skip
"""Variables that say where compilers find their parts."""
_ELF = b"\x7fELF"
_MAPS = Path("/proc/self/maps")
_CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that works, and the flags that it was seen to accept.

    ``openmp`` is the runtime library to link, as a path, or empty for the compiler's own.
    ``cpu`` names the processor: ``-march=native`` makes code for one kind of it.
    """

    path: str
    version: str
    flags: tuple[str, ...]
    openmp: str
    cpu: str

    @property
    def parallel(self) -> bool:
        """Whether loops are divided among threads."""
        return "-fopenmp" in self.flags

    @property
    def identity(self) -> str:
        """Everything beside the text that the machine code depends on."""
        return content_key(self.path, self.version, " ".join(self.flags), self.openmp, self.cpu)

    def command(self, source: Path, target: Path) -> list[str]:
        """Compile and link in one call.

        The runtime stands before the one that ``-fopenmp`` appends, so with ``--as-needed`` it
        satisfies every symbol and the appended one is dropped.
        """
        command = [self.path, *self.flags, "-Wl,--as-needed", str(source)]
        if self.openmp:
            command += [self.openmp, f"-Wl,-rpath,{Path(self.openmp).parent}"]
        return [*command, "-o", str(target)]


@functools.cache
def find_cxx(preferred: str = "") -> Compiler | None:
    """The first of ``preferred``, g++, clang++ and c++ that compiles and links a library."""
    for name in (preferred, *_NAMES):
        path = shutil.which(name) if name else None
        compiler = _probe(path) if path else None
        if compiler is not None:
            return compiler
    return None


def remembered_cxx(cache: Cache) -> Compiler | None:
    """``find_cxx()`` with its answer cached: starting a compiler twice takes half the time of a
    process that finds everything else in the cache."""
    paths = [path for name in _NAMES if (path := shutil.which(name))]
    key = _probe_key(paths)
    if not key:
        return find_cxx("")
    known = cache.get(key)
    if known is not None:
        path, version, flags, openmp, cpu = json.loads(known)
        return Compiler(path, version, tuple(flags), openmp, cpu)
    compiler = find_cxx("")
    if compiler is not None and compiler.path in paths:
        quiet = Cache(cache.directory, warn=False)  # nobody needs to know where this fails
        quiet.put(key, json.dumps(astuple(compiler)).encode())
    return compiler


def _probe_key(paths: Sequence[str]) -> str:
    """Everything that the answer of ``find_cxx`` depends on: the files, the process, the
    environment. Empty if a file does not tell which compiler it is: a script, or a wrapper that
    starts another (ccache)."""
    tools = [path for name in _TOOLS if (path := shutil.which(name))]
    kept = [each.name for each in fields(Compiler)]
    facts = [__name__, *kept, *BASE_FLAGS, cpu_identity(), *loaded_openmp()]
    facts += [f"{name}={os.environ.get(name)}" for name in _LOOKED_AT]
    for path in (*paths, *tools):
        real = Path(path).resolve()
        if path in paths and not _is_compiler(real):
            return ""
        seen = real.stat()
        facts.append(f"{path} {real} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}")
    return content_key(*facts) if paths else ""


def _is_compiler(file: Path) -> bool:
    if not any(name in file.name for name in ("g++", "gcc", "clang")):
        return False
    with file.open("rb") as opened:
        return opened.read(len(_ELF)) == _ELF


def loaded_openmp() -> tuple[str, ...]:
    """The OpenMP runtimes in this process, PyTorch's own among them."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return ()
    files = (line.split(maxsplit=5)[-1] for line in lines if "omp" in line)
    return tuple(dict.fromkeys(f for f in files if _is_openmp(Path(f).name)))


def _is_openmp(name: str) -> bool:
    return name.startswith(("libgomp", "libomp", "libiomp")) and ".so" in name


def cpu_identity() -> str:
    """The processor and its instruction sets, in a few characters."""
    return hashlib.sha256(f"{platform.machine()} {' '.join(cpu_flags())}".encode()).hexdigest()[:16]


def cpu_flags() -> tuple[str, ...]:
    """The processor's features as the operating system reports them, sorted; empty if it does
    not."""
    try:
        lines = _CPU.read_text().splitlines()
    except OSError:
        return ()
    listed = (line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features")))
    return tuple(sorted(next(listed, "").split()))


def _probe(path: str) -> Compiler | None:
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if shown.returncode != 0:
        return None
    version = shown.stdout.splitlines()[0] if shown.stdout else path
    runtimes = (*loaded_openmp()[:1], "")
    native = ("-march=native",)
    for flags, runtime in (
        *(((*native, "-fopenmp"), runtime) for runtime in runtimes),
        *((("-fopenmp",), runtime) for runtime in runtimes),
        (native, ""),
        ((), ""),
    ):
        compiler = Compiler(path, version, (*BASE_FLAGS, *flags), runtime, cpu_identity())
        if _try(compiler):
            return compiler
    return None


def _try(compiler: Compiler) -> bool:
    try:
        _compile(_PROBE, compiler)
    except RuntimeFailure:
        return False
    return True


def compile_cpp(
    texts: Sequence[str], cache: Cache, compiler: Compiler, *, jobs: int | None = None
) -> list[Path]:
    """A shared library for each text, in the same order; texts compile side by side."""
    workers = max(1, min(len(texts), jobs or os.cpu_count() or 1))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda text: _cached_library(text, cache, compiler), texts))


def load_functions(library: Path, names: Sequence[str]) -> dict[str, Callable[..., None]]:
    """``void f(void* const* pointers, const int64_t* sizes, int64_t instances)`` by name.

    Calls drop the interpreter lock. ``RuntimeFailure`` when the library lacks a name.
    """
    try:
        handle = ctypes.CDLL(str(library))
        functions = {name: handle[name] for name in names}
    except (OSError, AttributeError) as error:
        raise RuntimeFailure(f"cannot load {library}: {error}", code="TR-402") from error
    for function in functions.values():
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    return dict(functions)


def library_key(text: str, compiler: Compiler) -> str:
    """The name in the cache of the library that ``compiler`` makes of ``text``."""
    return content_key(text, compiler.identity)


def _cached_library(text: str, cache: Cache, compiler: Compiler) -> Path:
    key = library_key(text, compiler)
    path = cache.path(key, LIBRARY)
    if path is not None:
        return path
    with cache.lock(key):
        path = cache.path(key, LIBRARY)  # another process may have been first
        return path or cache.put_path(key, LIBRARY, _compile(text, compiler))


@contextmanager
def _source_file(text: str) -> Generator[Path]:
    """A file with this text in a temporary directory. TR-404 if it cannot be written."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="treadle-cxx-")
        source = Path(folder.name) / "unit.cpp"
        source.write_text(text)
    except OSError as error:
        raise RuntimeFailure(
            f"generated code cannot be written to a temporary directory: {error}",
            code="TR-404",
            remedy="free some disk space, or point TMPDIR to a directory with space",
        ) from error
    with folder:
        yield source


def _compile(text: str, compiler: Compiler) -> bytes:
    with _source_file(text) as source:
        target = source.with_suffix(".so")
        command = compiler.command(source, target)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 and target.exists():
            return target.read_bytes()
    first = "\n".join(done.stderr.splitlines()[:20])
    raise RuntimeFailure(
        f"{compiler.path} rejected generated code:\n{first}",
        code="TR-402",
        remedy=(
            "this is a bug in treadle; please report it. Until then, use codegen=False, which "
            "runs PyTorch's kernels"
        ),
    )


def thread_setter(library: Path) -> Callable[[int], None] | None:
    """``omp_set_num_threads`` of the runtime that ``library`` uses, or ``None`` without one."""
    try:
        function = ctypes.CDLL(str(library))["omp_set_num_threads"]
    except (OSError, AttributeError):
        return None
    function.restype = None
    function.argtypes = (ctypes.c_int,)
    return function
