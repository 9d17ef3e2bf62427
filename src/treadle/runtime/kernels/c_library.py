"""Small functions in C that are the same for every step: compiled once for a cache."""

import ctypes
import platform
import shutil
from collections.abc import Sequence
from typing import Any

from treadle.runtime.kernels.compilers import Compiler, compile_cpp
from treadle.runtime.store.cache import Cache
from treadle.util.errors import RuntimeFailure

COMPILERS = ("cc", "gcc", "clang", "g++", "clang++", "c++")
"""Any of these will do; the first that is there is used."""
_FLAGS = ("-x", "c", "-O2", "-fPIC", "-shared")


def load_c(
    source: str, names: Sequence[str], directory: str, *, keeps_lock: bool
) -> dict[str, Any]:
    """The functions of a text in C by name, if addresses have 64 bits; none without a compiler.
    ``keeps_lock``: calls keep the interpreter lock, so that nothing changes meanwhile."""
    paths = map(shutil.which, COMPILERS)
    path = next((each for each in paths if each), None)
    if path is None or ctypes.sizeof(ctypes.c_void_p) != ctypes.sizeof(ctypes.c_uint64):
        return {}
    compiler = Compiler(path, "", _FLAGS, "", platform.machine())
    try:
        (library,) = compile_cpp([source], Cache(directory, warn=False), compiler, jobs=1)
        loaded = (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(str(library))
        return {name: loaded[name] for name in names}
    except (RuntimeFailure, OSError, AttributeError):
        return {}
