"""The interface of a language's loader, and the functions that it returns."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from treadle.runtime.kernels.launch_table import LaunchJoiner
from treadle.runtime.replay.tables import Tables
from treadle.runtime.store.artifact import Launch, Source
from treadle.runtime.store.cache import Cache


class DeviceFunction(Protocol):
    """Makes a launch from the storages of the buffers of each instance (1-D, stride 1) and its
    sizes. Each call of the launch runs the function on what the lists hold at the time.
    ``pointers``: the array with their addresses, if a ``joiner`` of the language needs it."""

    def __call__(
        self,
        storages: Sequence[Sequence[Tensor]],
        sizes: Sequence[Sequence[int]],
        pointers: "ctypes.Array[Any] | None" = None,
        /,
    ) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class Functions:
    """Loaded code by name. ``set_threads`` tells its OpenMP runtime how many to use; ``joiners``
    make one action of several launches."""

    native: Mapping[str, Callable[..., None]] = field(
        default_factory=dict[str, Callable[..., None]]
    )
    device: Mapping[str, DeviceFunction] = field(default_factory=dict[str, DeviceFunction])
    set_threads: Callable[[int], None] | None = None
    tables: Tables = field(default_factory=Tables)
    joiners: tuple[LaunchJoiner, ...] = ()

    def joined(self, other: "Functions") -> "Functions":
        """The functions of both, which share their tables."""
        setter = self.set_threads or other.set_threads
        native, device = {**self.native, **other.native}, {**self.device, **other.device}
        return Functions(native, device, setter, self.tables, (*self.joiners, *other.joiners))


class Loader(Protocol):
    """Makes functions of the sources of one language. ``identity``: all that the binaries depend
    on."""

    @property
    def identity(self) -> str:
        """What makes one build differ from another, beside the sources."""
        ...

    def ahead(self, operations: int) -> AbstractContextManager[None]:
        """A context from now to ``load``, for a graph of so many operations."""
        ...

    def load(
        self, sources: Sequence[Source], launches: Sequence[Launch], tables: Tables
    ) -> Functions:
        """Every function of ``sources``, ready for ``launches``; ``tables``: makes the tables of
        the functions."""
        ...

    def keys(self, sources: Sequence[Source]) -> list[str]:
        """Where in the cache the compiled code of these sources is, once it is compiled."""
        ...


MakeLoader = Callable[[Cache], Loader | None]
"""Makes the loader for a cache; ``None`` if this machine cannot load the language."""
