"""The one comparison that every call makes, in C: thousands of words of memory at 1 ns each.

::

    table = [address of the addresses, address of the expected words, exact, count, none]
    first_difference(table, begin)  =  the first i >= begin whose word is another one, or -1

The order is a promise: a word is read only where all before it, from ``begin`` on, are as expected,
so that an address may depend on an earlier word. Of the words from ``exact`` on it counts only
whether they are ``none``. The interpreter lock is kept: nothing changes meanwhile.
"""

import ctypes
import functools
import platform
import shutil
from collections.abc import Callable

from treadle.runtime.cache import Cache
from treadle.runtime.compilers import Compiler, compile_cpp
from treadle.util.errors import RuntimeFailure

FirstDifference = Callable[[int, int], int]
"""From the address of a table and the position to begin with to the position of the first word
that is not as expected, or -1."""

_SOURCE = """
typedef unsigned long long word;
long long first_difference(const word *table, long long begin) {
  const volatile word *const *at = (const volatile word *const *)table[0];
  const word *expected = (const word *)table[1];
  const long long exact = (long long)table[2], count = (long long)table[3];
  const word none = table[4];
  for (long long i = begin; i < exact; i++)
    if (*at[i] != expected[i]) return i;
  for (long long i = begin > exact ? begin : exact; i < count; i++)
    if ((*at[i] == none) != (expected[i] == none)) return i;
  return -1;
}
"""
COMPILERS = ("cc", "gcc", "clang", "g++", "clang++", "c++")
"""Any of these will do; the first that is there is used."""
_FLAGS = ("-x", "c", "-O2", "-fPIC", "-shared")


@functools.cache
def first_difference(directory: str) -> FirstDifference | None:
    """The function, compiled once for a cache; ``None`` where there is no C compiler."""
    paths = map(shutil.which, COMPILERS)
    path = next((each for each in paths if each), None)
    if path is None or ctypes.sizeof(ctypes.c_void_p) != ctypes.sizeof(ctypes.c_uint64):
        return None
    compiler = Compiler(path, "", _FLAGS, "", platform.machine())
    try:
        (library,) = compile_cpp([_SOURCE], Cache(directory, warn=False), compiler, jobs=1)
        found = ctypes.PyDLL(str(library))["first_difference"]
    except (RuntimeFailure, OSError, AttributeError):
        return None
    found.restype = ctypes.c_int64
    found.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found


__all__ = ["COMPILERS", "FirstDifference", "first_difference"]
