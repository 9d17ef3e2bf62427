"""What this machine offers: the facts that ``treadle doctor`` prints."""

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

import torch

from treadle.runtime.kernels.compilers import cpu_flags, find_cxx, loaded_openmp
from treadle.runtime.store.cache import Cache, content_key
from treadle.util.errors import RuntimeFailure
from treadle.util.sizes import format_bytes

_SIMD = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def facts(cache_dir: Path | str, *, cxx: str = "") -> dict[str, str]:
    """Name -> value, in the order to show them; a missing thing says what it costs."""
    return {
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "torch": torch.__version__,
        "cores": f"{os.cpu_count()}, {torch.get_num_threads()} threads in torch",
        "simd": ", ".join(flag for flag in _SIMD if flag in cpu_flags()) or "unknown",
        **_compiler(cxx),
        "cuda": _cuda(),
        "triton": _version("triton") or "not installed: no generated kernels on CUDA",
        "cache": _cache(Path(cache_dir)),
    }


def _compiler(cxx: str) -> dict[str, str]:
    compiler = find_cxx(cxx)
    if compiler is None:
        missing = "none: the CPU runs PyTorch's kernels only; install g++ or clang++"
        return {"compiler": missing, "openmp": "no compiler"}
    loaded = loaded_openmp()
    own = compiler.openmp or "the compiler's own, beside " + (", ".join(loaded) or "nothing")
    return {
        "compiler": f"{compiler.version} ({compiler.path})",
        "flags": " ".join(compiler.flags),
        "openmp": own if compiler.parallel else "not accepted: generated code uses one core",
    }


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "not available"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: " + ", ".join(names)


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return ""
    return importlib.metadata.version(package)


def _cache(directory: Path) -> str:
    """Written to and read back, since a mode bit does not tell (a full disk, a root user)."""
    cache = Cache(directory, warn=False)
    key = content_key("treadle doctor")
    try:
        cache.put(key, b"works")
    except RuntimeFailure as error:
        return f"{directory}: {error.message}"
    if not cache.writable:
        return f"{directory}: cannot be written, a temporary directory is used instead"
    return f"{directory}: {'works' if cache.get(key) else 'unreadable'}, {_size(cache)}"


def _size(cache: Cache) -> str:
    return f"{format_bytes(cache.size())} of at most {format_bytes(cache.limit_bytes)}"
