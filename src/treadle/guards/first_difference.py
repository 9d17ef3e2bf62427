"""The comparisons of every call, in C: thousands of memory words at 1 ns each.

::

    table = [address of the addresses, address of the expected words, exact, count, none]
    first_difference(table, begin)  =  the first i >= begin whose word is another one, or -1
    first_other(addresses, count)   =  the first i whose float is not equal to the 0th, or -1
    items = [address of positions, address of expected words, count, offset]
    first_other_item(items, list)   =  the first i whose item list[positions[i]] is another, or -1

The order is guaranteed: a word is read only if all words before it, from ``begin`` on, are as
expected, so an address may depend on an earlier word. (Words ahead are fetched into the caches of
the processor; if an address is no longer valid, nothing is fetched.) For the words from ``exact``
on, only whether they are ``none`` is compared. The interpreter lock is held, so nothing changes
meanwhile.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from treadle.runtime.kernels.c_library import load_c

FirstDifference = Callable[[int, int], int]
"""From the address of a table and the position to begin with to the position of the first word
that is not as expected, or -1."""
FirstOther = Callable[[int, int], int]
"""From the address of the addresses of floats, and how many they are, to the position of the first
one that is not equal to the 0th, or -1. (A NaN is equal to none.)"""
FirstOtherItem = Callable[[int, int], int]
"""From the address of a table of positions and addresses, and that of a list, to the first position
at which another object stands, or -1."""

_SOURCE = """
typedef unsigned long long word;
enum { AHEAD = 64 };
long long first_difference(const word *table, long long begin) {
  const volatile word *const *at = (const volatile word *const *)table[0];
  const word *expected = (const word *)table[1];
  const long long exact = (long long)table[2], count = (long long)table[3];
  const word none = table[4];
  for (long long i = begin; i < exact; i++) {
    if (i + AHEAD < count) __builtin_prefetch((const void *)at[i + AHEAD]);
    if (*at[i] != expected[i]) return i;
  }
  for (long long i = begin > exact ? begin : exact; i < count; i++)
    if ((*at[i] == none) != (expected[i] == none)) return i;
  return -1;
}

long long first_other(const volatile float *const *at, long long count) {
  for (long long i = 0; i < count; i++)
    if (!(*at[i] == *at[0])) return i;
  return -1;
}

long long first_other_item(const word *items, word list) {
  const word *at = (const word *)items[0], *expected = (const word *)items[1];
  const volatile word *words = *(const volatile word *const *)(list + items[3]);
  for (long long i = 0; i < (long long)items[2]; i++)
    if (words[at[i]] != expected[i]) return i;
  return -1;
}
"""
_NAMES = ("first_difference", "first_other", "first_other_item")


def first_difference(directory: str) -> FirstDifference | None:
    """The function, compiled once for a cache; ``None`` where there is no C compiler."""
    return _compiled(directory).get("first_difference")


def first_other(directory: str) -> FirstOther | None:
    """The function, from the same library."""
    return _compiled(directory).get("first_other")


def first_other_item(directory: str) -> FirstOtherItem | None:
    """Likewise."""
    return _compiled(directory).get("first_other_item")


@functools.cache
def _compiled(directory: str) -> dict[str, Any]:
    found = load_c(_SOURCE, _NAMES, directory, keeps_lock=True)
    for each in found.values():
        each.restype = ctypes.c_int64
        each.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found
