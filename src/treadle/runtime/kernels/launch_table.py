"""Consecutive launches as one C call.

::

    table = [function, pointers, sizes, instances] of each launch
    run_launches(table, count)  =  function(pointers, sizes, instances), one after another

The function is the same for all steps, and its input is data: a step is bound as before, by writing
into arrays of pointers, and needs no additional compilation.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from treadle.runtime.kernels.c_library import load_c

_SOURCE = """
typedef unsigned long long word;
typedef void (*kernel)(void *const *, const long long *, long long);

void run_launches(const word *table, long long count) {
  for (const word *at = table; at < table + 4 * count; at += 4)
    ((kernel)at[0])((void *const *)at[1], (const long long *)at[2], (long long)at[3]);
}
"""


class JoinedLaunchError(Exception):
    """An ``error`` of launch number ``at`` among those that run as one."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(str(error))
        self.at, self.error = at, error


class LaunchJoiner(Protocol):
    """Makes one action of launches of one kind."""

    def takes(self, action: object) -> bool:
        """Whether it can run this launch."""
        ...

    def together(self, launches: Sequence[Any]) -> Callable[[], None]:
        """Runs them one after another; ``JoinedLaunchError`` where one fails."""
        ...


@final
@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """A function of a library in C++ on arrays of C, which hold pointers and sizes of its
    instances."""

    function: Callable[..., None]
    pointers: "ctypes.Array[Any]"
    sizes: "ctypes.Array[Any]"
    instances: int

    def __call__(self) -> None:
        """Run it alone."""
        addresses = ctypes.addressof(self.pointers), ctypes.addressof(self.sizes)
        self.function(*addresses, self.instances)

    @property
    def row(self) -> tuple[int, int, int, int]:
        """The row of this launch in a table."""
        held: Any = self.function
        function = ctypes.cast(held, ctypes.c_void_p).value
        assert function is not None
        addresses = ctypes.addressof(self.pointers), ctypes.addressof(self.sizes)
        return function, *addresses, self.instances


@final
class LaunchTable(functools.partial[None]):
    """Launches that run as one call, without a frame of Python, and what they need."""

    launches: tuple[NativeLaunch, ...]
    words: "ctypes.Array[ctypes.c_uint64]"

    @staticmethod
    def of(run: Callable[[int, int], None], launches: tuple[NativeLaunch, ...]) -> "LaunchTable":
        """The table of these launches, in this order."""
        rows = [word for launch in launches for word in launch.row]
        words = (ctypes.c_uint64 * len(rows))(*rows)
        table = LaunchTable(run, ctypes.addressof(words), len(launches))
        table.launches, table.words = launches, words
        return table


@final
@dataclass(frozen=True, slots=True)
class LaunchRunner:
    """Makes one function of launches."""

    run: Callable[[int, int], None]

    def takes(self, action: object) -> bool:
        """Whether the launch is one in C++."""
        return isinstance(action, NativeLaunch)

    def together(self, launches: Sequence[NativeLaunch]) -> LaunchTable:
        """Runs them one after another."""
        return LaunchTable.of(self.run, tuple(launches))


@functools.cache
def launch_runner(directory: str) -> LaunchRunner | None:
    """Compiled once per cache; ``None`` without a C compiler. Calls release the interpreter lock,
    as single launches do."""
    found = load_c(_SOURCE, ("run_launches",), directory, keeps_lock=False)
    if not found:
        return None
    run = found["run_launches"]
    run.restype = None
    run.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return LaunchRunner(run)
